"""Measure what modules add to the call of what they wrap, beside the reference implementation in one process.

Everything is around an identity module with one tensor. The rows run interleaved on one thread, and only the time of that
thread counts; each figure is the fastest of many rounds. ``above`` is what is left of a call without those of the modules
inside; ``ref / ours`` compares whole calls. Nothing here passes or fails. Without tensordict its columns stay empty.

    python benchmarks/nn.py [--rounds 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import td_core
import td_nn

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensordict
        import tensordict.nn as reference
except ModuleNotFoundError:
    tensordict = None

#: The most that a row may add, in microseconds; None where only the comparison counts.
LIMITS = {
    "collection": 4.0,
    "keyword": 8.0,
    "position": None,
    "nested keys": None,
    "sequence of 3": 15.0,
    "function": None,
}
CALLS = 500


def rows(lib: Any, modules: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the calls of one implementation, and how many identity modules each runs."""
    x, inner = torch.ones(3), nn.Identity()
    data = lib.TensorDict({"x": x}, batch_size=[])
    deep = lib.TensorDict({"n": {"x": x}}, batch_size=[])
    one = modules.TensorDictModule(inner, ["x"], ["y"])
    nested = modules.TensorDictModule(inner, [("n", "x")], [("n", "y")])
    keys = ["x", "a", "b", "c"]
    chain = modules.TensorDictSequential(
        *[modules.TensorDictModule(inner, [read], [write]) for read, write in itertools.pairwise(keys)]
    )
    function = modules.WrapModule(lambda td: td)
    return {
        "collection": (lambda: one(data), 1),
        "keyword": (lambda: one(x=x), 1),
        "position": (lambda: one(x), 1),
        "nested keys": (lambda: nested(deep), 1),
        "sequence of 3": (lambda: chain(data), 3),
        "function": (lambda: function(data), 0),
    }


def measure(calls: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Return the microseconds of each call, the fastest of many rounds in which they take turns."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            best[key] = min(best[key], (time.thread_time() - start) / CALLS * 1e6)
    return best


def main() -> None:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="how often each row is measured (100)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    sides = {"ours": rows(td_core, td_nn)}
    if tensordict is not None:
        sides["ref"] = rows(tensordict, reference)
    x, inner = torch.ones(3), nn.Identity()
    calls: dict[Any, Callable[[], Any]] = {"inner": lambda: inner(x)}
    calls |= {(side, name): call for side, table in sides.items() for name, (call, _) in table.items()}
    took = measure(calls, options.rounds)
    base = took["inner"]
    print(f"call of an identity module: {base:.2f} us\n")
    print(f"{'row':14}{'above us':>10}{'limit':>8}{'ref above':>11}{'ref / ours':>12}")
    found, ratios = {}, []
    for name, limit in LIMITS.items():
        count = sides["ours"][name][1]
        above = took["ours", name] - count * base
        found[name] = {"above": above, "limit": limit}
        line = f"{name:14}{above:10.2f}{'' if limit is None else format(limit, '.0f'):>8}"
        if "ref" in sides:
            ratio = took["ref", name] / took["ours", name]
            ratios.append(ratio)
            found[name] |= {"ref_above": took["ref", name] - count * base, "ratio": ratio}
            line += f"{took['ref', name] - count * base:11.2f}{ratio:12.2f}"
        print(line)
    if ratios:
        print(f"\ngeometric mean of ref / ours: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
