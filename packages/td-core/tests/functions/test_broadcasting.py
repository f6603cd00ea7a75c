"""Operations of three collections broadcast the batch sizes of all operands against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import BatchSizeError, TensorDict, TensorDictParams, lazy_stack


def make(*size: int) -> TensorDict:
    """Build a collection with a nested entry; the leaves have distinct values."""
    count = torch.arange(1.0, torch.Size(size).numel() + 1).view(size)
    return TensorDict({"a": count, "n": {"b": torch.stack([count, count * 2], -1)}}, batch_size=size)


KINDS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda td: td,
    "lazy": lambda td: lazy_stack(list(td.unbind(0))),
    "params": lambda td: TensorDictParams(td, no_convert=True),
}
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
    "addcdiv": torch.addcdiv,
    "clamp": torch.clamp,
    "method": lambda x, y, z: x.lerp(y, z),
}
SIZES = [((3,), (2, 3), (3,)), ((3,), (3,), (2, 3)), ((1, 3), (2, 1), (4, 1, 3)), ((2, 3), (3,), (1, 1))]


def widen(leaf: torch.Tensor, ndim: int, most: int) -> torch.Tensor:
    """Insert leading batch dims, so that torch aligns the batch dims of leaves."""
    return leaf.reshape((1,) * (most - ndim) + tuple(leaf.shape))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_ternary_operands_of_other_batch_sizes_broadcast(kind, operation, sizes):
    parts = [make(*size) for size in sizes]
    result = OPERATIONS[operation](KINDS[kind](parts[0]), *parts[1:])
    most = max(map(len, sizes))
    assert result.batch_size == torch.broadcast_shapes(*sizes)
    for key in ("a", ("n", "b")):
        leaves = [widen(part[key], len(size), most) for part, size in zip(parts, sizes, strict=True)]
        assert torch.equal(result[key], OPERATIONS[operation](*leaves)), key


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_ternary_tensor_operand_expands_the_batch(name):
    end, weight = torch.arange(1.0, 7).view(2, 3), torch.full((2, 1), 0.5)
    result = getattr(make(3), name)(end, weight)
    assert result.batch_size == (2, 3)
    assert torch.equal(result["a"], getattr(torch, name)(make(3)["a"].expand(2, 3), end, weight))


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_ternary_operands_that_do_not_fit_raise(name):
    with pytest.raises(BatchSizeError, match=r"shape \[4\] does not broadcast against the batch size \[3\]"):
        getattr(make(3), name)(make(4), make(3))
    data = make(3)
    with pytest.raises(BatchSizeError, match=r"batch size \[2, 3\] does not fit into \[3\]"):
        getattr(data, f"{name}_")(make(2, 3), make(3))
    assert (data == make(3)).all()


MASK = torch.tensor([[True, False, True], [False, False, True]])
#: Operands of torch.where: the condition, and batch sizes or numbers.
WHERE = {
    "larger condition": (MASK, (3,), (3,)),
    "larger condition and a number": (MASK, (3,), 0.0),
    "number first": (MASK, 0.0, (3,)),
    "larger other": (MASK[0], (3,), (2, 3)),
    "larger other and condition": (MASK, (3,), (2, 3)),
    "smaller other": (MASK, (2, 3), (3,)),
    "0-d condition": (torch.tensor(False), (3,), (2, 3)),
    "sizes of one": (MASK, (2, 1), (1, 3)),
}


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_where_broadcasts_condition_and_both_collections(kind, name):
    mask, *sizes = WHERE[name]
    parts = [-make(*size) if isinstance(size, tuple) else size for size in sizes]
    parts[0] = parts[0] + 100
    if isinstance(parts[0], TensorDict):
        parts[0] = KINDS[kind](parts[0])
    result = torch.where(mask, *parts)
    assert result.batch_size == (2, 3)
    for key in ("a", ("n", "b")):
        leaves = [part if isinstance(part, float) else part[key] for part in parts]
        if key != "a":
            leaves = [widen(leaf, 2, 3) if getattr(leaf, "ndim", 3) == 2 else leaf for leaf in leaves]
        condition = mask if key == "a" or not mask.ndim else mask[..., None]
        assert torch.equal(result[key], torch.where(condition, *leaves)), key


@pytest.mark.parametrize(
    ("mask", "other", "message"),
    [
        (
            torch.ones(2, 4, dtype=torch.bool),
            0,
            r"the condition of shape \[2, 4\] does not broadcast against",
        ),
        (torch.ones(4, dtype=torch.bool), 0, r"the condition of shape \[4\] does not broadcast against"),
        (MASK, TensorDict(batch_size=[4]), r"the other collection of shape \[4\] does not broadcast against"),
    ],
)
def test_where_operands_that_do_not_broadcast_raise(mask, other, message):
    with pytest.raises(BatchSizeError, match=message):
        make(3).where(mask, other)
