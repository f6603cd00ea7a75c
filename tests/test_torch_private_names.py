"""Only ``td_core._torch.private`` uses private names of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the sources are the same in every environment

ROOT = Path(__file__).parents[1]


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each private name that is imported from torch or read from one of its modules."""
    modules = {"torch": "torch"}  # names in this file, and the modules or classes of torch that they refer to
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            modules.update((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            modules.update((alias.asname or alias.name, name) for alias, name in zip(node.names, found))
        else:
            continue
        yield from ((node.lineno, name) for name in found if is_private(name))
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            name = ".".join((modules.get(inner.id, inner.id), *parts))
            if is_private(name):
                yield inner.lineno, name


def is_private(name: str) -> bool:
    """Return True for a dotted name in torch with a part that starts with one underscore."""
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def test_private_names_finds_imports_and_attributes():
    source = (
        "import torch._dynamo\nimport torch.utils as u\nfrom torch.utils import _pytree\nfrom torch import Tensor as T, nn\n"
        "torch.nn.init._no_grad\nu._pytree\nT._make\nnn.Module.__call__\nother._x\nself.torch._x\n"
    )
    expected = [
        (1, "torch._dynamo"), (3, "torch.utils._pytree"), (5, "torch.nn.init._no_grad"), (6, "torch.utils._pytree"),
        (7, "torch.Tensor._make"),
    ]  # fmt: skip
    assert sorted(private_names(ast.parse(source))) == expected


def test_sources_use_private_names_of_torch_in_one_module():
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources
        if path.relative_to(ROOT).parts[-3:] != ("td_core", "_torch", "private.py")
        for line, name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
