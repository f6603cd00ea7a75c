"""Packages outside of td_core import public names alone, and use the private members of nodes that td_core.spi lists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict, TensorDictParams, spi

pytestmark = pytest.mark.once  # the sources are the same in every environment

ROOT = Path(__file__).parents[1]
OUTSIDE = sorted(
    path
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/src/**/*.py")]
    if "td_core" not in path.parts
)
LISTED = {*spi.REQUIRED, *spi.PROVIDED, *spi.OVERRIDABLE, *spi.WRAPPING}


def list_private_members(*classes: type) -> set[str]:
    """Return the private members that td_core defines for classes and their bases."""
    return {
        name
        for cls in classes
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "td_core"
        for name in {*vars(base), *vars(base).get("__annotations__", ())}
        if name.startswith("_") and not name.startswith(("__", "_abc_"))
    }


EVERY_NODE = list_private_members(TensorCollection)
SOME_NODES = list_private_members(TensorDict, LazyStackedTensorDict, TensorDictParams, spi.Wrapper)


def list_definitions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each member that a class statement defines, or lists as a slot."""
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for statement in cls.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                yield statement.name, statement.lineno
            for node in ast.walk(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else ():
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement.lineno
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value, statement.lineno


def find_unlisted_members(text: str, own: set[str]) -> list[str]:
    """Return the places where a module reads a private member of nodes that spi does not list, nor the package defines."""
    tree = ast.parse(text)
    used = [(node.attr, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    # nn.Module has members with these names, too.
    others = {"_buffers", "_parameters", "_load_from_state_dict"}
    known = EVERY_NODE | (SOME_NODES - own - others)
    return sorted(f"line {line}: {name}" for name, line in used if name in known - LISTED - own)


def find_unlisted_overrides(text: str) -> list[str]:
    """Return the places where a class that derives from a class of td_core defines a member that spi does not list."""
    tree = ast.parse(text)
    kinds = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {"_children", "_schema", "_with_children", "_map"} & set(dict(list_definitions(node)))
    ]
    return sorted(
        f"line {line}: {name}"
        for cls in kinds
        for name, line in list_definitions(cls)
        if name in EVERY_NODE - LISTED
    )


@functools.cache
def read_own_names(package: Path) -> set[str]:
    """Return the members that the classes of a package define."""
    texts = [file.read_text(encoding="utf-8") for file in package.rglob("*.py")]
    return {name for text in texts for name, _ in list_definitions(ast.parse(text))}


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_uses_only_listed_members_of_nodes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    package = next(parent for parent in path.parents if parent.parent.name == "src")
    found = find_unlisted_members(text, read_own_names(package)) + find_unlisted_overrides(text)
    assert found == [], "list the member in td_core.spi, use another one, or move the work into td_core"


def list_private_imports(text: str) -> list[str]:
    """Return the private modules and names of td_core that a module imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    private = re.compile(r"td_core(\..*)?\._(?!_version__$).*")
    return [name for name in found if private.fullmatch(name)]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_public_names_of_td_core(path: Path) -> None:
    assert list_private_imports(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from td_core._encode.node_kinds import encode", ["td_core._encode.node_kinds.encode"]),
        ("from td_core.spi import _hidden, walk", ["td_core.spi._hidden"]),
        ("import td_core._encode.node_kinds", ["td_core._encode.node_kinds"]),
        ("from td_core import __version__, encode", []),
        ("from ._nodes import _Node", []),
    ],
)
def test_list_private_imports_returns_names(text: str, expected: list[str]) -> None:
    assert list_private_imports(text) == expected


def test_members_of_nodes_are_found() -> None:
    assert {"_children", "_members_and_dim", "_undo"} - EVERY_NODE == set()
    assert (EVERY_NODE | {"_dict", "_make", "_stack_dim", "_tensordict"}) - SOME_NODES == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node._children()", []),
        ("node._members_and_dim()", ["line 1: _members_and_dim"]),
        ("node._dict", ["line 1: _dict"]),
        ("node._own", []),
    ],
)
def test_find_unlisted_members_returns_places(text: str, expected: list[str]) -> None:
    assert find_unlisted_members(text, {"_own"}) == expected


def test_find_unlisted_overrides_returns_places() -> None:
    text = "class Kind(TensorDict):\n    def _map(self): ...\n    def _zip_leaves(self): ...\n    def _own(self): ..."
    assert find_unlisted_overrides(text) == ["line 3: _zip_leaves"]
