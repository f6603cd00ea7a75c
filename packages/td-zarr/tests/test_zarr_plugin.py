"""The package as a third party would build it: public names of td-core only, and nothing imported before it is needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import td_zarr

SOURCES = sorted(Path(td_zarr.__file__).parent.glob("*.py"))
PUBLIC = {"td_core", "td_core.array_formats", "td_core.errors", "td_core.spi", "td_core.typing"}


def list_imports(path: Path) -> list[tuple[str, str]]:
    """Return the module and the name of each import of td_core in a file."""
    return [
        (node.module if isinstance(node, ast.ImportFrom) else alias.name, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0] == "td_core"
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_module_imports_only_public_names_of_td_core(path: Path) -> None:
    for module, name in list_imports(path):
        assert module in PUBLIC, f"{path.name} imports {module}"
        assert not name.startswith("_") or name == "__version__", f"{path.name} imports {name}"


def test_public_names_are_those_of_all() -> None:
    assert sorted(td_zarr.__all__) == [name for name in dir(td_zarr) if not name.startswith("_")]
    for name in (*td_zarr.__all__, "open"):
        assert callable(getattr(td_zarr, name))
    with pytest.raises(AttributeError, match="'td_zarr' has no attribute 'other'"):
        td_zarr.other  # noqa: B018
