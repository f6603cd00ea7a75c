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
from td_core.errors import (
    StructureError,
)


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


def test_write_to_results_of_autograd_is_refused_for_views_of_unbind_only() -> None:
    result = torch.ones(2, 3, requires_grad=True) * 1
    td = TensorDict({"a": result.clone()})
    td.zero_()
    assert not td["a"].any()
    with pytest.raises(RuntimeError, match="autograd lets nobody write"):
        TensorDict({"a": result.unbind()[0]}).zero_()
    assert result.all()


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


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_update_inplace_unreadable_value_writes_nothing(kind: str) -> None:
    td = TensorDict({"c": torch.ones(3), "a": torch.ones(3)}, [3])
    with pytest.raises(StructureError, match="cannot write key 'a' in place"):
        td.update_({"c": torch.zeros(3), "a": UNREADABLE[kind]()})
    assert td["c"].tolist() == td["a"].tolist() == [1, 1, 1]


WHOLE_WRITES: dict[str, Callable[[Any, Any], Any]] = {
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
@pytest.mark.parametrize("write", WHOLE_WRITES.values(), ids=WHOLE_WRITES)
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
