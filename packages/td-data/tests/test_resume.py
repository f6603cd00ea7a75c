"""The position of a loader: rules S1 to S7."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from order_samples import ROWS, SAMPLERS, join_ranks, make_data, run_ranks, take_rows

from td_data import Loader, MixtureSampler, RandomSampler

THREADS: list[dict[str, int]] = [{"prefetch": 0}, {"prefetch": 7, "num_threads": 3}, {"num_workers": 2}]


def make_loader(**options: Any) -> Loader:
    return Loader(make_data(), 10, **{"shuffle": True, "seed": 5, **options})


def take(loader: Loader, count: int) -> list[torch.Tensor]:
    """Return the rows of some batches, and break the iteration off."""
    batches = iter(loader)
    return [next(batches)["row"] for _ in range(count)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_s1_state_is_small_json_of_what_the_consumer_got(name: str) -> None:
    loader = Loader(make_data(), 12, sampler=SAMPLERS[name](ROWS), prefetch=5)
    batches = iter(loader)
    next(batches), next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["rows"], state["length"]) == (0, 24, len(SAMPLERS[name](ROWS)))
    assert state["version"] == 1
    assert len(json.dumps(state)) < 1000
    assert (loader.epoch, loader.rows) == (0, 24)


@pytest.mark.parametrize("options", THREADS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_s2_loaded_position_gives_batches_that_are_left(name: str, options: dict[str, int]) -> None:
    if "num_workers" in options and "blocks" in name:
        pytest.skip("windows are in the memory of one process")
    loader = Loader(make_data(), 12, sampler=SAMPLERS[name](ROWS))
    take(loader, 3)
    state = loader.state_dict()
    whole = Loader(make_data(), 12, sampler=SAMPLERS[name](ROWS))
    wanted = take_rows(whole)[3:] + take_rows(whole)
    other = Loader(make_data(), 12, sampler=SAMPLERS[name](ROWS), **options)
    other.load_state_dict(json.loads(json.dumps(state)))
    found = take_rows(other) + take_rows(other)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


def test_s2_resume_reads_nothing_that_was_given_out() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, positions: torch.Tensor) -> torch.Tensor:
            self.read += positions.tolist()
            return positions

    data = Recorded()
    loader = Loader(data, 4, prefetch=0)
    loader.load_state_dict({**loader.state_dict(), "rows": 10**9 - 8})
    assert [batch.tolist()[0] for batch in loader] == [10**9 - 8, 10**9 - 4]
    assert min(data.read) == 10**9 - 8


@given(
    st.integers(1, 80),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_s3_other_number_of_ranks_gets_the_rest(
    rows: int, batch: int, world: int, steps: int, other_batch: int, other_world: int
) -> None:
    options = {"shuffle": True, "seed": 2}
    first = join_ranks(run_ranks(make_data(rows), world, batch, even=False, **options))
    steps = min(steps, len(first) - 1)
    loader = Loader(make_data(rows), batch, rank=0, world_size=world, prefetch=0, **options)
    take(loader, steps)
    rest = join_ranks(
        run_ranks(make_data(rows), other_world, other_batch, state=loader.state_dict(), even=False, **options)
    )
    found = [row for part in (*first[:steps], *rest) for row in part.tolist()]
    assert sorted(found) == list(range(rows))


def test_s4_each_iteration_is_the_next_epoch() -> None:
    loader = make_loader()
    epochs = [torch.cat(take_rows(loader)) for _ in range(3)]
    for number, rows in enumerate(epochs):
        assert rows.equal(RandomSampler(ROWS, seed=5).order(number)(0, ROWS))
    assert loader.epoch == 3


def test_s4_epoch_that_was_broken_off_is_over() -> None:
    loader = make_loader()
    take(loader, 2)
    assert (loader.epoch, loader.rows) == (0, 20)
    assert torch.cat(take_rows(loader)).equal(RandomSampler(ROWS, seed=5).order(1)(0, ROWS))


def test_s4_epoch_advances_with_its_last_batch() -> None:
    loader = make_loader()
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert (loader.epoch, loader.rows) == (1, 0)


def test_s4_epoch_without_batches_advances() -> None:
    loader = Loader(make_data(3), 5, drop_last=True)
    assert list(loader) == [] == list(loader)
    assert loader.epoch == 2


def test_s5_set_epoch_keeps_loaded_position_of_that_epoch() -> None:
    loader = make_loader()
    loader.set_epoch(4)
    take(loader, 2)
    state = loader.state_dict()
    for epoch, rows in ((4, ROWS - 20), (5, ROWS)):
        other = make_loader()
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert (other.epoch, other.rows) == (epoch, ROWS - rows)
        assert torch.cat(take_rows(other)).equal(RandomSampler(ROWS, seed=5).order(epoch)(ROWS - rows, ROWS))


def test_s5_set_epoch_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="an epoch is 0 or more; got -1"):
        make_loader().set_epoch(-1)


@pytest.mark.parametrize("options", [{}, *THREADS])
@pytest.mark.parametrize(("loaded", "epoch"), [(None, 2), ((1, 0), 2), ((2, 30), 2)])
def test_s5_set_epoch_holds_for_iteration_without_a_batch(
    loaded: tuple[int, int] | None, epoch: int, options: dict[str, int]
) -> None:
    loader = make_loader(**options)
    if loaded is not None:
        loader.load_state_dict({**loader.state_dict(), "epoch": loaded[0], "rows": loaded[1]})
    batches = iter(loader)
    loader.set_epoch(epoch)
    rows = loaded[1] if loaded is not None and loaded[0] == epoch else 0
    assert (loader.epoch, loader.rows) == (epoch, rows)
    found = torch.cat([batch["row"] for batch in batches])
    assert found.equal(RandomSampler(ROWS, seed=5).order(epoch)(rows, ROWS))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_s5_set_epoch_holds_for_begun_dataloader(num_workers: int) -> None:
    loader = make_loader()
    batches = iter(loader.as_dataloader(num_workers=num_workers))
    loader.set_epoch(2)
    found = torch.cat([batch["row"] for batch in batches])
    assert found.equal(RandomSampler(ROWS, seed=5).order(2)(0, ROWS))
    assert loader.epoch == 3


def test_s5_iteration_that_gave_nothing_leaves_loaded_position() -> None:
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "rows": 30})
    iter(loader)
    assert torch.cat(take_rows(loader)).equal(RandomSampler(ROWS, seed=5).order(1)(30, ROWS))


def test_s5_set_epoch_leaves_iteration_that_gave_a_batch() -> None:
    loader = make_loader()
    batches = iter(loader)
    first = next(batches)["row"]
    loader.set_epoch(3)
    rest = [batch["row"] for batch in batches]
    assert torch.cat([first, *rest]).equal(RandomSampler(ROWS, seed=5).order(0)(0, ROWS))


def set_trainer_epoch(loader: Loader, epoch: int) -> None:
    """Set the epoch as Lightning does: on the sampler of a loader, or of its batch sampler."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(owner, "sampler", None)
        if sampler is not None:
            sampler.set_epoch(epoch)


