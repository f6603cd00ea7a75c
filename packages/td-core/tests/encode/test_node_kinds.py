"""Node kinds: their registry, the table of an encoded tree and its key paths, classes by their name in files."""

from __future__ import annotations

import copy
import copyreg
import json
import pickle
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core._encode.node_kinds import (
    KINDS,
    NodeKinds,
    as_named,
    find_subclass,
    get_class_name,
    get_key_path,
    sort_topologically,
    user_class,
)
from td_core.errors import PluginError, StructureError
from td_core.spi import Encoded, Layout, NodeKind, Record, dump_table, encode, load_table


class Foreign(TensorDict):
    """A class with a node kind of a plugin."""


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))])
@pytest.mark.parametrize("chosen", [True, False])
def test_copy_keeps_attributes_that_kind_selects(provide: Any, chosen: bool, copied: Any) -> None:
    def attributes(node: Any) -> dict[str, Any]:
        return {"note": node.note}

    def unflatten(record: Record) -> Foreign:
        return Foreign(dict(record.entries))

    kind = NodeKind(
        "test.Foreign",
        Foreign,
        lambda node: Record({}, node._children()),
        unflatten,
        attributes=attributes if chosen else None,
    )
    node: Any = Foreign({"a": 1})
    node.note, node.state = "kept", "the kind's"
    with provide(kind):
        assert vars(copied(node)) == ({"note": "kept"} if chosen else {})


@pytest.mark.parametrize("given", [None, ({}, {})])
@pytest.mark.parametrize("take", [encode, copy.deepcopy, pickle.dumps, TensorDict.state_dict])
def test_encode_flatten_not_a_record_error_names_plugin(provide: Any, given: Any, take: Any) -> None:
    layout = Layout(lambda node: given, str)
    wrong = NodeKind("test.Foreign", Foreign, lambda node: given, str, {"state_dict/2": layout})
    message = (
        r"flatten of the node kind 'test.Foreign', of td-foreign==1.5, gives a Record; got (None|\({}, {}\))$"
    )
    with provide(wrong, distribution="td-foreign", version="1.5"):
        for td in (TensorDict({"n": {"a": {}, "x": Foreign(), "b": {}}}), Foreign()):
            with pytest.raises(PluginError, match=message) as caught:
                take(td)
            if take is not TensorDict.state_dict:
                assert str(caught.value).startswith("flatten" if type(td) is Foreign else "key ('n', 'x'): ")


def make_flat(value: float = 1.0) -> TensorDict:
    return TensorDict({"a": torch.full((2,), value)}, [2])


@pytest.mark.parametrize(
    ("tree", "nodes", "leaves"),
    [
        (
            lambda: TensorDict({"a": 1, "n": {"b": 2, "m": {}}}),
            {(), ("n",), ("n", "m")},
            {("a",), ("n", "b")},
        ),
        (
            lambda: TensorDict({"s": lazy_stack([make_flat(), make_flat()])}),
            {(), ("s",), ("s", "0"), ("s", "1")},
            {("s", "0", "a"), ("s", "1", "a")},
        ),
        (lambda: TensorDictParams(make_flat()), {(), ("params",)}, {("params", "a")}),
        (lambda: TensorDict(), {()}, set()),
    ],
)
def test_encoded_paths_match_positions(tree: Any, nodes: set[Any], leaves: set[Any]) -> None:
    encoded = encode(tree())
    assert set(encoded.node_paths()) == nodes
    assert set(encoded.leaf_paths()) == leaves
    assert (len(encoded.node_paths()), len(encoded.leaf_paths())) == (len(encoded.nodes), len(encoded.leaves))


def test_encoded_paths_name_leaf_at_position() -> None:
    leaves = {f"k{i}": torch.tensor(i) for i in range(5)}
    encoded = encode(TensorDict({"x": leaves, **leaves}))
    for path, leaf in zip(encoded.leaf_paths(), encoded.leaves, strict=True):
        assert path[-1] == f"k{leaf.item()}"
    assert len(set(encoded.leaf_paths())) == 10


