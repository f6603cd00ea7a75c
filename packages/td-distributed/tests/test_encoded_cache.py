"""The cached encoding of a consolidated collection: after any change, every output has the new content."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from loopback import Done, Loop, assert_same, make_blank, make_tree, replace_entry, send_to

from td_core import TensorDict
from td_core.errors import FormatError, StructureError
from td_distributed import _reference_wire, storage_of
from td_distributed._collectives import Payload, unpack

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def swap_entries(td: Any) -> None:
    one, other = td["a"], td["b"]
    replace_entry(td, "a", other)
    replace_entry(td, "b", one)


def swap_data(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def reverse_keys(td: Any) -> None:
    for key in ("b", "a", "n"):
        td[key] = td.pop(key)


def unlock_first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a change so that it unlocks the collection first."""

    def run(td: Any) -> None:
        td.unlock_()
        change(td)
        td.lock_()

    return run


def make_sevens() -> torch.Tensor:
    return torch.full((3, 3), 7.0)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda td: None,
    "written in place": lambda td: td["n", "a"].add_(5),
    "a leaf of equal shape": unlock_first(lambda td: td.set("a", make_sevens())),
    "a leaf of equal shape below": unlock_first(lambda td: td.set(("n", "a"), make_sevens())),
    "a leaf of equal shape in spite of the lock": lambda td: replace_entry(td["n"], "a", make_sevens()),
    "leaves exchanged in spite of the lock": swap_entries,
    "the order of keys": unlock_first(reverse_keys),
    "a leaf more": unlock_first(lambda td: td.set("x", torch.ones(3))),
    "a leaf less": unlock_first(lambda td: td.pop("a")),
    "a leaf for a sub-collection in spite of the lock": lambda td: replace_entry(td, "n", make_sevens()),
    "a sub-collection": unlock_first(lambda td: td.set("n", {"a": make_sevens(), "c": make_sevens()})),
    "a sub-collection in spite of the lock": lambda td: replace_entry(td, "n", (td["n"] + 1).lock_()),
    "other data": lambda td: setattr(td["a"], "data", make_sevens()),
    "data of another dtype": lambda td: setattr(td["a"], "data", td["a"].data.view(torch.int32)),
    "the same data transposed": lambda td: setattr(td["a"], "data", td["a"].data.t()),
    "data exchanged": lambda td: swap_data(td["a"], td["b"]),
    "resize_": lambda td: td["a"].resize_(3, 2),
    "t_": lambda td: td["n", "a"].t_(),
    "unsqueeze_": lambda td: td["a"].unsqueeze_(1),
    "set_": lambda td: td["b"].set_(make_sevens()),
    "a gradient": lambda td: td["a"].requires_grad_(),
    "the batch size": lambda td: setattr(td, "batch_size", []),
    "the batch size below": lambda td: setattr(td["n"], "batch_size", [3, 3]),
    "names": lambda td: setattr(td, "names", ["time"]),
    "names below": lambda td: setattr(td["n"], "names", ["time"]),
    "the device": lambda td: td.clear_device_(),
}


#: Changes that keep the number of references to the storage, which is all that the tensordict wire checks.
UNSEEN = {each for each in CHANGES if each.endswith("in spite of the lock")} | {
    "data of another dtype", "the same data transposed", "data exchanged", "resize_", "t_", "unsqueeze_",
}  # fmt: skip


if HAS_TENSORCLASS:
    from td_tensorclass import NonTensorData

    CHANGES["a value of another type"] = unlock_first(lambda td: td.set("s", ("x", 2)))


def encode_and_decode(td: Any) -> Any:
    """Encode a collection as a Payload of a collective, and return the decoded copy."""
    parcel = Payload(lambda: td, torch.device("cpu"))
    return unpack(list(parcel.front), parcel.data, 0)


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_pickle_or_send_after_change_has_new_content(change: str, consolidated: bool) -> None:
    td = make_tree().consolidate()
    for _ in range(2):
        pickle.dumps(td)
        encode_and_decode(td)
        send_to(td, make_blank(td).consolidate())
        send_to(make_blank(td), td)
        send_to(make_blank(td).consolidate(), td)
        send_to(td, make_blank(td), wire="reference")
    CHANGES[change](td)
    assert_same(pickle.loads(pickle.dumps(td)), td)
    assert_same(encode_and_decode(td), td)
    for each in (td, td.consolidate(), td.consolidate(metadata=True)):
        assert_same(each, td)
        if each.is_consolidated():
            storage = storage_of(each)
            memory = {leaf.untyped_storage().data_ptr() for leaf in each.values(True, True)}
            assert memory == {storage.untyped_storage().data_ptr()}
        else:
            assert each is td
            with pytest.raises(StructureError, match="is not consolidated: call consolidate"):
                storage_of(each)
    other = make_blank(td)
    other = other.consolidate() if consolidated else other
    assert_same(send_to(td, other), td)
    if change not in UNSEEN:
        assert_same(send_to(td, other.apply(torch.zeros_like), wire="reference"), td)
    wanted = make_blank(td)
    source = wanted.consolidate() if consolidated else wanted
    for _ in range(2):
        assert_same(send_to(source, td), wanted)
        td.data.zero_()
    if change not in UNSEEN:
        assert_same(send_to(source, td, wire="reference"), wanted)


