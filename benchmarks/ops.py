"""Measure all kinds of operations with td, with a hand-written loop over a dict, and with tensordict.

The three alternate in one process, on one thread, and the time is the CPU time of that thread (on a GPU, the time until the
GPU is idle). ``/ loop`` (lower is better) and ``ref / ours`` (higher is better) are medians of the ratios of each round.
Rows of kind *torch* run a torch operation per leaf and are compared with the loop; rows of kind *dict* only access the
dictionary and are compared with tensordict. If an expert would call torch's foreach functions, the loop is the faster of
both forms. A loop uses the batch size, but no other property of the leaves: their feature dims may differ. No result makes
the script fail.

Run ``python benchmarks/ops.py --help``; without tensordict installed its columns stay empty.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import re
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from operator import truediv
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import td_distributed  # noqa: F401 -- adds consolidate()

BATCH = (4, 2)
TAIL = 4
SLOTS = 64
SLICE_OF_TIME = 1e-3
"""Seconds that one sample of one contestant should take."""


@dataclass(frozen=True)
class Row:
    """One operation: the statement on a collection, and the equivalent loop over a dict.

    Attributes:
        name: name in the table.
        kind: ``"torch"``, ``"dict"``, or ``"other"`` for one that is compared only with tensordict.
        call: body of a function over ``td`` and the other names of :func:`fixtures`.
        leaf: expression over a leaf ``v``, its key ``k`` and the same leaf ``w`` of a second dict.
        foreach: expression over the list of leaves ``vs`` and that of the second dict, ``ws``.
        loop: body of a function over dicts, if a comprehension is not sufficient.
        shapes: substring of the names of the shapes to measure it on.
        second: the variable that a loop has as its second dict.
        turns: number of collections, of equal structure and other dtypes and sizes, on which the calls alternate.
    """

    name: str
    kind: str
    call: str
    leaf: str = ""
    foreach: str = ""
    loop: str = ""
    shapes: str = ""
    second: str = "e"
    turns: int = 1


PARTS = """
parts = {{k: loop(v) if v.__class__ is dict else v.{method} for k, v in d.items()}}
return [{{k: part[i] for k, part in parts.items()}} for i in range({count})]
"""
WRITE = """
for k, v in d.items():
    if v.__class__ is dict: loop(v, e[k])
    else: {statement}
"""
KEYS = """
out = []
for k, v in d.items():
    if v.__class__ is dict:
        for inner in loop(v): out.append((k, *inner) if inner.__class__ is tuple else (k, inner))
    else: out.append(k)
return out
"""
ITEMS = """
out = []
for k, v in d.items():
    if v.__class__ is dict:
        for inner, x in loop(v): out.append(((k, *inner) if inner.__class__ is tuple else (k, inner), x))
    else: out.append((k, v))
return out
"""
EXCLUDE = """
return {k: v for k, v in d.items() if k not in top_half}
"""
FLATTEN = """
out = {}
for k, v in d.items():
    if v.__class__ is dict:
        for inner, x in loop(v).items(): out[k + "." + inner] = x
    else: out[k] = v
return out
"""
UNFLATTEN = """
out = {}
for k, v in flat_d.items():
    *path, last = k.split(".")
    level = out
    for part in path: level = level.setdefault(part, {})
    level[last] = v
return out
"""
STATE = """
if out is None: out = OrderedDict(); out._metadata = {}
out._metadata[prefix] = {"batch_size": batch}
for k, v in d.items():
    if v.__class__ is dict: loop(v, prefix=prefix + k + ".", out=out)
    else: out[prefix + k] = v.detach()
return out
"""
LOAD = """
found = flattened(d, "")
if found.keys() != state_d.keys(): raise KeyError(found.keys() ^ state_d.keys())
for k, v in found.items():
    if v.shape != state_d[k].shape: raise ValueError(k)
with torch.no_grad():
    for k, v in found.items(): v.copy_(state_d[k])
"""
BUILD = """
for k, v in d.items():
    if v.__class__ is dict: loop(v)
    elif v.shape[:2] != batch: raise ValueError(k)
