"""The order of rows: rules D1 to D8 of the samplers, with fixed seeds."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from order_samples import ROWS, SAMPLERS, iterate, join_ranks, make_data, run_ranks, take_rows
from torch import Tensor

from td_core import TensorDict
from td_data import BlockSampler, Concat, Loader, MixtureSampler, RandomSampler, WeightedRandomSampler
from td_data._order import PAGE, Draws, make_generator, make_keys, mix, permute

#: The algorithm of an order is part of the format of a state: these positions do not change.
VECTORS = {
    (10, 0, 0): [6, 3, 1, 2, 8, 0, 7, 4],
    (1000, 7, 3): [838, 70, 758, 27, 508, 615, 296, 768],
    (10**9, 1, 2): [
        43628869,
        754879251,
        705190613,
        58691414,
        997803448,
        448734501,
        449707217,
        649775144,
    ],
}


@pytest.mark.parametrize("key", VECTORS)
def test_d4_random_order_is_pinned(key: tuple[int, int, int]) -> None:
    count, seed, epoch = key
    assert RandomSampler(count, seed=seed).order(epoch)(0, 8).tolist() == VECTORS[key]


def test_d3_mix_is_pinned_and_not_additive() -> None:
    assert mix(0, 1, "use") == mix(0, 1, "use") != mix(1, 0, "use")
    assert list(iterate(RandomSampler(50, seed=0), 1)) != list(iterate(RandomSampler(50, seed=1), 0))


@pytest.mark.parametrize("name", SAMPLERS)
def test_d1_order_is_function_of_seed_and_epoch(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again = (list(iterate(SAMPLERS[name](ROWS), 4, page)) for page in (17, 100))
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), before)
    if "ordered" not in name and name != "sequential":
        assert list(iterate(SAMPLERS[name](ROWS), 5)) != first


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 5, "num_threads": 4}])
def test_d1_order_does_not_depend_on_threads(options: dict[str, int]) -> None:
    data = make_data()
    wanted = RandomSampler(ROWS, seed=5).order(0)(0, ROWS)
    assert torch.cat(take_rows(Loader(data, 10, shuffle=True, seed=5, **options))).equal(wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_d2_ranks_together_have_batches_of_one_process(name: str, world: int) -> None:
    data, make = make_data(), lambda: SAMPLERS[name](ROWS)
    together = join_ranks(run_ranks(data, world, 12, make=make))
    alone = take_rows(Loader(data, 12 * world, sampler=make(), prefetch=0))
    assert len(together) == len(alone)
    for mine, wanted in zip(together[:-1], alone[:-1]):
        assert mine.equal(wanted)
    assert set(together[-1].tolist()) >= set(alone[-1].tolist())
    counts = {len(batch) for rank in run_ranks(data, world, 12, make=make) for batch in rank[-1:]}
    assert len(counts) == 1


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_d2_every_row_comes_once(
    rows: int, batch: int, world: int, drop_last: bool, even: bool, shuffle: bool
) -> None:
    ranks = run_ranks(make_data(rows), world, batch, drop_last=drop_last, even=even, shuffle=shuffle)
    together = [row for step in join_ranks(ranks) for row in step.tolist()]
    whole = rows // (batch * world) * batch * world if drop_last else rows
    counts = torch.tensor(together, dtype=torch.int64).bincount(minlength=rows)
    assert int((counts > 0).sum()) == whole
    if drop_last or not even:
        assert len(together) == whole
    else:
        assert len(together) < whole + world
        assert len({len(rank) for rank in ranks}) == 1
    loaders = [
        Loader(make_data(rows), batch, drop_last=drop_last, even=even, rank=rank, world_size=world)
        for rank in range(world)
    ]
    assert list(map(len, loaders)) == list(map(len, ranks))


def list_measures(count: int, epochs: int) -> dict[str, float]:
    """Return how many standard deviations the orders of some epochs are from random ones."""
    neighbours = fixed = 0
    table = torch.zeros(10, 10)
    places, before, correlations = torch.arange(count), None, []
    for epoch in range(epochs):
        order = RandomSampler(count, seed=5).order(epoch)(0, count)
        neighbours += int((order.diff().abs() == 1).sum())
        fixed += int((order == places).sum())
        cells = places * 10 // count * 10 + order * 10 // count
        table.view(-1).index_add_(0, cells, torch.ones(count))
        if before is not None:
            correlations.append(float(torch.corrcoef(torch.stack([order.double(), before.double()]))[0, 1]))
        before = order
    wanted, cell = epochs * 2 * (count - 1) / count, epochs * count / 100
    chi = float(((table - cell) ** 2).sum() / cell)
    return {
        "neighbours": (neighbours - wanted) / wanted**0.5,
        "fixed points": (fixed - epochs) / epochs**0.5,
        "table": (chi - 81) / (2 * 81) ** 0.5,
        "epochs": sum(correlations) * (count / len(correlations)) ** 0.5,
    }


@pytest.mark.parametrize(("count", "epochs"), [(100, 400), (1000, 200), (10_000, 60)])
def test_d4_measures_of_random_order_are_those_of_chance(count: int, epochs: int) -> None:
    assert {name: value for name, value in list_measures(count, epochs).items() if abs(value) > 3.5} == {}


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_d4_permutation_has_every_position_once(count: int, seed: int) -> None:
    found = permute(torch.arange(count), count, make_keys(seed))
    assert found.sort().values.equal(torch.arange(count))


def test_d4_pages_have_every_position_once() -> None:
    order = RandomSampler(PAGE + 100).order(0)
    found = torch.cat([order(start, min(start + 5000, PAGE + 100)) for start in range(0, PAGE + 100, 5000)])
    assert found.sort().values.equal(torch.arange(PAGE + 100))


def test_d4_billion_rows_need_no_memory_for_each() -> None:
    order = RandomSampler(10**9).order(0)
    assert len(order(10**9 - 256, 10**9)) == 256
    assert sys.getsizeof(order.held[1].untyped_storage()) < 1 << 20


def test_d5_weighted_draws_follow_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])
    drawn = WeightedRandomSampler(weights, 80_000, seed=1).order(0)(0, 80_000)
    counts = drawn.bincount(minlength=5)
    assert counts[[0, 3]].tolist() == [0, 0]
    wanted = 80_000 * weights / 8
    assert bool(((counts - wanted).abs() <= 4 * wanted.sqrt()).all())


def test_d5_weights_have_no_limit_of_categories_and_keep_small_ones() -> None:
    draws = Draws(torch.cat([torch.full((1 << 24,), 1e-9), torch.ones(4, dtype=torch.float64)]))
    assert draws.find(torch.tensor([0.999999999])).item() == (1 << 24) + 3
    assert draws.find(torch.tensor([1e-6], dtype=torch.float64)).item() > 4000


def test_d5_weighted_draws_without_replacement_are_distinct() -> None:
    weights = torch.tensor([0.0, 1.0, 1.0, 100.0])
    orders = [WeightedRandomSampler(weights, 3, False, seed=s).order(0)(0, 3) for s in range(200)]
    assert all(sorted(order.tolist()) == [1, 2, 3] for order in orders)
    assert sum(order[0].item() == 3 for order in orders) > 180


def test_d5_draws_with_replacement_are_reached_without_earlier_ones() -> None:
    sampler = RandomSampler(1000, replacement=True, num_samples=10**12)
    assert sampler.order(0)(10**12 - 5, 10**12).equal(sampler.order(0)(10**12 - 7, 10**12)[2:])


def draw_noise(batch: TensorDict, generator: torch.Generator) -> TensorDict:
    return batch.set("noise", torch.rand(len(batch), generator=generator))


def draw_global(batch: TensorDict) -> TensorDict:
    return batch.set("noise", torch.rand(len(batch)))


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"num_threads": 3, "prefetch": 3}, {"num_workers": 1}, {"num_workers": 2}]
)
def test_d6_generator_of_transform_depends_on_batch_only(options: dict[str, int]) -> None:
    data = make_data(30)
    wanted = [
        torch.rand(8, generator=make_generator(mix(9, 0, "batch", start, 0)))[: min(8, 30 - start)]
        for start in range(0, 30, 8)
    ]
    noise = [batch["noise"] for batch in Loader(data, 8, seed=9, transform=draw_noise, **options)]
    assert torch.equal(noise[0], wanted[0])
    assert len({float(each[0]) for each in noise}) == 4
    assert [each.tolist() for each in noise] == [
        each.tolist() for each in (batch["noise"] for batch in Loader(data, 8, seed=9, transform=draw_noise))
    ]


def test_d6_workers_seed_global_state_by_batch() -> None:
    data = make_data(30)
    one, two = (
        torch.cat([batch["noise"] for batch in Loader(data, 8, transform=draw_global, num_workers=count)])
        for count in (1, 2)
    )
    assert one.equal(two)


def test_d7_each_block_is_read_by_one_rank_in_one_window() -> None:
    blocks = [range(i, i + 10) for i in range(0, 240, 10)]
    order = BlockSampler(blocks, window=3, lanes=4, seed=2).order(1)
    owners = [set() for _ in blocks]
    for lane in range(4):
        for row in (order(60 * 4 * 0 + i * 4 + lane, i * 4 + lane + 1).item() for i in range(60)):
            owners[row // 10].add(lane)
    assert all(len(owner) == 1 for owner in owners)
    lane = order(0, 240)[::4]
    for window in lane.split(30):
        assert len({row // 10 for row in window.tolist()}) == 3
        assert window.tolist() != sorted(window.tolist())


def test_d7_lanes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    sampler = BlockSampler([range(100)], lanes=6)
    with pytest.raises(ValueError, match=r"6 lanes cannot be shared by 4 ranks: .* \[1, 2, 3, 6\]"):
        list(Loader(make_data(100), 3, sampler=sampler, rank=0, world_size=4))
    with pytest.raises(ValueError, match=r"3 ranks, the batch size is a multiple of 2"):
        list(Loader(make_data(100), 3, sampler=sampler, rank=0, world_size=3))


def test_d7_lanes_of_first_epoch_are_kept_in_state() -> None:
    loader = Loader(make_data(48), 4, sampler=BlockSampler(4), rank=0, world_size=2)
    next(iter(loader))
    state = loader.state_dict()
    assert state["sampler"]["lanes"] == 2
    other = Loader(make_data(48), 8, sampler=BlockSampler(4))
    other.load_state_dict(state)
    rest = torch.cat(take_rows(other))
    assert len(rest.unique()) == 40


def test_d7_sampler_of_other_data_is_refused() -> None:
    sampler = BlockSampler(4)
    first = Loader(make_data(10), 2, sampler=sampler)
    with pytest.raises(ValueError, match="is of data of 10 rows, and the loader has 6: make another one"):
        Loader(make_data(6), 2, sampler=sampler)
    assert sorted(torch.cat(take_rows(first)).tolist()) == list(range(10))
    assert len(Loader(make_data(10), 5, sampler=sampler)) == 2


def test_d7_refused_state_leaves_the_lanes_open() -> None:
    state = Loader(make_data(48), 4, sampler=BlockSampler(4, lanes=6)).state_dict()
    loader = Loader(make_data(48), 4, sampler=BlockSampler(3))
    with pytest.raises(ValueError, match="its blocks of the sampler is"):
        loader.load_state_dict(state)
    assert loader.state_dict()["sampler"]["lanes"] is None


def test_d8_shares_follow_weights_and_parts_come_in_their_order() -> None:
    sampler = MixtureSampler([50, 5000], [3, 1], num_samples=40_000, seed=4)
    rows = torch.cat([sampler.order(0)(start, start + 1000) for start in range(0, 40_000, 1000)])
    first = rows[rows < 50]
    assert abs(len(first) - 30_000) < 3 * (40_000 * 0.75 * 0.25) ** 0.5
    passes = first[: len(first) // 50 * 50].view(-1, 50)
    assert passes.sort(1).values.eq(torch.arange(50)).all()
    assert not passes[0].equal(passes[1])
    second = rows[rows >= 50]
    assert len(second[:5000].unique()) == 5000


def test_d8_run_of_batch_size_gives_batches_of_one_part() -> None:
    parts = Concat([make_data(40), make_data(60)])
    sampler = MixtureSampler(parts, [1, 1], run=10, num_samples=200, seed=1)
    for start in range(0, 200, 10):
        part = sampler.order(0)(start, start + 10) < 40
        assert bool((part == part[0]).all())


def test_d8_counts_of_state_save_the_count_of_earlier_pages() -> None:
    def take(sampler: MixtureSampler) -> Tensor:
        return sampler.order(2)(200_000, 200_010)

    first = MixtureSampler([70, 9000], [1, 3], num_samples=300_000, seed=1)
    wanted = take(first)
    state = {"epoch": 2, "rows": 200_000, **first._get_counts(2, 200_000)}
    other = MixtureSampler([70, 9000], [1, 3], num_samples=300_000, seed=1)
    other._adopt(state)
    assert take(other).equal(wanted)
    assert sum(state["counts"]) == 200_000 // PAGE * PAGE


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RandomSampler(-1), "0 or more; got -1"),
        (lambda: RandomSampler(5, num_samples=0), "1 or more; got 0"),
        (lambda: RandomSampler(0, num_samples=3), "no rows to draw from"),
        (lambda: RandomSampler(5, seed=0.5), "seed is an integer"),
        (lambda: WeightedRandomSampler([1.0, float("nan")], 3), "got nan at position 1"),
        (lambda: WeightedRandomSampler([1.0, -2.0], 3), "got -2.0 at position 1"),
        (lambda: WeightedRandomSampler([0.0, 0.0], 3), "one of them must be above zero"),
        (lambda: WeightedRandomSampler([0.0, 1.0], 2, False), "only 1 rows have a weight above zero"),
        (lambda: MixtureSampler([3, 4], [1]), "got 1 weights for 2 parts"),
        (lambda: MixtureSampler([0, 4], [1, 1]), "part 0 has the weight 1.0, but no rows"),
        (lambda: BlockSampler([3, 4]), "blocks are ranges of rows"),
        (lambda: BlockSampler([range(4)], window=0), "window is an integer of 1 or more"),
        (lambda: len(BlockSampler(4)), "gets the number of rows from a Loader"),
    ],
)
def test_e6_wrong_argument_of_sampler_is_refused(make: object, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()