@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        "a leaf of equal shape",
        "a leaf of equal shape below",
        "the order of keys",
        "a leaf more",
        "a leaf less",
        "other data",
        "names",
        "names below",
    ],
)
def test_pickle_after_change_of_member_has_new_content(change: str) -> None:
    td = pickle.loads(pickle.dumps(TensorDict.lazy_stack([make_tree(), make_tree() + 1], 0).consolidate()))
    members = td.tensordicts
    pickle.dumps(td)
    encode_and_decode(td)
    CHANGES[change](members[0])
    for found in (pickle.loads(pickle.dumps(td)), encode_and_decode(td), td.consolidate()):
        for one, other in zip(found.tensordicts, members, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("change", [each for each in CHANGES if each not in UNSEEN])
def test_tensordict_wire_after_change_sends_new_content(change: str, consolidated: bool) -> None:
    td = make_tree().consolidate()
    for _ in range(2):
        send_to(td, td, wire="reference")
    CHANGES[change](td)
    target, source = make_blank(td), make_blank(td)
    assert_same(send_to(td, target.consolidate() if consolidated else target, wire="reference"), td)
    assert_same(send_to(source.consolidate() if consolidated else source, td, wire="reference"), source)


def keep_and_replace(leaf: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept.append(leaf.data)
    leaf.data = make_sevens()


@pytest.mark.parametrize(
    "change",
    [
        lambda td, kept: swap_data(td["a"], td["b"]),
        lambda td, kept: swap_data(td["a"], kept[0]["a"]),
        lambda td, kept: keep_and_replace(td["a"], kept),
    ],
    ids=["exchanged", "exchanged with another collection", "replaced, and kept by someone"],
)
def test_tensordict_wire_undetected_change_sends_old_data(change: Any) -> None:
    td, kept = make_tree().consolidate(), [(make_tree() + 1).consolidate()]
    before = td.clone()  # before the message: it makes views of the storage, which the wire notices
    send_to(td, td, wire="reference")
    change(td, kept)
    assert not torch.equal(td["a"], before["a"])
    assert_same(send_to(td, make_blank(td), wire="reference"), before)
    assert_same(send_to(td, make_blank(td)), td)
    view = td["b"][0]
    assert_same(send_to(td, make_blank(td), wire="reference"), td)
    assert torch.equal(view, td["b"][0])


@pytest.mark.parametrize("wire", ["td", "reference"])
def test_send_unlocked_after_replaced_leaf_has_new_content(wire: str) -> None:
    td = pickle.loads(pickle.dumps(make_tree().consolidate()))
    assert td.is_consolidated() and not td.is_locked
    for _ in range(2):
        send_to(td, td, wire=wire)
    td["a"] = td["a"] - 1
    assert_same(send_to(td, make_blank(td), wire=wire), td)
    td["new"] = td["a"]
    assert_same(send_to(td, make_blank(td), wire=wire), td)


def test_tensordict_wire_without_refcount_checks_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_reference_wire, "count_users", lambda memory: None)
    td = make_tree().consolidate()
    send_to(td, td, wire="reference")
    swap_data(td["a"], td["b"])
    assert_same(send_to(td, make_blank(td), wire="reference"), td)


def test_recv_other_key_after_cached_message_raises() -> None:
    td = make_tree().consolidate()
    for _ in range(3):
        send_to(make_tree().consolidate(), td)
    before = td.clone()
    with pytest.raises(StructureError, match="key 'b' is torch.float32"):
        send_to(make_tree().rename_key_("b", "x").consolidate(), td)
    assert_same(td, before)
    assert_same(send_to((make_tree() + 1).consolidate(), td), make_tree() + 1)


def test_recv_no_bytes_after_cached_message_raises() -> None:
    td, loop = make_tree().consolidate(), Loop()
    for _ in range(3):
        send_to(make_tree().consolidate(), td)
    loop.recv = lambda tensors, rank, tag: Done()  # type: ignore[method-assign]
    with pytest.raises(FormatError, match="what arrived is not a message of send"):
        td.recv(group=loop, group_src=0)


@pytest.mark.parametrize(
    "change", ["a leaf less", "data of another dtype", "resize_", "the batch size", "unsqueeze_"]
)
def test_recv_after_structure_change_raises(change: str) -> None:
    td, source = make_tree().consolidate(), make_blank(make_tree()).consolidate()
    for _ in range(2):
        send_to(source, td)
    CHANGES[change](td)
    before = td.clone()
    with pytest.raises(StructureError, match="nothing was changed"):
        send_to(source, td)
    assert_same(td, before)


#: Collections of one structure with different layouts of the leaves in storages.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "storage": lambda td: td.consolidate(),
    "with its structure": lambda td: td.consolidate(metadata=True),
    "another order": lambda td: TensorDict(dict(reversed(td.items())), td.batch_size).consolidate(),
    "tensors": lambda td: td,
}


