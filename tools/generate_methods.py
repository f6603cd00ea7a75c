"""Write what follows from the tables of operations and dtypes: methods, and their lists in the reference.

    python tools/generate_methods.py          write the files
    python tools/generate_methods.py --check  exit with 1 if a file differs from what would be written

It needs torch, which computes the results of the examples, but not td_core, which it may have to mend.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages/td-core/src/td_core"
PAGE = ROOT / "docs/reference/collections.md"
OPERATIONS = runpy.run_path(str(CORE / "_operators.py"))["OPERATIONS"]
DTYPES = runpy.run_path(str(CORE / "_dtypes.py"))["DTYPES"]

MODULE = '''\
# Generated from td_core/_operators.py: change the table, then run tools/generate_methods.py.
"""The pointwise methods that follow from the table of operations."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from .operands import Operand, combine, combine_inplace
from .pointwise import (
    OPS,
    WrittenPointwiseMixin,
    apply_binary,
    apply_binary_inplace,
    apply_unary,
    apply_unary_inplace,
    compare,
)


class PointwiseMixin(WrittenPointwiseMixin):
    """Pointwise operations, their operators and comparisons."""

    __slots__ = ()
'''

UNARY = '''
    def {name}(self) -> Self:
        """Return {returns}.

        >>> {example}
        {result}
        """
        return apply_unary(self, "{name}")
'''

UNARY_OPERATOR = '''
    def __{dunder}__(self) -> Self:
        """Return {returns}."""
        return apply_unary(self, "{name}")
'''

UNARY_INPLACE = '''
    def {name}_(self) -> Self:
        """Compute :meth:`{name}` in place; return self."""
        return apply_unary_inplace(self, "{name}_")
'''

BINARY = '''
    def {name}(self, other: Operand, *, default: object = None) -> Self:
        """Return {returns}; arguments are those of :meth:`add`.

        >>> {example}
        {result}
        """
        return apply_binary(self, "{name}", other, default)
'''

BINARY_INPLACE = '''
    def {name}_(self, other: Operand) -> Self:
        """Compute :meth:`{name}` in place; return self. Operands and errors are those of :meth:`add_`."""
        return apply_binary_inplace(self, "{name}_", other)
