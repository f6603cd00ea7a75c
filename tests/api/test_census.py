"""The table of torch's functions in the reference is complete, true, and its lines run."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import td_core
from td_core import TensorDict
from td_core._functions.torch_function import TABLE

pytestmark = pytest.mark.once  # the page is the same in every environment

PAGE = (Path(__file__).parents[2] / "docs/reference/torch.md").read_text(encoding="utf-8")
#: The release of torch whose names the page lists.
RELEASE = re.search(r"in torch (\d+\.\d+)", PAGE)[1]  # type: ignore[index]
HAS_RELEASE = torch.__version__.startswith(f"{RELEASE}.")
REASONS = {
    name
    for row in re.findall(r"^\| ([a-z][a-z ,]*) \| [a-z]", PAGE, re.MULTILINE)
    for name in (row, *row.split(", "))
}


class Row(NamedTuple):
    """A row of the page."""

    name: str
    method: bool
    function: bool
    reason: str
    line: str


def read_rows() -> dict[str, Row]:
    """Read the rows of the page by name."""
    found = re.findall(r"^\| `(\w+)` \| (yes|) \| (yes|) \| ([^`|]*)(?:`(.*)`)? \|$", PAGE, re.MULTILINE)
    assert len(found) == PAGE.count("\n| `")
    return {
        name: Row(name, bool(method), bool(function), reason.strip(": "), line)
        for name, method, function, reason, line in found
    }


ROWS = read_rows()
FUNCTIONS = {
    name
    for name in dir(torch)
    if name[0] != "_" and isinstance(getattr(torch, name), (FunctionType, BuiltinFunctionType))
}
METHODS = {name for name in dir(torch.Tensor) if name[0] != "_"}


def test_page_lists_each_name_of_torch() -> None:
    lacking = (FUNCTIONS | METHODS) - ROWS.keys()
    assert not lacking, (
        f"torch {torch.__version__} has names without a row in docs/reference/torch.md: {sorted(lacking)}; add what each "
        "does on collections, or the line to write instead"
    )
    assert not HAS_RELEASE or ROWS.keys() == FUNCTIONS | METHODS


def is_row_true(name: str) -> bool:
    """Return True if a row says what exists, with a reason and a line for what does not."""
    row = ROWS[name]
    if (name in METHODS and row.method is not (name in dir(TensorDict))) or (
        name in FUNCTIONS and row.function is not (getattr(torch, name) in TABLE)
    ):
        return False
    if not HAS_RELEASE:
        return True  # another release may have the name in one place only
    complete = (row.method or name not in METHODS) and (row.function or name not in FUNCTIONS)
    has_line = bool(row.reason) and row.reason != "takes no tensor"
    return bool(row.reason) is not complete and row.reason in {"", *REASONS} and bool(row.line) is has_line


def test_rows_say_what_exists() -> None:
    assert [name for name in ROWS if not is_row_true(name)] == []


def make_rows(*shape: int, batch_dims: int = 1, dtype: torch.dtype = torch.float32) -> TensorDict:
    leaf = (
        torch.rand(shape).to(dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.ones(shape, dtype=dtype)
    )
    return TensorDict({"a": leaf, "n": {"b": leaf.clone()}}, shape[:batch_dims])


#: Collections of three rows; each line has to run on one of them.
SAMPLES: dict[str, Callable[[], TensorDict]] = {
    "vectors": lambda: make_rows(3, 4),
    "numbers": lambda: make_rows(3),
    "square": lambda: make_rows(3, 4, 4),
    "two batch dims": lambda: make_rows(3, 4, batch_dims=2),
    "three batch dims": lambda: make_rows(3, 4, 2, batch_dims=3),
    "ints": lambda: make_rows(3, 4, dtype=torch.int64),
    "complex": lambda: make_rows(3, 4, dtype=torch.complex64),
    "complex images": lambda: make_rows(3, 3, 6, dtype=torch.complex64),
    "images": lambda: make_rows(3, 4, 4, 4),
}
#: Reasons whose lines have names of the reader's, such as ``weight``.
NOT_RUN = {"a layer, of one entry", "internal to torch", "of a quantized leaf"}


def run_line(line: str, td: TensorDict) -> object:
    """Run a line with the names that the page describes; return the error, None if there is none."""
    names: dict[str, Any] = {"torch": torch, "td_core": td_core, "TensorDict": TensorDict, "np": np, "td": td}
    names |= {
        "other": td.clone(),
        "index": torch.zeros(td.batch_size, dtype=torch.long),
        "module": nn.Module(),
    }
    try:
        exec(line, names)
    except Exception as error:
        return error
    return None


def find_errors(row: Row) -> list[object]:
    """Run the line of a row on each sample until it succeeds; return the errors if it never does."""
    errors = []
    for sample in SAMPLES.values():
        torch.manual_seed(0)
        errors.append(run_line(row.line, sample()))
        if errors[-1] is None:
            return []
    return errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", sorted({row.reason for row in ROWS.values() if row.line}))
def test_lines_run(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in ROWS.values() if row.line and row.reason == reason]
    for row in rows:
        ast.parse(row.line)
        assert "(...)" not in row.line
    if reason in NOT_RUN or not HAS_RELEASE:
        return
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(bytes(12))
    if reason == "another name":
        pytest.importorskip("td_memmap")
        make_rows(3).save("folder")
    assert {row.line: errors for row in rows if (errors := find_errors(row))} == {}


GUIDE = (Path(__file__).parents[2] / "docs/guide/operations.md").read_text(encoding="utf-8")
#: The arguments that methods lack, and the line to write instead, by the names of methods and of arguments.
ARGUMENT_ROWS = re.findall(r"^\| (`.*`) \| (`.*`) \| `(.*?)`", GUIDE, re.MULTILINE)
#: Methods that take any argument, or have another meaning than that of torch.
OTHERWISE = {"apply_", "clone", "cpu", "cuda", "scatter", "select", "set_"}


def find_lacking_arguments() -> set[tuple[str, str]]:
    """Return each argument that a method of tensors has and the one of collections lacks, by torch's stubs."""
    stub = ast.parse((Path(torch.__file__).parent / "_C/__init__.pyi").read_text(encoding="utf-8"))
    [body] = [node.body for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "TensorBase"]
    lacking = set()
    for item in body:
        if isinstance(item, ast.FunctionDef) and item.name in METHODS - OTHERWISE:
            method = getattr(TensorDict, item.name, None)
            if callable(method):
                args = item.args.posonlyargs + item.args.args + item.args.kwonlyargs
                names = {arg.arg for arg in args} - {"self"} - inspect.signature(method).parameters.keys()
                lacking |= {(item.name, name) for name in names}
    return lacking


@pytest.mark.skipif(not HAS_RELEASE, reason="other releases have other arguments")
def test_page_lists_each_argument_that_methods_lack() -> None:
    listed = {
        (name, argument)
        for methods, arguments, _ in ARGUMENT_ROWS
        for name in re.findall(r"\w+", methods)
        for argument in re.findall(r"\w+", arguments)
    }
    lacking = find_lacking_arguments()
    assert lacking - listed == set()
    assert {name for name, _ in listed} == {name for name, _ in lacking}
    assert {argument for _, argument in listed} == {argument for _, argument in lacking}


@pytest.mark.parametrize("line", [line for *_, line in ARGUMENT_ROWS])
def test_line_instead_of_argument_runs(line: str) -> None:
    exec(line, {"torch": torch, "TensorDict": TensorDict, "data": make_rows(3, 2)})