@pytest.mark.parametrize("held", [name for name in LAYOUTS if name != "another order"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "another order"])
def test_tensordict_wire_any_storage_layout_keeps_content(layout: str, held: str) -> None:
    source = TensorDict({"a": torch.arange(5), "b": torch.ones(3)})
    found = send_to(LAYOUTS[layout](source), LAYOUTS[held](source.apply(torch.zeros_like)), wire="reference")
    assert found["a"].tolist() == source["a"].tolist()


@pytest.mark.parametrize("size", [5, 50_000])
@pytest.mark.parametrize("held", ["storage", "with its structure"])
def test_recv_same_structure_other_layout_keeps_content(held: str, size: int) -> None:
    def make(first: int) -> Any:
        return TensorDict({key: torch.arange(first + i, first + i + size) for i, key in enumerate("abc")})

    target = LAYOUTS[held](make(0))
    for step, (one, other) in enumerate(product(LAYOUTS, repeat=2)):
        for i, layout in enumerate((one, one, one, other, one)):
            source = make(10 * step + i)
            assert_same(send_to(LAYOUTS[layout](source), target), source)


def test_recv_cached_structure_writes_new_elements() -> None:
    td = make_tree().consolidate()
    for step in range(3):
        source = (make_tree() + step).consolidate()
        assert_same(send_to(source, td), source)
        assert torch.equal(storage_of(td), storage_of(source))


def test_irecv_two_messages_writes_in_order_of_wait() -> None:
    td, loop = make_tree().consolidate(), Loop()
    for _ in range(2):
        send_to(make_tree().consolidate(), td)
    named, last = (make_tree() + 1).refine_names("t"), make_tree() + 2
    for each in (named, last):
        each.consolidate().send(group=loop, group_dst=0, consolidated=True)
    first, second = (td.irecv(group=loop, group_src=0, return_premature=True)[0] for _ in range(2))
    first.wait()
    assert torch.equal(td["a"], named["a"])
    second.wait()
    assert_same(td, last)


def test_tensordict_wire_same_layout_sends_without_copy() -> None:
    td = make_tree().consolidate()
    for _ in range(2):
        assert _reference_wire.make_messages(td, True, torch.device("cpu"))[0] is storage_of(td)


@pytest.mark.skipif(not HAS_TENSORCLASS, reason="needs td-tensorclass")
def test_pickle_after_inplace_list_change_has_new_value() -> None:
    td = TensorDict({"a": torch.ones(2), "v": NonTensorData(["x"])}).consolidate()
    for step in range(3):
        assert encode_and_decode(td)["v"] == pickle.loads(pickle.dumps(td))["v"] == ["x", *range(step)]
        td["v"].append(step)


def test_delete_consolidated_collection_frees_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        td = make_tree().consolidate()
        encode_and_decode(td), pickle.dumps(td), send_to(td, td)
        gone = [weakref.ref(each) for each in (td, td["n"], td["n", "a"])]
        del td
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()


class Noted(TensorDict):
    """A class whose instances have attributes."""

    note: Any


class Slotted(TensorDict):
    """A class whose instances have an attribute in a slot."""

    __slots__ = ("note",)


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle_keeps_attributes_of_every_node(protocol: int) -> None:
    level = Noted({"b": torch.ones(2)})
    td = Noted({"a": torch.zeros(3), "n": level, "s": Slotted({"c": torch.ones(1)})}).consolidate()
    for each, note in ((td, "root"), (td["n"], "level"), (td["s"], "slot")):
        each.note = [note]
    for _ in range(2):  # first without the cached encoding, then with it
        again = pickle.loads(pickle.dumps(td, protocol))
        assert [each.note for each in (again, again["n"], again["s"])] == [["root"], ["level"], ["slot"]]
        assert len(storage_of(again)) == len(storage_of(td))
    td["n"].note = "changed"
    assert pickle.loads(pickle.dumps(td, protocol))["n"].note == "changed"
    twice = TensorDict({"x": level, "y": level}).consolidate()
    twice["x"].note = 1
    assert pickle.loads(pickle.dumps(twice, protocol))["x"].note == 1


def test_unpickle_invalid_node_attributes_raises() -> None:
    rebuild, (schema, storage, values, classes) = make_tree().consolidate().__reduce_ex__(2)
    for attributes in ({9: {"note": 1}}, {0: {"_batch_size": torch.Size([7])}}, {0: 1}):
        with pytest.raises(FormatError, match=r"the attributes of node \d cannot be set"):
            rebuild(schema, storage, values, classes, attributes)
