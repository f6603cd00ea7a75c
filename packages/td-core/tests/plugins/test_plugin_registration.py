"""Registration of plugins: validation, errors and removal of what they add; kinds of plugins in encoded trees."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import td_core.__main__
from td_core import (
    Coercer,
    Layout,
    LazyStackedTensorDict,
    LeafSerializer,
    NodeKind,
    Record,
    Serializer,
    TensorDict,
    hookimpl,
)
from td_core._encode.node_kinds import KINDS
from td_core._encode.value_types import VALUES
from td_core._formats.serializers import SERIALIZERS
from td_core._transforms.pytree import Shell
from td_core.errors import FormatError, MissingPluginError, PluginError
from td_core.plugins import hookspecs
from td_core.plugins.manager import installed
from td_core.plugins.siblings import SiblingMethods

HOOKS = {"td_node_kinds", "td_methods", "td_serializers", "td_coercers"}


class Foreign(TensorDict):
    """A class with a node kind of a plugin."""


class Other:
    """A type without a coercer or serializer in core."""


class Nameless(Serializer):
    def save(self, data: Any, path: Path) -> Any: ...

    def load(self, path: Path) -> Any: ...

    def detect(self, path: Path, head: bytes) -> bool:
        return False


class Text(Nameless):
    name = "test-text"

    def save(self, data: Any, path: Path, *, level: int = 0) -> Any:
        path.write_text(f"{level} {sorted(data.keys())}")
        return data

    def load(self, path: Path, *, upper: bool = False) -> Any:
        return TensorDict({"upper": torch.tensor(upper)})

    def detect(self, path: Path, head: bytes) -> bool:
        return path.suffix == ".text"


def make_kind(tag: str = "test.Foreign", cls: type = Foreign) -> NodeKind:
    return NodeKind(tag, cls, lambda node: Record({}, node._children()), lambda record: cls(record.entries))


def make_leaf_serializer(tag: str = "test.Other", cls: type = Other) -> LeafSerializer:
    return LeafSerializer(tag, cls, lambda value: None, lambda value: cls())


def make_coercer(cls: type = Other) -> Coercer:
    return Coercer((cls,), lambda value, batch_size, device: torch.zeros(batch_size))


def shine(self: TensorDict, times: int = 1) -> str:
    """Shine."""
    return "*" * times


class Methods:
    def shine(self, times: int = 1) -> str:
        return "*" * times

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @property
    def glow(self) -> int:
        return 1

    def _private(self) -> None: ...


def make_plugin(**hooks: Any) -> SimpleNamespace:
    """Return a plugin whose hooks return the given results."""

    def implementation(name: str, result: Any) -> Callable[[], Any]:
        def hook() -> Any:
            return result() if inspect.isfunction(result) else result

        hook.__name__ = name
        return hookimpl(hook)

    return SimpleNamespace(**{name: implementation(name, result) for name, result in hooks.items()})


ALL = {
    "td_node_kinds": [make_kind()],
    "td_methods": Methods,
    "td_serializers": [Text(), make_leaf_serializer()],
    "td_coercers": (make_coercer(),),
}


def test_hookspecs_has_four_documented_hooks() -> None:
    functions = {
        name: value
        for name, value in vars(hookspecs).items()
        if inspect.isfunction(value) and value.__module__ == hookspecs.__name__
    }
    assert set(functions) == HOOKS
    for name, function in functions.items():
        assert function.__annotations__["return"], name
        assert len(function.__doc__ or "") > 200, name


def test_installed_all_hooks_adds_and_removes_everything(
    copy_registries: Callable[[], tuple[Any, ...]],
) -> None:
    before = copy_registries()
    with installed(make_plugin(**ALL)) as record:
        assert record.state == "active"
        assert set(record.hooks) == HOOKS
        td = TensorDict(batch_size=[2])
        assert td.shine(3) == "***"
        assert (TensorDict.named(), td.glow) == ("TensorDict", 1)
        assert not hasattr(td, "_private")
        td["zeros"] = Other()
        assert td["zeros"].tolist() == [0.0, 0.0]
        assert KINDS.of(Foreign()).tag == "test.Foreign"
        assert "test-text" in SERIALIZERS
        assert VALUES.by_type[Other].tag == "test.Other"
    assert copy_registries() == before
    assert not hasattr(TensorDict(), "shine")


def test_installed_block_raises_removes_additions(copy_registries: Callable[[], tuple[Any, ...]]) -> None:
    before = copy_registries()
    with pytest.raises(ZeroDivisionError), installed(make_plugin(**ALL)):
        1 / 0  # noqa: B018
    assert copy_registries() == before


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_register_empty_hook_result_adds_nothing(
    hook: str, copy_registries: Callable[[], tuple[Any, ...]]
) -> None:
    before = copy_registries()
    with installed(make_plugin(**{hook: {} if hook == "td_methods" else []})) as record:
        assert record.hooks == (hook,)
        assert copy_registries() == before


def test_register_generator_hook_adds_its_items() -> None:
    def kinds() -> Iterable[NodeKind]:
        yield make_kind()

    with installed(make_plugin(td_node_kinds=kinds)):
        assert "test.Foreign" in KINDS


REFUSED = [
    ("td_node_kinds", [make_kind("TensorDict")], "the node kind tag 'TensorDict' is taken by"),
    ("td_node_kinds", [make_kind("test.x", TensorDict)], "already has a node kind, 'TensorDict'"),
    (
        "td_node_kinds",
        [make_kind(), make_kind(cls=LazyStackedTensorDict)],
        "the node kind tag 'test.Foreign' is taken by",
    ),
    ("td_node_kinds", make_kind(), "expected an iterable of NodeKind, got a NodeKind"),
    ("td_node_kinds", ["TensorDict"], "expected NodeKind, got a str: 'TensorDict'"),
    ("td_node_kinds", "TensorDict", "expected an iterable of NodeKind, got a str: 'TensorDict'"),
    (
        "td_node_kinds",
        [make_kind(cls=int)],
        "the type of the node kind 'test.Foreign' is not a class of collections",
    ),
    ("td_node_kinds", [make_kind(cls="Foreign")], "is not a class of collections: 'Foreign'"),
    ("td_node_kinds", [make_kind(tag=None)], "the tag of a node kind is a string; got None"),
    ("td_node_kinds", [NodeKind("a", Foreign, None, str)], "the node kind 'a' lacks a function"),
    (
        "td_node_kinds",
        [NodeKind("a", Foreign, str, str, attributes={})],
        "the attributes of the node kind 'a' are not a function: {}",
    ),
    (
        "td_node_kinds",
        [NodeKind("a", Foreign, str, str, {"memmap/1": 3})],
        "are not Layouts: {'memmap/1': 3}",
    ),
    (
        "td_node_kinds",
        [NodeKind("a", Foreign, str, str, {"consolidated/1": Layout(str, str, ("TensorDict",))})],
        "the name 'TensorDict' in 'consolidated/1' is taken by the kind 'TensorDict'",
    ),
    ("td_serializers", [Text(), Text()], "the format 'test-text' is taken by"),
    ("td_serializers", [make_leaf_serializer("tuple")], "the value tag 'tuple' is taken by <class 'tuple'>"),
    (
        "td_serializers",
        [make_leaf_serializer(cls=tuple)],
        "values of <class 'tuple'> already have a serializer",
    ),
    ("td_serializers", [make_leaf_serializer("a b")], "the value tag 'a b' is not a name"),
    ("td_serializers", [make_leaf_serializer(tag=3)], "the value tag 3 is not a name"),
    ("td_serializers", [make_leaf_serializer(cls="Other")], "a value type is a class and two functions"),
    ("td_serializers", [LeafSerializer("a", Other, None, str)], "a value type is a class and two functions"),
    ("td_serializers", [Nameless()], "has no name: set the class attribute 'name'; got None"),
    ("td_serializers", [Text], "expected Serializer or LeafSerializer, got a"),
    ("td_coercers", [make_coercer(), make_coercer()], "already have a coercer"),
    ("td_coercers", [Other], "expected Coercer, got a type"),
    ("td_coercers", [Coercer(Other, shine)], "the types of a coercer are a tuple of classes; got <class"),
    (
        "td_coercers",
        [Coercer(("Other",), shine)],
        "the types of a coercer are a tuple of classes; got ('Other',)",
    ),
    ("td_coercers", [Coercer((Other,), None)], "a coercer converts with a function; got None"),
    *(
        ("td_coercers", [Coercer((Other, cls), shine)], f"values of {cls!r} become entries without a coercer")
        for cls in (torch.Tensor, np.ndarray, dict, list, int, np.number, Mapping, TensorDict)
    ),
    ("td_methods", {3: shine}, "the method name 3 is not a public Python identifier"),
    ("td_methods", {"class": shine}, "the method name 'class' is not a public Python identifier"),
    ("td_methods", [shine], "expected a class or a mapping of names to members, got a list"),
    ("td_methods", {"get": shine}, "the method name 'get' would shadow EntryMixin.get"),
    ("td_methods", {"batch_size": shine}, "the method name 'batch_size' would shadow"),
    ("td_methods", {"_shine": shine}, "the method name '_shine' is not a public Python identifier"),
    ("td_methods", {"__call__": shine}, "the method name '__call__' is not a public Python identifier"),
    ("td_methods", {"a b": shine}, "the method name 'a b' is not a public Python identifier"),
    ("td_methods", {"shine": 3}, "the method 'shine' is a int; it must be a function, classmethod"),
    ("td_methods", {"memmap_": shine}, "the method 'memmap_' is declared for the package 'td-memmap' alone"),
]


@pytest.mark.parametrize(("hook", "result", "message"), REFUSED)
def test_register_invalid_addition_raises_and_removes_all(
    hook: str, result: Any, message: str, copy_registries: Callable[[], tuple[Any, ...]]
) -> None:
    before = copy_registries()
    others = {name: value for name, value in ALL.items() if name != hook}
    with pytest.raises(PluginError) as caught, installed(make_plugin(**{**others, hook: result})):
        pass
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"plugin 'test-plugin', hook {hook}() -> ")
    assert copy_registries() == before


DUPLICATES = [
    ("td_node_kinds", [make_kind()], "() -> Iterable[NodeKind]", "the node kind tag 'test.Foreign' is taken"),
    (
        "td_methods",
        {"shine": shine},
        "() -> type | Mapping[str, object]",
        "the method name 'shine' would shadow",
    ),
    (
        "td_serializers",
        [Text()],
        "() -> Iterable[Serializer | LeafSerializer]",
        "the format 'test-text' is taken",
    ),
    (
        "td_serializers",
        [make_leaf_serializer()],
        "() -> Iterable[Serializer | LeafSerializer]",
        "the value tag 'test.Other' is taken",
    ),
    (
        "td_serializers",
        [make_leaf_serializer("test.o")],
        "() -> Iterable[Serializer | LeafSerializer]",
        "already have a serializer",
    ),
    ("td_coercers", [make_coercer()], "() -> Iterable[Coercer]", "Other'> already have a coercer"),
]


@pytest.mark.parametrize(("hook", "result", "signature", "message"), DUPLICATES)
def test_register_duplicate_error_names_owners_and_hook(
    hook: str, result: Any, signature: str, message: str, copy_registries: Callable[[], tuple[Any, ...]]
) -> None:
    with installed(make_plugin(**ALL), id="first", distribution="one", version="1.0"):
        during = copy_registries()
        with (
            pytest.raises(PluginError) as caught,
            installed(make_plugin(**{hook: result}), id="second", distribution="two", version="2.0"),
        ):
            pass
        assert copy_registries() == during
    text = str(caught.value)
    assert text.startswith(
        f"plugin 'second' (distribution 'two' 2.0, entry point None), hook {hook}{signature}: "
    )
    assert message in text
    assert text.endswith("; it belongs to plugin 'first' (distribution 'one' 1.0, entry point None)")


def test_register_duplicate_id_raises() -> None:
    with (
        installed(make_plugin(), id="a"),
        pytest.raises(PluginError, match="the plugin id 'a' is taken by plugin 'a'"),
        installed(make_plugin(), id="a"),
    ):
        pass


def test_register_hook_with_unknown_argument_raises(copy_registries: Callable[[], tuple[Any, ...]]) -> None:
    before = copy_registries()

    class Wrong:
        @hookimpl
        def td_coercers(self) -> list[Coercer]:
            return [make_coercer()]

        @hookimpl
        def td_node_kinds(self, config: object) -> list[NodeKind]:
            return []

    with (
        pytest.raises(PluginError, match=r"plugin 'test-plugin'.*td_node_kinds.*'config'"),
        installed(Wrong()),
    ):
        pass
    assert copy_registries() == before
    with installed(make_plugin(**ALL)):  # the refused plugin does not occupy its id
        pass


def test_register_unknown_hook_error_lists_known_hooks() -> None:
    with pytest.raises(PluginError) as caught, installed(make_plugin(td_kinds=[])):
        pass
    assert str(caught.value).startswith(
        "plugin 'test-plugin' implements the unknown hook td_kinds(); the hooks are "
        "td_node_kinds() -> Iterable[NodeKind], td_methods()"
    )


def test_register_unknown_optional_hook_is_accepted() -> None:
    @hookimpl(optionalhook=True)
    def td_elsewhere() -> None: ...

    with installed(SimpleNamespace(td_elsewhere=td_elsewhere)) as record:
        assert record.hooks == ("td_elsewhere",)


def test_register_declared_method_replaces_declaration() -> None:
    if "is_consolidated" in vars(SiblingMethods):
        pytest.skip("td-distributed is installed, so the method is provided")

    def is_consolidated(self: TensorDict) -> bool:
        return True

    with installed(
        make_plugin(td_methods={"is_consolidated": is_consolidated}), distribution="td-distributed"
    ):
        assert vars(SiblingMethods)["is_consolidated"] is is_consolidated
        assert TensorDict().is_consolidated() is True
        assert hasattr(TensorDict(), "is_consolidated")
    assert "is_consolidated" not in vars(SiblingMethods)
    assert not hasattr(TensorDict(), "is_consolidated")


def all_gather_wrong_default(self: TensorDict, *, group: Any = 1) -> list[Any]:
    return []


def all_gather_wrong_name(self: TensorDict, *, pg: Any = None) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("member", "got"),
    [
        (all_gather_wrong_default, "(self, *, group=1)"),
        (all_gather_wrong_name, "(self, *, pg=None)"),
        (classmethod(lambda self, *, group=None: []), "classmethod (self, *, group=None)"),
    ],
)
def test_register_declared_method_wrong_signature_raises(member: Any, got: str) -> None:
    if "all_gather" in vars(SiblingMethods):
        pytest.skip("td-distributed is installed, so the method is provided")
    with (
        pytest.raises(PluginError) as caught,
        installed(make_plugin(td_methods={"all_gather": member}), distribution="td-distributed"),
    ):
        pass
    assert f"the method 'all_gather' is declared as (self, *, group=None); got {got}" in str(caught.value)


#: Functions that put a node into a collection, by the key path of the node in messages.
WRAPPED = {
    "the root": lambda node: node,
    "key 'x'": lambda node: TensorDict({"a": 1, "n": {}, "x": node}),
    "key ('n', 'x')": lambda node: TensorDict({"m": {"x": {}}, "n": {"x": node}}),
    "key ('l', '1')": lambda node: TensorDict({"l": TensorDict.lazy_stack([TensorDict(), node])}),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_decode_kind_of_missing_package_names_package(wrap: str) -> None:
    with installed(make_plugin(td_node_kinds=[make_kind()]), distribution="td-foreign", version="1.5"):
        encoded = td_core.encode(WRAPPED[wrap](Foreign({"a": 1})))
        assert [row.get("from") for row in encoded.nodes if row["kind"] == "test.Foreign"] == [
            "td-foreign==1.5"
        ]
        assert type(td_core.decode(encoded)) is type(WRAPPED[wrap](Foreign()))
    with pytest.raises(MissingPluginError) as caught:
        td_core.decode(encoded)
    assert str(caught.value) == (
        f"{wrap}, of the kind 'test.Foreign', was written by 'td-foreign' 1.5, which is not installed: "
        "install it from where its authors publish it"
    )


def test_decode_below_damaged_row_error_names_position() -> None:
    encoded = td_core.encode(TensorDict({"n": {"b": 1}}))
    encoded.nodes[0]["entries"] = None
    encoded.nodes[1]["kind"] = "nope"
    with pytest.raises(
        FormatError, match="^node 1 is of the kind 'nope', which no installed package provides$"
    ):
        td_core.decode(encoded)


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
    encoded = td_core.encode(TensorDict({"a": torch.zeros(2)}, [2]))
    encoded.nodes[0]["meta"].update(meta)
    encoded.nodes[0].update(row)
    with pytest.raises(FormatError, match=message):
        td_core.decode(encoded)
    with pytest.raises(FormatError, match="there is none"):
        td_core.decode(td_core.Encoded([], [], []))


@pytest.mark.parametrize("nodes", [3, {"a": 1}, "ab"])
def test_decode_nodes_not_a_list_raises(nodes: Any) -> None:
    with pytest.raises(
        FormatError, match=f"nodes of an encoded tree are a list; got a {type(nodes).__name__}"
    ):
        td_core.decode(td_core.Encoded(nodes, [], []))


@pytest.mark.parametrize("entry", [None, 3, np.ones(3), [1.0], {"a": torch.ones(3)}])
@pytest.mark.parametrize("batch_size", [[], [3]])
def test_set_coercer_returns_wrong_type_raises(entry: Any, batch_size: list[int]) -> None:
    wrong = Coercer((Other,), lambda value, batch_size, device: entry)
    message = f"^key 'x': the coercer of Other gave no tensor or collection, but a {type(entry).__name__}$"
    with installed(make_plugin(td_coercers=[wrong])):
        td = TensorDict(batch_size=batch_size)
        with pytest.raises(PluginError, match=message):
            td["x"] = Other()
        assert not td.keys()


def test_decode_unflatten_fails_error_names_writer() -> None:
    wrong = NodeKind("test.Foreign", Foreign, lambda node: Record({}), lambda record: record.meta["unit"])
    with installed(make_plugin(td_node_kinds=[wrong]), distribution="td-foreign", version="1.5"):
        encoded = td_core.encode(TensorDict({"x": Foreign()}))
        with pytest.raises(FormatError) as caught:
            td_core.decode(encoded)
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
    flatten: Any, unflatten: Any, error: type, message: str
) -> None:
    wrong = NodeKind("test.Foreign", Foreign, flatten, unflatten or str)
    with installed(make_plugin(td_node_kinds=[wrong])), pytest.raises(error, match=message):
        td_core.decode(td_core.encode(TensorDict({"x": Foreign()})))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))])
@pytest.mark.parametrize("chosen", [True, False])
def test_copy_keeps_attributes_that_kind_selects(chosen: bool, copied: Any) -> None:
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
    with installed(make_plugin(td_node_kinds=[kind])):
        assert vars(copied(node)) == ({"note": "kept"} if chosen else {})


@pytest.mark.parametrize("given", [None, ({}, {})])
@pytest.mark.parametrize("take", [td_core.encode, copy.deepcopy, pickle.dumps, TensorDict.state_dict])
def test_encode_flatten_not_a_record_error_names_plugin(given: Any, take: Any) -> None:
    layout = Layout(lambda node: given, str)
    wrong = NodeKind("test.Foreign", Foreign, lambda node: given, str, {"state_dict/2": layout})
    message = (
        r"flatten of the node kind 'test.Foreign', of td-foreign==1.5, gives a Record; got (None|\({}, {}\))$"
    )
    with installed(make_plugin(td_node_kinds=[wrong]), distribution="td-foreign", version="1.5"):
        for td in (TensorDict({"n": {"a": {}, "x": Foreign(), "b": {}}}), Foreign()):
            with pytest.raises(PluginError, match=message) as caught:
                take(td)
            if take is not TensorDict.state_dict:
                assert str(caught.value).startswith("flatten" if type(td) is Foreign else "key ('n', 'x'): ")


@pytest.mark.parametrize("leaf", [3, None, [1.0], TensorDict()])
def test_decode_leaf_not_a_tensor_raises(leaf: Any) -> None:
    encoded = td_core.encode(TensorDict({"a": 1, "n": {"b": 2}}))
    encoded.leaves[1] = leaf
    with pytest.raises(FormatError, match=r"^key \('n', 'b'\) of the encoded tree is a tensor; got "):
        td_core.decode(encoded)


def test_shell_equality_compares_array_values() -> None:
    def shell(*values: Any) -> Shell:
        named = {str(i): np.array(value) for i, value in enumerate(values)}
        return Shell(TensorDict(), Record({}, values=named))

    assert shell([1, 2], ["a"]) == shell([1, 2], ["a"])
    for others in ([1, 3], ["a"]), ([1, 2],), ([1.0, 2.0], ["a"]):
        assert shell([1, 2], ["a"]) != shell(*others)
    assert shell([1, 2]) != [1, 2]
