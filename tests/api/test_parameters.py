"""Every parameter of every public function and method changes the outcome of a call or raises; none is ignored.

Each line of ``calls.txt`` is a call in three parts: the name, its arguments, and other values of its parameters that have
to change the outcome. Arguments are the inside of ``dict(...)`` and use the names of :func:`make_names`; ``args`` holds
positional arguments. ``lazy.sum`` is a method of ``lazy``, ``sum`` a method of ``td``, ``L.stack`` a function; a word after
a blank distinguishes calls of one name. Each line of ``hidden.txt`` is a name with a parameter that has no visible effect,
or a name that a single call cannot test, and the reason; the docstring describes such a parameter.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import inspect
import io
import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("td", reason="the table calls every package")

import td as library
import td_core
from td_core._tree.node import Core

HERE = Path(__file__).parent
P = inspect.Parameter
Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Point:
    """A plain dataclass."""

    x: torch.Tensor
    name: str = "p"


class Sample(library.TensorClass):
    """A tensorclass with a tensor and a value."""

    a: torch.Tensor
    name: str = "none"


class Typed(library.TypedTensorDict):
    """A TypedTensorDict with one key."""

    a: torch.Tensor


def make_names(folder: Path) -> dict[str, Any]:
    """Build new objects under the names that calls use."""
    torch.manual_seed(0)
    make = library.TensorDict
    a = torch.arange(6.0).view(2, 3)
    td = make({"a": a, "n": {"b": torch.arange(12.0).view(2, 3, 2) + 1}}, [2, 3], names=["x", "y"])
    lazy = library.lazy_stack([make({"a": torch.arange(3.0) + i}, [3]) for i in range(2)])
    uneven = library.lazy_stack([make({"a": torch.ones(i + 1), "k": torch.zeros(1)}) for i in range(2)])
    grad = make({"a": torch.ones(2, requires_grad=True) * 2, "b": torch.ones(2, requires_grad=True) * 3})
    values = make({"s": "x", "m": None, "t": torch.zeros(2), "n": {"u": "y"}}, [2])
    weight, trained = torch.ones(3, requires_grad=True), make({"a": torch.ones(3, requires_grad=True)}, [3])
    trained["a"].sum().backward()
    return {
        "T": make, "L": library, "torch": torch, "np": np, "nn": nn, "folder": folder, "Pair": Pair, "Point": Point,
        "Sample": Sample, "Typed": Typed, "dataclasses": dataclasses,
        "td": td, "lazy": lazy, "uneven": uneven, "grad": grad, "values": values,
        "flat": make({"a": torch.arange(3.0), "b": torch.ones(3)}, [3]),
        "one": make({"a": torch.tensor(1.0)}),
        "mask": torch.tensor([[True, False, True], [False, True, False]]),
        "module": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)),
        "sample": Sample(a=torch.ones(2), batch_size=[2]),
        "tied": make({"a": a, "b": a}),
        "keyed": make({"a.b": torch.ones(2), "c": torch.ones(2)}, [2]),
        "params": library.TensorDictParams(make({"a": torch.ones(2)})),
        "bools": make({"a": torch.tensor([True, False]), "b": torch.tensor([True, True])}, [2]),
        "wide": make({"a": torch.ones(3, 2), "b": torch.zeros(3, 2)}, [3]),
        "reverse": make({"b": torch.ones(3), "a": torch.arange(3.0)}, [3]),
        "gaps": make({"a": torch.tensor([torch.inf, -torch.inf])}, [2]),
        "falling": make({"a": torch.tensor([3.0, 1.0, 2.0])}, [3]),
        "locked": make({"a": torch.ones(3)}, [3]).lock_(),
        "squares": make({"a": weight * weight}, [3]), "roots": make({"a": weight}, [3]), "trained": trained,
        "hollow": make({"a": torch.ones(3), "e": {}}, [3]),
        "needs": make({"a": torch.ones(3, requires_grad=True)}, [3]),
        "loose": make({"a": torch.ones(2, 3), "n": make({"b": torch.ones(2, 3)}, [2])}, [2]),
        "channels": make({"a": torch.ones(1, 3, 2, 2)}),
        "deep": make({"a": torch.ones(2), "n": make({"b": torch.ones(2, 3)}, [2, 3])}, [2]),
        "own": make({"0": {"weight": torch.ones(2, 2)}}),
        "odd": make({"a/b": torch.ones(2)}),
        "objects": make({"o": object}),
        "texts": make({"s": ["p", "q"]}, [2]),
        "like_saved": make({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4]),
        "like_pickled": make({"a": torch.zeros(2), "o": object}, [2]),
        "leafy": make({"a": torch.ones((), requires_grad=True) * 2}),
        "ints": make({"a": torch.ones(2, dtype=torch.int64)}),
        "stepped": make({"a": torch.ones(1, 3).as_strided((1, 3), (7, 1))}, [1]),
        "rough": library.lazy_stack([make({"a": torch.ones(i + 1)}) for i in range(2)]),
        "unset": Sample(a=torch.ones(2), name=None, batch_size=[2]),
    }  # fmt: skip


def _save(path: Path, names: dict[str, Any]) -> Path:
    names["T"]({"a": torch.arange(4.0), "n": {"b": torch.ones(4)}}, [4]).memmap(path, checksums=True)
    return path


def _save_changed(path: Path, names: dict[str, Any]) -> Path:
    _save(path, names)
    file = path / "a.memmap"
    file.write_bytes(bytes(file.stat().st_size))
    return path


def _save_pickled(path: Path, names: dict[str, Any]) -> Path:
    names["T"]({"a": torch.ones(2), "o": object}, [2]).memmap(path, allow_pickle=True)
    return path


def _save_text(path: Path, names: dict[str, Any]) -> Path:
    names["T"]({"a": torch.ones(2), "o": "p"}, [2]).memmap(path)
    return path


def _save_checkpoint(path: Path, names: dict[str, Any]) -> Path:
    names["L"].save({"state": names["flat"].clone(), "step": 3}, path)
    return path


def _save_coded(path: Path, names: dict[str, Any]) -> Path:
    names["odd"].memmap(path)
    return path


def _save_packed(path: Path, names: dict[str, Any]) -> Path:
    names["flat"].memmap(path.with_suffix(".tdz"), archive=True)
    return path.with_suffix(".tdz")


def _save_consolidated(path: Path, names: dict[str, Any]) -> Path:
    names["flat"].consolidate(path)
    return path


def _save_changed_consolidated(path: Path, names: dict[str, Any]) -> Path:
    names["T"]({"a": torch.arange(4.0)}).consolidate(path, checksums=True)
    with path.open("r+b") as file:
        file.write(b"\x01")
    return path


#: Functions that write the files that rows name; they run only for rows that name them.
SAVES: dict[str, Callable[[Path, dict[str, Any]], Path]] = {
    "saved": _save,
    "changed": _save_changed,
    "pickled": _save_pickled,
    "worded": _save_text,
    "checkpoint": _save_checkpoint,
    "coded": _save_coded,
    "packed": _save_packed,
    "consolidated": _save_consolidated,
    "consolidated_changed": _save_changed_consolidated,
}

#: Values for parameters by name, unless a row has another value.
USUAL = """
    device='meta', dtype=torch.float64, names=['p', 'q'], batch_size=[2], inplace=True, lock=True, requires_grad=True,
    cast_filter=lambda key, leaf: False, key_transform=lambda key: key + '_', keepdim=True, reduce=True, default=7.0,
    is_leaf=lambda node: True, layout=torch.sparse_coo, auto_batch_size=True, batch_dims=1, sort=True, leaves_only=True,
    include_nested=True, alpha=2, value=3.0, progress=3, allow_pickle=3
