"""Read the imports of the packages: the graph that tests/test_layers.py checks, and that tools/near.py follows backwards."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = {
    folder.name: folder for folder in ROOT.glob("packages/*/src/*") if (folder / "__init__.py").exists()
}
#: What a string that names a module of the project looks like.
MODULE_NAME = re.compile(r"\.+[A-Za-z_][\w.]*|td_\w+(\.\w+)*\._\w+(\.\w+)*")


class Import(NamedTuple):
    """One import: the dotted name it reads, its line, and how it is spelled."""

    target: str
    line: int
    #: Whether it runs inside a function.
    local: bool = False
    #: Whether it is a string, which a function imports later.
    by_string: bool = False


@functools.cache
def modules(package: str) -> dict[str, Path]:
    """Return the dotted names of a package's modules; the package itself is ``__init__``."""
    folder = SOURCES[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


@functools.cache
def imports(package: str, name: str) -> list[Import]:
    """List the imports of packages of the project in a module, those for types and those by strings included."""
    return list(read_imports(modules(package)[name], package, name))


def read_imports(path: Path, package: str = "", name: str = "__init__") -> Iterator[Import]:
    """Yield the imports in a file; a file without a package, such as a test, has no relative imports."""
    here = [package, *name.split(".")] if name != "__init__" else [package]
    if path.name != "__init__.py":
        here = here[:-1]
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while todo:
        node, local = todo.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if package and MODULE_NAME.fullmatch(node.value):
                level = len(node.value) - len(node.value.lstrip("."))
                prefix = here[: len(here) - level + 1] if level else []
                target = ".".join([*prefix, node.value.lstrip(".")])
                if target.partition(".")[2] in modules(package):
                    yield Import(target, node.lineno, by_string=True)
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            todo.extend((child, local or inside) for child in ast.iter_child_nodes(node))
            continue
        for target in targets:
            if target.split(".")[0] in SOURCES:
                yield Import(target, node.lineno, local)


def own_module(package: str, target: str) -> str | None:
    """Return the module of ``package`` that defines a dotted name, or None if it belongs to another package."""
    head, *parts = target.split(".")
    if head != package:
        return None
    known = modules(package)
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or "__init__"
