"""Plans that repeat, reorder, pad and select elements, compared with torch; conditions and aligned dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core._plans import elements
from td_core._plans.elements import Where, align_dims, append_dims
from td_core.errors import BatchSizeError, DimError

Batch = tuple[int, ...]
BATCHES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=0, max_size=4).map(tuple)
NON_EMPTY = BATCHES.filter(lambda batch: len(batch) > 0)

# A case is (batch, plan, torch operation on a tensor of shape ``batch``).
Case = tuple[Batch, Any, Callable[[Tensor], Any]]


def draw_dim(draw: st.DrawFn, batch: Batch) -> int:
    return draw(st.integers(-len(batch), len(batch) - 1))


@st.composite
def repeats(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    times = draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch) + 2))
    return batch, elements.repeat_plan(batch, times), lambda t: t.repeat(times)


@st.composite
def interleaves(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    if draw(st.booleans()):
        times: Any = draw(st.integers(0, 3))
    else:
        times = torch.tensor(
            draw(st.lists(st.integers(0, 3), min_size=batch[dim], max_size=batch[dim])), dtype=torch.long
        )
    return (
        batch,
        elements.repeat_interleave_plan(batch, times, dim, None),
        lambda t: t.repeat_interleave(times, dim),
    )


@st.composite
def narrows(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    start = draw(st.integers(-batch[dim], batch[dim]))
    length = draw(
        st.integers(0, batch[dim] - start % batch[dim] if 0 <= start < batch[dim] or start < 0 else 0)
    )
    return batch, elements.narrow_plan(batch, dim, start, length), lambda t: t.narrow(dim, start, length)


@st.composite
def flips(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    dims = draw(st.permutations(range(len(batch))))[: draw(st.integers(0, len(batch)))]
    return batch, elements.flip_plan(batch, dims), lambda t: t.flip(dims)


@st.composite
def rolls(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dims = draw(st.lists(st.integers(-len(batch), len(batch) - 1), min_size=1, max_size=3))
    shifts = draw(st.lists(st.integers(-4, 4), min_size=len(dims), max_size=len(dims)))
    return batch, elements.roll_plan(batch, shifts, dims), lambda t: t.roll(shifts, dims)


@st.composite
def gathers(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY.filter(lambda batch: 0 not in batch))
    dim = draw_dim(draw, batch)
    shape = list(batch)
    shape[dim] = draw(st.integers(1, 4))
    index = torch.randint(
        batch[dim], shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    return batch, elements.gather_plan(batch, dim, index), lambda t: t.gather(dim, index)


@st.composite
def pads(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    count = draw(st.integers(0, len(batch)))
    amounts = [
        draw(st.tuples(st.integers(-(size // 2), 2), st.integers(-(size // 2), 2))) for size in batch[:count]
    ]
    backwards = [0, 0] * (len(batch) - count) + [side for amount in reversed(amounts) for side in amount]
    flat = [side for amount in amounts for side in amount]
    return batch, elements.pad_plan(batch, flat, 7), lambda t: torch.nn.functional.pad(t, backwards, value=7)


@pytest.mark.parametrize(
    "cases", [repeats, interleaves, narrows, flips, rolls, gathers, pads], ids=lambda cases: cases.__name__
)
def test_shape_plan_equals_torch(check_plan: Any, cases: Callable[[], st.SearchStrategy[Case]]) -> None:
    settings(max_examples=120, deadline=None)(given(cases())(check_plan))()


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (lambda: elements.repeat_plan((2, 3), (2,)), ValueError, r"got \[2\] for the batch size \[2, 3\]"),
        (lambda: elements.repeat_plan((2,), (-1,)), BatchSizeError, r"must not be negative; got \[-1\]"),
        (
            lambda: elements.repeat_interleave_plan((2,), torch.ones(3).long(), 0, None),
            BatchSizeError,
            r"batch dim 0, 2; got shape \[3\]",
        ),
        (
            lambda: elements.repeat_interleave_plan((2,), -1, 0, None),
            BatchSizeError,
            "must not be negative; got -1",
        ),
        (
            lambda: elements.repeat_interleave_plan((2,), 2, 0, 5),
            BatchSizeError,
            "output_size is 5, but the result has size 4",
        ),
        (
            lambda: elements.narrow_plan((2, 3), 1, 1, 3),
            BatchSizeError,
            r"start \(1\) \+ length \(3\) exceeds the size of batch dim 1, 3",
        ),
        (
            lambda: elements.narrow_plan((2, 3), 1, 4, 0),
            IndexError,
            r"start out of range \(expected to be in range of \[-3, 3\], but got 4\)",
        ),
        (
            lambda: elements.narrow_plan((2, 3), 1, 0, -1),
            BatchSizeError,
            "length must be non-negative; got -1",
        ),
        (lambda: elements.flip_plan((2, 3), (0, -2)), DimError, r"several times in \[0, -2\]"),
        (lambda: elements.roll_plan((2, 3), (1, 2), 0), BatchSizeError, r"shifts \[1, 2\] and dims \[0\]"),
        (
            lambda: elements.gather_plan((2, 3), 0, torch.zeros(2).long()),
            BatchSizeError,
            r"shape \[2\] for the batch size \[2, 3\]",
        ),
    ],
)
def test_plan_bad_argument_raises(plan: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan()


VALUE = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "ndim", "expected"), [((), 2, (1, 1)), ((2,), 3, (2, 1, 1)), ((2, 3), 2, (2, 3))]
)
def test_append_dims_adds_dims_at_the_end(shape: Batch, ndim: int, expected: Batch) -> None:
    assert append_dims(torch.ones(shape), ndim).shape == expected


@pytest.mark.parametrize(
    ("shape", "ndim", "batch_dims", "expected"),
    [
        ((2,), 3, 1, (2, 1, 1)),
        ((2, 4), 3, 1, (2, 1, 4)),
        ((2, 3, 4), 4, 2, (2, 3, 1, 4)),
        ((2, 4), 2, 1, (2, 4)),
        ((2, 4), 3, 0, (2, 4)),
        ((4,), 3, 2, (4,)),
    ],
)
def test_align_dims_inserts_dims_after_the_batch(
    shape: Batch, ndim: int, batch_dims: int, expected: Batch
) -> None:
    assert align_dims(torch.ones(shape), ndim, batch_dims).shape == expected


@pytest.mark.parametrize("shift", [1, -7, 0])
@pytest.mark.parametrize("tail", [(), (4,), (0,)])
def test_roll_plan_without_dims_rolls_flat_batch(shift: int, tail: Batch) -> None:
    leaf = VALUE[..., 0] if not tail else VALUE[..., : tail[0]]
    plan = elements.roll_plan((2, 3), shift, None)
    found = plan.leaf(leaf)
    assert found.shape == leaf.shape and plan.along(0) is None
    for one, column in zip(found.view(6, -1).unbind(1), leaf.reshape(6, -1).unbind(1), strict=True):
        assert torch.equal(one, column.roll(shift))


@pytest.mark.parametrize("tail", [(), (4,)])
def test_where_plan_equals_torch(tail: Batch) -> None:
    condition = torch.tensor([[True, False, True], [False, False, True]])
    left = VALUE if tail else VALUE[..., 0]
    plan = Where(condition)
    expected = torch.where(condition.view(2, 3, *[1] * len(tail)), left, -left)
    assert torch.equal(plan.leaf([left, -left]), expected)
    for dim in (0, 1):
        parts = plan.split(dim, left.size(dim))
        rows = zip(parts, left.unbind(dim), strict=True)
        assert torch.equal(torch.stack([part.leaf([row, -row]) for part, row in rows], dim), expected)


def test_where_plan_uniform_condition_takes_whole_leaf() -> None:
    left, right = torch.ones(2, 3, dtype=torch.int32), torch.zeros(2, 5)
    for value, chosen in ((True, left), (False, right)):
        found = Where(torch.tensor([value, value]), takes_whole=True).leaf([left, right])
        assert (found.dtype, found.shape) == (torch.float32, chosen.shape) and torch.equal(
            found, chosen.float()
        )
    for condition, takes_whole in (([True, False], True), ([True, True], False), ([True, True], None)):
        with pytest.raises(RuntimeError, match="must match the size"):
            Where(torch.tensor(condition), takes_whole).leaf([left, right])


def test_where_plan_of_part_takes_whole_row_unless_forbidden() -> None:
    rows = [torch.ones(3), torch.zeros(5)]
    parts = Where(torch.tensor([True, False])).split(0, 2)
    assert [len(part.leaf(rows)) for part in parts] == [3, 5]
    with pytest.raises(RuntimeError, match="must match the size"):
        Where(torch.tensor([True, False]), takes_whole=False).split(0, 2)[0].leaf(rows)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: elements.roll_plan((2, 3), (1, 2), None), BatchSizeError, r"one shift; got \[1, 2\]"),
        (lambda: elements.pad_plan((2,), [1], 0), BatchSizeError, r"two numbers for each dim; got \[1\]"),
        (lambda: elements.pad_plan((2,), [1, 0, 1, 0], 0), BatchSizeError, r"2 dims, \[1, 0, 1, 0\].*\[2\] has 1"),
        (lambda: elements.pad_plan((2,), [-2, -1], 0), BatchSizeError, "takes more from batch dim 0 than its size, 2"),
        (lambda: elements.pad_plan((2,), "ab", 0), TypeError, "pad: pad_size is a sequence of ints; got 'ab'"),
        (lambda: elements.gather_plan((2,), 0, [0]), TypeError, r"gather: index is a tensor; got \[0\]"),
        (lambda: elements.gather_plan((2,), 1, torch.tensor([0])), DimError, r"\[-1, 0\], but got 1"),
    ],
)  # fmt: skip
def test_plan_of_elements_invalid_argument_raises(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