"""


SURFACE = json.loads((HERE / "surface.json").read_text())


def read(name: str, count: int) -> list[tuple[str, ...]]:
    """Return the lines of a table, each split into ``count`` parts."""
    lines = (HERE / name).read_text().splitlines()
    rows = [
        tuple(part.strip() for part in f"{line} ".split("| "))
        for line in lines
        if line and not line.startswith("#")
    ]
    for row in rows:
        assert len(row) == count, f"{name}: a line has {count} parts, not {row}"
    return rows


ROWS = read("calls.txt", 3)
#: By name and parameter ("*" for all): the reason why no effect is visible, or no call is possible.
HIDDEN = {tuple(name.split()): reason for name, reason in read("hidden.txt", 2)}


def public() -> dict[str, Callable[..., Any]]:
    """Return the functions and methods in ``surface.json``, by name.

    Groups with ``"called": false`` have names that only the tests of their packages call.
    """
    found = {}
    for group in SURFACE:
        if not group.get("called", True):
            continue
        owner: Any = None
        if group["on"] == "collection":
            owner = td_core.TensorDict
        elif group["on"] == "module":
            owner = pytest.importorskip(
                "td" if group["package"] == "td-all" else group["package"].replace("-", "_")
            )
        for name, facts in group["names"].items() if owner is not None else ():
            if facts["kind"] in ("method", "classmethod", "staticmethod", "function"):
                member = (
                    getattr(owner, name) if group["on"] == "module" else inspect.getattr_static(owner, name)
                )
                function = getattr(member, "__func__", member)
                if inspect.isroutine(function):
                    found[name if group["on"] == "collection" else f"L.{name}"] = function
    return found


PUBLIC = public()


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a public name without ``self``."""
    parameters = list(inspect.signature(PUBLIC[name]).parameters.values())
    return {each.name: each for each in (parameters if name.startswith("L.") else parameters[1:])}