@pytest.mark.parametrize("stop", [5, 11, 14, 22])
@pytest.mark.parametrize("loads_state", [True, False])
def test_s5_trainer_that_sets_epochs_resumes(stop: int, loads_state: bool) -> None:
    """Lightning loads the state at a checkpoint within an epoch only, and calls ``iter()`` before it sets the epoch."""
    orders = [RandomSampler(ROWS, seed=5).order(epoch)(0, ROWS).split(10) for epoch in range(3)]
    whole = [batch for order in orders for batch in order]
    epoch, number = divmod(stop, 11)
    if number and not loads_state:
        pytest.skip("such a checkpoint has its state loaded")
    loader = make_loader()
    take_rows(loader)
    state = {**loader.state_dict(), "epoch": epoch, "rows": number * 10}
    loader = make_loader()
    if loads_state:
        loader.load_state_dict(state)
    found = []
    for current in range(epoch, 3):
        batches = iter(loader)
        set_trainer_epoch(loader, current)
        found += [batch["row"] for batch in batches]
    assert torch.cat(found).equal(torch.cat(whole[stop:]))


def test_s5_trainer_that_is_behind_an_epoch_finishes_it() -> None:
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "rows": 30})
    set_trainer_epoch(loader, 2)
    assert (loader.epoch, loader.rows) == (1, 30)


def test_batch_sampler_has_what_trainers_read() -> None:
    found = make_loader(drop_last=True).batch_sampler
    assert (found.batch_size, found.drop_last) == (10, True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: Loader(make_data(50), 10, shuffle=True, seed=5), "its length is 103, here it is 50"),
        (lambda: make_loader(seed=6), "its seed of the sampler is 5, here it is 6"),
        (
            lambda: make_loader(shuffle=False),
            "its name of the sampler is 'RandomSampler', here it is 'SequentialSampler'",
        ),
        (
            lambda: make_loader(shuffle=False, sampler=RandomSampler(ROWS, seed=5, replacement=True)),
            "its replacement of the sampler is False, here it is True",
        ),
    ],
)
def test_s6_state_of_other_data_is_refused(change: Any, text: str) -> None:
    loader = make_loader()
    take(loader, 1)
    with pytest.raises(ValueError, match=text):
        change().load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "its version is 2, here it is 1"),
        ({"rows": 104}, "no such position: row 104 of epoch 0"),
        ({"epoch": -1}, "no such position"),
    ],
)
def test_s6_state_that_is_no_position_is_refused(change: dict[str, int], text: str) -> None:
    loader = make_loader()
    with pytest.raises(ValueError, match=text):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(ValueError, match=r"has no \['epoch'"):
        loader.load_state_dict({"rows": 0})


