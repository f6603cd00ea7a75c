"""A public method of td-core is a signature, a manual and at most three statements; the work is a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

METHODS = Path(__file__).parents[1] / "packages" / "td-core" / "src" / "td_core" / "_methods"
MOST = 3
#: Methods with a longer body, and the reason.
LONGER: dict[str, str] = {
    "conversion.to_dict": "hot: a call would take 43 of 357 ns",
    "entries.get": "hot: a call would take 20 of 1125 ns for an entry of parameters",
    "entries.__getitem__": "hot: a call would take 33 of 920 ns for an entry of parameters",
    "entries.set": "hot: a call would take 32 of 511 ns",
    "entries._set_path": "hot: a call would take 39 of 1560 ns for a collection with a device",
    "structure.rename_key_": "hot: a call would take 27 of 285 ns",
    "collection.__torch_function__": "hot: every torch function of a collection goes through it",
    "update.update": "hot: a call with its ten arguments would take 70 of 1230 ns",
    "update._assign": "hot: ``td[i] = x`` of every kind; what is not whole is the work of IndexedWrite",
}


def iter_methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in METHODS.glob("*.py"):
        for item in ast.parse(path.read_text(encoding="utf-8")).body:
            for method in item.body if isinstance(item, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    yield f"{path.stem}.{method.name}", method


def count_statements(method: ast.FunctionDef) -> int:
    """Return the number of statements in a body, nested ones counted, without the docstring."""
    count = sum(isinstance(node, ast.stmt) for node in ast.walk(method)) - 1
    return count - (ast.get_docstring(method) is not None)


def test_methods_have_three_statements_or_are_listed() -> None:
    longer = {name for name, method in iter_methods() if count_statements(method) > MOST}
    assert longer == set(LONGER)


def test_mixins_derive_from_core_alone() -> None:
    for path in METHODS.glob("*.py"):
        for item in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(item, ast.ClassDef) and path.stem != "collection":
                assert [ast.unparse(base) for base in item.bases] in (["Core"], []), item.name