'''

OPERATOR = '''
    def __{dunder}__(self, other: Operand) -> Self:
        """Return ``td {symbol} x``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "td {symbol} x", OPS["{name}"], other)
'''

REFLECTED = '''
    def __r{dunder}__(self, other: Operand) -> Self:
        """Return ``x {symbol} td``; ``x`` is an operand of :meth:`add`."""
        return combine(self, "x {symbol} td", OPS["{reflected}"], other)
'''

AUGMENTED = '''
    def __i{dunder}__(self, other: Operand) -> Self:
        """Compute ``td {symbol}= x`` in place; ``x`` is an operand of :meth:`add_`."""
        return combine_inplace(self, "td {symbol}= x", OPS["{name}_"], other)
'''

COMPARISON = '''
    def __{dunder}__(self, other: object) -> Any:
        """Return ``td {symbol} x`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."""
        return compare(self, "{name}", "td {symbol} x", other)
'''

#: Elements of the leaf in an example; of those for unary operations, the first whose results are finite and differ.
ELEMENTS = {
    "unary": ("[-1.5, 0.5]", "[0.25, 0.5]", "[-torch.inf, 1, torch.inf, torch.nan]", "[1, 1j]"),
    "binary": ("[1, 6]",),
}
OPERANDS: dict[str, tuple[int, ...]] = {"unary": (), "binary": (4,)}


def list_templates(row: Any) -> Iterator[str]:
    """Yield the template of each method of an operation."""
    if row.kind == "unary":
        yield from [UNARY] * row.named + [UNARY_INPLACE] * row.inplace + [UNARY_OPERATOR] * bool(row.dunder)
    elif row.kind == "binary":
        yield from [BINARY] * row.named + [BINARY_INPLACE] * row.inplace
        if row.dunder:
            yield from [OPERATOR] + [REFLECTED] * bool(row.reflected) + [AUGMENTED] * row.inplace
    elif row.kind == "comparison":
        yield COMPARISON


def make_example(row: Any) -> dict[str, str]:
    """Return an example of a method, and the result that torch computes."""
    operands = OPERANDS[row.kind]
    for elements in ELEMENTS[row.kind]:
        tensor = eval(f"torch.tensor({elements})", {"torch": torch})
        result = getattr(torch, row.functions[0])(tensor, *map(torch.tensor, operands))
        if result.isfinite().all() and len(set(result.tolist())) > 1:
            break
    call = f"{row.name}({', '.join(map(str, operands))})"
    return {"example": f'TensorDict({{"a": torch.tensor({elements})}}).{call}["a"]', "result": repr(result)}


def make_methods() -> str:
    """Return the source of all methods that ``pointwise.py`` does not define."""
    tree = ast.parse((CORE / "_ops/pointwise.py").read_text(encoding="utf-8"))
    written = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    parts = [MODULE]
    for row in OPERATIONS:
        for template in list_templates(row):
            example = make_example(row) if "{example}" in template else {}
            source = template.format(**row._asdict(), **example)
            if source.split("(")[0].split()[1] not in written:
                parts.append(source)
    return "".join(parts)


def make_list() -> str:
    """Return the operations as a table of Markdown."""
    lines = ["| method | returns | in place | operator | torch |", "|---|---|---|---|---|"]
    for row in OPERATIONS:
        name = f"`{row.name}`" if row.named and row.kind != "comparison" else ""
        symbol = f"`{row.symbol}`".replace("`|`", "<code>&#124;</code>") if row.symbol else ""
        functions = ", ".join(f"`{function}`" for function in row.functions)
        inplace = f"`{row.name}_`" if row.inplace else ""
        lines.append(f"| {name} | {row.returns} | {inplace} | {symbol} | {functions} |")
    return "\n".join([*lines, ""])


def make_casts() -> str:
    """Return the declarations of the casting methods."""
    names = sorted(name for row in DTYPES for name in row.methods)
    return "".join(f'    {name} = make_cast("{name}")\n' for name in names)


def make_list_of_casts() -> str:
    """Return the casting methods as a table of Markdown."""
    lines = [
        f"| {', '.join(f'`{name}`' for name in row.methods)} | `torch.{row.name}` |"
        for row in DTYPES
        if row.methods
    ]
    return "\n".join(["| method | dtype |", "|---|---|", *lines, ""])


def replace_part(text: str, subject: str, part: str) -> str:
    """Replace the lines between the comments "Begin of ``subject``" and "End of ``subject``"."""
    start = text.index("\n", text.index(f"Begin of {subject}: written by tools/generate_methods.py")) + 1
    stop = text.rindex("\n", start - 1, text.index(f"End of {subject}.")) + 1
    return text[:start] + part + text[stop:]


def make_files() -> dict[Path, str]:
    """Return what each file should contain."""
    page = PAGE.read_text(encoding="utf-8")
    casts = CORE / "_ops/dtypes.py"
    return {
        CORE / "_ops/pointwise_methods.py": make_methods(),
        casts: replace_part(casts.read_text(encoding="utf-8"), "casts", make_casts()),
        PAGE: replace_part(replace_part(page, "operations", make_list()), "casts", make_list_of_casts()),
    }


def main() -> int:
    """Write the files, or compare them."""
    files = make_files()
    old = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in files}
    changed = [path for path, text in files.items() if old[path] != text]
    if "--check" not in sys.argv:
        for path in changed:
            path.write_text(files[path], encoding="utf-8")
        return 0
    for path in changed:
        print(f"{path.relative_to(ROOT)} differs from its table: run python tools/generate_methods.py")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
