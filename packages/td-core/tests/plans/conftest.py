"""Checks of plans that the tests of shapes and of elements share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core._plans.plans import ShapePlan

Batch = tuple[int, ...]


def make_leaf(batch: Batch) -> Tensor:
    return torch.arange(math.prod(batch)).view(batch)


def assert_members_equal(batch: Batch, plan: Any, expected: Tensor) -> None:
    for stack_dim in range(len(batch)):
        along = plan.along(stack_dim)
        if along is None:
            continue
        members = make_leaf(batch).unbind(stack_dim)
        if isinstance(along.picks, int):
            member = members[along.picks]
            assert torch.equal(member if along.plan is None else along.plan.leaf(member), expected)
            continue
        picked = members if along.picks is None else [members[i] for i in along.picks]
        done = [member if along.plan is None else along.plan.leaf(member) for member in picked]
        if done:
            assert torch.equal(torch.stack(done, along.stack_dim), expected)
            if along.plan is not None:
                inner = tuple(batch[:stack_dim] + batch[stack_dim + 1 :])
                assert along.plan.lead + inner[along.plan.n :] == tuple(done[0].shape)
        else:
            assert expected.shape[along.stack_dim] == 0


@pytest.fixture(scope="session")
def check_plan() -> Callable[[tuple[Batch, Any, Callable[[Tensor], Any]]], None]:
    """Return a function that compares a plan with a torch operation, on leaves and on the members of lazy stacks."""

    def check(case: tuple[Batch, Any, Callable[[Tensor], Any]]) -> None:
        batch, plan, reference = case
        expected = reference(make_leaf(batch))
        assert isinstance(plan, ShapePlan)
        assert plan.lead + batch[plan.n :] == tuple(expected.shape)
        assert len(plan.sources) == len(plan.lead)
        for dim in plan.sources:
            assert dim is None or dim < plan.n, "a new dim is not named after one that the plan left alone"
        assert torch.equal(plan.leaf(make_leaf(batch)), expected)
        # Feature dims are unchanged; one plan is used for several shapes in turn.
        for tail in [(2,), (1, 3), (2,), ()]:
            columns = [make_leaf(batch) * (i + 2) for i in range(math.prod(tail))]
            wide = torch.stack(columns, -1).view((*batch, *tail))
            want = torch.stack([reference(column) for column in columns], -1).reshape(
                (*expected.shape, *tail)
            )
            assert torch.equal(plan.leaf(wide), want)
        assert_members_equal(batch, plan, expected)

    return check
