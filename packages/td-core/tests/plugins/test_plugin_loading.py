"""Loading of plugins from entry points: selection, broken plugins, order of imports. The distributions are fakes on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from td_core import TensorDict
from td_core.errors import MissingPluginError, PluginError
from td_core.plugins.manager import FIRST_PARTY, PluginManager, PluginWarning, Selection
from td_core.plugins.siblings import SiblingMethods
from td_core.spi import hookimpl

EVERYTHING = Selection()

GOOD = """
    from td_core.spi import hookimpl

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
    before, missing = set(sys.modules), dict(MissingPluginError.unavailable)
    yield Fakes(tmp_path)
    MissingPluginError.unavailable.clear()
    MissingPluginError.unavailable.update(missing)
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
        from td_core.spi import hookimpl, Coercer

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
        from td_core.spi import hookimpl

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
        from td_core.spi import hookimpl

        @hookimpl
        def td_node_kinds():
            return [3]
        """,
        "expected NodeKind, got a int: 3",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_load_broken_plugin_warns_once(
    what: str, fakes: Fakes, manager: PluginManager, copy_registries: Callable[[], tuple[Any, ...]]
) -> None:
    code, reason = BROKEN[what]
    fakes.add("broken", code, version="3.2", points={"bad": "broken"})
    fakes.add("healthy", GOOD.format(name="still_here"))
    before = copy_registries()
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
    assert copy_registries() == before


def test_import_plugin_before_hooks_exist_warns_with_advice(fakes: Fakes) -> None:
    fakes.add("early", GOOD.format(name="is_early"), points={"early": "early_plugin"})
    (fakes.folder / "early.py").write_text("from td_core.spi import hookimpl\nword = 1\n")
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

    @hookimpl
    def td_methods() -> dict[str, Any]:
        clock[0] += 2
        return {}

    monkeypatch.setitem(sys.modules, "slow_hook", SimpleNamespace(td_methods=td_methods))
    manager.load([EntryPoint("slow", "slow_hook", "td")], EVERYTHING)
    assert [record.seconds for record in manager.records()] == [2.0]


def test_load_entry_point_without_module_warns(fakes: Fakes, manager: PluginManager) -> None:
    fakes.add("gone", "", points={"gone": "no_such_module:thing"})
    with pytest.warns(PluginWarning, match="No module named 'no_such_module'"):
        manager.load(fakes.points(), EVERYTHING)


@pytest.mark.parametrize("distribution", FIRST_PARTY)
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
    if "send" in vars(SiblingMethods):
        pytest.skip("td-distributed is installed, so the method is provided")
    with pytest.raises(MissingPluginError) as caught:
        TensorDict().send(1)
    assert str(caught.value) == (
        "TensorDict.send() is provided by the package 'td-distributed', which is installed but not active: "
        "TD_PLUGINS leaves it out"
    )


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


def test_load_fifty_plugins_ten_broken_registers_forty(
    fakes: Fakes, manager: PluginManager, copy_registries: Callable[[], tuple[Any, ...]]
) -> None:
    for number in range(50):
        broken = number % 5 == 0
        fakes.add(f"fake-{number:02}", "1 / 0" if broken else GOOD.format(name=f"fake_method_{number}"))
    before = copy_registries()
    with pytest.warns(PluginWarning) as caught:
        manager.load(fakes.points(), EVERYTHING)
    assert len(caught) == 10
    assert [record.id for record in manager.records()] == [f"fake-{number:02}" for number in range(50)]
    assert TensorDict().fake_method_49() == "fake_method_49"
    assert not hasattr(TensorDict, "fake_method_45")
    for record in manager.records():
        if record.state == "active":
            manager.unregister(record.id)
    assert copy_registries() == before


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