return dict(d)
"""
WHERE = """
wide = mask2[..., None]
def chosen(d, e): return {k: chosen(v, e[k]) if v.__class__ is dict else torch.where(wide, v, e[k]) for k, v in d.items()}
return chosen(d, e)
"""
NO_GRAD = """
ps, ws = leaves(old_d), leaves(e)
if not all(map(torch.Tensor.is_same_size, ps, ws)): raise ValueError
with torch.no_grad(): torch.{}
"""
LERP = NO_GRAD.format("_foreach_lerp_(ps, ws, 0.1)")
SOME = """
for k, w in some_d.items():
    if d[k].shape != w.shape: raise ValueError(k)
for k, w in some_d.items(): d[k].copy_(w)
"""
REPLAY = """
i = next(turn)
def write(d, e):
    for k, v in d.items():
        if v.__class__ is dict: write(v, e[k])
        else: v[i] = e[k]
write(buffer_d, row_d)
"""
SWAP = """
for p, q in ((d, True), (old_d, False)): swap(model, p)
"""
FROM_MODULE = """
def walk(m):
    out = {**m._parameters, **m._buffers}
    for k, child in m._modules.items(): out[k] = walk(child)
    return out
return walk(model)
"""

ROWS = [
    Row("construct", "dict", "return TensorDict(d, batch)", loop=BUILD),
    Row("get", "dict", "return td.get(key)", loop="return d.get(key)"),
    Row("getitem key", "dict", "return td[key]", loop="return d[key]"),
    Row("set", "dict", "td.set(key, x)", loop="d[key] = x"),
    Row("setitem key", "dict", "td[key] = x", loop="d[key] = x"),
    Row("get nested", "dict", "return td[deep]", loop="return d['n']['m']['c0']", shapes="nest"),
    Row("set nested", "dict", "td[deep] = x", loop="d['n']['m']['c0'] = x", shapes="nest"),
    Row("index int", "torch", "return td[0]", "v[0]"),
    Row("index slice", "torch", "return td[1:3]", "v[1:3]"),
    Row("index tensor", "torch", "return td[index]", "v[index]"),
    Row("index mask", "torch", "return td[mask]", "v[mask]"),
    Row("index ellipsis", "torch", "return td[..., 0]", "v[:, 0]"),
    Row("setitem", "torch", "td[0] = row", loop=WRITE.format(statement="v[0] = e[k]"), second="row_d"),
    Row("replay write", "torch", "buffer[next(turn)] = row", loop=REPLAY),
    Row("clone", "torch", "return td.clone()", "v.clone()"),
    Row("clone shallow", "dict", "return td.clone(False)", "v"),
    Row("stack", "torch", "return torch.stack([td, other])", "torch.stack([v, w])"),
    Row("cat", "torch", "return torch.cat([td, other])", "torch.cat([v, w])"),
    Row("lazy stack", "dict", "return lazy_stack([td, other])", loop="return [d, e]"),
    Row("lazy index", "dict", "return lazy[0]", loop="return both[0]"),
    Row("lazy get", "torch", "return lazy.get(key)", loop="return torch.stack([m[key] for m in both])"),
    Row("apply", "torch", "return td.apply(function)", "function(v)"),
    Row("named_apply", "torch", "return td.named_apply(named)", "named(k, v)"),
    Row("exp", "torch", "return td.exp()", "v.exp()", "torch._foreach_exp(vs)"),
    Row("add scalar", "torch", "return td + 1", "v + 1", "torch._foreach_add(vs, 1)"),
    Row("add td", "torch", "return td + other", "v + w", "torch._foreach_add(vs, ws)"),
    Row("mul scalar", "torch", "return td * 2", "v * 2", "torch._foreach_mul(vs, 2)"),
    Row("mul td", "torch", "return td * other", "v * w", "torch._foreach_mul(vs, ws)"),
    Row("add_ scalar", "torch", "td.add_(0)", "v.add_(0)", "torch._foreach_add_(vs, 0)"),
    Row("mul_ td", "torch", "td.mul_(ones)", "v.mul_(w)", "torch._foreach_mul_(vs, ws)", second="ones_d"),
    Row("reshape", "torch", "return td.reshape(2, 4)", "v.reshape(2, 4, *v.shape[2:])"),
    Row("view", "torch", "return td.view(8)", "v.view(8, *v.shape[2:])"),
    Row("unsqueeze", "torch", "return td.unsqueeze(0)", "v.unsqueeze(0)"),
    Row("permute", "torch", "return td.permute(1, 0)", "v.transpose(0, 1)"),
    Row("expand", "torch", "return td.expand(3, 4, 2)", "v.expand(3, 4, 2, *v.shape[2:])"),
    Row("unbind", "torch", "return td.unbind(0)", loop=PARTS.format(method="unbind(0)", count=4)),
    Row("split", "torch", "return td.split(2)", loop=PARTS.format(method="split(2)", count=2)),
    Row("to dtype", "torch", "return td.to(torch.float64)", "v.double()"),
    Row("to same device", "dict", "return placed.to(place)", "v"),
    Row("keys nested leaves", "dict", "return list(td.keys(True, True))", loop=KEYS),
    Row("items nested leaves", "dict", "return list(td.items(True, True))", loop=ITEMS),
    Row("select", "dict", "return td.select(*half)", loop="return {k: d[k] for k in top_half}"),
    Row("exclude", "dict", "return td.exclude(*half)", loop=EXCLUDE),
    Row("update", "dict", "td.update(other)", loop="d.update(e)"),
    Row("update_", "torch", "td.update_(td2)", "v.copy_(w)", "torch._foreach_copy_(vs, ws)"),
    Row("update_ dict", "torch", "td.update_(e)", "v.copy_(w)", "torch._foreach_copy_(vs, ws)"),
    Row("update_ some", "torch", "td.update_(some_d)", loop=SOME),
    Row("update_ params", "torch", "with torch.no_grad(): params.update_(fresh)", loop=NO_GRAD.format("_foreach_copy_(ps, ws)")),
    Row("lerp_ params", "torch", "with torch.no_grad(): params.lerp_(fresh, 0.1)", loop=LERP),
    Row("flatten_keys", "dict", "return td.flatten_keys('.')", loop=FLATTEN),
    Row("unflatten_keys", "dict", "return flat.unflatten_keys('.')", loop=UNFLATTEN),
    Row("equal", "torch", "return td == other", "v == w"),
    Row("sum dim", "torch", "return td.sum(0)", "v.sum(0)"),
    Row("mean", "torch", "return td.mean()", "v.mean()"),
    Row("all", "torch", "return truth.all()", loop="return all(v.all() for v in truths)"),
    Row("lock unlock", "dict", "td.lock_(); td.unlock_()", loop="pass"),
    Row("to_module", "dict", "with params.to_module(model): pass", loop=SWAP),
    Row("from_module", "dict", "return TensorDict.from_module(model)", loop=FROM_MODULE),
    Row("state_dict", "torch", "return td.state_dict()", loop=STATE),
    Row("load_state_dict", "torch", "td.load_state_dict(state)", loop=LOAD),
    Row("to_dict", "dict", "return td.to_dict()", "v"),
    Row("from_dict", "dict", "return TensorDict.from_dict(d, batch_size=batch)", loop=BUILD),
    Row("where", "torch", "return td.where(mask2, other)", loop=WHERE),
    Row("gather", "torch", "return td.gather(0, index2)", "v.gather(0, index2[..., None].expand(2, 2, *v.shape[2:]))"),
    Row("pytree map", "torch", "return tree_map(function, td)", loop="return tree_map(function, d)"),
    Row("tc construct", "dict", "return Point(**d, batch_size=batch)", loop=BUILD, shapes="10 leaves"),
    Row("tc get", "dict", "return tc.a0", loop="return d['a0']", shapes="10 leaves"),
    Row("tc set", "dict", "tc.a0 = x", loop="d['a0'] = x", shapes="10 leaves"),
    Row("tc index", "torch", "return tc[0]", "v[0]", shapes="10 leaves"),
    Row("tc view", "torch", "return tc.view(8)", "v.view(8, *v.shape[2:])", shapes="10 leaves"),
    Row("tc stack", "torch", "return torch.stack([tc, tc])", "torch.stack([v, v])", shapes="10 leaves"),
    Row("tc add", "torch", "return tc + 1", "v + 1", "torch._foreach_add(vs, 1)", shapes="10 leaves"),
    Row("tc unbind", "torch", "return tc.unbind(0)", loop=PARTS.format(method="unbind(0)", count=4), shapes="10"),
    Row("packed mul_", "torch", "box.mul_(1.0)", "v.mul_(1.0)", "torch._foreach_mul_(vs, 1.0)"),
    Row("packed add_", "torch", "box.add_(box2)", "v.add_(w)", "torch._foreach_add_(vs, ws)"),
    Row("packed lerp_", "torch", "box.lerp_(box2, 0.1)", "v.lerp_(w, 0.1)", "torch._foreach_lerp_(vs, ws, 0.1)"),
    Row("packed update_", "torch", "box.update_(box2)", "v.copy_(w)", "torch._foreach_copy_(vs, ws)"),
    Row("packed zero_", "torch", "box.zero_()", "v.zero_()", "torch._foreach_zero_(vs)"),
    Row("repr", "dict", "return repr(td)", "f'{k}: {tuple(v.shape)} {v.dtype}'"),
]  # fmt: skip
WRITES = {
    "setitem", "replay write", "add_ scalar", "mul_ td", "update_", "update_ dict", "update_ some", "update_ params",
    "lerp_ params", "load_state_dict",
}  # fmt: skip
"""Names of the rows that write in place; each is also measured on three collections that take turns."""
ROWS += [replace(row, name=f"{row.name} in turn", turns=3) for row in ROWS if row.name in WRITES]

FORMS = ((TAIL, torch.float32), (TAIL - 1, torch.float32), (TAIL + 1, torch.float64))
"""Feature dim and dtype of the leaves of collections that take turns."""


def leaf(form: int = 0) -> torch.Tensor:
    """Build one small leaf."""
    tail, dtype = FORMS[form]
    return torch.rand(*BATCH, tail, dtype=dtype)


def plain(shape: str, form: int = 0) -> dict[str, Any]:
    """Build the nested dict for the name of a shape."""
    if shape == "nest":
        level = {f"c{i}": leaf(form) for i in range(4)}
        middle = {**{f"b{i}": leaf(form) for i in range(3)}, "m": level}
        return {**{f"a{i}": leaf(form) for i in range(3)}, "n": middle}
    return {f"a{i}": leaf(form) for i in range(int(shape.split()[0]))}


SHAPES = ("10 leaves", "nest", "200 leaves")


def mapped(function: Callable[[torch.Tensor], Any], d: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to each leaf of nested dicts."""
    return {k: mapped(function, v) if isinstance(v, dict) else function(v) for k, v in d.items()}


