"""Registration of plugins: selection, validation, errors, and removal of what they add."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import td_core.__main__
from td_core import LazyStackedTensorDict, TensorDict
from td_core._encode.node_kinds import KINDS
from td_core._encode.value_types import VALUES
from td_core._formats.object_locations import STORES
from td_core._formats.serializers import SERIALIZERS
from td_core.errors import PluginError
from td_core.plugins.manager import PluginRecord, Selection, installed
from td_core.plugins.siblings import SiblingMethods
from td_core.spi import Coercer, Layout, LeafSerializer, NodeKind, Record, Serializer, hookimpl

HOOKS = {"td_node_kinds", "td_methods", "td_serializers", "td_coercers", "td_stores"}


class Foreign(TensorDict):
    """A class with a node kind of a plugin."""


class Below(Foreign):
    """A class of a second node kind."""


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


def open_test(url: str, options: Any) -> Any:
    return url, options


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
    "td_stores": {"test": open_test, "test+2": open_test},
}


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
        assert STORES.open("TEST+2://a", {"b": 1}) == ("TEST+2://a", {"b": 1})
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
    with installed(make_plugin(**{hook: {} if hook in ("td_methods", "td_stores") else []})) as record:
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
        [
            NodeKind("a", Foreign, str, str, {"test/1": Layout(str, str, ("N",))}),
            NodeKind("b", Below, str, str, {"test/1": Layout(str, str, ("N",))}),
        ],
        "the name 'N' in 'test/1' is taken by the kind 'a'",
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
    ("td_stores", [open_test], "expected a mapping of schemes to functions, got a list"),
    ("td_stores", {"S3": open_test}, "two or more letters in lower case, and not 'file'; got 'S3'"),
    ("td_stores", {"c": open_test}, "two or more letters in lower case, and not 'file'; got 'c'"),
    ("td_stores", {"file": open_test}, "two or more letters in lower case, and not 'file'; got 'file'"),
    ("td_stores", {3: open_test}, "two or more letters in lower case, and not 'file'; got 3"),
    ("td_stores", {"test": None}, "opens the stores of the scheme 'test'; got None"),
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
    ("td_stores", {"test": open_test}, "() -> Mapping[str, StoreFactory]", "the scheme 'test' is taken by"),
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


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "abc"),
        ("none", ""),
        ("a", "a"),
        ("a,b", "ab"),
        (" a , b ", "ab"),
        ("-c", "ab"),
        ("-c,-a", "b"),
        ("x", ""),
    ],
)
def test_selection_parse_allows_selected_plugins(text: str, allowed: str) -> None:
    selection = Selection.parse(text)
    assert "".join(name for name in "abc" if selection.allows(name)) == allowed


@pytest.mark.parametrize("text", ["a,-b", "none,a", "none,-a"])
def test_selection_parse_mixed_names_raises(text: str) -> None:
    with pytest.raises(
        PluginError, match=rf"^TD_PLUGINS is 'none', .* not a mixture; got {re.escape(repr(text))}$"
    ):
        Selection.parse(text)


def test_plugins_returns_plugin_records() -> None:
    assert all(isinstance(record, PluginRecord) for record in td_core.plugins())


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
