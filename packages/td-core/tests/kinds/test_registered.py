"""The node kinds of core: what a record, a header or a layout of tensordict may say about a node, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import FormatError, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._encode.node_kinds import KINDS
from td_core.spi import Encoded, Record, decode, decode_table, encode, load_table

STACK, DENSE = "LazyStackedTensorDict", "TensorDict"
#: Kinds and metadata of a node without entries that no collection has.
IMPOSSIBLE = {
    "rows of an empty stack": (STACK, {"batch_size": [1 << 40], "stack_dim": 0}),
    "sizes of an empty stack": (STACK, {"batch_size": [], "stack_dim": 0}),
    "far stack dim": (STACK, {"batch_size": [], "stack_dim": 1 << 40}),
    "negative stack dim": (STACK, {"batch_size": [0], "stack_dim": -1}),
    "stack dim": (STACK, {"batch_size": [0], "stack_dim": "0"}),
    "no size of the stack dim": (STACK, {"stack_dim": 1}),
    "name of the stack dim": (STACK, {"batch_size": [0], "stack_dim": 0, "stack_dim_name": 7}),
    "names": (DENSE, {"batch_size": [3], "names": [7]}),
    "number of names": (DENSE, {"batch_size": [3], "names": ["x", "y"]}),
    "repeated names": (DENSE, {"batch_size": [3, 3], "names": ["x", "x"]}),
    "huge size": (DENSE, {"batch_size": [1 << 63]}),
    "negative size": (DENSE, {"batch_size": [-1]}),
    "bool": (DENSE, {"batch_size": [True]}),
    "float": (DENSE, {"batch_size": [1.0]}),
    "text": (DENSE, {"batch_size": ["3"]}),
    "object": (DENSE, {"batch_size": {"0": 1}}),
    "number": (DENSE, {"batch_size": 3}),
    "device": (DENSE, {"batch_size": [], "device": "x"}),
}


@pytest.mark.parametrize(("kind", "meta"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_build_node_with_impossible_metadata_raises(kind: str, meta: Any) -> None:
    row = {"kind": kind, "meta": meta, "entries": [], "members": [], "values": []}
    parent = {**row, "kind": DENSE, "meta": {"batch_size": []}, "entries": [["n", 1]]}
    header = {"version": 1, "nodes": [parent, row], "leaves": [], "values": []}
    with pytest.raises(
        FormatError, match=f"x.bin: key 'n', of the kind '{kind}' cannot be put together|x.bin: a lazy stack"
    ):
        decode_table(load_table(header, "x.bin"), [], "x.bin")


@pytest.mark.parametrize(("size", "dim"), [([0], 0), ([0, 1 << 40], 0), ([3, 0], 1)])
def test_build_empty_stack_keeps_its_batch_size(size: list[int], dim: int) -> None:
    row = {
        "kind": STACK,
        "meta": {"batch_size": size, "stack_dim": dim},
        "entries": [],
        "members": [],
        "values": [],
    }
    table = load_table({"version": 1, "nodes": [row], "leaves": [], "values": []}, "x.bin")
    found = decode_table(table, [], "x.bin")
    assert (found.batch_size, found.stack_dim) == (torch.Size(size), dim)


@pytest.mark.parametrize("values", [{"hook_in": 3}, {"_members": list}])
def test_decode_bad_hook_raises(values):
    encoded = encode(lazy_stack([TensorDict({"a": 1})]))
    encoded.nodes[0]["values"] = [[name, i] for i, name in enumerate(values)]
    with pytest.raises(FormatError, match=f"a lazy stack has no {next(iter(values))} that is"):
        decode(Encoded(encoded.nodes, encoded.leaves, list(values.values())))


def test_attributes_of_parameters_are_hooks_and_what_the_user_set() -> None:
    params: Any = TensorDictParams(TensorDict({"w": torch.ones(2)}))
    attributes = KINDS.of(params).attributes
    assert attributes is not None and attributes(params) == {}
    params.note = "here"
    hook = params.register_forward_hook(lambda *_: None)
    found = attributes(params)
    assert found["note"] == "here" and list(found["_forward_hooks"]) == [hook.id]
    hook.remove()
    assert list(found["_forward_hooks"]) == [hook.id], "the dicts of hooks are copies"


@pytest.mark.parametrize("part", ["members", "values"])
def test_decode_tensordict_with_members_or_values_raises(part: str) -> None:
    record = Record({"batch_size": []}, **{part: {"x": TensorDict()}})
    with pytest.raises(FormatError, match=r"a TensorDict has no members and no values: \['x'\]"):
        KINDS.of(TensorDict()).unflatten(record)


def test_decode_leaf_of_other_batch_size_raises() -> None:
    record = Record({"batch_size": [3]}, {"a": torch.zeros(2)})
    with pytest.raises(FormatError, match="'a'"):
        KINDS.of(TensorDict()).unflatten(record)


def test_decode_stack_dim_of_other_members_raises() -> None:
    record = Record({"stack_dim": 2}, members={"0": TensorDict(batch_size=[3])})
    with pytest.raises(FormatError, match=r"members of \[1\] batch dims cannot have the stack_dim 2"):
        KINDS.of(LazyStackedTensorDict()).unflatten(record)