def test_encoded_paths_of_shared_node_are_first_ones() -> None:
    node = make_flat()
    encoded = encode(TensorDict({"x": node, "y": node}), shared=True)
    assert encoded.node_paths() == [(), ("x",)]
    assert encoded.leaf_paths() == [("x", "a")]


def test_leaf_paths_without_members_are_keys(tree: TensorDict) -> None:
    paths = encode(tree).leaf_paths(members=False)
    keys = {key if isinstance(key, tuple) else (key,) for key in tree.keys(True, True)}
    assert set(paths) == keys
    assert encode(tree).node_paths(members=False).count(("s",)) == 3


def test_encode_plain_writes_layout_of_format(dict_layout: str) -> None:
    td = TensorDict({"a": torch.zeros(2), "n": TensorDict({}, [2])}, [2])
    encoded = encode(td, format_name=dict_layout)
    assert [row["format"] for row in encoded.nodes] == [dict_layout] * 2
    assert [row["meta"]["mark"] for row in encoded.nodes] == ["dict"] * 2


def test_encode_plain_without_layout_writes_general_form(dict_layout: str) -> None:
    td = TensorDict({"p": TensorDictParams(TensorDict({}))})
    encoded = encode(td, format_name=dict_layout)
    assert ["format" in row for row in encoded.nodes] == [True, False, True]
    assert encoded.nodes[1]["meta"] == encode(td).nodes[1]["meta"]


def test_encode_plain_convert_none_writes_general_form(dict_layout: str) -> None:
    seen: list[tuple[str, Any]] = []

    def convert(node: Any, record: Record, above: dict[str, Any]) -> Record | None:
        seen.append((above.get("format", "general"), list(record.entries)))
        return None if "m" in record.entries else record

    td = TensorDict({"n": {"m": {"a": 1}}})
    encoded = encode(td, format_name=dict_layout, convert=convert)
    assert seen == [("general", ["n"]), (dict_layout, ["m"]), ("general", ["a"])]
    assert ["format" in row for row in encoded.nodes] == [True, False, True]
    assert encoded.nodes[1] == encode(td).nodes[1]


def make_kind(tag: str, cls: type, *names: str) -> NodeKind:
    return NodeKind(
        tag, cls, lambda node: Record({}), lambda record: cls(), {"test/1": Layout(str, str, names)}
    )


class Below(Foreign):
    """A class without a kind of its own."""


def test_registry_finds_kinds_by_tag_class_and_name() -> None:
    kinds = NodeKinds()
    base, kind = make_kind("base", TensorDict, "Base"), make_kind("foreign", Foreign, "One", "Two")
    kinds.add(base)
    kinds.add(kind, provider="td-foreign==1.5")
    assert list(kinds) == [base, kind]
    assert (kinds["base"], kinds.get("foreign"), kinds.get("none"), "none" in kinds) == (
        base,
        kind,
        None,
        False,
    )
    assert [kinds.of(cls) for cls in (TensorDict, Foreign, Below)] == [base, kind, kind]
    assert kinds.of(Below()) is kind
    assert [kinds.find_by_name("test/1", name) for name in ("Base", "Two", "x")] == [base, kind, None]
    assert kinds.providers == {"foreign": "td-foreign==1.5"}
    kinds.remove("foreign")
    assert list(kinds) == [base]
    assert (kinds.of(Foreign), kinds.find_by_name("test/1", "One"), kinds.providers) == (base, None, {})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (make_kind("base", Foreign), "the node kind tag 'base' is taken by <class 'td_core.TensorDict'>"),
        (make_kind("x", TensorDict), "<class 'td_core.TensorDict'> already has a node kind, 'base'"),
        (make_kind("x", Foreign, "A", "Base"), "the name 'Base' in 'test/1' is taken by the kind 'base'"),
        (make_kind("", Foreign), "the tag of a node kind is a string; got ''"),
        (make_kind("x", int), "the type of the node kind 'x' is not a class of collections: <class 'int'>"),
    ],
    ids=["tag", "type", "name", "no tag", "no collection"],
)
def test_registry_refuses_taken_or_malformed_kind(kind: NodeKind, message: str) -> None:
    kinds = NodeKinds()
    kinds.add(make_kind("base", TensorDict, "Base"))
    with pytest.raises(PluginError) as caught:
        kinds.add(kind)
    assert str(caught.value).replace("td_core._kinds.tensordict.", "td_core.") == message
    assert [kind.tag for kind in kinds] == ["base"]


