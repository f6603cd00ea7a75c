"""Measure operations on packed collections, beside plain ones, torch's fused functions, a loop, and tensordict.

The contestants alternate in one process, on one thread, and the time is the CPU time of that thread; each figure is the median of
the rounds. The leaves of a *packed* collection are views of one storage (``consolidate()``); its figures include the check
that they still are. *bound* is the least that such a check can do (the version of the dict, the address and the form of each
leaf, by functions of C), and the kernel on the storage. No result makes the script fail.

    python benchmarks/packed.py [--rounds 21] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ops import measure

import td_core
import td_distributed  # noqa: F401 -- adds consolidate()
from td_core.spi import guard_forms

SHAPES = {"10 leaves of 32 x 8": (10, (32, 8)), "200 leaves of 16 x 16": (200, (16, 16))}
NAMES = ("packed", "plain", "foreach", "loop", "tensordict", "bound")
DATA_PTR = torch.Tensor.data_ptr
DICT_VERSION = torch._C._dynamo.guards.dict_version


class Row(NamedTuple):
    """One operation as expressions over collections, lists or leaves a, b and c.

    Attributes:
        name: name in the table.
        operands: how many of a, b and c it needs.
        call: the operation on collections.
        fused: the function of torch for lists of leaves; "" if there is none.
        leaf: the operation on one leaf; the same expression as ``call`` if it is empty.
    """

    name: str
    operands: int
    call: str
    fused: str = ""
    leaf: str = ""


ROWS = [
    Row("mul_ number", 1, "a.mul_(1.0)", "torch._foreach_mul_(a, 1.0)"),
    Row("add_ number", 1, "a.add_(0.0)", "torch._foreach_add_(a, 0.0)"),
    Row("add_", 2, "a.add_(b)", "torch._foreach_add_(a, b)"),
    Row("lerp_", 2, "a.lerp_(b, 0.1)", "torch._foreach_lerp_(a, b, 0.1)"),
    Row("addcmul_", 3, "a.addcmul_(b, c)", "torch._foreach_addcmul_(a, b, c)"),
    Row("zero_", 1, "a.zero_()", "torch._foreach_zero_(a)"),
    Row("fill_", 1, "fill(a)", "", "a.fill_(0.5)"),
    Row("update_", 2, "a.update_(b)", "torch._foreach_copy_(a, b)", "a.copy_(b)"),
    Row("sum of all", 1, "a.sum(reduce=True)", "", "a.sum()"),
    Row("clone", 1, "a.clone()", "", "a.clone()"),
]


def fill(data: Any) -> None:
    """Fill all leaves with a number; tensordict fills one entry in a call."""
    if isinstance(data, td_core.TensorDict):
        data.fill_(0.5)
        return
    for key in list(data.keys()):
        data.fill_(key, 0.5)


def compile_call(text: str) -> Callable[..., Any]:
    """Compile an expression over a, b and c."""
    made: Callable[..., Any] = eval(f"lambda a, b=None, c=None: {text}", {"torch": torch, "fill": fill})
    return made


def make_bound(kernel: Callable[..., Any], trees: list[dict[str, torch.Tensor]]) -> Callable[[], Any]:
    """Build the call of a kernel on the storages, behind the least check of each collection."""
    checks, flats = [], []
    for d in trees:
        flat = torch.cat([leaf.flatten() for leaf in d.values()])
        parts = flat.split([leaf.numel() for leaf in d.values()])
        held = {k: part.view(leaf.shape) for (k, leaf), part in zip(d.items(), parts, strict=True)}
        leaves = list(held.values())
        checks.append((held, DICT_VERSION(held), leaves, list(map(DATA_PTR, leaves)), guard_forms(leaves)))
        flats.append(flat)

    def call() -> Any:
        for held, version, leaves, places, is_same in checks:
            if DICT_VERSION(held) != version or list(map(DATA_PTR, leaves)) != places:
                raise ValueError
            if not is_same(*leaves):
                raise ValueError
        return kernel(*flats)

    return call


def make_contestants(row: Row, count: int, shape: tuple[int, ...], libraries: list[Any]) -> dict[str, Any]:
    """Build the calls of one row by name."""
    trees = [{f"k{i}": torch.rand(*shape) for i in range(count)} for _ in range(row.operands)]
    call, single = compile_call(row.call), compile_call(row.leaf or row.call)
    plain, *others = [
        [lib.TensorDict({k: v.clone() for k, v in d.items()}) for d in trees] for lib in libraries
    ]
    packed = [td.clone().consolidate() for td in plain]
    columns = [[v.clone() for v in d.values()] for d in trees]
    calls = {
        "packed": lambda: call(*packed),
        "plain": lambda: call(*plain),
        "loop": lambda: dict(zip(trees[0], map(single, *columns), strict=True)),
        "bound": make_bound(single, trees),
    }
    if row.fused:
        fused = compile_call(row.fused)
        calls["foreach"] = lambda: fused(*columns)
    if others:
        calls["tensordict"] = lambda: call(*others[0])
    return calls


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = [import_module("td_core")]
    try:
        libraries.append(import_module("tensordict"))
    except ModuleNotFoundError:
        print("tensordict is not installed: its column stays empty")
    results = []
    for title, (count, shape) in SHAPES.items():
        print(f"\n{title}, us; then the time of packed as a part of each other one")
        print(
            f"{'':12}"
            + "".join(f"{name:>11}" for name in NAMES)
            + "".join(f"{name:>11}" for name in NAMES[1:])
        )
        for row in ROWS:
            with torch.no_grad():
                calls = make_contestants(row, count, shape, libraries)
                samples = measure(list(calls.values()), options.rounds, time.thread_time)
            times = {name: statistics.median(each) for name, each in zip(calls, samples, strict=True)}
            ratios = {
                name: statistics.median([a / b for a, b in zip(samples[0], each, strict=True)])
                for name, each in zip(calls, samples, strict=True)
            }
            cells = [f"{times[name]:11.1f}" if name in times else " " * 11 for name in NAMES]
            cells += [f"{ratios[name]:11.2f}" if name in ratios else " " * 11 for name in NAMES[1:]]
            print(f"{row.name:12}" + "".join(cells), flush=True)
            results.append({"shape": title, "row": row.name, "us": times, "ratio": ratios})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
