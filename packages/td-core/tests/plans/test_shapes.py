"""Shape plans, compared with torch on plain tensors, and per member for lazy stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core._plans import elements, shapes
from td_core._plans.plans import MultiPlan
from td_core.errors import BatchSizeError, DimError

Batch = tuple[int, ...]
BATCHES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), min_size=0, max_size=4).map(tuple)
NON_EMPTY = BATCHES.filter(lambda batch: len(batch) > 0)


def make_leaf(batch: Batch, tail: Batch = ()) -> Tensor:
    return torch.arange(math.prod(batch) * math.prod(tail)).view((*batch, *tail))


def draw_dim(draw: st.DrawFn, batch: Batch) -> int:
    return draw(st.integers(-len(batch), len(batch) - 1))


# A case is (batch, plan, torch operation on a tensor of shape ``batch``).
Case = tuple[Batch, Any, Callable[[Tensor], Any]]


@st.composite
def reshapes(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    factors = [size for size in batch if size != 1]
    cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=3)))
    new = [math.prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
    if math.prod(new) and draw(st.booleans()):
        new[draw(st.integers(0, len(new) - 1))] = -1
    return batch, shapes.view_plan(batch, new), lambda t: t.view(new)


@st.composite
def flattens(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    if not batch:
        return batch, shapes.flatten_plan(batch, 0, -1), lambda t: t.flatten()
    start, end = sorted((draw(st.integers(0, len(batch) - 1)), draw(st.integers(0, len(batch) - 1))))
    end -= draw(st.sampled_from([0, len(batch)]))
    return batch, shapes.flatten_plan(batch, start, end), lambda t: t.flatten(start, end)


@st.composite
def unflattens(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    sizes = draw(st.sampled_from([(batch[dim],), (1, batch[dim]), (batch[dim], 1, 1), (-1,), (1, -1)]))
    if batch[dim] == 0 and -1 in sizes:
        sizes = (0, 5)
    return batch, shapes.unflatten_plan(batch, dim, sizes), lambda t: t.unflatten(dim, sizes)


@st.composite
def permutes(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    dims = draw(st.permutations(range(len(batch))))
    return batch, shapes.permute_plan(batch, dims), lambda t: t.permute(dims)


@st.composite
def transposes(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    a, b = draw_dim(draw, batch), draw_dim(draw, batch)
    return batch, shapes.transpose_plan(batch, a, b), lambda t: t.transpose(a, b)


@st.composite
def movedims(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    count = draw(st.integers(1, len(batch)))
    source = draw(st.permutations(range(len(batch))))[:count]
    target = draw(st.permutations(range(-len(batch), 0)))[:count]
    return batch, shapes.movedim_plan(batch, source, target), lambda t: t.movedim(source, target)


@st.composite
def unsqueezes(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    dim = draw(st.integers(-len(batch) - 1, len(batch)))
    return batch, shapes.unsqueeze_plan(batch, dim), lambda t: t.unsqueeze(dim)


@st.composite
def squeezes(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    if draw(st.booleans()):
        return batch, shapes.squeeze_plan(batch, None), lambda t: t.squeeze()
    dims = draw(st.lists(st.integers(0, len(batch) - 1), unique=True))
    return batch, shapes.squeeze_plan(batch, dims), lambda t: t.squeeze(tuple(dims))


@st.composite
def expands(draw: st.DrawFn) -> Case:
    batch = draw(BATCHES)
    new = [draw(st.integers(0, 3)) if size == 1 else draw(st.sampled_from([size, -1])) for size in batch]
    new = draw(st.lists(st.integers(0, 3), max_size=2)) + new
    return batch, shapes.expand_plan(batch, new), lambda t: t.expand(new)


@st.composite
def unbinds(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    return batch, shapes.unbind_plan(batch, dim), lambda t: t.unbind(dim)


@st.composite
def splits(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        return batch, shapes.split_plan(batch, size, dim), lambda t: t.split(size, dim)
    cuts = sorted(draw(st.lists(st.integers(0, batch[dim]), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, batch[dim]], strict=True)]
    return batch, shapes.split_plan(batch, sizes, dim), lambda t: t.split(sizes, dim)


@st.composite
def chunks(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim, count = draw_dim(draw, batch), draw(st.integers(1, 5))
    return batch, shapes.chunk_plan(batch, count, dim), lambda t: t.chunk(count, dim)


@st.composite
def tensor_splits(draw: st.DrawFn) -> Case:
    batch = draw(NON_EMPTY)
    dim = draw_dim(draw, batch)
    form = draw(st.sampled_from(["int", "list", "tensor"]))
    if form == "int":
        where: Any = draw(st.integers(1, 4))
    else:
        where = sorted(draw(st.lists(st.integers(0, 4), max_size=3)))
        where = torch.tensor(where, dtype=torch.long) if form == "tensor" else where
    return batch, shapes.tensor_split_plan(batch, where, dim), lambda t: t.tensor_split(where, dim)


ONE_RESULT = [
    reshapes,
    flattens,
    unflattens,
    permutes,
    transposes,
    movedims,
    unsqueezes,
    squeezes,
    expands,
]
PARTS = [unbinds, splits, chunks, tensor_splits]


@pytest.mark.parametrize("cases", ONE_RESULT, ids=lambda cases: cases.__name__)
def test_shape_plan_equals_torch(check_plan: Any, cases: Callable[[], st.SearchStrategy[Case]]) -> None:
    settings(max_examples=120, deadline=None)(given(cases())(check_plan))()


@pytest.mark.parametrize("cases", PARTS, ids=lambda cases: cases.__name__)
def test_multi_plan_equals_torch(cases: Callable[[], st.SearchStrategy[Case]]) -> None:
    @settings(max_examples=120, deadline=None)
    @given(cases())
    def check(case: Case) -> None:
        batch, plan, reference = case
        expected = reference(make_leaf(batch))
        assert isinstance(plan, MultiPlan)
        assert [lead + batch[plan.n :] for lead in plan.leads] == [tuple(part.shape) for part in expected]
        for part, want in zip(plan.leaf(make_leaf(batch)), expected, strict=True):
            assert torch.equal(part, want)
        wide = make_leaf(batch, (2,))
        for part, want in zip(
            plan.leaf(wide), zip(*[reference(wide[..., i]) for i in (0, 1)], strict=True), strict=True
        ):
            assert torch.equal(part, torch.stack(want, -1))
        for stack_dim in range(len(batch)):
            along = plan.along(stack_dim)
            members = make_leaf(batch).unbind(stack_dim)
            if along.picks is not None:
                for pick, want in zip(along.picks, expected, strict=True):
                    if isinstance(pick, int):
                        assert torch.equal(members[pick], want)
                    elif len(pick):
                        assert torch.equal(torch.stack([members[i] for i in pick], along.stack_dim), want)
            elif members:
                columns = zip(*[along.plan.leaf(member) for member in members], strict=True)
                for column, want in zip(columns, expected, strict=True):
                    assert torch.equal(torch.stack(column, along.stack_dim), want)

    check()


@settings(max_examples=150, deadline=None)
@given(NON_EMPTY, st.data())
def test_join_plan_equals_torch(batch: Batch, data: st.DataObject) -> None:
    stacks = data.draw(st.booleans())
    if stacks:
        dim = data.draw(st.integers(-len(batch) - 1, len(batch)))
        leaves = [make_leaf(batch) + i for i in range(data.draw(st.integers(1, 3)))]
        plan, expected = shapes.stack_plan(batch, dim, len(leaves)), torch.stack(leaves, dim)
    else:
        dim = data.draw(st.integers(-len(batch), len(batch) - 1))
        sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        at = dim % len(batch)
        leaves = [make_leaf((*batch[:at], size, *batch[at + 1 :])) for size in sizes]
        batch = tuple(leaves[0].shape)
        plan, expected = shapes.cat_plan(batch, dim, sizes), torch.cat(leaves, dim)
    assert plan.lead + batch[plan.n :] == tuple(expected.shape)
    assert torch.equal(plan.leaf(leaves), expected)
    for stack_dim, size in enumerate(batch):
        along = plan.along(stack_dim)
        if along is None:
            assert (stack_dim, stacks) == (plan.dim, False)
        elif size:
            members = zip(*[leaf.unbind(stack_dim) for leaf in leaves], strict=True)
            joined = [along.plan.leaf(list(column)) for column in members]
            assert torch.equal(torch.stack(joined, along.stack_dim), expected)


@pytest.mark.parametrize(
    ("plan", "dims"),
    [
        (shapes.reshape_plan((2, 3), (6,)), (None,)),
        (shapes.reshape_plan((2, 3), (2, 3)), (0, 1)),
        (shapes.flatten_plan((2, 3, 4), 0, 1), (None, 2)),
        (shapes.flatten_plan((2, 3, 4), 1, 1), (0, 1, 2)),
        (shapes.unflatten_plan((2, 3, 4), 1, (3, 1)), (0, None, None, 2)),
        (shapes.permute_plan((2, 3, 4), (2, 0, 1)), (2, 0, 1)),
        (shapes.unsqueeze_plan((2, 3), 1), (0, None)),
        (shapes.squeeze_plan((2, 1, 3), None), (0,)),
        (shapes.expand_plan((2, 3), (5, 2, 3)), (None, 0, 1)),
        (elements.repeat_plan((2, 3), (2, 1, 1)), (None, 0, 1)),
        (elements.flip_plan((2, 3), 0), (0, 1)),
        (elements.narrow_plan((2, 3), 1, 0, 1), (0, 1)),
        (shapes.unbind_plan((2, 3, 4), 1), (0,)),
        (shapes.split_plan((2, 3, 4), 1, 1), (0, 1)),
        (shapes.stack_plan((2, 3), 1, 2), (0, None, 1)),
        (shapes.cat_plan((2, 3), 0, [2, 2]), (0, 1)),
    ],
)
def test_plan_dims_keep_names(plan: Any, dims: tuple[int | None, ...]) -> None:
    assert plan.sources == dims


def test_view_plans_return_views() -> None:
    leaf = make_leaf((2, 1, 3), (2,))
    batch = (2, 1, 3)
    for plan in [
        shapes.reshape_plan(batch, (6,)),
        shapes.flatten_plan(batch, 0, 1),
        shapes.unflatten_plan(batch, 2, (1, 3)),
        shapes.permute_plan(batch, (2, 0, 1)),
        shapes.unsqueeze_plan(batch, 0),
        shapes.squeeze_plan(batch, None),
        shapes.expand_plan(batch, (4, 2, 1, 3)),
        elements.narrow_plan(batch, 2, 0, 2),
    ]:
        assert plan.leaf(leaf).data_ptr() == leaf.data_ptr()


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (
            lambda: shapes.reshape_plan((2, 3), (4,)),
            BatchSizeError,
            r"shape \[4\] is invalid for a batch of 6 elements, \[2, 3\]",
        ),
        (lambda: shapes.reshape_plan((2, 3), (-1, -1)), BatchSizeError, r"shape \[-1, -1\] is invalid"),
        (lambda: shapes.reshape_plan((0, 3), (-1, 0)), BatchSizeError, r"shape \[-1, 0\] is invalid"),
        (lambda: shapes.reshape_plan((2, 3), (-2, -3)), BatchSizeError, r"shape \[-2, -3\] is invalid"),
        (lambda: shapes.flatten_plan((2, 3), 1, 0), DimError, "start_dim 1 comes after end_dim 0"),
        (lambda: shapes.flatten_plan((), 1, 0), DimError, r"range of \[-1, 0\], but got 1"),
        (
            lambda: shapes.unflatten_plan((2, 3), 1, (2, 2)),
            BatchSizeError,
            r"\[2, 2\] don't multiply up to 3, the size of batch dim 1",
        ),
        (lambda: shapes.unflatten_plan((2, 3), 1, ()), BatchSizeError, "sizes must be non-empty"),
        (lambda: shapes.permute_plan((2, 3), (0, 0)), DimError, r"each of \[0, 1\] once; got \[0, 0\]"),
        (lambda: shapes.transpose_plan((2, 3), 0, 2), DimError, r"range of \[-2, 1\], but got 2"),
        (
            lambda: shapes.movedim_plan((2, 3), 0, (0, 1)),
            DimError,
            r"same number of dims; got \[0\] and \[0, 1\]",
        ),
        (
            lambda: shapes.movedim_plan((2, 3), (0, 0), (0, 1)),
            DimError,
            r"movedim: source: a dim appears several times in \[0, 0\]",
        ),
        (lambda: shapes.unsqueeze_plan((2, 3), 3), DimError, r"range of \[-3, 2\], but got 3"),
        (lambda: shapes.squeeze_plan((2, 3), 2), DimError, r"range of \[-2, 1\], but got 2"),
        (
            lambda: shapes.expand_plan((2, 3), (3,)),
            BatchSizeError,
            r"number of sizes \(1: \[3\]\) must not be smaller",
        ),
        (
            lambda: shapes.expand_plan((2, 3), (5, 3)),
            BatchSizeError,
            "size 5 is not possible for batch dim 0 of size 2",
        ),
        (
            lambda: shapes.expand_plan((2,), (-1, 2)),
            BatchSizeError,
            "size -1 is not possible for a new leading dim",
        ),
        (lambda: shapes.unbind_plan((), 0), DimError, r"batch size \[\] has no dimensions"),
        (lambda: shapes.split_plan((2, 3), [1, 1], 1), BatchSizeError, r"batch dim 1, 3; got \[1, 1\]"),
        (lambda: shapes.split_plan((2, 3), 0, 1), ValueError, "split_size must be positive; got 0"),
        (lambda: shapes.chunk_plan((2, 3), 0, 1), ValueError, "chunks must be greater than zero; got 0"),
        (lambda: shapes.tensor_split_plan((2, 3), 0, 1), BatchSizeError, "must be larger than 0; got 0"),
        (lambda: shapes.stack_plan((2, 3), 3, 2), DimError, r"range of \[-3, 2\], but got 3"),
        (lambda: shapes.cat_plan((2, 3), 2, [1, 1]), DimError, r"range of \[-2, 1\], but got 2"),
    ],
)
def test_plan_bad_argument_raises(plan: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan()
