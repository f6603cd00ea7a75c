"""Fixtures and settings for the tests of all packages."""

from __future__ import annotations

import doctest
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from td_core import TensorDict
from td_core.plugins.declarations import Declaration

ROOT = Path(__file__).parent

# Examples may be slow on a busy machine, which must not fail a test.
settings.register_profile("td", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("td")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device under test: ``TD_TEST_DEVICE``, or the CPU."""
    return torch.device(os.environ.get("TD_TEST_DEVICE", "cpu"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``once`` outside of the folders in ``TD_ONCE_TESTS_IN``; without the variable, run all."""
    folders = os.environ.get("TD_ONCE_TESTS_IN")
    if folders is None:
        return
    chosen = [ROOT / folder for folder in folders.split(",") if folder]

    def runs(item: pytest.Item) -> bool:
        return item.get_closest_marker("once") is None or any(map(item.path.is_relative_to, chosen))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


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
    if isinstance(item, Declaration):
        return False  # The examples run where the package implements the method.
    if inspect.isfunction(item):
        return inspect.unwrap(item).__globals__ is vars(module)
    if inspect.isclass(item) and item.__module__.partition(".")[0] == module.__name__.partition(".")[0]:
        return re.search(rf"^ *class {item.__name__}\b", inspect.getsource(module), re.MULTILINE) is not None
    return bool(_from_module(finder, module, item))


doctest.DocTestFinder._from_module = is_defined_in  # type: ignore[attr-defined]
