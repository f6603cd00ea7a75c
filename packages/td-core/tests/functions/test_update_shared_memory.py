"""In-place writes that overlap, that autograd records, or that torch rejects: a failed write changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import (
    StructureError,
)


def make_inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, source: td.update_(source),
    "update_ from a mapping": lambda td, source: td.update_(source.to_dict()),
    "update": lambda td, source: td.update(source, inplace=True),
    "a number at an index": lambda td, source: td.__setitem__(slice(0, 2), 1),
    "a mapping at an index": lambda td, source: td.__setitem__(0, source[0].to_dict()),
    "a collection at an index": lambda td, source: td.__setitem__(0, source[0]),
    "a number at positions": lambda td, source: td.__setitem__([0, 1], 1),
    "a collection at positions": lambda td, source: td.__setitem__([0, 1], source[[0, 1]]),
    "apply_": lambda td, source: td.apply_(lambda leaf: torch.ones(3)),
    "add_": lambda td, source: td.add_(source),
    "masked_fill_": lambda td, source: td.masked_fill_(torch.ones(3, dtype=torch.bool), 1),
}

REJECTED_BY_TORCH: dict[str, Callable[[], Tensor]] = {
    "inference": make_inference_tensor,
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "leaf that requires grad": lambda: torch.zeros(3, requires_grad=True),
    "view of a leaf that requires grad": lambda: torch.zeros(6, requires_grad=True)[:3],
}


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.update_({"a": 1, "w": torch.ones(3)}),
        lambda td: td.update_(TensorDict({"a": torch.ones(3), "w": torch.ones(3)}, [3])),
        lambda td: td.apply_(lambda leaf: torch.ones(3)),
        lambda td: td.__setitem__(slice(0, 2), 1),
        lambda td: td.__setitem__(slice(0, 2), td[0:2] + 1),
    ],
)
def test_write_expanded_leaf_writes_nothing(write: Any) -> None:
    td = TensorDict({"a": torch.zeros(3), "w": torch.zeros(1).expand(3)}, batch_size=[3])
    with pytest.raises(StructureError, match="key 'w' in place: it is expanded"):
        write(td)
    assert not td["a"].any()


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("make", REJECTED_BY_TORCH.values(), ids=REJECTED_BY_TORCH)
@pytest.mark.parametrize("before", [0, 4])
def test_write_unwritable_leaf_writes_nothing(before: int, make: Any, write: Any) -> None:
    source = TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
    # Earlier valid writes fill the metadata cache, which must not accept the unwritable leaf.
    for _ in range(before):
        write(source.clone(), source)
    with pytest.raises(RuntimeError, match=r"key \('n', 'w'\)"):
        write(TensorDict({"a": (first := torch.zeros(3)), "n": {"w": make()}}, [3]), source)
    assert not first.any()


@pytest.mark.parametrize("name", ["update_", "a collection at an index", "a collection at positions", "add_"])
def test_write_value_with_other_metadata_is_checked_again(name: str) -> None:
    write, source = IN_PLACE[name], TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
    for _ in range(4):
        write(source.clone(), source)
    expected, td = source.clone().zero_(), source.clone().zero_()
    write(expected, source)
    write(td, TensorDict({"a": torch.ones(3, dtype=torch.int64), "n": {"w": torch.ones(6)[::2]}}, [3]))
    assert (td == expected).all()
    td.zero_()
    with pytest.raises(RuntimeError, match=r"\('n', 'w'\)"):
        write(td, TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3, 2)}}, [3]))
    assert not td["a"].any()


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("before", [0, 4])
def test_write_inference_leaf_outside_mode_raises(before: int, write: Any) -> None:
    source = TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
    for _ in range(before):
        write(source.clone(), source)
    with torch.inference_mode():
        td = source.clone().zero_()
        for _ in range(before):
            write(td, source)
        td.zero_()
    with pytest.raises(StructureError, match="it was made under torch.inference_mode"):
        write(td, source)
    assert not td["a"].any() and not td["n", "w"].any()
    with torch.inference_mode():
        write(td, source)
    assert td["a"].any() and td["n", "w"].any()


UNWRITABLE: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(2),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("sealed", UNWRITABLE)
@pytest.mark.parametrize("write", [lambda td: td.zero_(), lambda td: td.fill_("n", 0)])
def test_fill_unwritable_leaf_writes_nothing(write: Callable[[Any], Any], sealed: str) -> None:
    td = TensorDict({"n": {"a": torch.ones(2), "b": UNWRITABLE[sealed](), "c": torch.ones(2)}})
    with pytest.raises((StructureError, RuntimeError), match="in place|in-place"):
        write(td)
    assert all(leaf.tolist() == [1.0, 1.0] for leaf in td.values(True, True))
    write(td.clone().detach())


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


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
}

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


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_update_inplace_unreadable_value_writes_nothing(kind: str) -> None:
    td = TensorDict({"c": torch.ones(3), "a": torch.ones(3)}, [3])
    with pytest.raises(StructureError, match="cannot write key 'a' in place"):
        td.update_({"c": torch.zeros(3), "a": UNREADABLE[kind]()})
    assert td["c"].tolist() == td["a"].tolist() == [1, 1, 1]


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "update_ from a collection": lambda td, values: td.update_(TensorDict(values, [3])),
    "slice": lambda td, values: td.__setitem__(slice(None), values),
    "slice of a collection": lambda td, values: td.__setitem__(slice(0, 3), TensorDict(values, [3])),
    "positions": lambda td, values: td.__setitem__([0, 1, 2], values),
    "positions of a collection": lambda td, values: td.__setitem__([0, 1, 2], TensorDict(values, [3])),
    "mask": lambda td, values: td.__setitem__(torch.ones(3, dtype=torch.bool), values),
    "update_at_": lambda td, values: td.update_at_(values, slice(None)),
    "update_at_ at positions": lambda td, values: td.update_at_(values, [0, 1, 2]),
    "load_state_dict": lambda td, values: td.load_state_dict(TensorDict(values, [3]).state_dict()),
}


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_write_unreadable_value_writes_nothing(kind: str, write: Any) -> None:
    for _ in range(2):
        td = TensorDict({"c": torch.ones(3), "a": torch.ones(3)}, [3])
        with pytest.raises(StructureError, match="cannot write key 'a' in place"):
            write(td, {"c": torch.zeros(3), "a": UNREADABLE[kind]()})
        assert td["c"].tolist() == td["a"].tolist() == [1, 1, 1]
        # A valid write fills the metadata cache; the next round must still reject the value.
        write(td, {"c": torch.zeros(3), "a": torch.zeros(3)})
        assert td["c"].tolist() == td["a"].tolist() == [0, 0, 0]
