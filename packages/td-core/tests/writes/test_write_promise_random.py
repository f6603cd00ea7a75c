"""Random writes into random trees: either every leaf is written as by torch, or the collection is unchanged, bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex", "ignore:.*quantiz", "ignore:Sparse")

Leaves = dict[tuple[str, ...], Tensor]

#: Functions that make one leaf unfit for some writes, or that torch treats in its own way.
SPOILS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda leaf: leaf,
    "requires grad": lambda leaf: leaf.clone().requires_grad_(),
    "view of a leaf": lambda leaf: torch.stack([leaf, leaf]).requires_grad_()[0],
    "unbound": lambda leaf: torch.stack([leaf, leaf]).requires_grad_().mul(1).unbind(0)[0],
    "inference": lambda leaf: make_inference_tensor(leaf),
    "expanded": lambda leaf: leaf[..., :1].clone().expand(leaf.shape),
    "meta": lambda leaf: leaf.to("meta"),
    "sparse": lambda leaf: leaf.to_sparse(),
    "quantized": lambda leaf: torch.quantize_per_tensor(leaf, 0.1, 0, torch.quint8),
    "int64": lambda leaf: (leaf * 10).long(),
    "bool": lambda leaf: leaf > 0.5,
    "float64": lambda leaf: leaf.double(),
    "complex64": lambda leaf: leaf.to(torch.complex64),
    "wider": lambda leaf: torch.cat([leaf, leaf], -1),
    "strided": lambda leaf: torch.stack([leaf, leaf], -1)[..., 0],
}

if importlib.util.find_spec("td_store") is not None:
    from td_store import StoredTensor
    from td_store.testing import MemorySource

    SPOILS["read-only"] = lambda leaf: StoredTensor(MemorySource(leaf), mode="r")
    SPOILS["stored"] = lambda leaf: StoredTensor(MemorySource(leaf))


def make_inference_tensor(leaf: Tensor) -> Tensor:
    with torch.inference_mode():
        return leaf.clone()


def set_at(td: Any, index: Any, value: Any) -> None:
    td[index] = value


ALL = torch.tensor([True, True])

#: A write into a collection, and the same write into one leaf.
WRITES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Tensor, Tensor], Any]]] = {
    "update_": (lambda td, source: td.update_(source), lambda leaf, value: leaf.copy_(value)),
    "copy_": (lambda td, source: td.copy_(source), lambda leaf, value: leaf.copy_(value)),
    "apply_": (
        lambda td, source: td.apply_(lambda leaf, value: value, source),
        lambda leaf, value: leaf.copy_(value),
    ),
    "slice": (lambda td, source: set_at(td, slice(None), source), lambda leaf, value: leaf.copy_(value)),
    "positions": (lambda td, source: set_at(td, [0, 1], source), lambda leaf, value: leaf.copy_(value)),
    "mask": (lambda td, source: set_at(td, ALL, source), lambda leaf, value: leaf.copy_(value)),
    "number": (lambda td, source: set_at(td, ALL, 1), lambda leaf, value: leaf.fill_(1)),
    "zero_": (lambda td, source: td.zero_(), lambda leaf, value: leaf.zero_()),
    "masked_fill_": (lambda td, source: td.masked_fill_(ALL, 1), lambda leaf, value: leaf.fill_(1)),
    "add_": (lambda td, source: td.add_(source), lambda leaf, value: leaf.add_(value)),
    "mul_": (lambda td, source: td.mul_(source), lambda leaf, value: leaf.mul_(value)),
    "div_": (lambda td, source: td.div_(source), lambda leaf, value: leaf.div_(value)),
    "pow_": (lambda td, source: td.pow_(source), lambda leaf, value: leaf.pow_(value)),
    "maximum_": (lambda td, source: td.maximum_(source), lambda leaf, value: leaf.clamp_min_(value)),
    "lerp_": (lambda td, source: td.lerp_(source, 0.5), lambda leaf, value: leaf.lerp_(value, 0.5)),
    "addcmul_": (
        lambda td, source: td.addcmul_(source, source),
        lambda leaf, value: leaf.addcmul_(value, value),
    ),
    "exp_": (lambda td, source: td.exp_(), lambda leaf, value: leaf.exp_()),
    "neg_": (lambda td, source: td.neg_(), lambda leaf, value: leaf.neg_()),
}

KEYS = ("a", "b", "c")


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[str, ...]]:
    """Draw the key paths of the leaves of a tree; no path is a prefix of another one."""
    paths = draw(st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), min_size=2, max_size=6))
    kept: list[tuple[str, ...]] = []
    for path in map(tuple, paths):
        if not any(path[: len(other)] == other or other[: len(path)] == path for other in kept):
            kept.append(path)
    return kept


def make_leaf(seed: int, *shape: int) -> Tensor:
    return (torch.arange(float(torch.Size(shape).numel())).view(shape) * 0.37 + 0.13 * seed) % 0.8 + 0.1


def build(leaves: Leaves, size: list[int]) -> TensorDict:
    return TensorDict({path if len(path) > 1 else path[0]: leaf for path, leaf in leaves.items()}, size)


def is_refused(write: Callable[[Tensor, Tensor], Any], leaf: Tensor, value: Tensor) -> bool:
    try:
        write(leaf, value)
    except (RuntimeError, TypeError, NotImplementedError):
        return True
    return False


def is_stricter(target: str, value: str, name: str) -> bool:
    """Return True where a collection refuses what torch accepts for one leaf (docs/guide/writes.md)."""
    at_index = name in ("slice", "positions", "mask", "number")
    return (
        target == "expanded"
        or (target == "sparse" and at_index)
        or (target == "meta" and value in ("sparse", "quantized"))
    )


@settings(max_examples=150)
@given(
    paths=trees(),
    lazy=st.booleans(),
    name=st.sampled_from(sorted(WRITES)),
    spoiled=st.integers(0, 5),
    member=st.integers(0, 1),
    target=st.sampled_from(sorted(SPOILS)),
    value=st.sampled_from(sorted(SPOILS)),
)
def test_random_write_is_complete_or_changes_nothing(
    describe_leaf: Any, paths: Any, lazy: bool, name: str, spoiled: int, member: int, target: str, value: str
) -> None:
    place = paths[spoiled % len(paths)]
    tail = {path: (2, 1, 3)[i % 3] for i, path in enumerate(paths)}

    def make(seed: int, spoil: str, lead: tuple[int, ...], here: bool) -> Leaves:
        leaves = {path: make_leaf(seed + i, *lead, tail[path]) for i, path in enumerate(paths)}
        if here:
            leaves[place] = SPOILS[spoil](leaves[place])
        return leaves

    def make_pair() -> tuple[list[Leaves], list[Leaves], Any, Any]:
        lead: tuple[int, ...] = () if lazy else (2,)
        count = 2 if lazy else 1
        left = [make(10 * i, target, lead, i == member % count) for i in range(count)]
        right = [make(10 * i + 5, value, lead, i == member % count) for i in range(count)]
        nodes = [[build(leaves, list(lead)) for leaves in side] for side in (left, right)]
        if lazy:
            return left, right, LazyStackedTensorDict(*nodes[0]), LazyStackedTensorDict(*nodes[1])
        return left, right, nodes[0][0], nodes[1][0]

    whole, single = WRITES[name]
    expected, values, _, _ = make_pair()
    refused = [
        path
        for leaves, others in zip(expected, values, strict=True)
        for path, leaf in leaves.items()
        if is_refused(single, leaf, others[path])
    ]
    held, _, td, source = make_pair()
    before = [describe_leaf(leaf) for leaves in held for leaf in leaves.values()]
    structure = repr(td)
    try:
        whole(td, source)
    except (RuntimeError, TypeError, NotImplementedError):
        assert refused or is_stricter(target, value, name)
        assert {*map(id, td._leaves())} == {id(leaf) for leaves in held for leaf in leaves.values()}
        assert [describe_leaf(leaf) for leaves in held for leaf in leaves.values()] == before
        assert repr(td) == structure
        return
    # At positions, a collection casts values of other dtypes, which torch would not quantize.
    assert not refused or (target == "quantized" and name in ("positions", "mask"))
    if refused:
        return
    for leaves, results in zip(held, expected, strict=True):
        for path, leaf in leaves.items():
            assert describe_leaf(leaf)[:2] == describe_leaf(results[path])[:2], path
            assert describe_leaf(leaf)[-1] == describe_leaf(results[path])[-1], path
