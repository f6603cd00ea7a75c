"""The forms of leaves that passed the check of a write are remembered on their node; a leaf that no longer passes is found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._writes.check import has_passed, remember


class Special(Tensor):
    """A subclass of Tensor without overrides."""


def make(value: float) -> TensorDict:
    """Build three leaves; the last is the one that the tests make unwritable."""
    return TensorDict(
        {"a": torch.full((3, 2), value), "n": {"b": torch.full((3,), value)}, "c": torch.full((3, 4), value)},
        [3],
    )


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, other: td.update_(other),
    "update_ dict": lambda td, other: td.update_(other.to_dict()),
    "copy_": lambda td, other: td.copy_(other),
    "mul_": lambda td, other: td.mul_(other),
    "mul_ number": lambda td, other: td.mul_(2.0),
    "lerp_": lambda td, other: td.lerp_(other, 0.5),
    "zero_": lambda td, other: td.zero_(),
    "index": lambda td, other: td.__setitem__(0, other[0]),
    "slice": lambda td, other: td.__setitem__(slice(0, 2), other[:2]),
    "mask": lambda td, other: td.__setitem__(torch.tensor([True, False, True]), other[torch.tensor([0, 2])]),
    "load_state_dict": lambda td, other: td.load_state_dict(other.state_dict()),
}


def expand(td: TensorDict) -> None:
    td["c"] = torch.zeros(3, 1).expand(3, 4)


def seal(td: TensorDict) -> None:
    with torch.inference_mode():
        td["c"] = torch.zeros(3, 4)


def expand_data(td: TensorDict) -> None:
    td["c"].data = torch.zeros(3, 1).expand(3, 4)  # the same object, of the same shape


def seal_data(td: TensorDict) -> None:
    with torch.inference_mode():
        td["c"].data = torch.zeros(3, 4)


REFUSED: dict[str, tuple[Callable[[TensorDict], object], str]] = {
    "expanded": (expand, "expanded"),
    "expanded data": (expand_data, "expanded"),
    "expanded in place": (lambda td: td["c"].as_strided_((3, 4), (1, 0)), "expanded"),
    "inference": (seal, "inference_mode"),
    "inference data": (seal_data, "inference_mode"),
    "requires grad": (lambda td: td["c"].requires_grad_(), "requires grad"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("condition", REFUSED)
def test_write_leaf_refused_after_writes_changes_nothing(condition: str, write: str) -> None:
    change, message = REFUSED[condition]
    td, other = make(1.0), make(2.0)
    for _ in range(4):
        WRITES[write](td, other)
    change(td)
    if write == "load_state_dict" and condition == "requires grad":
        WRITES[write](td, other)  # it writes under no_grad()
        assert torch.equal(td["c"], other["c"])
        return
    before = td.clone()
    with pytest.raises(RuntimeError, match=message):
        WRITES[write](td, other)
    assert (td == before).all()


@pytest.mark.parametrize("write", ["update_", "copy_", "mul_", "lerp_"])
@pytest.mark.parametrize("side", [0, 1])
def test_write_leaf_resized_after_writes_changes_nothing(write: str, side: int) -> None:
    pair = [make(1.0), make(2.0)]
    for _ in range(4):
        WRITES[write](*pair)
    pair[side]["c"].t_()  # the same object, with as many elements
    before = pair[0].clone()
    with pytest.raises(RuntimeError, match="'c'"):
        WRITES[write](*pair)
    assert all(map(torch.equal, pair[0]._leaves(), before._leaves()))


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("write", ["update_", "update_ dict", "slice", "mask"])
@pytest.mark.parametrize(
    ("make_value", "message"),
    [
        (lambda: torch.zeros(3, 4, device="meta"), "meta"),
        (lambda: torch.zeros(3, 4).to_sparse(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3, 4), 1.0, 0, torch.qint8), "quantized"),
    ],
    ids=["meta", "sparse", "quantized"],
)
def test_write_unsuitable_value_after_writes_changes_nothing(
    make_value: Any, message: str, write: str
) -> None:
    td, other = make(1.0), make(2.0)
    for _ in range(4):
        WRITES[write](td, other)
    value = make_value()
    index = {"slice": slice(0, 2), "mask": torch.tensor([True, False, True])}.get(write)
    if message == "layout" and index is not None:
        pytest.skip("a sparse tensor has no such index")
    other["c"] = value
    before = td.clone()
    with pytest.raises(RuntimeError, match=message):
        WRITES[write](td, other)
    assert (td == before).all()


def test_write_value_that_requires_grad_after_writes_passes_gradient() -> None:
    td, other = make(1.0), make(2.0)
    for _ in range(4):
        td.update_(other)
    other["c"].requires_grad_()
    td.update_(other)
    td["c"].sum().backward()
    assert torch.equal(other["c"].grad, torch.ones(3, 4))
    assert not td["a"].requires_grad


@pytest.mark.parametrize("write", WRITES)
def test_write_alternating_collections_equals_torch(write: str) -> None:
    forms = [lambda leaf: leaf, lambda leaf: leaf.double(), lambda leaf: leaf[..., None].clone()]
    pairs = [(make(float(i)).apply(form), make(i + 5.0).apply(form)) for i, form in enumerate(forms)]
    fresh = [(td.clone(), other.clone()) for td, other in pairs]
    for i in range(5):
        for (td, other), (_, same) in zip(pairs, fresh):
            if i == 3:
                td["a"] = td["a"].clone()  # another object with the same values
            WRITES[write](td, other)
            assert (other == same).all()
        for td, other in fresh:
            WRITES[write](td.clone(), other)  # no node is written twice
            WRITES[write](td, other)
    for (td, _), (expected, _) in zip(pairs, fresh):
        assert (td == expected).all()


def test_remember_accepts_tensors_of_equal_forms() -> None:
    td = make(1.0)
    leaves = td._leaves()
    for _ in range(2):
        assert not has_passed(td, "copy", leaves)
        remember(td, "copy", leaves)
    assert has_passed(td, "copy", leaves)
    assert has_passed(td, "copy", [leaf + 1 for leaf in leaves])
    with torch.no_grad():
        assert not has_passed(td, "copy", leaves)  # leaves that require grad pass only there
    for others in (leaves[:2], [*leaves[:2], leaves[0]], [leaf.double() for leaf in leaves], [1, 2, 3]):
        assert not has_passed(td, "copy", others)
    assert not has_passed(td, "scatter", leaves)


def test_remember_many_forms_keeps_a_few() -> None:
    td = TensorDict({"a": torch.zeros(64), "b": torch.zeros(64)}, [64])
    for stop in [*range(1, 64), 5, 5, 5]:
        td[:stop] = TensorDict({"a": torch.full((stop,), float(stop)), "b": torch.ones(stop)}, [stop])
        assert len(td._passed) <= 16
    assert torch.equal(td["a"], torch.tensor([5.0] * 5 + [63.0] * 58 + [0.0]))


def test_remember_does_not_keep_leaves_alive() -> None:
    gc.disable()
    try:
        td, other = make(1.0), make(2.0)
        for _ in range(3):
            td.update_(other)
            td.mul_(other)
        old, source = weakref.ref(td["c"]), weakref.ref(other["c"])
        td["c"] = torch.zeros(3, 4)
        del other
        assert old() is None
        assert source() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("change", ["mul_", "update_"])
def test_write_strided_nested_leaf_raises_without_crash(change: str, side: int) -> None:
    pair = [TensorDict({"a": torch.ones(3), "b": torch.ones(2)}) for _ in range(2)]
    for _ in range(4):
        pair[0].add_(1)
        getattr(pair[0], change)(pair[1])
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    pair[side] = TensorDict({"a": torch.full((3,), 5.0), "b": ragged})
    pair[side].add_(1)
    assert torch.equal(pair[side]["b"][1], torch.full((2,), 2.0))
    before = pair[0]["a"].clone()
    with pytest.raises(RuntimeError):
        getattr(pair[0], change)(pair[1])
    assert torch.equal(pair[0]["a"], before)


@pytest.mark.parametrize("write", ["update_", "mul_"])
def test_write_subclass_leaf_after_writes_keeps_class(write: str) -> None:
    td, other = make(1.0), make(2.0)
    for _ in range(3):
        WRITES[write](td, other)
    td["c"] = torch.full((3, 4), 3.0).as_subclass(Special)
    WRITES[write](td, other)
    assert type(td["c"]) is Special
    assert torch.equal(td["c"].as_subclass(Tensor), torch.full((3, 4), 2.0 if write == "update_" else 6.0))


MASK = torch.tensor([False, True, True, True])
OVERLAPS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Tensor, Tensor], Any]]] = {
    "set_": (lambda td, value: td.set_("a", value), lambda leaf, value: leaf.copy_(value)),
    "update_": (lambda td, value: td.update_({"a": value}), lambda leaf, value: leaf.copy_(value)),
    "copy_": (
        lambda td, value: td.copy_(TensorDict({"a": value}, [4])),
        lambda leaf, value: leaf.copy_(value),
    ),
    "set_at_ slice": (
        lambda td, value: td.set_at_("a", value[:3], slice(1, 4)),
        lambda leaf, value: leaf[1:4].copy_(value[:3]),
    ),
    "set_at_ positions": (
        lambda td, value: td.set_at_("a", value[:3], torch.tensor([1, 2, 3])),
        lambda leaf, value: leaf[1:4].copy_(value[:3]),
    ),
    "slice": (
        lambda td, value: td.__setitem__(slice(1, 4), {"a": value[:3]}),
        lambda leaf, value: leaf[1:4].copy_(value[:3]),
    ),
    "mask": (
        lambda td, value: td.__setitem__(MASK, {"a": value[:3]}),
        lambda leaf, value: leaf[1:4].copy_(value[:3]),
    ),
    "mul_": (
        lambda td, value: td.mul_(TensorDict({"a": value}, [4])),
        lambda leaf, value: leaf.mul_(value),
    ),
    "lerp_": (
        lambda td, value: td.lerp_(TensorDict({"a": value}, [4]), 0.5),
        lambda leaf, value: leaf.lerp_(value, 0.5),
    ),
}


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("write", OVERLAPS)
def test_write_overlapping_value_equals_write_of_clone(write: str, shift: int) -> None:
    ours, theirs = OVERLAPS[write]
    memory = torch.arange(12.0)
    expected = memory.clone()
    td = TensorDict({"a": memory[:8].view(4, 2)}, [4])
    ours(td, memory[shift : 8 + shift].view(4, 2))
    theirs(expected[:8].view(4, 2), expected[shift : 8 + shift].view(4, 2).clone())
    assert torch.equal(memory, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_update_nested_tensor_from_dict_stores_it() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    td = TensorDict({"a": torch.zeros(2)}, [2])
    assert td.update({"b": ragged})["b"] is ragged
    with pytest.raises(ValueError, match=r"'c'.*does not start with the batch size"):
        td.update({"b": ragged, "c": torch.zeros(3)})


@pytest.mark.parametrize("side", [0, 1])
def test_write_leaf_of_new_dtype_after_writes_as_torch(side: int) -> None:
    pair = [make(1.0), make(2.0)]
    for _ in range(4):
        pair[0].lerp_(pair[1], 0.5)
        pair[0].mul_(pair[1])
        pair[0].update_(pair[1])
    leaf = pair[side]["c"]
    leaf.data = leaf.data.double()  # the same object
    pair[0].mul_(pair[1])
    assert pair[0]["c"].dtype == (torch.float64 if side == 0 else torch.float32)
    assert torch.equal(pair[0]["c"].float(), torch.full((3, 4), 4.0))
    with pytest.raises(RuntimeError, match="'c'"):
        pair[0].lerp_(pair[1], 0.5)
    assert torch.equal(pair[0]["a"], torch.full((3, 2), 4.0))
