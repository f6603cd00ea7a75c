"""Decoding of tables: the kinds that are missing, damaged rows, classes that moved, and the nodes of plugins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core._encode.decode import decode_all
from td_core.errors import FormatError, MissingPluginError, PluginError
from td_core.spi import Encoded, NodeKind, Record, decode, encode


class Foreign(TensorDict):
    """A class with a node kind of a plugin."""


def make_kind(tag: str = "test.Foreign", cls: type = Foreign) -> NodeKind:
    return NodeKind(tag, cls, lambda node: Record({}, node._children()), lambda record: cls(record.entries))


#: Functions that put a node into a collection, by the key path of the node in messages.
WRAPPED = {
    "the root": lambda node: node,
    "key 'x'": lambda node: TensorDict({"a": 1, "n": {}, "x": node}),
    "key ('n', 'x')": lambda node: TensorDict({"m": {"x": {}}, "n": {"x": node}}),
    "key ('l', '1')": lambda node: TensorDict({"l": TensorDict.lazy_stack([TensorDict(), node])}),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_decode_kind_of_missing_package_names_package(provide: Any, wrap: str) -> None:
    with provide(make_kind(), distribution="td-foreign", version="1.5"):
        encoded = encode(WRAPPED[wrap](Foreign({"a": 1})))
        assert [row.get("from") for row in encoded.nodes if row["kind"] == "test.Foreign"] == [
            "td-foreign==1.5"
        ]
        assert type(decode(encoded)) is type(WRAPPED[wrap](Foreign()))
    with pytest.raises(MissingPluginError) as caught:
        decode(encoded)
    assert str(caught.value) == (
        f"{wrap}, of the kind 'test.Foreign', was written by 'td-foreign' 1.5, which is not installed: "
        "install it from where its authors publish it"
    )


def test_decode_below_damaged_row_error_names_position() -> None:
    encoded = encode(TensorDict({"n": {"b": 1}}))
    encoded.nodes[0]["entries"] = None
    encoded.nodes[1]["kind"] = "nope"
    with pytest.raises(
        FormatError, match="^node 1 is of the kind 'nope', which no installed package provides$"
    ):
        decode(encoded)


@pytest.mark.parametrize(
    ("row", "meta", "message"),
    [
        ({}, {"batch_size": [7]}, r"the batch size \[7\] does not fit: key 'a' has shape \[2\]"),
        ({}, {"device": "bogus"}, "cannot be put together: RuntimeError"),
        ({"entries": [["a", [-1]]]}, {}, "a place in its entries is negative"),
        ({"entries": [[1, [0]]]}, {}, "not all keys of its entries are strings"),
        ({"entries": [["a", [0]], ["a", [0]]]}, {}, "a key is repeated in its entries"),
        ({"meta": None}, {}, "cannot be put together: AttributeError"),
        ({"kind": ["x"]}, {}, r"the root is of the kind \['x'\], which no"),
    ],
)
def test_decode_inconsistent_table_raises(row: Any, meta: Any, message: str) -> None:
    encoded = encode(TensorDict({"a": torch.zeros(2)}, [2]))
    encoded.nodes[0]["meta"].update(meta)
    encoded.nodes[0].update(row)
    with pytest.raises(FormatError, match=message):
        decode(encoded)
    with pytest.raises(FormatError, match="there is none"):
        decode(Encoded([], [], []))


@pytest.mark.parametrize("nodes", [3, {"a": 1}, "ab"])
def test_decode_nodes_not_a_list_raises(nodes: Any) -> None:
    with pytest.raises(
        FormatError, match=f"nodes of an encoded tree are a list; got a {type(nodes).__name__}"
    ):
        decode(Encoded(nodes, [], []))


def test_decode_unflatten_fails_error_names_writer(provide: Any) -> None:
    wrong = NodeKind("test.Foreign", Foreign, lambda node: Record({}), lambda record: record.meta["unit"])
    with provide(wrong, distribution="td-foreign", version="1.5"):
        encoded = encode(TensorDict({"x": Foreign()}))
        with pytest.raises(FormatError) as caught:
            decode(encoded)
    assert str(caught.value) == (
        "key 'x', of the kind 'test.Foreign', written by 'td-foreign==1.5', cannot be put together: KeyError('unit')"
    )


@pytest.mark.parametrize(
    ("flatten", "unflatten", "error", "message"),
    [
        (
            lambda node: {},
            None,
            PluginError,
            r"^key 'x': flatten of the node kind 'test.Foreign' gives a Record; got {}$",
        ),
        (lambda node: Record({}), lambda record: 3, FormatError, "a node is a collection; got 3"),
    ],
)
def test_encode_or_decode_wrong_kind_result_raises(
    provide: Any, flatten: Any, unflatten: Any, error: type, message: str
) -> None:
    wrong = NodeKind("test.Foreign", Foreign, flatten, unflatten or str)
    with provide(wrong), pytest.raises(error, match=message):
        decode(encode(TensorDict({"x": Foreign()})))


@pytest.mark.parametrize("leaf", [3, None, [1.0], TensorDict()])
def test_decode_leaf_not_a_tensor_raises(leaf: Any) -> None:
    encoded = encode(TensorDict({"a": 1, "n": {"b": 2}}))
    encoded.leaves[1] = leaf
    with pytest.raises(FormatError, match=r"^key \('n', 'b'\) of the encoded tree is a tensor; got "):
        decode(encoded)


@pytest.mark.parametrize("ref", [-1, 0, 2, True], ids=str)
def test_decode_child_that_does_not_follow_parent_raises(ref: Any) -> None:
    encoded = encode(TensorDict({"n": {"b": 1}}))
    encoded.nodes[1]["entries"].append(["x", ref])
    with pytest.raises(FormatError, match="^node 1 of the encoded tree is damaged: ValueError"):
        decode(encoded)


@pytest.mark.parametrize("name", ["kind", "meta", "entries", "members", "values"])
def test_decode_row_without_field_raises(name: str) -> None:
    encoded = encode(TensorDict({"n": {"b": 1}}))
    del encoded.nodes[1][name]
    with pytest.raises(FormatError, match=f"^node 1 of the encoded tree is damaged: KeyError\\('{name}'\\)$"):
        decode(encoded)


def test_decode_all_returns_nodes_and_keeps_those_made() -> None:
    encoded = encode(TensorDict({"n": {"b": 1}, "m": {}}))
    made = TensorDict({"other": 2})
    nodes = decode_all(encoded, {1: made})
    assert [list(node.keys()) for node in nodes] == [["n", "m"], ["other"], []]
    assert nodes[0].get("n") is nodes[1] is made
    assert nodes[0].get("m") is nodes[2]


class Own(TensorDict):
    """A class of the user, which can have been in another module when it was saved."""


class OtherOwn(TensorDict):
    """A class that is stored under its present name."""


#: By case: the class that the caller names, the class of the saved root, its name in the row, the class that is built.
NAMED: dict[str, tuple[Any, Any, str | None, type]] = {
    "moved": (Own, Own, "old.module:Own", Own),
    "moved without a name": (None, Own, "old.module:Own", TensorDict),
    "defined": (Own, OtherOwn, None, OtherOwn),
    "class of core": (TensorDict, Own, "old.module:Own", TensorDict),
}


@pytest.mark.parametrize("case", NAMED)
def test_decode_named_class_replaces_moved_class_of_root(case: str) -> None:
    named, saved, stored, expected = NAMED[case]
    encoded = replace(encode(saved({"n": {"b": 1}})), classes={})
    if stored is not None:
        encoded.nodes[0]["class"] = stored
    found = decode(encoded, named=named)
    assert (type(found), type(found["n"]), found["n", "b"].item()) == (expected, TensorDict, 1)


def test_decode_classes_precede_names_in_rows() -> None:
    encoded = encode(Own({"a": 1}))
    encoded.nodes[0]["class"] = f"{__name__}:OtherOwn"
    assert type(decode(encoded)) is Own
    assert type(decode(replace(encoded, classes={}))) is OtherOwn


def test_decode_sets_attributes_or_raises() -> None:
    encoded = encode(Own({"n": Own({"a": 1})}))
    encoded.attributes[1] = {"note": "kept"}
    assert decode(encoded)["n"].note == "kept"
    with pytest.raises(FormatError, match="^the attributes of node 0 cannot be set: TypeError"):
        decode(replace(encode(TensorDict()), attributes={0: {"note": "kept"}}))


@pytest.mark.parametrize(("fix", "device"), [(False, "cpu"), (True, "meta")])
def test_decode_fix_devices_corrects_labels(fix: bool, device: str) -> None:
    encoded = encode(TensorDict({"n": {"b": torch.ones(2)}}, device="cpu"))
    found = decode(replace(encoded, leaves=[leaf.to("meta") for leaf in encoded.leaves]), fix_devices=fix)
    assert [str(node.device) for node in (found, found["n"])] == [device, device]
