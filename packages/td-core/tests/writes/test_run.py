"""Checked writes: they read before they write, are recorded by autograd as those of torch, and run in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core._writes.run import is_overlapping
from td_core.errors import (
    StructureError,
)

#: A write into a collection, and the same write into a tensor.
RECORDED = {
    "update_": (lambda td, new: td.update_(new), lambda leaf, new: leaf.copy_(new)),
    "update_ from a dict": (lambda td, new: td.update_(new.to_dict()), lambda leaf, new: leaf.copy_(new)),
    "update in place": (lambda td, new: td.update(new, inplace=True), lambda leaf, new: leaf.copy_(new)),
    "apply_": (lambda td, new: td.apply_(lambda old, it: old + it, new), lambda leaf, new: leaf.add_(new)),
    "index": (lambda td, new: td.__setitem__(1, new[0]), lambda leaf, new: leaf[1].copy_(new[0])),
    "slice": (
        lambda td, new: td.__setitem__(slice(1, 3), new[:2]),
        lambda leaf, new: leaf[1:3].copy_(new[:2]),
    ),
    "list": (
        lambda td, new: td.__setitem__([2, 0], new[:2]),
        lambda leaf, new: leaf.__setitem__([2, 0], new[:2]),
    ),
    "mask": (
        lambda td, new: td.__setitem__(torch.tensor([True, False, True]), new[1:]),
        lambda leaf, new: leaf.__setitem__(torch.tensor([True, False, True]), new[1:]),
    ),
    "a nested entry": (lambda td, new: td.set_(("n", "b"), new["n", "b"]), None),
    "a nested entry at an index": (lambda td, new: td.set_at_(("n", "b"), new["n", "b"][2], 0), None),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("write", RECORDED)
def test_write_gradients_equal_torch(write, theirs, mine, stacked) -> None:
    def leaves(start: float, grad: bool) -> list[Tensor]:
        shapes = [(3,), (3, 2), (3, 1)]
        return [(torch.rand(shape) + start).requires_grad_(grad) for shape in shapes]

    def collection(a: Tensor, b: Tensor, c: Tensor) -> TensorDict:
        return TensorDict({"a": a * 1, "n": {"b": b * 1, "c": c * 1}}, [3])

    old, new = leaves(1, mine), leaves(2, theirs)
    td, given = collection(*old), collection(*new)
    if stacked:  # each member has separate leaves
        td = LazyStackedTensorDict(*[td[i].clone() for i in range(3)])
    whole, single = RECORDED[write]
    plain, theirs_plain = [leaf * 1 for leaf in old], [leaf * 1 for leaf in new]
    for i, (leaf, value) in enumerate(zip(plain, theirs_plain, strict=True)):
        if single is not None:
            single(leaf, value)
        elif i == 1:
            leaf.__setitem__(0, value[2]) if "index" in write else leaf.copy_(value)
    whole(td, given)
    found = [td["a"], td["n", "b"], td["n", "c"]]
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad or stacked
    inputs = [leaf for leaf in (*old, *new) if leaf.requires_grad]
    if inputs:
        gradients = [
            torch.autograd.grad(
                sum((leaf**2).sum() for leaf in each if leaf.requires_grad), inputs, allow_unused=True
            )
            for each in (found, plain)
        ]
        for one, other in zip(*gradients, strict=True):
            zero = torch.zeros(())
            assert torch.allclose(zero if one is None else one, zero if other is None else other)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("write", RECORDED)
def test_write_after_no_grad_records_gradients(write, stacked) -> None:
    start = torch.ones(3, 2, requires_grad=True)
    td = TensorDict({"a": start * 1, "n": {"b": start * 1, "c": start * 1}}, [3])
    if stacked:
        td = LazyStackedTensorDict(*[td[i].clone() for i in range(3)])
    new = TensorDict({"a": start * 2, "n": {"b": start * 2, "c": start * 2}}, [3])
    whole, _ = RECORDED[write]
    with torch.no_grad():
        for _ in range(3):  # fill the metadata cache
            whole(td, new)
    whole(td, new)
    torch.autograd.grad(sum(leaf.sum() for leaf in td.values(True, True)), start)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        *[whole for whole, single in RECORDED.values() if single is not None],
        lambda td, new: td.zero_(),
        lambda td, new: td.mul_(2),
        lambda td, new: td.sigmoid_(),
        lambda td, new: td.masked_fill_(torch.tensor([True, False, True]), 1.0),
        lambda td, new: td.__setitem__(0, 1.0),
    ],
)
def test_write_view_requiring_grad_writes_nothing(write, stacked) -> None:
    whole = torch.ones(3, 3, 2, requires_grad=True) * 1
    parts = whole[0].unbind(0) if stacked else whole.unbind(0)[:1]
    members = [TensorDict({"a": torch.ones(3, 2)[: len(b)], "n": {"b": b}}, [len(b)]) for b in parts]
    td = LazyStackedTensorDict(*members) if stacked else members[0]
    before = td["a"].clone()
    with pytest.raises(StructureError, match=r"key \('n', 'b'\).*view of which autograd lets nobody write"):
        write(td, TensorDict({"a": before + 1, "n": {"b": td["n", "b"].detach() + 1}}, td.batch_size))
    assert torch.equal(td["a"], before)


SHIFTED: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, source: td[1:].update_(source),
    "update_ from a mapping": lambda td, source: td[1:].update_(source.to_dict()),
    "copy_": lambda td, source: td[1:].copy_(source),
    "set_": lambda td, source: [td[1:].set_(key, source[key]) for key in ("o", ("n", "a"))],
    "load_state_dict": lambda td, source: td[1:].load_state_dict(source.state_dict()),
    "slice": lambda td, source: td.__setitem__(slice(1, None), source),
    "positions": lambda td, source: td.__setitem__([1, 2, 3], source),
    "mask": lambda td, source: td.__setitem__(torch.tensor([False, True, True, True]), source),
    "a mapping at positions": lambda td, source: td.__setitem__([1, 2, 3], source.to_dict()),
    "update_at_": lambda td, source: td.update_at_(source, slice(1, None)),
    "set_at_": lambda td, source: [td.set_at_(key, source[key], slice(1, None)) for key in ("o", ("n", "a"))],
}


@pytest.mark.parametrize("write", SHIFTED.values(), ids=SHIFTED)
@pytest.mark.parametrize("tail", [(), (2,)])
def test_write_overlapping_values_reads_before_writing(write: Any, tail: tuple[int, ...]) -> None:
    whole = torch.arange(4.0).view(4, *[1] * len(tail)).expand(4, *tail).clone()
    td = TensorDict({"o": torch.zeros(4, *tail), "n": {"a": whole}}, [4])
    source = TensorDict({"o": torch.ones(3, *tail), "n": {"a": whole[:3]}}, [3])
    write(td, source)
    assert td["o"].view(4, -1)[:, 0].tolist() == [0, 1, 1, 1]
    assert whole.view(4, -1)[:, 0].tolist() == [0, 0, 1, 2]


BASE = torch.arange(16.0)


SQUARE = BASE.view(4, 4)


@pytest.mark.parametrize(
    ("leaf", "other", "expected"),
    [
        (BASE[1:], BASE[:-1], True),
        (SQUARE, SQUARE.t(), True),
        (BASE, BASE.view(16), False),
        (BASE[:8], BASE[8:], False),
        (BASE[:0], BASE, False),
        (BASE, BASE.clone(), False),
        (BASE, 1.0, False),
    ],
    ids=["shifted", "transposed", "same", "disjoint", "empty", "copy", "number"],
)
def test_is_overlapping_returns_true_for_partial_overlap(leaf: Tensor, other: Any, expected: bool) -> None:
    assert is_overlapping(leaf, other) is expected
