"""Measure many items, deep and wide trees, ragged entries, strings and nested tensorclasses, with td and with tensordict.

The two alternate in one process, on one thread, with a hand-written loop over dicts where there is one. The time is the CPU time
of that thread; each figure is the fastest of the rounds. No result makes the script fail.

    python benchmarks/scale.py [--rounds 5] [--rows REGEX] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import math
import pickle
import re
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

COUNT = 1000
DEPTH = 60
WIDTH = 5000
#: Seconds of the calls of one sample.
SLICE_OF_TIME = 0.01


class Row(NamedTuple):
    """One operation.

    Attributes:
        group: the fixture that the call gets, by the name of its function.
        name: name in the table.
        call: a function of the library and the fixture.
        loop: the same by hand, as a function of the dicts of the fixture; None if there is none.
    """

    group: str
    name: str
    call: Callable[[Any, Any], Any]
    loop: Callable[[Any], Any] | None = None


def make_steps() -> list[dict[str, Any]]:
    """Build the dicts of the steps of a rollout."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "obs": torch.rand(4, generator=generator),
            "action": torch.randint(0, 2, (), generator=generator),
            "next": {"reward": torch.rand(1, generator=generator), "done": torch.tensor([i % 50 == 49])},
        }
        for i in range(COUNT)
    ]


def make_deep() -> dict[str, Any]:
    """Build a nest of dicts with a leaf at each level."""
    tree: dict[str, Any] = {"leaf": torch.ones(3)}
    for _ in range(DEPTH):
        tree = {"leaf": torch.ones(3), "n": tree}
    return tree


def make_wide() -> dict[str, Any]:
    """Build a dict of many leaves."""
    return {f"k{i}": torch.ones(2) for i in range(WIDTH)}


def make_ragged() -> list[dict[str, Any]]:
    """Build dicts whose leaves have different lengths."""
    return [{"tokens": torch.arange(1 + i % 17), "label": torch.tensor(i)} for i in range(COUNT)]


def make_strings() -> list[dict[str, Any]]:
    """Build dicts with a string beside a leaf."""
    return [{"x": torch.ones(2), "text": f"row {i}"} for i in range(COUNT)]


def of_items(make: Callable[[], list[dict[str, Any]]]) -> Callable[[ModuleType], Any]:
    """Return a function that builds one collection of each dict."""
    return lambda lib: [lib.TensorDict(item) for item in make()]


def stack_dense(lib: Any, items: list[Any]) -> Any:
    """Stack collections to a dense one."""
    return torch.stack(items)


def make_classes(lib: Any) -> Any:
    """Build a tensorclass that holds a tensorclass, in many rows."""
    classes = import_module("td_tensorclass" if lib.__name__ == "td_core" else "tensordict")
    base = classes.TensorClass
    inner = type(base)("Inner", (base,), {"__annotations__": {"x": torch.Tensor, "y": torch.Tensor}})
    outer = type(base)("Outer", (base,), {"__annotations__": {"a": torch.Tensor, "inner": inner}})
    return outer(
        a=torch.rand(COUNT, 2),
        inner=inner(x=torch.rand(COUNT, 3), y=torch.rand(COUNT), batch_size=[COUNT]),
        batch_size=[COUNT],
    )


FIXTURES: dict[str, Callable[[Any], Any]] = {
    "steps": of_items(make_steps),
    "rollout": lambda lib: torch.stack(of_items(make_steps)(lib)),
    "lazy steps": lambda lib: lib.lazy_stack(of_items(make_steps)(lib)),
    "deep": lambda lib: lib.TensorDict(make_deep()),
    "wide": lambda lib: lib.TensorDict(make_wide()),
    "ragged": lambda lib: lib.lazy_stack(of_items(make_ragged)(lib)),
    "strings": of_items(make_strings),
    "string column": lambda lib: lib.lazy_stack(of_items(make_strings)(lib)),
    "classes": make_classes,
}
DICTS: dict[str, Callable[[], Any]] = {
    "steps": make_steps,
    "rollout": lambda: stack_dicts(make_steps()),
    "lazy steps": make_steps,
    "deep": make_deep,
    "wide": make_wide,
    "ragged": make_ragged,
    "strings": make_strings,
}