def test_s6_state_of_another_mixture_is_refused() -> None:
    state = Loader(make_data(), 4, sampler=MixtureSampler([3, 100], [1, 1])).state_dict()
    with pytest.raises(ValueError, match="weights of the sampler"):
        Loader(make_data(), 4, sampler=MixtureSampler([3, 100], [1, 2])).load_state_dict(state)


def test_s7_all_ranks_have_the_same_state() -> None:
    loaders = [make_loader(rank=rank, world_size=3) for rank in range(3)]
    for loader in loaders:
        take(loader, 2)
    assert loaders[0].state_dict() == loaders[1].state_dict() == loaders[2].state_dict()
    loaders[0].load_state_dict(loaders[2].state_dict())
    assert loaders[0].rows == 60


def test_state_is_a_plain_entry_of_a_checkpoint(tmp_path: Any) -> None:
    loader = make_loader()
    take(loader, 1)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


TORCH: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "prefetch_factor": 5},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("options", TORCH)
def test_as_dataloader_counts_what_the_consumer_got(options: dict[str, Any]) -> None:
    loader = make_loader()
    made = loader.as_dataloader(**options)
    wanted = [take_rows(make_loader()), *(RandomSampler(ROWS, seed=5).order(i)(0, ROWS) for i in (1, 2))]
    batches = iter(made)
    seen = [next(batches)["row"] for _ in range(3)]
    assert (loader.epoch, loader.rows) == (0, 30)
    state = loader.state_dict()
    for resume in (lambda other: other, lambda other: other.as_dataloader(**options)):
        other = make_loader()
        other.load_state_dict(state)
        assert torch.cat(seen + take_rows(resume(other))).equal(torch.cat(wanted[0]))
        assert (other.epoch, other.rows) == (1, 0)
    for number, batch in enumerate(made):  # the next epoch, which is broken off, too
        assert batch["row"].equal(wanted[1][number * 10 : number * 10 + 10])
        if number == 1:
            break
    assert (loader.epoch, loader.rows) == (1, 20)
    with pytest.raises(RuntimeError, match="is over: another iteration of this loader has begun"):
        next(batches)
    assert torch.cat(take_rows(made)).equal(wanted[2])
    assert (loader.epoch, loader.rows) == (3, 0)


def fail_at_30(batch: Any) -> Any:
    if batch["row"][0] == 30:
        raise KeyError("30")
    return batch


@pytest.mark.parametrize("options", TORCH)
def test_as_dataloader_tries_a_batch_with_an_error_again(options: dict[str, Any]) -> None:
    loader = make_loader(shuffle=False, transform=fail_at_30)
    batches = iter(loader.as_dataloader(**options))
    assert [int(next(batches)["row"][0]) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(KeyError, match="30"):
        next(batches)
    with pytest.raises(RuntimeError, match="it had an error; iterate over the loader again"):
        next(batches)
    assert (loader.epoch, loader.rows) == (0, 30)
    loader._transform = None
    rest = take_rows(loader)
    assert torch.cat(rest).equal(torch.arange(30, ROWS))


def test_as_dataloader_without_an_order_is_refused() -> None:
    with pytest.raises(ValueError, match="in_order=False gives batches in any order"):
        make_loader().as_dataloader(num_workers=2, in_order=False)


def test_parts_of_as_dataloader_count_what_was_drawn() -> None:
    from torch.utils.data import DataLoader

    loader = make_loader()
    made = loader.as_dataloader()
    for batches in (made.batch_sampler, DataLoader(made.dataset, batch_sampler=made.batch_sampler)):
        loader.set_epoch(0)
        iterator = iter(batches)
        next(iterator), next(iterator)
        assert loader.rows == 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_a_batch_sampler_of_torch_that_resumes(num_workers: int) -> None:
    from torch.utils.data import DataLoader

    from td_core import collate

    def make() -> Any:
        return RandomSampler(ROWS, seed=5).batches(10)

    batches = make()
    loader = DataLoader(make_data(), batch_sampler=batches, collate_fn=collate, num_workers=num_workers)
    assert torch.cat(take_rows(loader)).equal(RandomSampler(ROWS, seed=5).order(0)(0, ROWS))
    assert (batches.epoch, len(batches), batches.batch_size, batches.drop_last) == (1, 11, 10, False)
    first = iter(batches)
    wanted = [next(first) for _ in range(4)]
    other = make()
    other.load_state_dict(batches.state_dict())
    rest = list(other)
    order = RandomSampler(ROWS, seed=5).order(1)(0, ROWS)
    assert wanted + rest == [part.tolist() for part in order.split(10)]
    other.set_epoch(0)
    assert next(iter(other)) == RandomSampler(ROWS, seed=5).order(0)(0, 10).tolist()