def test_registry_replaces_kind_of_class_that_is_defined_again() -> None:
    kinds = NodeKinds()
    first, again = make_kind("foreign", Foreign, "Foreign"), make_kind("foreign", Below, "Foreign")
    kinds.add(first)
    kinds.add(again, replace=True)
    assert (kinds["foreign"], kinds.find_by_name("test/1", "Foreign")) == (again, again)


def test_add_layout_serves_kind_and_aliases_and_replaces_earlier() -> None:
    kinds = NodeKinds()
    kinds.add(make_kind("base", TensorDict, "Base"))
    kinds.add(make_kind("other", Slotted, "Other"))
    kinds.add_alias(Foreign, "base")
    for names in (("Dict",), ("Base", "Dict")):
        layout = Layout(str, str, names)
        kinds.add_layout("base", "new/1", layout)
        assert {kinds.of(cls).layouts["new/1"] for cls in (TensorDict, Foreign)} == {layout}
        assert kinds.find_by_name("new/1", "Dict") is kinds["base"] is kinds.of(TensorDict)
    assert "new/1" not in kinds["other"].layouts and "test/1" in kinds["base"].layouts
    with pytest.raises(PluginError, match="^the name 'Base' in 'new/1' is taken by the kind 'base'$"):
        kinds.add_layout("other", "new/1", layout)
    kinds.remove("base")
    assert kinds.find_by_name("new/1", "Dict") is None


def test_alias_flattens_class_as_other_kind() -> None:
    kinds = NodeKinds()
    kinds.add(make_kind("base", TensorDict))
    kinds.add_alias(Foreign, "base")
    assert (kinds.of(Below).tag, kinds.of(Below).type) == ("base", Foreign)
    assert list(kinds) == [kinds["base"]]


class Slotted(TensorDict):
    __slots__ = ("note", "unset")


def test_attributes_include_slots_and_dict() -> None:
    node: Any = Slotted({"a": 1})
    node.note = "kept"
    assert KINDS.attributes_of(node) == {"note": "kept"}
    assert KINDS.attributes_of(TensorDict()) == {}
    other: Any = Below()
    KINDS.set_attributes(other, {"colour": "red"})
    assert (other.colour, KINDS.attributes_of(other)) == ("red", {"colour": "red"})
    again: Any = Slotted()
    KINDS.set_attributes(again, {"note": 3})
    assert again.note == 3


def test_layout_of_other_format_is_general_form(dict_layout: str) -> None:
    kind = KINDS["TensorDict"]
    node = TensorDict({"a": 1}).lock_()
    assert (
        kind.record_of(node, "none").meta == kind.record_of(node).meta == {"batch_size": [], "locked": True}
    )
    record = kind.record_of(node, dict_layout)
    assert record.meta["is_locked"] is True
    assert kind.node_of(record, dict_layout).is_locked
    with pytest.raises(KeyError):
        kind.node_of(record, "none")


def test_encode_writes_rows_values_and_classes() -> None:
    encoded = encode(TensorDict({"a": 1, "n": Below({"b": 2})}))
    name = get_class_name(Below)
    assert [(row["kind"], row.get("class")) for row in encoded.nodes] == [
        ("TensorDict", None),
        ("TensorDict", name),
    ]
    assert (encoded.classes, encoded.values, encoded.attributes) == ({1: Below}, [], {})
    assert [type(node) for node in encoded.objects] == [TensorDict, Below]


@pytest.mark.parametrize(("shared", "count"), [(False, 4), (True, 3)])
def test_encode_shared_writes_one_row_of_node(shared: bool, count: int) -> None:
    node: Any = Below({"a": 1})
    node.note = "kept"
    # The node under "x" is found first, and is also below the node under "y".
    encoded = encode(TensorDict({"x": node, "y": {"z": node}}), shared=shared)
    assert (len(encoded.nodes), len(encoded.leaves)) == (count, count - 2)
    assert list(encoded.attributes.values()) == ([{"note": "kept"}] if shared else [])
    for position, row in enumerate(encoded.nodes):
        assert all(ref > position for _, ref in row["entries"] if isinstance(ref, int))
    assert {i for i, node in enumerate(encoded.objects) if type(node) is Below} == set(encoded.classes)


