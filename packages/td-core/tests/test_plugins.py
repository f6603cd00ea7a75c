"""Tests of the plugin manager: selection, validation, errors, removal. Fake distributions on disk provide plugins."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, distributions
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
from td_core._coerce import COERCERS
from td_core._missing import UNAVAILABLE
from td_core._nodes import KINDS
from td_core._pytree import Shell
from td_core._serializers import SERIALIZERS
from td_core._value_types import VALUES
from td_core.errors import FormatError, MissingPluginError, PluginError
from td_core.plugins import hookspecs
from td_core.plugins.manager import PluginManager, PluginRecord, PluginWarning, Selection, installed
from td_core.plugins.siblings import DECLARATIONS, SiblingMethods

HOOKS = {"td_node_kinds", "td_methods", "td_serializers", "td_coercers"}
EVERYTHING = Selection()

GOOD = """
    from td_core import hookimpl

    @hookimpl
    def td_methods():
        return {{"{name}": lambda self: "{name}"}}
"""


class Fakes:
    """Fake distributions in one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, name: str, code: str, *, version: str = "1.0", points: dict[str, str] | None = None
    ) -> None:
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{id} = {value}" for id, value in (points or {name: module}).items()]
        (info / "entry_points.txt").write_text("[td]\n" + "\n".join(lines) + "\n")

    def points(self) -> list[EntryPoint]:
        found = distributions(path=[str(self.folder)])
        return [point for each in found for point in each.entry_points.select(group="td")]

    def python(self, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a new interpreter with the fake distributions installed, and no sibling."""
        env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", **environ}
        return subprocess.run(
            [sys.executable, *(["-c", code] if " " in code else ["-m", code, "plugins"])],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    monkeypatch.syspath_prepend(tmp_path)
    before, missing = set(sys.modules), dict(UNAVAILABLE)
    yield Fakes(tmp_path)
    UNAVAILABLE.clear()
    UNAVAILABLE.update(missing)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).parent == tmp_path:
            del sys.modules[name]


@pytest.fixture
def manager() -> Iterator[PluginManager]:
    manager = PluginManager()
    yield manager
    for record in manager.records():
        if record.state == "active":
            manager.unregister(record.id)


def tables() -> tuple[Any, ...]:
    """Return a copy of all registries that a plugin can change."""
    return (
        dict(KINDS._by_tag),
        dict(KINDS._by_type),
        dict(KINDS._by_name),
        dict(SERIALIZERS._by_name),
        dict(VALUES.by_tag),
        dict(VALUES.by_type),
        dict(VALUES.written),
        dict(COERCERS._by_type),
        {name: value for name, value in vars(SiblingMethods).items() if not name.startswith("__")},
    )


class Foreign(TensorDict):
    """A class with a node kind of a plugin."""


class Other:
    """A type without a coercer or serializer in core."""


class Nameless(Serializer):
    def save(self, data: Any, path: Path) -> Any: ...

    def load(self, path: Path) -> Any: ...

    def detect(self, path: Path) -> bool:
        return False


class Text(Nameless):
    name = "test-text"

    def save(self, data: Any, path: Path, *, level: int = 0) -> Any:
        path.write_text(f"{level} {sorted(data.keys())}")
        return data

    def load(self, path: Path, *, upper: bool = False) -> Any:
        return TensorDict({"upper": torch.tensor(upper)})

    def detect(self, path: Path) -> bool:
        return path.suffix == ".text"


def kind(tag: str = "test.Foreign", cls: type = Foreign) -> NodeKind:
    return NodeKind(tag, cls, lambda node: Record({}, node._children()), lambda record: cls(record.entries))


def leaf(tag: str = "test.Other", cls: type = Other) -> LeafSerializer:
    return LeafSerializer(tag, cls, lambda value: None, lambda value: cls())


def coercer(cls: type = Other) -> Coercer:
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


def plugin(**hooks: Any) -> SimpleNamespace:
    """Return a plugin whose hooks return the given results."""

    def implementation(name: str, result: Any) -> Callable[[], Any]:
        def hook() -> Any:
            return result() if inspect.isfunction(result) else result

        hook.__name__ = name
        return hookimpl(hook)

    return SimpleNamespace(**{name: implementation(name, result) for name, result in hooks.items()})


ALL = {
    "td_node_kinds": [kind()],
    "td_methods": Methods,
    "td_serializers": [Text(), leaf()],
    "td_coercers": (coercer(),),
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


def test_installed_all_hooks_adds_and_removes_everything() -> None:
    before = tables()
    with installed(plugin(**ALL)) as record:
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
    assert tables() == before
    assert not hasattr(TensorDict(), "shine")


def test_installed_block_raises_removes_additions() -> None:
    before = tables()
    with pytest.raises(ZeroDivisionError), installed(plugin(**ALL)):
        1 / 0  # noqa: B018
    assert tables() == before


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_register_empty_hook_result_adds_nothing(hook: str) -> None:
    before = tables()
    with installed(plugin(**{hook: {} if hook == "td_methods" else []})) as record:
        assert record.hooks == (hook,)
        assert tables() == before


def test_register_generator_hook_adds_its_items() -> None:
    def kinds() -> Iterable[NodeKind]:
        yield kind()

    with installed(plugin(td_node_kinds=kinds)):
        assert "test.Foreign" in KINDS


REFUSED = [
    ("td_node_kinds", [kind("TensorDict")], "the node kind tag 'TensorDict' is taken by"),
    ("td_node_kinds", [kind("test.x", TensorDict)], "already has a node kind, 'TensorDict'"),
    (
        "td_node_kinds",
        [kind(), kind(cls=LazyStackedTensorDict)],
        "the node kind tag 'test.Foreign' is taken by",
    ),
    ("td_node_kinds", kind(), "expected an iterable of NodeKind, got a NodeKind"),
    ("td_node_kinds", ["TensorDict"], "expected NodeKind, got a str: 'TensorDict'"),
    ("td_node_kinds", "TensorDict", "expected an iterable of NodeKind, got a str: 'TensorDict'"),
    ("td_node_kinds", [kind(cls=int)], "the type of the node kind 'test.Foreign' is no class of collections"),
    ("td_node_kinds", [kind(cls="Foreign")], "is no class of collections: 'Foreign'"),
    ("td_node_kinds", [kind(tag=None)], "the tag of a node kind is a string; got None"),
    ("td_node_kinds", [NodeKind("a", Foreign, None, str)], "the node kind 'a' lacks a function"),
    (
        "td_node_kinds",
        [NodeKind("a", Foreign, str, str, attributes={})],
        "the attributes of the node kind 'a' are no function: {}",
    ),
    ("td_node_kinds", [NodeKind("a", Foreign, str, str, {"memmap/1": 3})], "are no Layouts: {'memmap/1': 3}"),
    (
        "td_node_kinds",
        [NodeKind("a", Foreign, str, str, {"consolidated/1": Layout(str, str, ("TensorDict",))})],
        "the name 'TensorDict' in 'consolidated/1' is taken by the kind 'TensorDict'",
    ),
    ("td_serializers", [Text(), Text()], "the format 'test-text' is taken by"),
    ("td_serializers", [leaf("tuple")], "the value tag 'tuple' is taken by <class 'tuple'>"),
    ("td_serializers", [leaf(cls=tuple)], "values of <class 'tuple'> already have a serializer"),
    ("td_serializers", [leaf("a b")], "the value tag 'a b' is not a name"),
    ("td_serializers", [leaf(tag=3)], "the value tag 3 is not a name"),
    ("td_serializers", [leaf(cls="Other")], "a value type is a class and two functions"),
    ("td_serializers", [LeafSerializer("a", Other, None, str)], "a value type is a class and two functions"),
    ("td_serializers", [Nameless()], "has no name: set the class attribute 'name'; got None"),
    ("td_serializers", [Text], "expected Serializer or LeafSerializer, got a"),
    ("td_coercers", [coercer(), coercer()], "already have a coercer"),
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
def test_register_invalid_addition_raises_and_removes_all(hook: str, result: Any, message: str) -> None:
    before = tables()
    others = {name: value for name, value in ALL.items() if name != hook}
    with pytest.raises(PluginError) as caught, installed(plugin(**{**others, hook: result})):
        pass
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"plugin 'test-plugin', hook {hook}() -> ")
    assert tables() == before


DUPLICATES = [
    ("td_node_kinds", [kind()], "() -> Iterable[NodeKind]", "the node kind tag 'test.Foreign' is taken"),
    (
        "td_methods",
        {"shine": shine},
        "() -> type | Mapping[str, Any]",
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
        [leaf()],
        "() -> Iterable[Serializer | LeafSerializer]",
        "the value tag 'test.Other' is taken",
    ),
    (
        "td_serializers",
        [leaf("test.o")],
        "() -> Iterable[Serializer | LeafSerializer]",
        "already have a serializer",
    ),
    ("td_coercers", [coercer()], "() -> Iterable[Coercer]", "Other'> already have a coercer"),
]


@pytest.mark.parametrize(("hook", "result", "signature", "message"), DUPLICATES)
def test_register_duplicate_error_names_owners_and_hook(
    hook: str, result: Any, signature: str, message: str
) -> None:
    with installed(plugin(**ALL), id="first", distribution="one", version="1.0"):
        during = tables()
        with (
            pytest.raises(PluginError) as caught,
            installed(plugin(**{hook: result}), id="second", distribution="two", version="2.0"),
        ):
            pass
        assert tables() == during
    text = str(caught.value)
    assert text.startswith(
        f"plugin 'second' (distribution 'two' 2.0, entry point None), hook {hook}{signature}: "
    )
    assert message in text
    assert text.endswith("; it belongs to plugin 'first' (distribution 'one' 1.0, entry point None)")


def test_register_duplicate_id_raises() -> None:
    with (
        installed(plugin(), id="a"),
        pytest.raises(PluginError, match="the plugin id 'a' is taken by plugin 'a'"),
        installed(plugin(), id="a"),
    ):
        pass


def test_register_hook_with_unknown_argument_raises() -> None:
    before = tables()

    class Wrong:
        @hookimpl
        def td_coercers(self) -> list[Coercer]:
            return [coercer()]

        @hookimpl
        def td_node_kinds(self, config: object) -> list[NodeKind]:
            return []

    with (
        pytest.raises(PluginError, match=r"plugin 'test-plugin'.*td_node_kinds.*'config'"),
        installed(Wrong()),
    ):
        pass
    assert tables() == before
    with installed(plugin(**ALL)):  # the refused plugin does not occupy its id
        pass


def test_register_unknown_hook_error_lists_known_hooks() -> None:
    with pytest.raises(PluginError) as caught, installed(plugin(td_kinds=[])):
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
    declared = vars(SiblingMethods)["is_consolidated"]
    if declared is not DECLARATIONS["is_consolidated"]:
        pytest.skip("td-distributed is installed, so the method is provided")

    def is_consolidated(self: TensorDict) -> bool:
        return True

    with installed(plugin(td_methods={"is_consolidated": is_consolidated}), distribution="td-distributed"):
        assert vars(SiblingMethods)["is_consolidated"] is is_consolidated
        assert TensorDict().is_consolidated() is True
        assert hasattr(TensorDict(), "is_consolidated")
    assert vars(SiblingMethods)["is_consolidated"] is declared
    assert not hasattr(TensorDict(), "is_consolidated")


def with_wrong_default(self: TensorDict, *, group: Any = 1) -> list[Any]:
    return []


def with_wrong_name(self: TensorDict, *, pg: Any = None) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("member", "got"),
    [
        (with_wrong_default, "(self, *, group=1)"),
        (with_wrong_name, "(self, *, pg=None)"),
        (classmethod(lambda self, *, group=None: []), "classmethod (self, *, group=None)"),
    ],
)
def test_register_declared_method_wrong_signature_raises(member: Any, got: str) -> None:
    if vars(SiblingMethods)["all_gather"] is not DECLARATIONS["all_gather"]:
        pytest.skip("td-distributed is installed, so the method is provided")
    with (
        pytest.raises(PluginError) as caught,
        installed(plugin(td_methods={"all_gather": member}), distribution="td-distributed"),
    ):
        pass
    assert f"the method 'all_gather' is declared as (self, *, group=None); got {got}" in str(caught.value)


def test_load_entry_point_registers_plugin(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("one-plugin", GOOD.format(name="first_light"))
    manager.load(fakes.points(), EVERYTHING)
    (record,) = manager.records()
    assert record.seconds > 0
    assert (record.id, record.distribution, record.version, record.state, record.reason, record.hooks) == (
        "one-plugin", "one-plugin", "1.0", "active", "", ("td_methods",),
    )  # fmt: skip
    assert TensorDict().first_light() == "first_light"


BROKEN = {
    "import": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "exit": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "syntax": ("def (:", "SyntaxError: "),
    "hook": (
        """
        from td_core import hookimpl, Coercer

        @hookimpl
        def td_coercers():
            return [Coercer((frozenset,), lambda *args: None)]

        @hookimpl
        def td_serializers():
            yield from ()
            raise RuntimeError("out of order")
        """,
        "RuntimeError: out of order",
    ),
    "argument": (
        """
        from td_core import hookimpl

        @hookimpl
        def td_methods(nonsense):
            return {}
        """,
        "Argument(s) {'nonsense'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "no marker": ("def td_methods(): return {}", "td_methods() lacks the decorator @hookimpl"),
    "lines": ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    "exit without a word": ("import sys; sys.exit()", "SystemExit"),
    "wrong type": (
        """
        from td_core import hookimpl

        @hookimpl
        def td_node_kinds():
            return [3]
        """,
        "expected NodeKind, got a int: 3",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_load_broken_plugin_warns_once(what: str, fakes: Fakes, manager: PluginManager) -> None:
    code, reason = BROKEN[what]
    fakes.add("broken", code, version="3.2", points={"bad": "broken"})
    fakes.add("healthy", GOOD.format(name="still_here"))
    before = tables()
    with pytest.warns(PluginWarning) as caught:
        manager.load(fakes.points(), EVERYTHING)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(
        "plugin 'bad' (distribution 'broken' 3.2, entry point 'broken') was not registered: "
    )
    assert reason in text
    assert text.endswith("; update it, or leave it out with TD_PLUGINS=-bad")
    assert {record.id: record.state for record in manager.records()} == {"bad": "failed", "healthy": "active"}
    assert reason in manager.records()[0].reason
    assert manager.pluggy.get_plugin("bad") is None
    manager.unregister("healthy")
    assert tables() == before


def test_import_plugin_before_hooks_exist_warns_with_advice(fakes: Fakes) -> None:
    fakes.add("early", GOOD.format(name="is_early"), points={"early": "early_plugin"})
    (fakes.folder / "early.py").write_text("from td_core import hookimpl\nword = 1\n")
    (fakes.folder / "early_plugin.py").write_text("from early import word\n")
    done = fakes.python("import early", TD_PLUGINS="early")
    assert done.returncode == 0
    assert "; import td_core before any of its modules, or first in its __init__.py; update it" in done.stderr


def test_import_plugin_before_td_core_warns_with_advice(fakes: Fakes) -> None:
    fakes.add("early", GOOD.format(name="is_early"))
    code = "import early, td_core; print([each.state for each in td_core.plugins() if each.id == 'early'])"
    done = fakes.python(code, TD_PLUGINS="early")
    assert (done.returncode, done.stdout) == (0, "['failed']\n")
    assert (
        "no hooks yet in the partially initialized module 'early'; import td_core before any" in done.stderr
    )
    done = fakes.python(f"import td_core, {code.removeprefix('import ')}", TD_PLUGINS="early")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['active']\n", "")


def test_register_seconds_include_hook_calls(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def methods() -> dict[str, Any]:
        clock[0] += 2
        return {}

    monkeypatch.setitem(sys.modules, "slow_hook", plugin(td_methods=methods))
    manager.load([EntryPoint("slow", "slow_hook", "td")], EVERYTHING)
    assert [record.seconds for record in manager.records()] == [2.0]


def test_load_entry_point_without_module_warns(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("gone", "", points={"gone": "no_such_module:thing"})
    with pytest.warns(PluginWarning, match="No module named 'no_such_module'"):
        manager.load(fakes.points(), EVERYTHING)


@pytest.mark.parametrize("distribution", ["td-memmap", "td-tensorclass", "td-distributed", "td-nn"])
def test_load_broken_first_party_plugin_raises(
    distribution: str, fakes: Fakes, manager: PluginManager
) -> None:
    fakes.add(distribution, "import no_such_module_anywhere", points={"x": f"fake_{distribution[3:]}"})
    with pytest.raises(PluginError) as caught:
        manager.load(fakes.points(), EVERYTHING)
    assert str(caught.value) == (
        f"plugin 'x' (distribution '{distribution}' 1.0, entry point 'fake_{distribution[3:]}') is broken: "
        f"ModuleNotFoundError: No module named 'fake_{distribution[3:]}'; reinstall {distribution}"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_load_two_plugins_same_id_keeps_first(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("one", GOOD.format(name="from_one"), points={"same": "one"})
    fakes.add("two", GOOD.format(name="from_two"), points={"same": "two"})
    with pytest.warns(
        PluginWarning, match=r"the plugin id 'same' is taken by plugin 'same' \(distribution 'one' 1.0"
    ):
        manager.load(fakes.points(), EVERYTHING)
    assert [(record.distribution, record.state) for record in manager.records()] == [
        ("one", "active"),
        ("two", "failed"),
    ]
    assert TensorDict().from_one() == "from_one"
    assert not hasattr(TensorDict, "from_two")


def test_load_two_plugins_same_method_warns(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("one", GOOD.format(name="same_method"))
    fakes.add("two", GOOD.format(name="same_method"), version="2.0")
    with pytest.warns(PluginWarning) as caught:
        manager.load(fakes.points(), EVERYTHING)
    text = str(caught[0].message)
    assert text.startswith(
        "plugin 'two' (distribution 'two' 2.0, entry point 'two') was not registered: hook td_methods() -> "
    )
    assert "it belongs to plugin 'one' (distribution 'one' 1.0, entry point 'one')" in text


def test_load_unselected_plugin_is_not_imported(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("secret", "raise SystemExit('imported')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.load(fakes.points(), Selection.parse("-secret"))
    assert "secret" not in sys.modules
    (record,) = manager.records()
    assert (record.state, record.reason, record.hooks) == ("blocked", "TD_PLUGINS leaves it out", ())


def test_call_method_of_blocked_package_error_says_inactive(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("td-distributed", "", points={"distributed": "td_distributed"})
    manager.load(fakes.points(), Selection.parse("none"))
    if vars(SiblingMethods)["send"] is not DECLARATIONS["send"]:
        pytest.skip("td-distributed is installed, so the method is provided")
    with pytest.raises(MissingPluginError) as caught:
        TensorDict().send(1)
    assert str(caught.value) == (
        "TensorDict.send() is provided by the package 'td-distributed', which is installed but not active: "
        "TD_PLUGINS leaves it out"
    )


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


def test_load_selected_plugin_not_installed_warns(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("here", GOOD.format(name="is_here"))
    with pytest.warns(PluginWarning) as caught:
        manager.load(fakes.points(), Selection.parse("here,typo"))
    assert str(caught[0].message) == "TD_PLUGINS names 'typo', which is not installed; installed: 'here'"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PluginManager().load([], Selection.parse("-absent"))


def test_load_with_trace_prints_each_plugin(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    manager = PluginManager(trace=True)
    fakes.add("one", GOOD.format(name="traced"))
    fakes.add("two", "")
    manager.load(fakes.points(), Selection.parse("-two"))
    assert capsys.readouterr().err.splitlines() == [
        "td: plugin 'one' (distribution 'one' 1.0, entry point 'one') is active, hooks td_methods",
        "td: plugin 'two' (distribution 'two' 1.0, entry point 'two') is blocked: TD_PLUGINS leaves it out",
    ]
    manager.unregister("one")


def test_load_fifty_plugins_ten_broken_registers_forty(fakes: Fakes, manager: PluginManager) -> None:
    for number in range(50):
        broken = number % 5 == 0
        fakes.add(f"fake-{number:02}", "1 / 0" if broken else GOOD.format(name=f"fake_method_{number}"))
    before = tables()
    with pytest.warns(PluginWarning) as caught:
        manager.load(fakes.points(), EVERYTHING)
    assert len(caught) == 10
    assert [record.id for record in manager.records()] == [f"fake-{number:02}" for number in range(50)]
    assert TensorDict().fake_method_49() == "fake_method_49"
    assert not hasattr(TensorDict, "fake_method_45")
    for record in manager.records():
        if record.state == "active":
            manager.unregister(record.id)
    assert tables() == before


def test_import_td_core_with_broken_plugin_warns_once(fakes: Fakes) -> None:
    fakes.add("broken", "1 / 0", version="3.2")
    fakes.add("healthy", GOOD.format(name="still_here"))
    done = fakes.python(
        "import td_core; print(td_core.TensorDict().still_here(), td_core.TensorDict(a=1)['a'].item())",
        TD_PLUGINS="broken,healthy",
    )
    assert (done.returncode, done.stdout) == (0, "still_here 1\n")
    assert done.stderr.count("Warning") == 1
    assert (
        "plugin 'broken' (distribution 'broken' 3.2, entry point 'broken') was not registered" in done.stderr
    )
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_main_plugins_prints_every_plugin(fakes: Fakes) -> None:
    fakes.add("broken", "1 / 0", version="3.2")
    fakes.add("healthy", GOOD.format(name="still_here"))
    fakes.add("unwanted", GOOD.format(name="never"))
    done = fakes.python("td_core", TD_PLUGINS="broken,healthy")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert next(iter(rows)) == "id"
    assert re.match(
        r"broken +broken +3\.2 +failed: ZeroDivisionError: division by zero +- +[\d.]+ ms$", rows["broken"]
    )
    assert re.match(r"healthy +healthy +1\.0 +active +td_methods +[\d.]+ ms$", rows["healthy"])
    assert re.match(
        r"unwanted +unwanted +1\.0 +blocked: TD_PLUGINS leaves it out +- +0\.0 ms$", rows["unwanted"]
    )


def test_main_plugins_without_plugins_prints_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(td_core.__main__, "plugins", list)
    monkeypatch.setattr(sys, "argv", ["td_core", "plugins"])
    td_core.__main__.main()
    assert capsys.readouterr().out == "no plugins are installed\n"


def test_plugins_returns_plugin_records() -> None:
    assert all(isinstance(record, PluginRecord) for record in td_core.plugins())


#: Functions that put a node into a collection, by the key path of the node in messages.
WRAPPED = {
    "the root": lambda node: node,
    "key 'x'": lambda node: TensorDict({"a": 1, "n": {}, "x": node}),
    "key ('n', 'x')": lambda node: TensorDict({"m": {"x": {}}, "n": {"x": node}}),
    "key ('l', '1')": lambda node: TensorDict({"l": TensorDict.lazy_stack([TensorDict(), node])}),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_decode_kind_of_missing_package_names_package(wrap: str) -> None:
    with installed(plugin(td_node_kinds=[kind()]), distribution="td-foreign", version="1.5"):
        encoded = td_core.encode(WRAPPED[wrap](Foreign({"a": 1})))
        assert [row.get("from") for row in encoded.nodes if row["kind"] == "test.Foreign"] == [
            "td-foreign==1.5"
        ]
        assert type(td_core.decode(encoded)) is type(WRAPPED[wrap](Foreign()))
    with pytest.raises(MissingPluginError) as caught:
        td_core.decode(encoded)
    assert str(caught.value) == (
        f"{wrap}, of the kind 'test.Foreign', was written by 'td-foreign' 1.5, which is not installed: "
        "pip install td-foreign"
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
        ({"entries": [["a", [0]], ["a", [0]]]}, {}, "a key stands twice in its entries"),
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
    with installed(plugin(td_coercers=[wrong])):
        td = TensorDict(batch_size=batch_size)
        with pytest.raises(PluginError, match=message):
            td["x"] = Other()
        assert not td.keys()


def test_decode_unflatten_fails_error_names_writer() -> None:
    wrong = NodeKind("test.Foreign", Foreign, lambda node: Record({}), lambda record: record.meta["unit"])
    with installed(plugin(td_node_kinds=[wrong]), distribution="td-foreign", version="1.5"):
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
    with installed(plugin(td_node_kinds=[wrong])), pytest.raises(error, match=message):
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
    with installed(plugin(td_node_kinds=[kind])):
        assert vars(copied(node)) == ({"note": "kept"} if chosen else {})


@pytest.mark.parametrize("given", [None, ({}, {})])
@pytest.mark.parametrize("take", [td_core.encode, copy.deepcopy, pickle.dumps, TensorDict.state_dict])
def test_encode_flatten_not_a_record_error_names_plugin(given: Any, take: Any) -> None:
    layout = Layout(lambda node: given, str)
    wrong = NodeKind("test.Foreign", Foreign, lambda node: given, str, {"state_dict/2": layout})
    message = (
        r"flatten of the node kind 'test.Foreign', of td-foreign==1.5, gives a Record; got (None|\({}, {}\))$"
    )
    with installed(plugin(td_node_kinds=[wrong]), distribution="td-foreign", version="1.5"):
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