def stack_dicts(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack dicts of tensors by hand."""
    return {
        k: stack_dicts([item[k] for item in items])
        if isinstance(v, dict)
        else torch.stack([item[k] for item in items])
        for k, v in items[0].items()
    }


def apply(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to the tensors of nested dicts and lists."""
    if isinstance(tree, dict):
        return {k: apply(function, v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [apply(function, item) for item in tree]
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def pickled(data: Any) -> Any:
    """Pickle and unpickle."""
    return pickle.loads(pickle.dumps(data))


def saved(data: Any) -> Any:
    """Save with torch.save, and load."""
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


INDEX = torch.arange(0, COUNT, 3)
MASK = torch.arange(COUNT) % 3 == 0
HALF = [f"k{i}" for i in range(0, WIDTH, 2)]

ROWS = [
    Row("steps", "construct each", lambda lib, x: [lib.TensorDict(dict(item)) for item in x]),
    Row("steps", "stack", lambda lib, x: torch.stack(x), stack_dicts),
    Row("steps", "lazy stack", lambda lib, x: lib.lazy_stack(x)),
    Row("steps", "cat of unsqueezed", lambda lib, x: torch.cat([item[None] for item in x])),
    Row("steps", "clone each", lambda lib, x: [item.clone() for item in x], lambda x: apply(torch.clone, x)),
    Row("steps", "add each", lambda lib, x: [item + 1 for item in x], lambda x: apply(lambda v: v + 1, x)),
    Row("steps", "get nested of each", lambda lib, x: [item["next", "reward"] for item in x],
        lambda x: [i["next"]["reward"] for i in x]),
    Row("steps", "set nested of each", lambda lib, x: [item.set(("next", "reward"), torch.zeros(1)) for item in x]),
    Row("steps", "select each", lambda lib, x: [item.select("obs") for item in x], lambda x: [{"obs": i["obs"]} for i in x]),
    Row("steps", "rename each", lambda lib, x: [item.clone(False).rename_key_("obs", "o") for item in x]),
    Row("steps", "select and rename", lambda lib, x: [item.select("obs").rename_key_("obs", "o") for item in x]),
    Row("steps", "update each", lambda lib, x: [item.clone(False).update({"z": INDEX}) for item in x]),
    Row("steps", "update_ each", lambda lib, x: [item.update_(other) for item, other in pairwise(x)]),
    Row("steps", "keys of each", lambda lib, x: [list(item.keys(True, True)) for item in x]),
    Row("steps", "to_dict of each", lambda lib, x: [item.to_dict() for item in x], lambda x: apply(lambda v: v, x)),
    Row("steps", "flatten_keys of each", lambda lib, x: [item.flatten_keys(".") for item in x]),
    Row("steps", "deepcopy of the list", lambda lib, x: copy.deepcopy(x)),
    Row("steps", "copy of each", lambda lib, x: [copy.copy(item) for item in x]),
    Row("steps", "pickle of the list", lambda lib, x: pickled(x), pickled),
    Row("steps", "pickle of each", lambda lib, x: [pickled(item) for item in x]),
    Row("steps", "print each", lambda lib, x: [repr(item) for item in x]),
    Row("steps", "detach each", lambda lib, x: [item.detach() for item in x], lambda x: apply(torch.detach, x)),
    Row("steps", "to float64 each", lambda lib, x: [item.to(torch.float64) for item in x]),
    Row("steps", "is_contiguous of each", lambda lib, x: [item.is_contiguous() for item in x]),
    Row("rollout", "index one by one", lambda lib, x: [x[i] for i in range(COUNT)],
        lambda x: [apply(lambda v: v[i], x) for i in range(COUNT)]),  # noqa: B023
    Row("rollout", "iterate", lambda lib, x: list(x)),
    Row("rollout", "unbind", lambda lib, x: x.unbind(0)),
    Row("rollout", "split in tens", lambda lib, x: x.split(10)),
    Row("rollout", "chunk", lambda lib, x: x.chunk(100)),
    Row("rollout", "slices of ten", lambda lib, x: [x[i : i + 10] for i in range(0, COUNT, 10)]),
    Row("rollout", "write one by one", lambda lib, x: [x.__setitem__(i, x[0]) for i in range(COUNT)]),
    Row("rollout", "tensor index", lambda lib, x: x[INDEX], lambda x: apply(lambda v: v[INDEX], x)),
    Row("rollout", "mask", lambda lib, x: x[MASK], lambda x: apply(lambda v: v[MASK], x)),
    Row("rollout", "reshape", lambda lib, x: x.reshape(10, 100)),
    Row("rollout", "pickle", lambda lib, x: pickled(x), pickled),
    Row("rollout", "torch.save", lambda lib, x: saved(x), saved),
    Row("lazy steps", "get", lambda lib, x: x["obs"], lambda x: torch.stack([i["obs"] for i in x])),
    Row("lazy steps", "get nested", lambda lib, x: x["next", "reward"]),
    Row("lazy steps", "tensor index", lambda lib, x: x[INDEX]),
    Row("lazy steps", "slice", lambda lib, x: x[10:200]),
    Row("lazy steps", "iterate", lambda lib, x: list(x)),
    Row("lazy steps", "dense", lambda lib, x: x.contiguous(), stack_dicts),
    Row("lazy steps", "add", lambda lib, x: x + 1),
    Row("lazy steps", "update_ by itself", lambda lib, x: x.update_(x)),
    Row("lazy steps", "set", lambda lib, x: x.set("obs", torch.zeros(COUNT, 4))),
    Row("lazy steps", "keys", lambda lib, x: list(x.keys(True, True))),
    Row("lazy steps", "deepcopy", lambda lib, x: copy.deepcopy(x)),
    Row("lazy steps", "pickle", lambda lib, x: pickled(x)),
    Row("deep", "construct", lambda lib, x: lib.TensorDict(x.to_dict())),
    Row("deep", "clone", lambda lib, x: x.clone(), lambda x: apply(torch.clone, x)),
    Row("deep", "add", lambda lib, x: x + 1, lambda x: apply(lambda v: v + 1, x)),
    Row("deep", "get", lambda lib, x: x[("n",) * DEPTH + ("leaf",)]),
    Row("deep", "set", lambda lib, x: x.set(("n",) * DEPTH + ("leaf",), torch.ones(3))),
    Row("deep", "keys", lambda lib, x: list(x.keys(True, True))),
    Row("deep", "flatten and unflatten", lambda lib, x: x.flatten_keys(".").unflatten_keys(".")),
    Row("deep", "to_dict", lambda lib, x: x.to_dict()),
    Row("deep", "pickle", lambda lib, x: pickled(x), pickled),
    Row("deep", "print", lambda lib, x: repr(x)),
    Row("deep", "deepcopy", lambda lib, x: copy.deepcopy(x), copy.deepcopy),
    Row("wide", "construct", lambda lib, x: lib.TensorDict(dict(x.items()))),
    Row("wide", "clone", lambda lib, x: x.clone(), lambda x: apply(torch.clone, x)),
    Row("wide", "add", lambda lib, x: x + 1, lambda x: apply(lambda v: v + 1, x)),
    Row("wide", "select", lambda lib, x: x.select(*HALF), lambda x: {k: x[k] for k in HALF}),
    Row("wide", "exclude", lambda lib, x: x.exclude(*HALF)),
    Row("wide", "update", lambda lib, x: x.clone(False).update(x)),
    Row("wide", "update_ by itself", lambda lib, x: x.update_(x)),
    Row("wide", "items", lambda lib, x: list(x.items(True, True))),
    Row("wide", "to_dict", lambda lib, x: x.to_dict()),
    Row("wide", "state_dict", lambda lib, x: x.state_dict()),
    Row("wide", "pickle", lambda lib, x: pickled(x), pickled),
    Row("wide", "print", lambda lib, x: repr(x)),
    Row("wide", "stack", lambda lib, x: torch.stack([x, x])),
    Row("ragged", "as jagged tensor", lambda lib, x: x.get("tokens", as_nested_tensor=True, layout=torch.jagged)),
    Row("ragged", "as list", lambda lib, x: x.get("tokens", as_list=True)),
    Row("ragged", "padded", lambda lib, x: x.get("tokens", as_padded_tensor=True)),
    Row("ragged", "iterate", lambda lib, x: list(x)),
    Row("ragged", "index", lambda lib, x: x[INDEX]),
    Row("ragged", "add", lambda lib, x: x + 1),
    Row("strings", "construct each", lambda lib, x: [lib.TensorDict({"x": INDEX, "text": "a"}) for _ in x]),
    Row("strings", "lazy stack", lambda lib, x: lib.lazy_stack(x)),
    Row("strings", "get of each", lambda lib, x: [item["text"] for item in x], lambda x: [i["text"] for i in x]),
    Row("strings", "clone each", lambda lib, x: [item.clone() for item in x]),
    Row("strings", "pickle", lambda lib, x: pickled(x), pickled),
    Row("string column", "get", lambda lib, x: x["text"]),
    Row("string column", "index", lambda lib, x: x[INDEX]),
    Row("string column", "one by one", lambda lib, x: [x[i]["text"] for i in range(COUNT)]),
    Row("classes", "index one by one", lambda lib, x: [x[i] for i in range(COUNT)]),
    Row("classes", "fields one by one", lambda lib, x: [x.inner.x for _ in range(COUNT)]),
    Row("classes", "stack", lambda lib, x: torch.stack([x, x])),
    Row("classes", "add", lambda lib, x: x + 1),
    Row("classes", "unbind and stack", lambda lib, x: torch.stack(list(x[:100].unbind(0)))),
    Row("classes", "pickle of rows", lambda lib, x: [x[i].clone() for i in range(100)]),
]  # fmt: skip


def measure(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the fastest time of each call in milliseconds; the calls alternate."""
    counts = []
    for call in calls:
        start = time.thread_time()
        call()
        counts.append(max(1, math.ceil(SLICE_OF_TIME / max(time.thread_time() - start, 1e-6))))
    best = [math.inf] * len(calls)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = range(len(calls))
            for i in order if number % 2 else reversed(order):
                start = time.thread_time()
                for _ in range(counts[i]):
                    calls[i]()
                best[i] = min(best[i], (time.thread_time() - start) / counts[i])
    finally:
        gc.enable()
    return [seconds * 1e3 for seconds in best]


def attempt(call: Callable[[], Any]) -> Callable[[], Any] | None:
    """Return a call, or None if the library cannot do it."""
    try:
        call()
    except Exception as error:
        print(f"    raises {type(error).__name__}: {str(error)[:80]!r}")
        return None
    return call


def main() -> None:
    """Measure and print the table and its mean."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="regular expression of the rows, as 'group: name'")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = [import_module("td_core")]
    try:
        libraries.append(import_module("tensordict"))
    except ModuleNotFoundError:
        print("tensordict is not installed: its column stays empty")
    print(f"{'ms':32}{'loop':>10}{'ours':>10}{'ref':>10}{'ref / ours':>12}")
    results = []
    for row in ROWS:
        title = f"{row.group}: {row.name}"
        if not re.search(options.rows, title):
            continue
        fixtures = [FIXTURES[row.group](lib) for lib in libraries]
        calls = [lambda lib=lib, x=x: row.call(lib, x) for lib, x in zip(libraries, fixtures)]  # noqa: B023
        names = [name for name, call in zip(("ours", "ref"), calls) if attempt(call) is not None]
        kept = [call for name, call in zip(("ours", "ref"), calls) if name in names]
        if row.loop is not None:
            dicts = DICTS[row.group]()
            names.append("loop")
            kept.append(lambda: row.loop(dicts))  # type: ignore[misc]  # noqa: B023
        times = dict(zip(names, measure(kept, options.rounds)))
        gain = times["ref"] / times["ours"] if {"ref", "ours"} <= times.keys() else math.nan
        cells = "".join(f"{times.get(name, math.nan):10.3f}" for name in ("loop", "ours", "ref"))
        print(f"{title:32}{cells}{gain:12.2f}{'  slower' if gain < 1 else ''}", flush=True)
        results.append({"row": title, "ms": times, "reference_over_ours": None if math.isnan(gain) else gain})
    gains = [item["reference_over_ours"] for item in results if item["reference_over_ours"]]
    if gains:
        slower = sum(gain < 1 for gain in gains)
        print(f"{len(gains)} rows: {statistics.geometric_mean(gains):.2f} times tensordict; {slower} slower")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