def test_sort_topologically_puts_parents_first() -> None:
    def row(**entries: Any) -> dict[str, Any]:
        return {"entries": [list(item) for item in entries.items()], "members": []}

    rows = [row(a=1, b=2), row(leaf=[0]), row(c=1)]
    assert sort_topologically(rows) == [0, 2, 1]
    assert [row["entries"] for row in rows] == [[["a", 2], ["b", 1]], [["leaf", [0]]], [["c", 2]]]


@pytest.mark.parametrize(
    ("position", "path"),
    [(0, ()), (1, ("n",)), (2, ("n", "m")), ([0], ("a",)), ([1], ("n", "m", "b"))],
    ids=str,
)
def test_key_path_of_node_or_leaf(position: Any, path: tuple[str, ...]) -> None:
    rows = encode(TensorDict({"a": 1, "n": {"m": {"b": 2}}})).nodes
    assert get_key_path(rows, position) == path


def test_class_name_of_spawned_script_is_main(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_class_name(Below) == f"{__name__}:Below"
    monkeypatch.setattr(Below, "__module__", "__mp_main__")
    assert get_class_name(Below) == "__main__:Below"
    assert find_subclass(TensorDict, "__main__:Below") is Below


def test_find_subclass_prefers_class_of_module() -> None:
    twice = type("Below", (Foreign,), {"__module__": __name__})
    for name in (f"{__name__}:Below", f"<class '{__name__}.Below'>"):
        assert find_subclass(TensorDict, name) is Below is not twice
    assert find_subclass(Below, f"{__name__}:Below") is None  # not a subclass of itself
    assert find_subclass(TensorDict, None) is None


def test_user_class_is_none_for_classes_of_core() -> None:
    assert [user_class(cls) for cls in (None, TensorDict, int, Below)] == [None, None, None, Below]


def test_as_named_converts_or_raises() -> None:
    class Only(TensorDict):
        @classmethod
        def _of_saved(cls, saved: Any) -> Any:
            if "a" not in saved.keys():
                raise TypeError("it has no 'a'")
            return cls(saved)

    td, own = TensorDict({"a": 1}), Only({"a": 1})
    assert as_named(TensorDict, td, "it") is td
    assert as_named(Only, own, "it") is own
    assert type(as_named(Only, td, "it")) is Only
    with pytest.raises(StructureError, match="^what is saved, a TensorDict, is not a Only: it has no 'a'$"):
        as_named(Only, TensorDict(), "what is saved")


class Meta(type(TensorDict)):
    """A metaclass whose classes pickle as a call."""


def test_reduce_classes_replaces_classes_that_copyreg_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Meta("Made", (TensorDict,), {})
    encoded = encode(TensorDict({"m": made(), "n": Below()}))
    assert set(encoded.reduce_classes().values()) == {made, Below}
    monkeypatch.setitem(copyreg.dispatch_table, Meta, lambda cls: (str, (cls.__name__,)))
    reduced = encoded.reduce_classes()
    places = {cls: position for position, cls in encoded.classes.items()}
    assert reduced[places[Below]] is Below
    assert pickle.loads(pickle.dumps(reduced[places[made]])) == "Made"


#: A collection with two rows or more, and by key path of a leaf what ``row_axes`` returns for it.
ROW_AXES: dict[str, tuple[Any, dict[tuple[str, ...], Any]]] = {
    "flat": (TensorDict({"a": torch.zeros(2, 3)}, [2]), {("a",): (1, None)}),
    "no batch dims": (TensorDict({"a": torch.zeros(2, 3)}), {("a",): (0, None)}),
    "longer below": (
        TensorDict({"n": TensorDict({"a": torch.zeros(2, 3)}, [2, 3])}, [2]),
        {("n", "a"): (1, None)},
    ),
    "two dims": (
        TensorDict({"n": {"a": torch.zeros(2, 3)}, "b": torch.zeros(2, 3, 4)}, [2, 3]),
        {("n", "a"): (2, None), ("b",): (2, None)},
    ),
    "rows of a stack": (
        lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)]),
        {("0", "a"): (0, 0), ("1", "a"): (0, 1)},
    ),
    "rows of a stack of two dims": (
        lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (2, 3)]),
        {("0", "a"): (1, 0), ("1", "a"): (1, 1)},
    ),
    "another stack dim": (
        lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (2, 3)], 1),
        {("0", "a"): (1, None), ("1", "a"): (1, None)},
    ),
    "an uneven dim": (
        lazy_stack([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]),
        {("0", "a"): (0, 0), ("1", "a"): (0, 1)},
    ),
    "stack below": (
        TensorDict({"n": lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])}, [2]),
        {("n", "0", "a"): (0, 0), ("n", "1", "a"): (0, 1)},
    ),
    "stack along a dim of its own": (
        TensorDict({"n": lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (2, 3)], 1)}, [2]),
        {("n", "0", "a"): (1, None), ("n", "1", "a"): (1, None)},
    ),
    "stack of stacks": (
        lazy_stack([lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])] * 2),
        {(i, j, "a"): (0, int(i)) for i in "01" for j in "01"},
    ),
    "parameters": (
        TensorDictParams(TensorDict({"a": torch.zeros(2, 3)}, [2])),
        {("params", "a"): (1, None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_AXES)
def test_row_axes_are_those_of_each_leaf(name: str) -> None:
    data, expected = ROW_AXES[name]
    encoded = encode(data)
    assert dict(zip(encoded.leaf_paths(), encoded.row_axes(), strict=True)) == expected
    without_nodes = load_table(json.loads(json.dumps(dump_table(encoded, encoded.leaf_paths()))), "x")
    assert without_nodes.row_axes() == encoded.row_axes()
    for leaf, found in zip(encoded.leaves, encoded.row_axes(), strict=True):
        dims, row = found or (0, None)
        part = data.batch_size if row is None else data.batch_size[1:]
        assert part[:dims] == leaf.shape[:dims]


def test_row_axes_of_other_kinds_need_their_batch_size(provide: Any) -> None:
    kind = NodeKind("test.Foreign", Foreign, lambda node: Record({}, dict(node._children())), str)
    with provide(kind):
        data = TensorDict({"a": torch.zeros(2), "f": Foreign({"b": torch.zeros(2)}, [2])}, [2])
        encoded = encode(data)
    assert dict(zip(encoded.leaf_paths(), encoded.row_axes(), strict=True)) == {
        ("a",): (1, None),
        ("f", "b"): None,
    }


def read_batch_sizes(table: Encoded) -> list[Any]:
    return [row["meta"].get("batch_size") for row in table.nodes]


def test_with_rows_replaces_size_of_rows_alone() -> None:
    inner = TensorDict({"a": torch.zeros(2, 2)}, [2, 2])
    data = TensorDict({"n": inner, "s": lazy_stack([TensorDict({}, [2])] * 2, 1)}, [2])
    table = encode(data)
    assert read_batch_sizes(table.with_rows(7)) == [[7], [7, 2], None, [7], [7]]
    assert read_batch_sizes(table) == [[2], [2, 2], None, [2], [2]]
    assert table.with_rows(7).leaves == table.leaves


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TensorDict({"a": 1}), "^a collection without batch dims has no rows; got 3 rows$"),
        (lazy_stack([TensorDict({"a": 1})] * 2), "has a node for each row: 2 rows cannot become 3$"),
    ],
    ids=["no batch dims", "stack"],
)
def test_with_rows_of_collection_without_rows_raises(data: Any, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        encode(data).with_rows(3)


def test_with_rows_of_stack_keeps_its_number() -> None:
    table = encode(lazy_stack([TensorDict({"a": torch.zeros(2)}, [2])] * 2))
    assert read_batch_sizes(table.with_rows(2)) == read_batch_sizes(table) == [None, [2], [2]]
