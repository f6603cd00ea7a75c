"""Fixtures of the tests that cross packages: the installed distributions, and a checked location for saves."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: The import names of the distributions.
MODULES = {
    path.parents[2].name: path.parent.name for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))
}


def is_installed(name: str) -> bool:
    """Return True if a distribution is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def installed() -> set[str]:
    """Return the distributions of the project that are installed."""
    return {name for name in MODULES if is_installed(name)}


@pytest.fixture(params=MODULES)
def present(request: pytest.FixtureRequest) -> str:
    """Return the import name of each package in turn. Skip the test for packages that are not installed."""
    if not is_installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return MODULES[request.param]


@pytest.fixture
def without(request: pytest.FixtureRequest) -> str:
    """Return the distribution that the test passes as a parameter. Skip the test if it is installed."""
    if is_installed(request.param):
        pytest.skip(f"{request.param} is installed")
    return str(request.param)


def load_schema() -> Any:
    """Load the test module of td-memmap that has the schema of saves and its checker."""
    path = ROOT / "packages" / "td-memmap" / "tests" / "test_schema.py"
    spec = importlib.util.spec_from_file_location("td_memmap_schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["directory", "archive.tdz"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return the path of a save to write; after the test, its metadata is checked against the shipped schema."""
    td_memmap, schema = pytest.importorskip("td_memmap"), load_schema()
    folder = tmp_path / str(request.param)
    yield folder
    if folder.is_file():
        folder = td_memmap.unpack_memmap(folder, tmp_path / "unpacked")
    for file in folder.rglob("meta.json"):
        assert schema.find_errors(json.loads(file.read_text()), schema.SCHEMA) == [], file
