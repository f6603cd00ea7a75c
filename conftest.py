"""Fixtures and settings for the tests of all packages."""

from __future__ import annotations

import doctest
import functools
import inspect
import os
import re
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from td_core import TensorDict
from td_core.plugins.siblings import Placeholder

ROOT = Path(__file__).parent
PLUGINS = {path.name.replace("-", "_") for path in (ROOT / "packages").iterdir()} - {"td_core"}

# Examples may be slow on a busy machine, which must not fail a test. The sessions of nox set HYPOTHESIS_PROFILE=full: the
# number of examples that tests without one of their own had before, the same ones in each run.
TOLERANT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=10, **TOLERANT)
settings.register_profile("full", settings.get_profile("ci"), **TOLERANT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device under test: ``TD_TEST_DEVICE``, or the CPU."""
    return torch.device(os.environ.get("TD_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def make_special() -> dict[str, Callable[[Path], object]]:
    """Return functions that make what is neither a file nor a directory at a path, by its name."""

    def make_socket(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as end:
            here = os.getcwd()
            os.chdir(path.parent)  # the path of a socket has at most 107 bytes
            try:
                end.bind(path.name)
            finally:
                os.chdir(here)

    return {
        "pipe": os.mkfifo,
        "socket": make_socket,
        "device": lambda path: path.symlink_to("/dev/null"),
        "link to a pipe": lambda path: (os.mkfifo(f"{path}-pipe"), path.symlink_to(f"{path}-pipe")),
    }


def _folders_in(variable: str) -> list[Path]:
    return [ROOT / folder for folder in os.environ.get(variable, "").split(",") if folder]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that another environment runs, and expect failures of the oldest dependencies.

    Tests marked ``once`` run in the folders of ``TD_ONCE_TESTS_IN``, or everywhere without the variable. Of the folders
    ``TD_SAMPLE_TESTS_OF``, a sixth runs, chosen by the names of the tests, and all tests of files that name plugins or a
    package beside their own and td_core. Tests listed in the file ``TD_EXPECTED_FAILURES`` must fail.
    """
    if path := os.environ.get("TD_EXPECTED_FAILURES"):
        expect_failures(items, Path(path).read_text(encoding="utf-8"))

    once, sampled = _folders_in("TD_ONCE_TESTS_IN"), _folders_in("TD_SAMPLE_TESTS_OF")

    @functools.cache
    def names_plugins(path: Path) -> bool:
        own = path.relative_to(ROOT / "packages").parts[0].replace("-", "_")
        named = set(re.findall(r"plugin|\btd_[a-z0-9]+", path.read_text(encoding="utf-8")))
        return "plugin" in named or not named & PLUGINS <= {own}

    def runs(item: pytest.Item) -> bool:
        if "TD_ONCE_TESTS_IN" in os.environ and item.get_closest_marker("once") is not None:
            return any(map(item.path.is_relative_to, once))
        if any(map(item.path.is_relative_to, sampled)) and not names_plugins(item.path):
            return zlib.crc32(item.nodeid.encode()) % 6 == 0
        return True

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip test files without smoke cases for ``-m smoke``, and files marked ``once`` that another environment runs.

    Importing all files takes longer than the smoke cases, and than many of those environments need for their tests.
    """
    smoke = config.option.markexpr == "smoke"
    here = any(map(collection_path.is_relative_to, _folders_in("TD_ONCE_TESTS_IN")))
    elsewhere = "TD_ONCE_TESTS_IN" in os.environ and not here
    if not (smoke or elsewhere) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_once = re.search(r"^pytestmark = \[?\s*pytest\.mark\.once\b", text, re.MULTILINE)
    return (smoke and "pytest.mark.smoke" not in text) or (elsewhere and bool(is_once)) or None


def expect_failures(items: list[pytest.Item], text: str) -> None:
    """Mark the tests that a line ``pattern of ids: reason`` names as expected failures; ``*`` stands for any characters.

    A line that starts with ``!`` names tests that do not run, since they would not end.
    """
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        pattern, _, reason = line.lstrip("!").rpartition(": ")
        matches = re.compile(".*".join(map(re.escape, pattern.split("*")))).fullmatch
        for item in items:
            if matches(item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=not line.startswith("!")))


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    """Define ``torch`` and ``TensorDict`` for all examples in docstrings."""
    doctest_namespace.update(torch=torch, TensorDict=TensorDict)


@pytest.fixture(autouse=True)
def folder_of_an_example(request: pytest.FixtureRequest) -> None:
    """Run each example of a docstring in a temporary folder, so that it may write files."""
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


_from_module = doctest.DocTestFinder._from_module  # type: ignore[attr-defined]


def is_defined_in(finder: doctest.DocTestFinder, module: ModuleType, item: Any) -> bool:
    """Collect examples from the module that defines their object, even if its ``__module__`` is a public alias."""
    if isinstance(item, Placeholder):
        return False  # The examples run where the package implements the method.
    if inspect.isfunction(item):
        return inspect.unwrap(item).__globals__ is vars(module)
    if inspect.isclass(item) and item.__module__.partition(".")[0] == module.__name__.partition(".")[0]:
        return re.search(rf"^ *class {item.__name__}\b", inspect.getsource(module), re.MULTILINE) is not None
    return bool(_from_module(finder, module, item))


doctest.DocTestFinder._from_module = is_defined_in  # type: ignore[attr-defined]
