"""Headers of encoded trees: check them, select keys, describe them, and build the collection."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import Buffer, CodecError, FormatError, KeyPathError, TensorDict, TensorDictParams, Tree
from td_core.spi import Encoded, decode_table, describe_table, dump_table, encode, load_table, select_keys


def read_back(tree: Any, keys: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """Encode a tree, pass its header through JSON, and decode the selected keys. Return also the places that were read."""
    encoded = encode(tree)
    header = json.loads(json.dumps(dump_table(encoded, list(range(len(encoded.leaves))))))
    table = select_keys(load_table(header, "x.bin"), keys, "x.bin")
    leaves = [encoded.leaves[place] for place in table.leaves]
    return decode_table(table, leaves, "x.bin", **options), table.leaves


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        (None, 8),
        ("z", 1),
        ([], 0),
        (["n"], 2),
        ([("n", "m")], 1),
        ([("n", "m"), "z"], 2),
        ([("s", "a")], 2),
        ([("s", "m", "c"), ("s", "a")], 4),
        ([("n", ("m", "c"))], 1),
        (["p", "s", "n", "z"], 8),
    ],
)
def test_select_keys_is_select(tree: TensorDict, keys: Any, count: int) -> None:
    found, places = read_back(tree, keys)
    chosen = [] if keys is None else [keys] if isinstance(keys, (str, tuple)) else keys
    expected = tree if keys is None else tree.select(*chosen)
    assert list(found.keys(True)) == list(expected.keys(True))
    assert (found == expected).all()
    assert len(places) == count
    if "p" in found.keys():
        assert type(found.get("p")) is TensorDictParams


def test_select_keys_includes_all_below_a_key(tree: TensorDict) -> None:
    found, places = read_back(tree, ["n", ("n", "b"), ("n", "m", "c")])
    assert list(found.keys(True, True)) == [("n", "b"), ("n", "m", "c")]
    assert len(places) == 2


@pytest.mark.parametrize(
    "keys", [["x"], [("n", "x"), "z"], [("s", "0")], [("s", "0", "a")], [("p", "params", "w")]]
)
def test_select_missing_key_raises(tree: TensorDict, keys: Any) -> None:
    with pytest.raises(KeyPathError, match=r"^x.bin: the save has no .*[x0w]"):
        read_back(tree, keys)


def test_select_keys_of_shared_node() -> None:
    node = TensorDict({"a": 1, "b": 2})
    encoded = encode(TensorDict({"x": node, "y": {"n": node}}), shared=True)
    table = load_table(dump_table(encoded, ["0", "1"]), "x.bin")
    assert select_keys(table, ["x", "y"], "x.bin").leaves == ["0", "1"]
    selected = select_keys(table, [("y", "n", "a"), ("x", "b"), ("x", "a")], "x.bin")
    found = decode_table(selected, [encoded.leaves[int(place)] for place in selected.leaves], "x.bin")
    assert found.to_dict() == {"y": {"n": {"a": 1}}, "x": {"b": 2, "a": 1}}


def test_select_keys_of_many_shared_members_ends() -> None:
    row = {"kind": "LazyStackedTensorDict", "meta": {"stack_dim": 0}, "entries": [], "values": []}
    rows: list[Any] = [{**row, "members": [["0", i + 1], ["1", i + 1]]} for i in range(60)]
    rows.append(
        {
            "kind": "TensorDict",
            "meta": {"batch_size": []},
            "entries": [["a", [0]]],
            "members": [],
            "values": [],
        }
    )
    assert len(select_keys(Encoded(rows, ["0"], []), "a", "x.bin").nodes) == 61


def edit(path: list[Any], value: Any) -> Callable[[Any], Any]:
    """Return a function that replaces one item of a header."""

    def change(header: Any) -> Any:
        place = header
        for item in path[:-1]:
            place = place[item]
        place[path[-1]] = value
        return header

    return change


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda header: [header], r"the td header has the version \["),
    "version": (edit(["version"], 2), "has the version 2; expected 1: upgrade"),
    "bool version": (edit(["version"], True), "has the version True; expected 1"),
    "nodes": (edit(["nodes"], {}), "nodes of the td header is not a list"),
    "leaves": (edit(["leaves"], None), "leaves of the td header is not a list"),
    "values": (edit(["values"], 1), "values of the td header is not a list"),
    "no nodes": (edit(["nodes"], []), "at least one node"),
    "node": (edit(["nodes", 0], 1), "nodes of its header are damaged"),
    "meta": (edit(["nodes", 0, "meta"], 1), "node 0 has the kind 'TensorDict' and the meta 1"),
    "kind": (edit(["nodes", 1, "kind"], ["x"]), "node 1 has the kind"),
    "key": (edit(["nodes", 0, "entries", 0], [1, [0]]), "a key of node 0 is 1"),
    "no ref": (edit(["nodes", 0, "entries", 0], ["a"]), "nodes of its header are damaged"),
    "leaf": (edit(["nodes", 0, "entries", 0, 1], [9]), r"'z' of node 0 refers to \[9\]"),
    "negative leaf": (edit(["nodes", 0, "entries", 0, 1], [-1]), r"refers to \[-1\]"),
    "two leaves": (edit(["nodes", 0, "entries", 0, 1], [0, 1]), "nodes of its header are damaged"),
    "earlier node": (edit(["nodes", 1, "entries", 1, 1], 1), "refers to 1"),
    "late node": (edit(["nodes", 1, "entries", 1, 1], 99), "refers to 99"),
    "bool": (edit(["nodes", 1, "entries", 1, 1], True), "refers to True"),
    "value": (edit(["nodes", 0, "values"], [["v", 0]]), "value 'v' of node 0 refers to 0"),
    "writer": (edit(["nodes", 0, "from"], 1), "node 0 was written by 1"),
}


def make_parameters() -> TensorDictParams:
    """Return parameters and buffers on three levels, each in a role of its own."""
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    below = {"c": frozen, "deep": {"e": Buffer(torch.ones(1))}, "d": torch.zeros(3)}
    beside = {"w": torch.nn.Parameter(torch.ones(1))}
    inner = TensorDict(
        {"m": below, "w": weight, "i": torch.tensor(3), "b": Buffer(torch.zeros(1)), "n": beside}
    )
    return TensorDictParams(inner, no_convert=True)


SELECTED = [
    "w",
    "b",
    "i",
    "m",
    ("m", "c"),
    ("m", "d"),
    ("m", "deep", "e"),
    ("n", "w"),
    ["b", ("m", "deep")],
    [("n", "w"), "w"],
]


@pytest.mark.parametrize("keys", SELECTED, ids=str)
@pytest.mark.parametrize("prefix", [(), ("net",), ("a", "net")])
def test_select_keys_of_parameters_keeps_their_roles(keys: Any, prefix: tuple[str, ...]) -> None:
    data: Any = make_parameters()
    for key in reversed(prefix):
        data = TensorDict({key: data, "step": torch.tensor(7)})
    chosen = [
        key if isinstance(key, tuple) else (key,) for key in (keys if isinstance(keys, list) else [keys])
    ]
    found, _ = read_back(data, [(*prefix, *key) for key in chosen])
    expected = data.select(*[(*prefix, *key) for key in chosen])
    assert list(found.keys(True, True)) == list(expected.keys(True, True))
    for key in expected.keys(True, True):
        leaf, other = found.get(key), expected.get(key)
        assert type(leaf) is type(other)
        assert leaf.requires_grad == other.requires_grad
        assert torch.equal(leaf, other)
    assert type(found.get(prefix) if prefix else found) is TensorDictParams


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_load_damaged_header_raises(tree: TensorDict, change: Callable[[Any], Any], message: str) -> None:
    encoded = encode(tree)
    header = json.loads(json.dumps(dump_table(encoded, list(range(8)))))
    with pytest.raises(FormatError, match=f"^x.bin: .*{message}"):
        load_table(change(header), "x.bin")


def test_decode_undefined_class_needs_strict_false() -> None:
    header = dump_table(encode(TensorDict({"p": {"x": 1}})), ["0"])
    header["nodes"].append(header["nodes"][1])
    header["nodes"][1] = {
        "kind": "no.where:P",
        "meta": {},
        "entries": [],
        "members": [["_tensordict", 2]],
        "values": [],
    }
    table = load_table(header, "x.bin")
    with pytest.raises(FormatError, match=r"^x.bin: .*'p'.*no.where:P.*import the module.*strict=False"):
        decode_table(table, [torch.tensor(1)], "x.bin")
    assert decode_table(table, [torch.tensor(1)], "x.bin", strict=False).to_dict() == {"p": {"x": 1}}


def test_dump_value_without_form_raises_with_key() -> None:
    encoded = encode(TensorDict({"n": {"m": {"a": 1}}}))
    encoded.values.append(object())
    encoded.nodes[2]["values"] = [["v", 0]]
    with pytest.raises(CodecError, match=r"^cannot save key \('n', 'm', 'v'\): "):
        dump_table(encoded, ["0"])


def test_describe_table_adds_sizes(tree: TensorDict) -> None:
    encoded = encode(tree)
    table = load_table(dump_table(encoded, list(range(8))), "x.bin")
    described = describe_table(table, "x.bin", lambda key, place: Tree(key, "leaf", [2], nbytes=10 + place))
    assert described.nbytes == 10 * 8 + sum(range(8))
    assert [*described.children] == ["z", "n", "s", "p"]
    assert [*described.children["s"].children["1"].children] == ["a", "m"]
    assert described.children["p"].kind == "TensorDictParams"
    assert described.children["s"].children["0"].shape == [3]


def test_decode_contradicting_leaf_raises_with_place() -> None:
    table = load_table(dump_table(encode(TensorDict({"a": torch.zeros(3)}, [3])), ["0"]), "x.bin")
    with pytest.raises(FormatError, match="^x.bin: .*'a'"):
        decode_table(table, [torch.zeros(2)], "x.bin")
    table.nodes[0]["values"], table.values = [["v", 0]], [["x", {"nonsense": 1}]]
    with pytest.raises(FormatError, match="^x.bin: the values of its header are damaged"):
        decode_table(table, [torch.zeros(3)], "x.bin")
