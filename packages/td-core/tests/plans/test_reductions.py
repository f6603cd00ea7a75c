"""Plans of reductions and scans: leading dims, names, stack dims and leaf functions, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core._plans.reductions import (
    Pair,
    flatten_features,
    make_call,
    make_single_dim_call,
    reduce_plan,
    scan_plan,
)
from td_core._plans.steps import Step, Whole

BATCH = (2, 3, 4)
LEAF = torch.arange(120.0).view(2, 3, 4, 5).sin()

#: Methods of tensors that reduce several dims, with options.
SEVERAL: list[tuple[str, dict[str, Any]]] = [
    ("sum", {}),
    ("amax", {}),
    ("sum", {"dtype": torch.float64}),
    ("var", {"correction": 0}),
]


def reduce_like_torch(leaf: Tensor, name: str, dims: Any, keepdim: bool, options: dict[str, Any]) -> Tensor:
    where = tuple(range(leaf.ndim)) if dims is None else dims
    return getattr(leaf, name)(where, keepdim=keepdim, **options)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2), (0, 1, 2), None])
@pytest.mark.parametrize(("name", "options"), SEVERAL)
def test_reduce_plan_equals_torch(name: str, options: dict[str, Any], dims: Any, keepdim: bool) -> None:
    plan = reduce_plan(BATCH, dims, keepdim, make_call(name, keepdim, options))
    expected = reduce_like_torch(LEAF, name, dims, keepdim, options)
    torch.testing.assert_close(plan.leaf(LEAF), expected, rtol=0, atol=0)
    assert plan.lead == expected.shape[: len(plan.lead)] and len(plan.lead) == (
        3 if keepdim else 3 - len(dims or BATCH)
    )
    assert plan.creates_values and plan.locate(torch.Size(BATCH)) == []


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(0,), (0, 2), (1, 2)])
def test_reduce_plan_reduces_members_of_stack(dims: tuple[int, ...], keepdim: bool) -> None:
    plan = reduce_plan(BATCH, dims, keepdim, make_call("sum", keepdim, {}))
    expected = LEAF.sum(dims, keepdim=keepdim)
    for stack_dim in range(3):
        along = plan.along(stack_dim)
        if stack_dim in dims:
            assert along is None, "the members must be stacked first"
            continue
        members = [along.plan.leaf(member) for member in LEAF.unbind(stack_dim)]
        torch.testing.assert_close(torch.stack(members, along.stack_dim), expected)


@pytest.mark.parametrize(
    ("dims", "keepdim", "front", "lead", "sources"),
    [
        ((1,), False, None, (2, 4), (0, 2)),
        ((1,), True, None, (2, 1, 4), (0, 1, 2)),
        ((0, 2), False, 7, (7, 3), (None, 1)),
        ((2,), True, 7, (7, 2, 3, 1), (None, 0, 1, 2)),
        (None, False, None, (), ()),
        (None, False, 7, (7,), (None,)),
        (None, True, None, (1, 1, 1), (0, 1, 2)),
    ],
)
def test_reduce_plan_keeps_names_of_other_dims(
    dims: Any, keepdim: bool, front: Any, lead: Any, sources: Any
) -> None:
    plan = reduce_plan(BATCH, dims, keepdim, lambda dims: torch.sum, front)
    assert (plan.lead, plan.sources) == (lead, sources)


@pytest.mark.parametrize("dim", range(3))
def test_scan_plan_equals_torch_and_keeps_shape(dim: int) -> None:
    plan = scan_plan(BATCH, dim, lambda dim: lambda leaf: leaf.cumsum(dim))
    assert torch.equal(plan.leaf(LEAF), LEAF.cumsum(dim))
    assert (plan.lead, plan.sources) == (BATCH, (0, 1, 2))
    for stack_dim in range(3):
        along = plan.along(stack_dim)
        if stack_dim == dim:
            assert along is None
        else:
            members = [along.plan.leaf(member) for member in LEAF.unbind(stack_dim)]
            assert torch.equal(torch.stack(members, along.stack_dim), LEAF.cumsum(dim))


def test_pair_has_leading_dims_for_both_results() -> None:
    plan = Pair(BATCH, (Step(1, 2, Whole(())),), lambda plan: lambda leaf: leaf.max(plan.steps[0].start))
    values, indices = plan.leaf(LEAF)
    assert plan.leads == [(2, 4), (2, 4)] and values.shape == indices.shape == (2, 4, 5)
    assert plan.locate(torch.Size(BATCH)) == []


@pytest.mark.parametrize(("n", "shape"), [(0, (24,)), (1, (2, 12)), (2, (2, 3, 4)), (3, (2, 3, 4, 1))])
def test_flatten_features_gives_one_feature_dim(n: int, shape: tuple[int, ...]) -> None:
    leaf = torch.arange(24).view(2, 3, 4)
    assert torch.equal(flatten_features(leaf, n), leaf.view(shape))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(1,), (0, 2), (0, 1, 2, 3), None, ()])
def test_single_dim_call_flattens_several_dims(dims: Any, keepdim: bool) -> None:
    find_max: Callable[..., Tensor] = lambda leaf, dim: leaf.max(dim).values  # noqa: E731
    found = make_single_dim_call(find_max, keepdim)(dims)(LEAF)
    where = range(4) if dims is None else dims
    expected = LEAF.amax(tuple(where), keepdim=keepdim) if dims != () else LEAF
    assert torch.equal(found, expected)


def test_single_dim_call_keeps_dims_behind_new_front() -> None:
    both: Callable[..., Tensor] = lambda leaf, dim: torch.stack([leaf.amin(dim), leaf.amax(dim)])  # noqa: E731
    found = make_single_dim_call(both, keepdim=True, front=True)((0, 2))(LEAF)
    assert torch.equal(found, torch.stack([LEAF.amin((0, 2), True), LEAF.amax((0, 2), True)]))