def leaves(d: dict[str, Any]) -> list[torch.Tensor]:
    """Return the leaves of nested dicts."""
    out: list[torch.Tensor] = []
    for v in d.values():
        if v.__class__ is dict:
            out += leaves(v)
        else:
            out.append(v)
    return out


def flattened(d: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return the leaves of nested dicts under dotted keys."""
    out: dict[str, torch.Tensor] = {}
    for k, v in d.items():
        if v.__class__ is dict:
            out |= flattened(v, f"{prefix}{k}.")
        else:
            out[prefix + k] = v
    return out


def rebuilt(d: dict[str, Any], values: Iterator[Any]) -> dict[str, Any]:
    """Build nested dicts of the same structure with other leaves."""
    return {k: rebuilt(v, values) if v.__class__ is dict else next(values) for k, v in d.items()}


def module_of(d: dict[str, Any]) -> nn.Module:
    """Build a module whose parameters are clones of the leaves."""
    module = nn.Module()
    for k, v in d.items():
        if isinstance(v, dict):
            module.add_module(k, module_of(v))
        else:
            module.register_parameter(k, nn.Parameter(v.clone()))
    return module


def swap(module: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Replace the parameters of a module, and return the old ones: the loop for ``to_module``."""
    old: dict[str, Any] = {}
    parameters = module._parameters
    for k, v in values.items():
        if v.__class__ is dict:
            old[k] = swap(module._modules[k], v)  # type: ignore[arg-type]
        else:
            old[k] = parameters[k]
            parameters[k] = v
    return old


def fixtures(shape: str, form: int = 0) -> dict[str, Any]:
    """Build the variables of the loops; the collections are built from the same tensors."""
    d, e = plain(shape, form), plain(shape, form)
    index, mask = torch.tensor([2, 0]), torch.tensor([True, False, True, True])
    model = module_of(d)
    flat_d = flattened(d, "")
    top = [k for k, v in d.items() if not isinstance(v, dict)]
    return {
        "d": d,
        "e": e,
        "flat_d": flat_d,
        "state_d": {k: v.clone() for k, v in flat_d.items()},
        "row_d": mapped(lambda v: v[0].clone(), e),
        "ones_d": mapped(torch.ones_like, e),
        "some_d": {k: e[k].clone() for k in top[: len(top) // 2]},
        "buffer_d": mapped(lambda v: v.new_zeros(SLOTS, *v.shape[1:]), d),
        "turn": itertools.cycle(range(SLOTS)),
        "both": [d, e],
        "batch": torch.Size(BATCH),
        "place": index.device.type,
        "key": top[0],
        "deep": ("n", "m", "c0"),
        "x": leaf(),
        "index": index,
        "index2": index[:, None].expand(2, 2),
        "mask": mask,
        "mask2": mask[:, None].expand(BATCH),
        "half": top[: len(top) // 2] + ([("n", "b0")] if shape == "nest" else []),
        "top_half": top[: len(top) // 2],
        "function": lambda v: v + 1,
        "named": lambda _, v: v + 1,
        "model": model,
        "swap": swap,
        "old_d": mapped(lambda v: nn.Parameter(v.clone()), d),
        "truths": [v == v for v in leaves(d)],
        "leaves": leaves,
        "rebuilt": rebuilt,
        "flattened": flattened,
        "OrderedDict": OrderedDict,
        "prefix": "",
        "torch": torch,
        "tree_map": torch.utils._pytree.tree_map,
    }


def point_class(lib: ModuleType) -> Any:
    """Define a tensorclass with the fields of the smallest shape."""
    base = import_module("td_tensorclass" if lib.__name__ == "td_core" else lib.__name__).TensorClass
    return type(base)("Point", (base,), {"__annotations__": dict.fromkeys(plain("10 leaves"), torch.Tensor)})


COLLECTIONS: dict[str, Callable[[ModuleType, dict[str, Any]], Any]] = {
    "TensorDict": lambda lib, _: lib.TensorDict,
    "lazy_stack": lambda lib, _: lib.lazy_stack,
    "Point": lambda lib, _: point_class(lib),
    "tc": lambda lib, space: point_class(lib)(**space["d"], batch_size=BATCH),
    "td": lambda lib, space: lib.TensorDict(space["d"], BATCH),
    "td2": lambda lib, space: lib.TensorDict(mapped(torch.clone, space["e"]), BATCH),
    "other": lambda lib, space: lib.TensorDict(space["e"], BATCH),
    "ones": lambda lib, space: lib.TensorDict(mapped(torch.ones_like, space["d"]), BATCH),
    "row": lambda lib, space: lib.TensorDict(space["row_d"], BATCH[1:]),
    "lazy": lambda lib, space: lib.lazy_stack([lib.TensorDict(space[k], BATCH) for k in ("d", "e")]),
    "flat": lambda lib, space: lib.TensorDict(space["flat_d"], BATCH),
    "placed": lambda lib, space: lib.TensorDict(space["d"], BATCH, device=space["place"]),
    "truth": lambda lib, space: lib.TensorDict(mapped(lambda v: v == v, space["d"]), BATCH),
    "state": lambda lib, space: lib.TensorDict(space["d"], BATCH).state_dict(),
    "buffer": lambda lib, space: lib.TensorDict(space["buffer_d"], (SLOTS, *BATCH[1:])),
    "box": lambda lib, space: lib.TensorDict(space["d"], BATCH).consolidate(),
    "box2": lambda lib, space: lib.TensorDict(space["e"], BATCH).consolidate(),
    "fresh": lambda lib, space: lib.TensorDict(space["e"]),
    "params": lambda lib, space: lib.TensorDict(mapped(lambda v: nn.Parameter(v.clone()), space["d"])),
}
"""Functions that build the other variables of the calls, which depend on the library."""


def contestant(row: Row, lib: ModuleType, shape: str, form: int = 0) -> Callable[[], Any]:
    """Build the call of a row on new collections of one library."""
    space = fixtures(shape, form)
    words = set(re.findall(r"\w+", row.call))
    return function_of(row.call, space | {k: COLLECTIONS[k](lib, space) for k in words & COLLECTIONS.keys()})


def alternate(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that makes the calls in turn; of one call, the call itself."""
    if len(calls) == 1:
        return calls[0]

    def call() -> None:
        for each in calls:
            each()

    return call


def function_of(body: str, space: dict[str, Any], arguments: str = "") -> Callable[[], Any]:
    """Compile the body of a function. All ``arguments`` have defaults, which recursive calls override."""
    text = "\n    ".join(body.strip().splitlines())
    exec(f"def loop({arguments}):\n    {text}", space)
    made: Callable[[], Any] = space["loop"]
    return made


def loops(row: Row, space: dict[str, Any], nested: bool) -> list[Callable[[], Any]]:
    """Build the hand-written forms of a row."""
    found = []
    arguments = f"d=d, e={row.second}, prefix=prefix"
    if row.leaf:
        text = re.sub(r"\bw\b", "e[k]", row.leaf)
        if nested:
            inner = "loop(v, e[k])" if text != row.leaf else "loop(v)"
            text = f"{inner} if v.__class__ is dict else {text}"
        body = f"return {{k: {text} for k, v in d.items()}}"
        found.append(function_of(body, dict(space), arguments))
    if row.foreach:
        collect = "leaves({})" if nested else "list({}.values())"
        build = "rebuilt(d, iter(out))" if nested else "dict(zip(d, out))"
        body = f"vs = {collect.format('d')}\n"
        if "ws" in row.foreach:
            body += f"ws = {collect.format('e')}\n"
        if "_(vs, ws)" in row.foreach:
            # An in-place operation that fails must not have written anything, so the loop checks first too.
            body += "if not all(map(torch.Tensor.is_same_size, vs, ws)): raise ValueError\n"
        body += row.foreach if "_(" in row.foreach else f"out = {row.foreach}\nreturn {build}"
        found.append(function_of(body, dict(space), arguments))
    if row.loop:
        if row.name == "state_dict":
            arguments += ", out=None"
        found.append(function_of(row.loop, dict(space), arguments))
    return found


@dataclass
class Result:
    """Result of one row on one shape: median times in microseconds, and medians of the ratios of rounds."""

    shape: str
    row: str
    kind: str
    ours: float
    loop: float
    reference: float | None
    ours_over_loop: float
    reference_over_ours: float | None


def result_of(shape: str, row: Row, samples: list[list[float]], libraries: int) -> Result:
    """Compute the result from the samples of td, of tensordict if ``libraries`` is 2, and of the loops."""
    ours, loop = samples[0], min(samples[libraries:], key=statistics.median)
    reference = samples[1] if libraries > 1 else None
    return Result(
        shape,
        row.name,
        row.kind,
        statistics.median(ours),
        statistics.median(loop),
        statistics.median(reference) if reference else None,
        statistics.median(map(truediv, ours, loop)),
        statistics.median(map(truediv, reference, ours)) if reference else None,
    )


def clock_of_gpu() -> float:
    """Wait until the GPU is idle, and return the time."""
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    """Return the mean time of ``count`` calls, in seconds."""
    repeat = range(count)
    start = clock()
    for _ in repeat:
        function()
    return (clock() - start) / count


def calibrated(function: Callable[[], Any], clock: Callable[[], float]) -> int:
    """Return the number of calls that one sample needs."""
    function()
    once = min(timed(function, 3, clock) for _ in range(9))
    return max(4, math.ceil(SLICE_OF_TIME / once))


def measure(
    contestants: list[Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> list[list[float]]:
    """Measure the contestants alternately; return the microseconds of each one in each round."""
    counts = [calibrated(function, clock) for function in contestants]
    samples: list[list[float]] = [[] for _ in contestants]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = range(len(contestants))
            for i in order if number % 2 else reversed(order):
                contestants[i]()  # warm-up: the allocator has released memory since the last call
                samples[i].append(timed(contestants[i], counts[i], clock))
    finally:
        gc.enable()
    return [[seconds * 1e6 for seconds in of_one] for of_one in samples]


def run(
    rows: list[Row], shapes: list[str], rounds: int, libraries: list[ModuleType], device: torch.device
) -> Iterator[Result]:
    """Measure each row on each shape, and yield the results."""
    # CPU time of this thread, so that other processes do not affect the result.
    clock = time.thread_time if device.type == "cpu" else clock_of_gpu
    for shape in shapes:
        for row in rows:
            if row.shapes not in shape:
                continue
            with torch.device(device):
                forms = range(row.turns)
                made = [alternate([contestant(row, lib, shape, form) for form in forms]) for lib in libraries]
                spaces = [fixtures(shape, form) for form in forms]
                hand = [
                    alternate(list(calls))
                    for calls in zip(*[loops(row, space, shape == "nest") for space in spaces])
                ]
            yield result_of(shape, row, measure([*made, *hand], rounds, clock), len(made))


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(ratios) if ratios else math.nan


def line(result: Result) -> str:
    """Format one row of the table."""
    ratio, gain = result.ours_over_loop, result.reference_over_ours
    late = result.kind == "torch" and ratio > 1.5
    lost = gain is not None and gain < (1.5 if result.kind == "dict" else 0.95)
    marks = ("  slow beside the loop" if late else "") + ("  slow beside the reference" if lost else "")
    numbers = f"{result.loop:9.2f} {result.ours:9.2f} {result.reference or math.nan:9.2f}"
    return f"{result.row:20} {result.kind:6}{numbers} {ratio:7.2f} {gain or math.nan:8.2f}{marks}"


def summary(results: list[Result]) -> list[str]:
    """Format the geometric means for each shape and for all shapes."""
    lines = []
    for shape in [*dict.fromkeys(r.shape for r in results), "all"]:
        of_shape = [r for r in results if shape in ("all", r.shape)]
        torch_rows = mean([r.ours_over_loop for r in of_shape if r.kind == "torch"])
        gains = [r.reference_over_ours for r in of_shape if r.reference_over_ours]
        dict_gains = [r.reference_over_ours for r in of_shape if r.kind == "dict" and r.reference_over_ours]
        lines.append(
            f"{shape:11} torch rows {torch_rows:.2f} of the loop; {mean(gains):.2f} times the reference "
            f"(dict rows {mean(dict_gains):.2f}, slowest row {min(gains, default=math.nan):.2f})"
        )
    return lines


def main() -> None:
    """Measure, and print the table and the means."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", default="", help="regular expression of the rows to measure")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--device", type=torch.device, default="cpu", help="where the leaves lie: cpu or cuda"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = [import_module("td_core")]
    try:
        libraries.append(import_module("tensordict"))
    except ModuleNotFoundError:
        print("tensordict is not installed: its columns stay empty")
    rows = [row for row in ROWS if re.search(options.rows, row.name)]
    results: list[Result] = []
    for result in run(rows, list(options.shapes), options.rounds, libraries, options.device):
        if not results or results[-1].shape != result.shape:
            print(f"\n{result.shape}\n{'':26}   loop µs   ours µs    ref µs  / loop  ref / ours")
        print(line(result), flush=True)
        results.append(result)
    print()
    print(*summary(results), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
