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
OPERATIONS = runpy.run_path(str(CORE / "_torch/operators.py"))["OPERATIONS"]
DTYPES = runpy.run_path(str(CORE / "_torch/dtypes.py"))["DTYPES"]

UNARY = '{name} = make_unary("{name}", "{elements}", "{result}")'
UNARY_INPLACE = '{name}_ = make_unary_inplace("{name}_")'
UNARY_OPERATOR = "__{dunder}__ = {name}"
BINARY = '{name} = make_binary("{name}", "{result}")'
BINARY_OF_FLOATS = '{name} = make_binary("{name}", "{result}", "{elements}")'
BINARY_INPLACE = '{name}_ = make_binary_inplace("{name}_")'
OPERATOR = '__{dunder}__ = make_operator("__{dunder}__", "td {symbol} x", "{name}")'
REFLECTED = '__r{dunder}__ = make_operator("__r{dunder}__", "x {symbol} td", "{reflected}")'
AUGMENTED = '__i{dunder}__ = make_augmented("__i{dunder}__", "td {symbol}= x", "{name}_")'
COMPARISON_NAME = "{name} = __{dunder}__"
COMPARISON = '__{dunder}__ = make_comparison("__{dunder}__", "td {symbol} x", "{name}")'

#: Elements of the leaf in an example; of those for unary operations, the first whose results are finite and differ.
ELEMENTS = {
    "unary": (
        "[-1.5, 0.5]",
        "[0.25, 0.5]",
        "[1.5, 2.5]",
        "[0.0, 1.5]",
        "[-torch.inf, 1, torch.inf]",
        "[1, torch.nan]",
        "[1, 1j]",
    ),
    "binary": ("[1, 6]", "[1.0, 6.0]"),
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
        yield from [COMPARISON] + [COMPARISON_NAME] * row.named


def make_example(row: Any) -> dict[str, str]:
    """Return the elements of the leaf in an example of a method, and the result that torch computes."""
    found: dict[str, str] = {}
    for elements in ELEMENTS[row.kind]:
        tensor = eval(f"torch.tensor({elements})", {"torch": torch})
        operands = [torch.tensor(number, dtype=tensor.dtype) for number in OPERANDS[row.kind]]
        try:
            result = getattr(torch, row.functions[0])(tensor, *operands)
        except NotImplementedError:
            continue  # torch has it for floats only
        if row.kind == "unary" or not found:
            found = {"elements": elements, "result": repr(result)}
        if result.isfinite().all() and len(set(result.tolist())) > 1:
            break
    return found


def make_methods() -> str:
    """Return the declarations of all methods that ``pointwise.py`` does not define."""
    tree = ast.parse((CORE / "_methods/pointwise.py").read_text(encoding="utf-8"))
    written = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines: list[str] = []
    for row in OPERATIONS:
        for template in list_templates(row):
            example = make_example(row) if "{result}" in template else {}
            if template is BINARY and example["elements"] != ELEMENTS["binary"][0]:
                template = BINARY_OF_FLOATS
            line = template.format(**row._asdict(), **example)
            if line.split()[0] not in written:
                lines.append(f"    {line}\n")
    return "".join(lines)


def make_list() -> str:
    """Return the operations as a table of Markdown."""
    lines = ["| method | returns | in place | operator | torch |", "|---|---|---|---|---|"]
    for row in OPERATIONS:
        name = f"`{row.name}`" if row.named else ""
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
    parts = [
        (CORE / "_methods/pointwise.py", "operations", make_methods()),
        (CORE / "_methods/casting.py", "casts", make_casts()),
        (PAGE, "operations", make_list()),
        (PAGE, "casts", make_list_of_casts()),
    ]
    files: dict[Path, str] = {}
    for path, subject, part in parts:
        text = files.get(path) or path.read_text(encoding="utf-8")
        files[path] = replace_part(text, subject, part)
    return files


def main() -> int:
    """Write the files, or compare them."""
    files = make_files()
    changed = [path for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    if "--check" not in sys.argv:
        for path in changed:
            path.write_text(files[path], encoding="utf-8")
        return 0
    for path in changed:
        print(f"{path.relative_to(ROOT)} differs from its table: run python tools/generate_methods.py")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
