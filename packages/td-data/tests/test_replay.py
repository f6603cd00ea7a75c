"""Replay buffers: rules R1 to R10."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import StructureError, TensorDict, lazy_stack
from td_core.errors import KeyMismatchError
from td_data import PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler, prefetch
from td_data._ring_counters import RingCounters


def make_rows(first: int, count: int, length: int = 5) -> TensorDict:
    """Return rows that have their number, in episodes of one length."""
    number = torch.arange(first, first + count)
    done = (number % length == length - 1)[:, None]
    return TensorDict(
        {"number": number, "n": {"x": number[:, None] * 1.0}, "traj": number // length, "done": done}, [count]
    )


def fill(buffer: ReplayBuffer, *counts: int) -> ReplayBuffer:
    for count in counts:
        buffer.extend(make_rows(buffer.write_count, count))
    return buffer


@given(st.integers(1, 9), st.lists(st.integers(0, 14), max_size=8))
def test_r1_numbers_are_those_of_writes(capacity: int, counts: list[int]) -> None:
    buffer = ReplayBuffer(capacity)
    written = 0
    for count in counts:
        assert buffer.extend(make_rows(written, count)).tolist() == list(range(written, written + count))
        written += count
    assert (buffer.write_count, len(buffer), buffer.capacity) == (written, min(written, capacity), capacity)
    if written:
        numbers = torch.arange(max(written - capacity, 0), written)
        assert buffer[numbers]["number"].equal(numbers)
        batch = buffer.sample(50)
        assert batch["index"].equal(batch["number"])
        assert set(batch["index"].tolist()) <= set(numbers.tolist())
        assert buffer[written - 1]["number"] == written - 1


def test_r1_row_that_was_overwritten_is_an_error() -> None:
    buffer = fill(ReplayBuffer(4), 6)
    with pytest.raises(IndexError, match="row 1 was overwritten: the buffer has the numbers from 2 to 5"):
        buffer[torch.tensor([5, 1])]
    with pytest.raises(IndexError, match="row 6 was not written"):
        buffer[6]


def test_r1_add_of_several_rows_is_refused() -> None:
    buffer = fill(ReplayBuffer(4), 3)
    for rows in (make_rows(3, 1), make_rows(3, 2)):
        with pytest.raises(
            StructureError, match=r"add\(\) takes one row; extend\(\) takes several: .* size \[\]"
        ):
            buffer.add(rows)
    with pytest.raises(TypeError, match="a row is a collection, or a dict of its entries; got int"):
        buffer.add(3)
    assert buffer.write_count == 3
    pairs = ReplayBuffer(make_rows(0, 8).view(4, 2))
    assert pairs.add(make_rows(5, 2)) == 0
    with pytest.raises(StructureError, match=r"batch size \[2\], this collection has \[\]"):
        pairs.add(make_rows(5, 1)[0])


@pytest.mark.parametrize("count", [3, 10, 14])
def test_r1_slice_is_one_of_numbers(count: int) -> None:
    buffer = fill(ReplayBuffer(10), count)
    low = max(count - 10, 0)
    numbers = list(range(count))
    for index in (slice(None), slice(low, None), slice(None, count), slice(None, count - 1), slice(None, None, 3),
                  slice(count - 2, count), slice(count, None), slice(low + 2, low + 1)):  # fmt: skip
        wanted = numbers[low:] if index.start is None else numbers
        stop = index.stop if index.stop is None or index.start is not None else index.stop - low
        wanted = wanted[slice(index.start, stop, index.step)]
        assert buffer[index]["number"].tolist() == wanted


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (slice(None, 3), "row 2 was overwritten: the buffer has the numbers from 4 to 13"),
        (slice(None, 4), "row 3 was overwritten"),
        (slice(3, 6), r"row 3 was overwritten: .*, and buffer\[:\] gives their rows"),
        (slice(5, 15), "row 14 was not written"),
        (slice(15, None), "row 15 was not written"),
        (slice(-3, None), "row -3 was not written"),
    ],
)
def test_r1_slice_with_rows_that_are_not_there_is_an_error(index: slice, text: str) -> None:
    with pytest.raises(IndexError, match=text):
        fill(ReplayBuffer(10), 14)[index]


def test_r1_rows_of_an_empty_buffer_are_an_error() -> None:
    for index in (slice(None), []):
        with pytest.raises(IndexError, match=r"the buffer is empty: extend\(\) it first"):
            ReplayBuffer(3)[index]
    with pytest.raises(IndexError, match=r"row 0 was not written: the buffer is empty, extend\(\) it first"):
        ReplayBuffer(3)[0]
    assert len(ReplayBuffer(make_rows(0, 3))[:]) == 0
    with pytest.raises(ValueError, match="the step of a slice is an integer of 1 or more; got -1"):
        fill(ReplayBuffer(3), 3)[::-1]


@pytest.mark.parametrize("counts", [(), (3,), (7, 7), (0, 25, 1)])
@pytest.mark.parametrize("is_stored", [False, True])
def test_r1_iteration_gives_the_rows_that_are_there(counts: tuple[int, ...], is_stored: bool) -> None:
    buffer = fill(ReplayBuffer(make_rows(0, 10) if is_stored else 10), *counts)
    numbers = list(range(max(sum(counts) - 10, 0), sum(counts)))
    assert [int(row["number"]) for row in buffer] == numbers
    assert [int(row["number"]) for row in reversed(buffer)] == numbers[::-1]
    assert len(buffer) == len(numbers)


@pytest.mark.parametrize(("turn", "at"), [(iter, 0), (reversed, -1)])
def test_r1_iteration_ends_with_an_error_at_a_row_that_is_overwritten(turn: Any, at: int) -> None:
    buffer = fill(ReplayBuffer(4), 6)
    rows = turn(buffer)
    assert next(rows)["number"] == [2, 3, 4, 5][at]
    fill(buffer, 4)
    with pytest.raises(IndexError, match=r"row \d was overwritten: the buffer has the numbers from 6 to 9"):
        list(rows)


def test_r1_add_writes_one_row() -> None:
    buffer = ReplayBuffer(make_rows(0, 3).zero_())
    assert [buffer.add(make_rows(i, 1)[0]) for i in range(4)] == [0, 1, 2, 3]
    assert buffer[3]["n", "x"].tolist() == [3.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows.exclude("traj"), "missing keys|extra keys"),
        (lambda rows: rows.set("more", rows["number"]), "more"),
        (lambda rows: rows.set("number", rows["number"].float()), "key 'number' has dtype torch.int64"),
        (lambda rows: rows.set(("n", "x"), torch.zeros(4, 2)), r"key \('n', 'x'\)"),
        (lambda rows: rows.unsqueeze(1), "batch size"),
    ],
)
def test_r2_rows_that_differ_are_refused_before_a_write(change: Any, text: str) -> None:
    buffer = fill(ReplayBuffer(6), 4)
    before = buffer.rows.clone()
    with pytest.raises((StructureError, KeyMismatchError), match=text):
        buffer.extend(change(make_rows(4, 4)))
    assert bool((buffer.rows == before).all())
    assert buffer.write_count == 4
    with pytest.raises(TypeError, match="add\\(\\) writes one row"):
        buffer.extend(make_rows(0, 2)[0])


def test_r3_sample_sees_what_was_written_and_prefetch_is_ahead() -> None:
    buffer = ReplayBuffer(100, batch_size=8)
    with pytest.raises(ValueError, match="the buffer is empty"):
        buffer.sample()
    fill(buffer, 1)
    assert buffer.sample()["number"].tolist() == [0] * 8
    batches = prefetch(iter(buffer.sample, None), 2)
    assert next(batches)["number"].tolist() == [0] * 8
    batches.close()
    with pytest.raises(ValueError, match="sample needs a batch size"):
        fill(ReplayBuffer(3), 1).sample()


def test_r4_uniform_draws_have_a_seed_of_their_own() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (fill(ReplayBuffer(50, seed=seed), 80).sample(20)["index"] for seed in (1, 1, 2))
    assert one.equal(two)
    assert not one.equal(other)
    assert torch.random.get_rng_state().equal(before)
    counts = fill(ReplayBuffer(10), 10).sample(20_000)["index"].bincount()
    assert bool(((counts - 2000).abs() < 4 * 2000**0.5).all())


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1000, 1025, 40_000])
def test_r5_draws_are_those_of_cumsum_and_searchsorted(capacity: int) -> None:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5)
    buffer = fill(ReplayBuffer(capacity, sampler=sampler), capacity)
    generator = torch.Generator().manual_seed(1)
    priority = torch.rand(capacity, generator=generator, dtype=torch.float64)
    buffer.update_priority(torch.arange(capacity), priority)
    p = (priority + 1e-8) ** 0.7
    for _ in range(3):
        other = torch.Generator()
        other.set_state(buffer._generator.get_state())
        target = torch.rand(500, dtype=torch.float64, generator=other) * p.cumsum(0)[-1]
        batch = buffer.sample(500)
        wanted = torch.searchsorted(p.cumsum(0), target, right=True)
        assert batch["index"].equal(wanted)
        torch.testing.assert_close(batch["priority_weight"], ((p / p.min()) ** -0.5)[wanted].float())


def test_r5_sums_do_not_drift() -> None:
    sampler = PrioritizedSampler()
    buffer = fill(ReplayBuffer(500, sampler=sampler), 500)
    for step in range(300):
        buffer.update_priority(torch.randint(500, (64,)), torch.rand(64) * 10 ** (step % 9 - 4))
    for below, above in zip(sampler._sums, sampler._sums[1:]):
        whole = below.view(-1, 32).sum(1)
        assert whole.equal(above[: len(whole)])


def test_r5_new_rows_get_the_largest_priority_and_old_ones_are_left_out() -> None:
    buffer = fill(ReplayBuffer(4, sampler=PrioritizedSampler(alpha=1.0, eps=0.0)), 4)
    assert buffer.update_priority(torch.tensor([0, 1, 2, 3]), torch.tensor([8.0, 1.0, 0.0, 0.0])) == 4
    fill(buffer, 1)
    assert buffer.update_priority(torch.tensor([0, 4, 2]), torch.tensor([100.0, 0.0, 2.0])) == 2
    counts = buffer.sample(3000)["index"].bincount(minlength=5)
    assert counts[[0, 3, 4]].tolist() == [0, 0, 0]
    assert abs(int(counts[1]) - 1000) < 120


def test_r5_largest_of_several_priorities_counts() -> None:
    buffer = fill(ReplayBuffer(2, sampler=PrioritizedSampler(alpha=1.0, eps=0.0)), 2)
    buffer.update_priority([0, 1, 0, 0], [1.0, 0.0, 5.0, 2.0])
    assert buffer._sampler.state_dict()["priorities"].tolist() == [5.0, 0.0]


def test_r5_all_zero_priorities_draw_uniformly() -> None:
    buffer = fill(ReplayBuffer(4, sampler=PrioritizedSampler(eps=0.0)), 3)
    buffer.update_priority(torch.arange(3), 0.0)
    batch = buffer.sample(300)
    assert set(batch["index"].tolist()) == {0, 1, 2}
    assert batch["priority_weight"].unique().tolist() == [1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_r5_priority_that_is_no_number_is_refused(value: float) -> None:
    buffer = fill(ReplayBuffer(4, sampler=PrioritizedSampler()), 4)
    with pytest.raises(
        ValueError, match=f"priorities are finite and not negative; got {value} at position 1"
    ):
        buffer.update_priority([0, 1], [1.0, value])
    with pytest.raises(ValueError, match="one priority for each number; got 3 for 2"):
        buffer.update_priority([0, 1], [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="has no priorities: pass sampler=PrioritizedSampler"):
        fill(ReplayBuffer(4), 1).update_priority([0], 1.0)


def list_slices(low: int, high: int, length: int, slice_len: int, pad: bool) -> list[list[int]]:
    """Return the slices of episodes that a ring has, by hand."""
    found = []
    for start in range(low, high):
        end = min((start // length + 1) * length, high)
        if pad or start + slice_len <= end:
            found.append([min(start + i, end - 1) for i in range(slice_len)])
    return found


@given(
    st.integers(3, 40),
    st.lists(st.integers(0, 25), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_r6_slices_are_those_of_episodes_in_the_ring(
    capacity: int, counts: list[int], length: int, slice_len: int, pad: bool, by_end: bool
) -> None:
    key = {"end_key": "done"} if by_end else {"traj_key": "traj"}
    buffer = ReplayBuffer(capacity, sampler=SliceSampler(slice_len, pad=pad, **key))
    for count in counts:
        buffer.extend(make_rows(buffer.write_count, count, length))
    low, high = max(buffer.write_count - capacity, 0), buffer.write_count
    wanted = list_slices(low, high, length, slice_len, pad)
    if not wanted:
        with pytest.raises(ValueError, match="buffer is empty|no episode in the buffer has"):
            buffer.sample(4)
        return
    batch = buffer.sample(40 * len(wanted))
    assert batch["number"].equal(batch["index"])
    assert batch.batch_size == (40 * len(wanted), slice_len)
    assert sorted({tuple(row) for row in batch["index"].tolist()}) == sorted(map(tuple, wanted))
    if pad:
        assert batch["is_pad"].any(1).sum() <= len(batch)


def test_r6_slices_are_drawn_uniformly() -> None:
    buffer = ReplayBuffer(30, sampler=SliceSampler(3, traj_key="traj"))
    buffer.extend(make_rows(0, 44, 11))
    first = buffer.sample(24_000)["index"][:, 0].bincount(minlength=44)
    starts = [row[0] for row in list_slices(14, 44, 11, 3, False)]
    wanted = 24_000 / len(starts)
    assert bool(((first[starts] - wanted).abs() < 4 * wanted**0.5).all())
    assert int(first.sum()) == int(first[starts].sum())


def test_r6_many_short_episodes_keep_few_in_memory() -> None:
    sampler = SliceSampler(2, traj_key="traj")
    buffer = ReplayBuffer(1000, sampler=sampler)
    for _ in range(40):
        buffer.extend(make_rows(buffer.write_count, 900, 2))
        assert buffer.sample(5).batch_size == (5, 2)
    assert sampler._count < 5000


@pytest.mark.parametrize("make", [lambda: None, PrioritizedSampler, lambda: SliceSampler(3, end_key="done")])
def test_r7_loaded_state_continues_with_the_same_draws(make: Any) -> None:
    buffer = fill(ReplayBuffer(20, sampler=make(), batch_size=6, seed=3), 17, 9)
    if isinstance(buffer._sampler, PrioritizedSampler):
        buffer.update_priority(torch.arange(10, 20), torch.rand(10))
    buffer.sample()
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    other = ReplayBuffer(20, sampler=make(), batch_size=6, seed=4)
    other.load_state_dict(state)
    for _ in range(3):
        assert bool((other.sample() == buffer.sample()).all())
        fill(buffer, 4), fill(other, 4)
    with pytest.raises(ValueError, match="the state is of a buffer of 20 rows; this one has 21"):
        ReplayBuffer(21).load_state_dict(state)


@pytest.mark.parametrize("storage", [20, make_rows(0, 20)], ids=["capacity", "memory"])
def test_r7_earlier_state_takes_a_buffer_back(storage: Any) -> None:
    buffer = fill(ReplayBuffer(storage, sampler=PrioritizedSampler(), batch_size=6), 25)
    state = buffer.state_dict()
    wanted = buffer.sample()
    fill(buffer, 30)
    buffer.load_state_dict(state)
    assert (buffer.write_count, len(buffer)) == (25, 20)
    found = buffer.sample()
    assert bool((found == wanted).all())
    assert found["index"].equal(found["number"])


def test_r7_rows_of_a_state_do_not_replace_newer_ones_of_other_processes(tmp_path: Path) -> None:
    state = fill(ReplayBuffer(10), 8).state_dict()
    shared = ReplayBuffer(make_rows(0, 10).zero_().share_memory_(), path=tmp_path / "counters")
    shared.load_state_dict(state)
    assert shared[torch.arange(8)]["number"].equal(torch.arange(8))
    fill(shared, 1)
    with pytest.raises(ValueError, match="has 9 rows written, which the 8 rows of the state would replace"):
        shared.load_state_dict(state)
    assert shared[8]["number"] == 8


SAMPLERS: dict[str, Any] = {
    "RingSampler": lambda: None,
    "PrioritizedSampler": PrioritizedSampler,
    "SliceSampler": lambda: SliceSampler(2, end_key="done"),
}


@pytest.mark.parametrize(("saved", "own"), list(itertools.permutations(SAMPLERS, 2)))
@pytest.mark.parametrize("is_loaded", [False, True])
def test_r7_state_of_another_sampler_is_refused(
    saved: str, own: str, is_loaded: bool, tmp_path: Path
) -> None:
    one, two = (fill(ReplayBuffer(5, sampler=SAMPLERS[name]()), 3) for name in (saved, own))
    advice = "leave out sampler=" if saved == "RingSampler" else rf"pass sampler={saved}\(\.\.\.\)"
    text = f"the state is of a buffer with a {saved}, this one has a {own}: {advice}"
    if is_loaded:
        pytest.importorskip("td_memmap")
        one.save(tmp_path / "buffer.td")
        with pytest.raises(ValueError, match=text):
            ReplayBuffer.load(tmp_path / "buffer.td", sampler=SAMPLERS[own]())
        return
    with pytest.raises(ValueError, match=text):
        two.load_state_dict(one.state_dict())
    assert two[2]["number"] == 2


@pytest.mark.parametrize("samplers", [(None, PrioritizedSampler), (PrioritizedSampler, None)])
def test_r7_state_without_the_name_of_its_sampler_is_loaded_if_it_fits(samplers: Any) -> None:
    one, two = (fill(ReplayBuffer(5, sampler=make and make()), 3) for make in samplers)
    state = one.state_dict()
    del state["sampler_name"]
    one.load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of a buffer with a (Ring|Prioritized)Sampler"):
        two.load_state_dict(state)


def test_r7_saved_rows_are_put_into_a_storage_that_is_given(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    fill(ReplayBuffer(10), 12).save(tmp_path / "buffer.td")
    storage = make_rows(0, 10).zero_().share_memory_()
    found = ReplayBuffer.load(tmp_path / "buffer.td", storage)
    assert found.rows is storage
    assert found[torch.arange(2, 12)]["number"].equal(torch.arange(2, 12))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ReplayBuffer(0), ValueError, "the capacity is an integer of 1 or more; got 0"),
        (lambda: ReplayBuffer(TensorDict()), TypeError, "a collection with batch dims; got TensorDict"),
        (lambda: ReplayBuffer([1]), TypeError, "a collection with batch dims; got list"),
        (
            lambda: ReplayBuffer(make_rows(0, 3).set("index", torch.zeros(3))),
            ValueError,
            "has an entry 'index'",
        ),
        (
            lambda: ReplayBuffer(3, sampler=RandomSampler(3)),
            TypeError,
            "got RandomSampler, which is for a Loader",
        ),
        (lambda: ReplayBuffer(3, batch_size=0), ValueError, "batch_size is an integer of 1 or more"),
        (lambda: ReplayBuffer(3, path="x"), ValueError, "path needs a storage that other processes can open"),
        (lambda: PrioritizedSampler(alpha=-1), ValueError, "alpha is a finite number of 0 or more; got -1"),
        (lambda: SliceSampler(0, traj_key="a"), ValueError, "slice_len is an integer of 1 or more"),
        (lambda: SliceSampler(2), ValueError, "exactly one of traj_key and end_key"),
    ],
)
def test_e6_wrong_argument_is_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_e6_key_of_slices_that_is_missing_is_refused() -> None:
    with pytest.raises(KeyError, match="trai"):
        ReplayBuffer(make_rows(0, 3), sampler=SliceSampler(2, traj_key="trai"))


def test_storage_with_two_batch_dims_gives_numbers_of_rows() -> None:
    buffer = ReplayBuffer(TensorDict({"a": torch.zeros(6, 3)}, [6, 3]))
    buffer.extend(TensorDict({"a": torch.arange(8.0)[:, None].expand(8, 3).clone()}, [8, 3]))
    batch = buffer.sample(5)
    assert batch.batch_size == (5, 3)
    assert batch["index"].equal(batch["a"].long())


def stack_lazily(rows: TensorDict) -> Any:
    return lazy_stack(list(rows.unbind(0)))


def nest_lazily(rows: TensorDict) -> Any:
    return rows.set("n", stack_lazily(rows["n"]))


def keep_dense(rows: TensorDict) -> Any:
    return rows


@pytest.mark.parametrize("storage", [stack_lazily, nest_lazily, keep_dense])
@pytest.mark.parametrize("rows", [stack_lazily, nest_lazily, keep_dense])
def test_r2_lazy_stacks_are_storages_and_rows(storage: Any, rows: Any) -> None:
    buffer = ReplayBuffer(storage(make_rows(0, 6).zero_()))
    for first, count in ((0, 4), (4, 1), (5, 9)):
        buffer.extend(rows(make_rows(first, count)))
        batch = buffer.sample(5)
        assert batch["index"].equal(batch["number"])
    numbers = torch.arange(8, 14)
    assert buffer[numbers]["number"].equal(numbers)
    assert buffer[numbers]["n", "x"].flatten().equal(numbers.float())
    with pytest.raises((StructureError, KeyMismatchError)):
        buffer.extend(rows(make_rows(14, 2).exclude("traj")))


@pytest.mark.parametrize(
    "index", [0.5, [True], torch.zeros(2), torch.tensor([True, False]), "number", None, {1}]
)
def test_r1_index_that_has_no_numbers_is_refused(index: Any) -> None:
    buffer = fill(ReplayBuffer(4, sampler=PrioritizedSampler()), 3)
    with pytest.raises(TypeError, match="index has numbers of rows of int64; got"):
        buffer[index]
    with pytest.raises(TypeError, match="index has numbers of rows of int64; got"):
        buffer.update_priority(index, 1.0)


def test_rows_without_any_are_written() -> None:
    buffer = ReplayBuffer(make_rows(0, 4))
    assert buffer.extend(make_rows(0, 0)).tolist() == []
    fill(buffer, 3)
    assert buffer.extend(make_rows(0, 0)).tolist() == []
    assert (len(buffer), buffer.write_count) == (3, 3)


class Crash(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("make", [lambda: None, PrioritizedSampler, lambda: SliceSampler(2, end_key="done")])
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 16)), max_size=8))
def test_r8_rows_are_whole_after_a_writer_ends_at_any_point(
    make: Any, capacity: int, extends: list[tuple[int, int]]
) -> None:
    """Each writer extends once, and ends at the n-th row that it writes, before the first store, or not at all."""
    storage = make_rows(0, capacity).zero_().share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        valid: set[int] = set()
        for count, crash in extends:
            buffer = ReplayBuffer(storage, path=f"{folder}/counters", sampler=make())
            first, before = buffer.write_count, valid

            def end(self: ReplayBuffer, rows: Any, stop: int, crash: int = crash) -> None:
                for row in range(min(crash, len(rows))):  # torn: half of each row
                    self.rows["number"][(stop - len(rows) + row) % self.capacity] = -1
                raise Crash

            with pytest.MonkeyPatch.context() as patch:
                if crash >= 0:
                    patch.setattr(ReplayBuffer, "_write", end)
                with contextlib.suppress(Crash):
                    buffer.extend(make_rows(first, count))
            buffer._counters.close()
            again = ReplayBuffer(storage, path=f"{folder}/counters", sampler=make())
            low, high = again._counters.read()
            valid = set(range(low, high))
            assert high == first + (count if crash < 0 else 0)
            assert before - valid <= set(range(min(before, default=0), min(before, default=0) + count))
            if valid:
                assert again[torch.arange(low, high)]["number"].tolist() == list(range(low, high))
                with contextlib.suppress(ValueError):  # no episode is long enough
                    batch = again.sample(20)
                    assert batch["index"].equal(batch["number"])
                    assert set(batch["index"].flatten().tolist()) <= valid


def test_r8_rows_of_an_extend_that_was_cut_off_stay_invalid(tmp_path: Path) -> None:
    storage = make_rows(0, 10).zero_().share_memory_()
    path = tmp_path / "counters"
    buffer = fill(ReplayBuffer(storage, path=path), 15)
    buffer._counters.reserve(18)  # what a killed writer leaves: rows 5 to 7 may be torn
    buffer._counters.close()
    again = ReplayBuffer(storage, path=path, sampler=PrioritizedSampler())
    assert (len(again), again.write_count) == (7, 15)
    assert set(again.sample(400)["index"].tolist()) == set(range(8, 15))
    again.extend(make_rows(15, 1))
    assert len(again) == 8
    assert set(again.sample(400)["index"].tolist()) == set(range(8, 16))
    again.extend(make_rows(16, 4))
    assert set(again.sample(400)["index"].tolist()) == set(range(10, 20))


def test_r8_counters_of_another_capacity_are_refused(tmp_path: Path) -> None:
    ReplayBuffer(make_rows(0, 10), path=tmp_path / "counters")
    with pytest.raises(ValueError, match="counts the rows of a buffer of 10 rows; this one has 11"):
        ReplayBuffer(make_rows(0, 11), path=tmp_path / "counters")


def test_r9_second_writer_is_refused(tmp_path: Path) -> None:
    storage = make_rows(0, 10).share_memory_()
    fill(one := ReplayBuffer(storage, path=tmp_path / "counters"), 3)
    two = ReplayBuffer(storage, path=tmp_path / "counters")
    assert set(two.sample(40)["index"].tolist()) == {0, 1, 2}
    with pytest.raises(
        RuntimeError, match="the buffer of .*counters has a writer, in another process or in this one"
    ):
        fill(two, 3)
    one._counters.close()
    fill(two, 3)
    assert one.write_count == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the reader is forked")
def test_r9_reader_that_a_killed_writer_forked_does_not_hold_its_lock(tmp_path: Path) -> None:
    storage = make_rows(0, 10).share_memory_()
    buffer = ReplayBuffer(storage, path=tmp_path / "counters")
    ready, wait = os.pipe(), os.pipe()
    writer = os.fork()
    if not writer:
        fill(buffer, 3)
        if os.fork():  # the reader outlives it
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(0)
    os.waitpid(writer, 0)
    os.read(ready[0], 1)
    try:
        fill(buffer, 2)
    finally:
        os.write(wait[1], b"x")
    assert buffer[torch.arange(5)]["number"].equal(torch.arange(5))


def test_r9_rows_that_are_overwritten_during_a_read_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(ReplayBuffer(10), 10)
    gather, calls = ReplayBuffer._gather, []

    def overwrite(self: ReplayBuffer, numbers: torch.Tensor, low: int) -> Any:
        calls.append(numbers)
        if len(calls) == 1:
            fill(buffer, 8)
        return gather(self, numbers, low)

    monkeypatch.setattr(ReplayBuffer, "_gather", overwrite)
    batch = buffer.sample(30)
    assert len(calls) == 2
    assert batch["number"].equal(batch["index"])
    assert int(batch["index"].min()) >= 8


def test_r9_readers_take_a_lock_where_stores_have_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_data._ring_counters._IS_ORDERED", False)
    buffer = fill(ReplayBuffer(make_rows(0, 10), path=tmp_path / "counters"), 12)
    assert set(buffer.sample(99)["index"].tolist()) == set(range(2, 12))
    assert (tmp_path / "counters.lock").exists()


def test_r9_counters_are_shared_by_a_pickle(tmp_path: Path) -> None:
    counters = RingCounters(7, os.fspath(tmp_path / "counters"), False, True)
    other = pickle.loads(pickle.dumps(counters))
    counters.reserve(9), counters.publish(9)
    assert other.read() == (2, 9)


def test_r9_sampler_of_a_reader_sees_rows_of_the_writer(tmp_path: Path) -> None:
    storage = make_rows(0, 20).zero_().share_memory_()
    writer = ReplayBuffer(storage, path=tmp_path / "counters")
    reader = ReplayBuffer(storage, path=tmp_path / "counters", sampler=SliceSampler(3, end_key="done"))
    for _ in range(8):
        fill(writer, 7)
        batch = reader.sample(50)
        assert batch["number"].equal(batch["index"])
        assert bool((batch["traj"] == batch["traj"][:, :1]).all())


def test_r10_rows_are_copied_to_the_device_of_the_storage(device: torch.device) -> None:
    buffer = ReplayBuffer(make_rows(0, 10).to(device))
    buffer.extend(make_rows(0, 4))
    assert buffer.sample(3).to("cpu")["number"].device.type == "cpu"


@pytest.mark.parametrize(
    "storage", [6, TensorDict({"a": torch.zeros(6, 2), "n": {"b": torch.zeros(6)}}, [6])]
)
def test_r2_dicts_and_lists_are_rows(storage: Any) -> None:
    buffer = ReplayBuffer(storage)
    rows = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.arange(3.0)}}, [3])
    assert buffer.add(rows[0].to_dict()) == 0
    assert buffer.extend([rows[0], rows[1].to_dict()]).tolist() == [1, 2]
    assert buffer.extend(rows.to_dict()).tolist() == [3, 4, 5]
    assert buffer[:]["n", "b"].tolist() == [0, 0, 1, 0, 1, 2]
    assert buffer[:]["a"][3:].equal(rows["a"])


def test_r2_dicts_have_the_batch_dims_of_the_storage() -> None:
    buffer = ReplayBuffer(TensorDict({"a": torch.zeros(6, 3)}, [6, 3]))
    assert buffer.add({"a": torch.ones(3)}) == 0
    assert buffer.extend({"a": torch.ones(2, 3)}).tolist() == [1, 2]
    assert buffer[:]["a"].equal(torch.ones(3, 3))


@pytest.mark.parametrize("rows", [[], 5, {"a": torch.tensor(1.0)}, TensorDict({"a": 1.0})])
def test_r2_rows_that_are_none_are_refused_with_what_is_taken(rows: Any) -> None:
    with pytest.raises(
        TypeError, match="rows are a collection with batch dims, a dict of columns, or a list of rows"
    ):
        ReplayBuffer(6).extend(rows)
    with pytest.raises(TypeError, match="a row is a collection, or a dict of its entries; got list"):
        ReplayBuffer(6).add([rows])


@pytest.mark.parametrize(
    "change", [lambda rows: rows.exclude("task"), lambda rows: rows.set("more", ["c", "d"])]
)
def test_r2_rows_with_other_values_are_refused_before_a_write(change: Any) -> None:
    pytest.importorskip("td_tensorclass")
    rows = TensorDict({"x": torch.arange(2), "task": ["a", "b"]}, [2])
    buffer = ReplayBuffer(4)
    buffer.extend(rows)
    with pytest.raises(KeyMismatchError, match="'task'|'more'"):
        buffer.extend(change(rows.clone()))
    assert buffer.write_count == 2
    assert [buffer[i]["task"] for i in range(2)] == ["a", "b"]


@pytest.mark.parametrize("take", ["save", "state_dict"])
def test_r8_write_after_a_state_without_rows_warns_once(take: str, tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    ring = ReplayBuffer(make_rows(0, 10).memmap_like(tmp_path / "ring"))
    fill(ring, 5)
    ring.save(tmp_path / "ring.td") if take == "save" else ring.state_dict()
    with pytest.warns(UserWarning, match="under wrong numbers. Give the buffer path=, or save again"):
        fill(ring, 5)
    fill(ring, 5)


def test_r8_ring_with_counters_that_is_written_after_a_save_is_loaded_with_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    ring = ReplayBuffer(make_rows(0, 10).memmap_like(tmp_path / "ring"), path=tmp_path / "counters")
    ring.extend(make_rows(0, 15))
    ring.save(tmp_path / "ring.td")
    ring.extend(make_rows(15, 4))
    del ring
    again = ReplayBuffer.load(tmp_path / "ring.td")
    assert again.write_count == 19 and again[:]["number"].tolist() == list(range(9, 19))
