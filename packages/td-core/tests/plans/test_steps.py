"""Steps of plans: sizes, names, stack dims and source positions of each primitive, compared with torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core._plans import elements, shapes
from td_core._plans.index import plan_index
from td_core._plans.steps import Pad, Permute, Range, Reshape, Split, Step, Take, Whole, locate_all
from td_core.errors import CollectionIndexError, DimError


def make_positions(size: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(size)).view(size)


#: (step, size of a batch, the same on a tensor)
STEPS: list[tuple[Step, tuple[int, ...], Callable[[Tensor], Tensor]]] = [
    (Step(0, 2, Reshape((6,))), (2, 3, 4), lambda t: t.reshape(6, 4)),
    (Step(1, 2, Reshape((2, 1, 2))), (3, 4), lambda t: t.reshape(3, 2, 1, 2)),
    (Step(1, 1, Reshape((1,))), (3, 4), lambda t: t.unsqueeze(1)),
    (Step(0, 2, Reshape((0, 5))), (0, 3), lambda t: t.reshape(0, 5)),
    (Step(0, 3, Permute((2, 0, 1))), (2, 3, 4), lambda t: t.permute(2, 0, 1)),
    (Step(1, 3, Permute((1, 0))), (2, 3, 4), lambda t: t.transpose(1, 2)),
    (Step(1, 2, Take(-1, 1)), (2, 3, 2), lambda t: t[:, -1]),
    (Step(0, 1, Take([2, 0, -2], 0)), (3, 2), lambda t: t[[2, 0, -2]]),
    (Step(0, 1, Take([], 0)), (3, 2), lambda t: t[:0]),
    (Step(1, 2, Take(torch.tensor([1, 1]), 1)), (2, 3), lambda t: t[:, [1, 1]]),
    (Step(0, 1, Take(torch.tensor(1), 0)), (2, 3), lambda t: t[1]),
    (Step(1, 2, Range(1, 2)), (2, 4), lambda t: t[:, 1:3]),
    (Step(0, 1, Range(0, 2, 2)), (4, 2), lambda t: t[::2]),
    (Step(0, 1, Range(3, 4, -1)), (4, 2), lambda t: t.flip(0)),
    (Step(0, 1, Range(-1, 4)), (4, 2), lambda t: t.roll(1, 0)),
    (Step(0, 1, Range(5, 4)), (4, 2), lambda t: t.roll(-5, 0)),
    (Step(1, 2, Range(0, 6)), (2, 2, 2), lambda t: t.repeat(1, 3, 1)),
    (Step(0, 1, Range(0, 6, each=2)), (3,), lambda t: t.repeat_interleave(2)),
    (Step(0, 1, Range(0, 0, each=0)), (3,), lambda t: t[:0]),
    (Step(0, 1, Range(0, 0)), (0, 2), lambda t: t.flip(0)),
    (Step(1, 2, Pad(1, 2)), (2, 2), lambda t: torch.nn.functional.pad(t, [1, 2], value=-1)),
    (Step(1, 2, Pad(-1, 1)), (2, 3), lambda t: torch.nn.functional.pad(t, [-1, 1], value=-1)),
    (Step(0, 1, Pad(2, -1)), (1, 2), lambda t: torch.nn.functional.pad(t, [0, 0, 2, -1], value=-1)),
    (Step(1, 2, Pad(1, 0)), (2, 0), lambda t: torch.nn.functional.pad(t, [1, 0], value=-1)),
    (Step(1, 2, Pad(0, 1)), (2, 2, 3), lambda t: torch.nn.functional.pad(t, [0, 0, 0, 1], value=-1)),
]


@pytest.mark.parametrize(("step", "size", "operation"), STEPS, ids=[str(step) for step, _, _ in STEPS])
def test_step_equals_torch(step: Step, size: tuple[int, ...], operation: Callable[[Tensor], Tensor]) -> None:
    expected = operation(make_positions(size))
    found = step.locate(size)
    assert found is not None
    assert (list(found[0]), found[1]) == (expected.flatten().tolist(), tuple(expected.shape))
    assert step.resize(size) == tuple(expected.shape)
    assert len(step.rename([*range(len(size))], size)) == expected.ndim
    for dim in range(len(size)):
        along = step.along(dim, size)
        if along is None:
            continue
        members = make_positions(size).unbind(dim)
        if along.picks is not None:
            members = (
                members[along.picks] if isinstance(along.picks, int) else [members[i] for i in along.picks]
            )
        if along.stack_dim is None:
            assert torch.equal(_apply(along.plan, members), expected)
        elif len(members):
            assert torch.equal(
                torch.stack([_apply(along.plan, member) for member in members], along.stack_dim), expected
            )
        else:
            assert expected.shape[along.stack_dim] == 0


def _apply(step: Step | None, member: Tensor) -> Tensor:
    if step is None:
        return member
    found = step.locate(tuple(member.shape))
    assert found is not None
    padded = torch.cat([member.flatten(), member.new_tensor([-1])])
    return padded[torch.tensor(list(found[0]), dtype=torch.long)].view(found[1])


@pytest.mark.parametrize(
    ("step", "size", "sources"),
    [
        (Step(0, 2, Reshape((6,))), (2, 3, 4), [None, 2]),
        (Step(0, 2, Reshape((3, 2))), (2, 3), [None, None]),
        (Step(0, 0, Reshape((1,))), (2,), [None, 0]),
        (Step(0, 2, Permute((1, 0))), (2, 3, 4), [1, 0, 2]),
        (Step(0, 1, Take(0, 0)), (2, 3), [1]),
        (Step(1, 2, Take([0], 1)), (2, 3), [0, 1]),
        (Step(0, 1, Range(0, 1)), (2, 3), [0, 1]),
        (Step(0, 1, Pad(1, 1)), (2, 3), [0, 1]),
        (Step(0, 1, Split(None)), (2, 3), [1]),
        (Step(0, 1, Split([1, 1])), (2, 3), [0, 1]),
        (Step(0, 2, Whole((5, 6))), (2, 3), [0, 1]),
        (Step(0, 2, Whole((5,))), (2, 3), [None]),
    ],
    ids=str,
)
def test_step_keeps_names(step: Step, size: tuple[int, ...], sources: list[int | None]) -> None:
    assert step.rename([*range(len(size))], size) == sources


@pytest.mark.parametrize(
    ("step", "stack_dim", "along"),
    [
        (Step(0, 1, Whole((5,))), 0, None),
        (Step(0, 1, Whole((5,))), 1, (None, "Step(start=0, stop=1, primitive=Whole((5,)))", 1)),
        (Step(1, 2, Whole(())), 0, (None, "Step(start=0, stop=1, primitive=Whole(()))", 0)),
        (Step(0, 1, Whole(())), 1, (None, "Step(start=0, stop=1, primitive=Whole(()))", 0)),
        (Step(0, 1, Pad(1, 0)), 0, None),
        (Step(0, 1, Split(None)), 0, (range(2), "None", None)),
        (Step(0, 1, Split([1, 1])), 0, ([range(1), range(1, 2)], "None", 0)),
        (Step(0, 1, Split([1, 1])), 1, (None, "Step(start=0, stop=1, primitive=Split([1, 1]))", 1)),
    ],
    ids=str,
)
def test_step_along_stack_dim(step: Step, stack_dim: int, along: tuple[Any, str, int | None] | None) -> None:
    found = step.along(stack_dim, (2, 3))
    assert (found and (found.picks, str(found.plan), found.stack_dim)) == along


def test_locate_several_steps_equals_torch() -> None:
    steps = [Step(0, 1, Range(1, 2, -1)), Step(0, 2, Permute((1, 0))), Step(1, 2, Pad(0, 1))]
    moved = make_positions((2, 3)).flip(0).t()
    expected = torch.nn.functional.pad(moved, [0, 1], value=-1)
    assert locate_all(steps, (2, 3)) == (expected.flatten().tolist(), (3, 3))
    assert locate_all([], (2, 3)) == (range(6), (2, 3))
    assert locate_all([*steps, Step(0, 1, Whole((1,)))], (2, 3)) is None


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (shapes.flatten_plan((2, 3), 0, 1), "ViewPlan([2, 3] -> [6]: [Step(start=0, stop=2, primitive=Reshape((6,)))])"),
        (elements.flip_plan((2,), 0), "ShapePlan([2] -> [2]: [Step(start=0, stop=1, primitive=Range(1, 2, -1, 1))])"),
        (plan_index(slice(1), (2, 3)), "IndexPlan([2, 3] -> [1]: [Step(start=0, stop=1, primitive=Range(0, 1, 1, 1))])"),
        (shapes.stack_plan((2,), 0, 3), "Join([2] -> [3, 2]: [Step(start=0, stop=0, primitive=Whole((3,)))])"),
    ],
)  # fmt: skip
def test_plan_repr_shows_steps(plan: Any, text: str) -> None:
    assert repr(plan) == text


@pytest.mark.parametrize(
    ("index", "steps"),
    [
        ((slice(None), 1), "[Step(start=1, stop=2, primitive=Take(1, 1))]"),
        ((None, slice(None), ...), "[Step(start=0, stop=0, primitive=Reshape((1,)))]"),
        (torch.ones(2, 3, dtype=torch.bool), "[Step(start=0, stop=2, primitive=Whole((6,)))]"),
        (True, "[Step(start=0, stop=0, primitive=Whole((1,)))]"),
        (
            ([0, 1], slice(None), [0, 1]),
            "[Step(start=0, stop=3, primitive=Permute((0, 2, 1))), Step(start=0, stop=2, primitive=Whole((2,)))]",
        ),
        (
            ([0, 1], 1, [0, 1]),
            "[Step(start=1, stop=2, primitive=Take(1, 1)), Step(start=0, stop=2, primitive=Whole((2,)))]",
        ),
    ],
    ids=str,
)
def test_plan_index_consists_of_steps(index: Any, steps: str) -> None:
    assert str(list(plan_index(index, (2, 3, 4)).steps)) == steps


COPIES: dict[str, Callable[[Any], Any]] = {
    "flip": lambda td: td.flip(0),
    "flip, no dims": lambda td: td.flip(()),
    "flipud": lambda td: td.flipud(),
    "roll": lambda td: td.roll(1, 0),
    "roll, flat": lambda td: td[:, 0].roll(1),
    "roll, by zero": lambda td: td.roll(0, 0),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat, once": lambda td: td.repeat(1, 1),
    "tile": lambda td: td.tile((2, 1)),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "repeat_interleave, tensor": lambda td: td.repeat_interleave(torch.tensor([1, 2]), dim=0),
    "rot90": lambda td: td.rot90(2),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("stack_dim", [0, 1])
def test_reordered_lazy_stack_is_copy(name: str, stack_dim: int) -> None:
    leaf = torch.arange(6.0).view(2, 3)
    lazy = lazy_stack(
        [TensorDict({"a": part.clone()}, part.shape) for part in leaf.unbind(stack_dim)], stack_dim
    )
    expected = COPIES[name](TensorDict({"a": leaf}, [2, 3]))["a"].clone()
    result = COPIES[name](lazy)
    assert torch.equal(result["a"], expected)
    result.add_(1)
    assert torch.equal(result["a"], expected + 1), "an element occurs twice in memory"
    assert torch.equal(lazy["a"], leaf)


def test_view_of_lazy_stack_shares_members() -> None:
    lazy = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    for view in (lazy.unsqueeze(0)[0], lazy.permute(1, 0), lazy.narrow(0, 1, 1), lazy.split(1)[1]):
        assert isinstance(view, LazyStackedTensorDict)
        view.add_(1)
    assert lazy["a"].tolist() == [[2.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("dims", [(0, 0), (0, -3)])
def test_squeeze_repeated_dim_raises(dims: tuple[int, ...]) -> None:
    for td in (TensorDict({"a": torch.zeros(1, 2, 1)}, [1, 2, 1]), TensorDict({}, [1, 2, 1])):
        with pytest.raises(DimError, match="squeeze: a dim appears several times"):
            td.squeeze(dims)


@pytest.mark.parametrize("index", [([0, 3],), (torch.tensor(-4),), (torch.tensor([0, 3]),)])
def test_lazy_stack_index_out_of_range_names_dim(index: tuple[Any, ...]) -> None:
    lazy = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)], 1)
    with pytest.raises(
        CollectionIndexError, match=r"index (3|-4) is out of bounds for batch dim 1 of size 3"
    ):
        lazy[(slice(None), *index)]


@pytest.mark.parametrize("size", [(), (3,), (3, 2), (0,)])
def test_new_zeros_of_nested_lazy_stack_equals_dense(size: tuple[int, ...]) -> None:
    members = [TensorDict({"a": torch.ones(4)}, []) for _ in range(2)]
    td = TensorDict({"n": lazy_stack(members)}, [])
    result = td.new_zeros(size)
    assert result["n"].batch_size == (*size, 2)
    assert torch.equal(result["n", "a"], torch.zeros(*size, 2, 4))
    named = TensorDict({"n": lazy_stack(members)}, [2]).new_ones(size)
    assert torch.equal(named["n", "a"], torch.ones(*size, 4))


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({}, []),
        ({"keepdim": True}, [None, "x", "y"]),
        ({"dim": 0}, [None, "y"]),
        ({"dim": 0, "keepdim": True}, [None, "x", "y"]),
        ({"dim": (1, 0)}, [None]),
    ],
    ids=str,
)
def test_quantiles_keep_names_of_remaining_dims(kwargs: dict[str, Any], names: list[str | None]) -> None:
    leaf = torch.rand(2, 3)
    levels = torch.tensor([0.1, 0.5])
    td = TensorDict({"a": leaf}, [2, 3], names=["x", "y"])
    for source in (td, td.to_lazystack(1)):
        result = source.quantile(levels, **kwargs)
        assert result.names == names
        assert torch.allclose(result["a"].flatten(), _quantile(leaf, levels, kwargs.get("dim")).flatten())


def _quantile(leaf: Tensor, levels: Tensor, dim: Any) -> Tensor:
    return torch.quantile(leaf, levels, dim) if isinstance(dim, int) else torch.quantile(leaf, levels)
