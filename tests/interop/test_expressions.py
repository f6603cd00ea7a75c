"""Small expressions have equal results with td and tensordict.

``expressions.txt`` has one expression per line. Statements before the last ``;`` run first, and the prefix ``LONG``
selects the long repr. ``differences.txt`` lists the expressions for which td differs on purpose, under the reason.
"""

from __future__ import annotations

import ast
import collections
import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

HERE = Path(__file__).parent
Pair = collections.namedtuple("Pair", "a b")


class Tied(nn.Module):
    """A module with a tied weight, a persistent buffer and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.l2.weight = self.l1.weight
        self.register_buffer("buf", torch.zeros(1))
        self.register_buffer("np", torch.ones(1), persistent=False)


def read(name: str) -> list[tuple[str, str]]:
    """Return the lines of a file, each with its heading."""
    found, heading = [], ""
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            heading = line[2:]
        elif line:
            found.append((line, heading))
    return found


DIFFERENCES = dict(read("differences.txt"))
EXPRESSIONS = [
    pytest.param(
        line,
        marks=pytest.mark.xfail(reason=DIFFERENCES[line], strict=True) if line in DIFFERENCES else (),
        id=f"{number}-{line[:70]}",
    )
    for number, (line, _) in enumerate(read("expressions.txt"), 1)
]


def make_namespace(lib: Any) -> dict[str, Any]:
    """Return the namespace of the expressions for one library."""
    make, lazy = lib.TensorDict, lib.lazy_stack

    @lib.tensorclass
    class TC:
        x: torch.Tensor
        y: str = None  # type: ignore[assignment]

    def mk() -> Any:
        nested = {"c": torch.ones(3), "d": torch.zeros(3, 4)}
        return make({"a": torch.arange(6).view(3, 2), "b": nested}, [3])

    def named() -> Any:
        nested = {"c": torch.arange(12.0).view(2, 3, 2)}
        return make({"a": torch.arange(6.0).view(2, 3), "b": nested}, [2, 3], names=["u", "v"])

    def ll() -> Any:
        values = torch.arange(12).view(3, 2, 2)
        return lazy(
            [make({"a": values[i], "n": {"m": torch.full((2,), float(i))}}, [2]) for i in range(3)], 0
        )

    def hl() -> Any:
        one = make({"a": torch.zeros(2, 3), "k": torch.zeros(2)}, [2])
        return lazy([one, make({"a": torch.ones(2, 4), "j": torch.zeros(2)}, [2])], 0)

    own = {"mk": mk, "named": named, "ll": ll, "hl": hl, "TC": TC, "NT": Pair, "Shared": Tied, "T": lib}
    names = "TensorDict LazyStackedTensorDict TensorDictParams lazy_stack NonTensorData NonTensorStack"
    ours = {name: getattr(lib, name) for name in names.split()}
    modules = {"torch": torch, "np": np, "nn": nn, "copy": copy, "pickle": pickle, "os": os}
    return {
        **own, **ours, **modules, "tempfile": tempfile, "collections": collections,
        "OrderedDict": collections.OrderedDict, "inspect": __import__("inspect"),
    }  # fmt: skip


def evaluate(line: str, lib: Any) -> Any:
    """Run the statements of a line and return the value of the last one."""
    torch.manual_seed(0)
    names = make_namespace(lib)
    *before, last = ast.parse(line.removeprefix("LONG ")).body
    with lib.set_printoptions(compact=not line.startswith("LONG "), sort_keys="alphabetical"):
        exec(compile(ast.Module(before, []), line, "exec"), names)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), line, "eval"), names)
        exec(compile(ast.Module([last], []), line, "exec"), names)
    return None


@pytest.mark.parametrize("line", EXPRESSIONS)
def test_expression_equals_tensordict(
    line: str, libraries: tuple[Any, Any], same: Callable[..., None], attempt: Callable[..., Any]
) -> None:
    ours, theirs = (attempt(lambda lib=lib: evaluate(line, lib)) for lib in libraries)
    same(ours, theirs)


def test_listed_differences_are_expressions() -> None:
    assert set(DIFFERENCES) <= {line for line, _ in read("expressions.txt")}