def name_of(row: str) -> str:
    """Return the public name that a row calls."""
    call = row.split()[0]
    return call if call.startswith("L.") else call.rpartition(".")[2]


class Shown:
    """Convert the result and the side effects of a call to plain values that can be compared."""

    def __init__(self, before: dict[str, Any], folder: Path) -> None:
        self.known: dict[int, str] = {}
        self.folder = folder
        for key, value in before.items():
            if isinstance(value, Core):
                self.known[id(value)] = key
                self.known |= {leaf.data_ptr(): key for leaf in value._leaves() if leaf.numel()}

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a description of a value that includes shared memory and the names of known objects."""
        if depth > 9:
            return "..."
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, Core):
            head = [type(value).__name__, self.known.get(id(value)), value.is_locked, str(value.device)]
            if value._is_value:
                return [*head, list(value.batch_size), repr(value._unwrap())]
            stacked = value._members_and_dim()
            if stacked is not None:
                return [
                    *head,
                    value._names,
                    stacked[1],
                    [self.of(member, depth + 1) for member in stacked[0]],
                ]
            entries = {key: self.of(child, depth + 1) for key, child in value._children().items()}
            return [*head, list(value.batch_size), value._names, list(entries), entries]
        if isinstance(value, dict):
            return {str(key): self.of(each, depth + 1) for key, each in value.items()}
        if isinstance(value, torch.nn.Module):
            return [
                type(value).__name__,
                self.of(dict(value.named_parameters())),
                self.of(dict(value.named_buffers())),
            ]
        if isinstance(value, (list, tuple, set, frozenset)):
            return [type(value).__name__, *[self.of(each, depth + 1) for each in value]]
        if isinstance(value, Iterator) or type(value).__name__.endswith(
            ("View", "Keys", "Values", "Items", "keys", "values", "items")
        ):
            return ["iterator", *[self.of(each, depth + 1) for each in value]]
        if value is None or isinstance(
            value, (str, int, float, complex, bool, torch.dtype, torch.device, Path)
        ):
            return repr(value).replace(str(self.folder), "")
        return [
            type(value).__name__,
            str(value).replace(str(self.folder), "") if " at 0x" not in str(value) else "",
        ]

    def _of_tensor(self, leaf: torch.Tensor) -> Any:
        facts = [type(leaf).__name__, str(leaf.dtype), str(leaf.device), str(leaf.layout), leaf.requires_grad]
        if leaf.layout is torch.strided and not leaf.is_nested:
            facts += [
                leaf.stride(),
                leaf.is_shared(),
                leaf.untyped_storage().nbytes(),
                str(getattr(leaf, "_place", "")).count("mode='r'"),
            ]
        if leaf.is_meta or leaf.is_quantized:
            return [*facts, list(leaf.shape)]
        if leaf.is_nested:
            return [*facts, [part.tolist() for part in leaf.unbind()]]
        dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        shared = self.known.get(leaf.data_ptr()) if leaf.layout is torch.strided and leaf.numel() else None
        return [
            *facts,
            list(leaf.shape),
            dense.tolist(),
            shared,
            None if not leaf.is_leaf else self.of(leaf.grad),
        ]


def run_call(
    row: str, base: str, changes: dict[str, Any] | str, folder: Path, only: str | None = None
) -> Any:
    """Return the result and side effects of a call, or its error. ``only`` is the name of the changed parameter."""
    folder.mkdir(parents=True)
    names = make_names(folder)
    names |= {
        name: save(folder / name, names)
        for name, save in SAVES.items()
        if f" {name}" in f" {row} {base}".replace("=", " ")
    }
    if row.startswith("mapped."):
        names["mapped"] = names["flat"].memmap(folder / "mapped")
    arguments = eval(f"dict({base})", names)
    if only is not None:
        every = changes if isinstance(changes, dict) else eval(f"dict({changes})", names)
        arguments[only] = every[only]
    call, parameters = row.split()[0], parameters_of(name_of(row))
    target = call if "." in call else f"td.{call}"
    positional = arguments.pop("args", ())
    if positional:  # parameters before *args must be positional too
        before = list(parameters)[
            : next(i for i, p in enumerate(parameters.values()) if p.kind is P.VAR_POSITIONAL)
        ]
        positional = (*[arguments.pop(name) for name in before if name in arguments], *positional)
    by_name: dict[str, Any] = {}
    for name, value in arguments.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.kind is P.VAR_KEYWORD:
            by_name |= value
        else:
            by_name[name] = value
    shown, printed = Shown(names, folder), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        warnings.simplefilter("ignore")
        try:
            result = eval(target, names)(*positional, **by_name)
            described = shown.of(result)
            if isinstance(result, Future):  # the save still writes its files
                result.result()
        except Exception as error:
            return ["raised", type(error).__name__, str(error)]
    state = {
        key: shown.of(value) for key, value in names.items() if isinstance(value, (Core, torch.nn.Module))
    }
    files = sorted(
        (
            str(path.relative_to(folder)),
            zlib.crc32(path.read_bytes()) if path.suffix == ".memmap" else path.stat().st_size,
        )
        for path in folder.rglob("*")
        if path.is_file()
    )
    handed = {
        key: shown.of(value)
        for key, value in by_name.items()
        if key in ("out", "destination", "memo", "swap_dest")
    }
    return [described, state, handed, files, printed.getvalue()]


def _without_row() -> list[tuple[str, str, str]]:
    """Return a call without arguments for each name that no row calls and that needs none."""
    called = {name_of(row) for row, *_ in ROWS}
    return [
        (name, "", "")
        for name in PUBLIC
        if name not in called
        and (name, "*") not in HIDDEN
        and all(
            each.default is not P.empty or each.kind is P.VAR_KEYWORD for each in parameters_of(name).values()
        )
    ]


def iter_cases() -> Iterator[Any]:
    """Yield every row with each parameter that has another value."""
    usual = set(eval(f"dict({USUAL})", {"torch": torch}))
    covered_names: dict[str, set[str]] = {}
    for row, base, changes in ROWS:
        name = name_of(row)
        own = _keys_of(changes)
        covered_names.setdefault(name, set()).update(_get_parameter(name, each) for each in own)
        for parameter in own:
            yield pytest.param(row, base, changes, parameter, id=f"{row}-{parameter}")
    for row, base, _ in [*ROWS, *_without_row()]:
        name = name_of(row)
        covered_names.setdefault(name, set())
        for parameter in parameters_of(name):
            if (
                parameter in usual
                and parameter not in covered_names[name]
                and (name, parameter) not in HIDDEN
                and ("*", parameter) not in HIDDEN
            ):
                covered_names[name].add(parameter)
                yield pytest.param(row, base, USUAL, parameter, id=f"{row}-{parameter}")


def _keys_of(arguments: str) -> list[str]:
    """Return the names of keyword arguments in source text, without evaluating it."""
    call: Any = ast.parse(f"dict({arguments})", mode="eval").body
    return [keyword.arg for keyword in call.keywords]


def _get_parameter(name: str, given: str) -> str:
    """Return the parameter to which an argument of a row belongs."""
    if given != "args":
        return given
    return next((each.name for each in parameters_of(name).values() if each.kind is P.VAR_POSITIONAL), "?")


CASES = list(iter_cases())
#: The first case of each row: the smoke cases.
FIRST = list({case.values[0]: case for case in reversed(CASES)}.values())[::-1]
OTHERS = [case for case in CASES if case not in FIRST]


#: Outcomes by row, computed once for all parameters.
OUTCOMES: dict[str, Any] = {}


def check_parameter(row: str, base: str, changes: str, parameter: str, folder: Path) -> None:
    if row not in OUTCOMES:
        OUTCOMES[row] = run_call(row, base, "", folder / "before")
        assert OUTCOMES[row][0] != "raised", OUTCOMES[row]
        assert OUTCOMES[row] == run_call(row, base, "", folder / "again"), "two calls leave different things"
    after = run_call(row, base, changes, folder / "after", parameter)
    assert after != OUTCOMES[row], f"{parameter} of {row} is accepted and ignored"


@pytest.mark.smoke
@pytest.mark.parametrize(("row", "base", "changes", "parameter"), FIRST)
def test_first_parameter_changes_result_or_raises(
    row: str, base: str, changes: str, parameter: str, tmp_path: Path
) -> None:
    check_parameter(row, base, changes, parameter, tmp_path)


@pytest.mark.parametrize(("row", "base", "changes", "parameter"), OTHERS)
def test_parameter_changes_result_or_raises(
    row: str, base: str, changes: str, parameter: str, tmp_path: Path
) -> None:
    check_parameter(row, base, changes, parameter, tmp_path)


def test_each_row_has_one_smoke_case() -> None:
    smoke = [case.values[0] for case in FIRST]
    assert sorted({row for row, *_ in ROWS} - set(smoke)) == []
    assert len(smoke) == len(set(smoke))
    assert len(ROWS) == len({row for row, *_ in ROWS}), "a word after a blank distinguishes calls of one name"


@pytest.mark.parametrize("name", [name for name in PUBLIC if (name, "*") not in HIDDEN])
def test_table_contains_every_parameter(name: str) -> None:
    covered = {_get_parameter(name, case.values[3]) for case in CASES if name_of(case.values[0]) == name}
    hidden = {parameter for owner, parameter in HIDDEN if owner in (name, "*")}
    lacking = set(parameters_of(name)) - covered - hidden
    assert lacking == set(), f"{name}() has parameters without a row in calls.txt"


@pytest.mark.parametrize(("name", "parameter"), [each for each in HIDDEN if "*" not in each])
def test_parameter_without_effect_is_in_docstring(name: str, parameter: str) -> None:
    assert parameter in parameters_of(name)
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    # Some docstrings refer to another method for their parameters.
    assert parameter in docstring or ":meth:" in docstring or ":func:" in docstring, HIDDEN[name, parameter]
