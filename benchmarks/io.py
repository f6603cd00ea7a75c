"""Measure saving and loading with td, tensordict, safetensors and torch.save, relative to a floor.

The contestants alternate in one process. The *floor* of a save is a plain ``write()`` of the same bytes to the same number
of files; the floor of a read in memory is a copy. Each time is a median over the rounds; ``/ floor`` and ``ref / ours`` are
ratios of medians. Files are written without sync, so saves write to the page cache, and loads map pages in it. No result
makes the script fail.

Run ``python benchmarks/io.py --help``; columns of packages that are not installed stay empty.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pickle
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def optional(name: str) -> ModuleType | None:
    """Import a module, or return None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ModuleNotFoundError:
            return None


#: The libraries by column of the table; tensordict only if it is installed.
LIBRARIES: dict[str, Any] = {"ours": import_module("td_core")}
if (reference := optional("tensordict")) is not None:
    LIBRARIES["ref"] = reference
SAFETENSORS = optional("safetensors.torch")


def transformer() -> dict[str, Any]:
    """Build the parameters of ``torch.nn.Transformer`` as nested dicts: 184 leaves, 177 MB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.nn.Transformer()
    return nested({name: value.detach() for name, value in model.state_dict().items()})


def nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Convert a flat dict with dotted names to nested dicts."""
    root: dict[str, Any] = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            place = place.setdefault(part, {})
        place[last] = leaf
    return root


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "transformer": transformer,
    "2000 small": lambda: {f"g{i}": {f"l{j}": torch.randn(256) for j in range(50)} for i in range(40)},
    "32 large": lambda: {f"l{i}": torch.randn(8 << 20) for i in range(32)},
}
ROWS = 100_000


def leaves_of(tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return the leaves of nested dicts with their key paths."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += leaves_of(value, (*path, key))
        else:
            found.append(((*path, key), value))
    return found


class Bench:
    """Runner of the measurements, and their results."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.results: list[dict[str, Any]] = []

    def row(
        self, data: str, what: str, contestants: dict[str, Callable[[], Any]], before: Any = None
    ) -> None:
        """Run the contestants alternately, and print and store their median times."""
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(self.rounds):
            for name, call in contestants.items():
                if before is not None:
                    before(name)
                gc.collect()
                start = time.perf_counter()
                result = call()
                times[name].append(time.perf_counter() - start)
                del result
        medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        best = {name: min(values) * 1e3 for name, values in times.items()}
        self.results.append({"data": data, "row": what, "median_ms": medians, "best_ms": best})
        shown = "  ".join(f"{name} {value:.3f}" for name, value in medians.items())
        ours, floor, ref = medians["ours"], medians.get("floor"), medians.get("ref")
        ratios = f"{ours / floor:.2f} / floor  " if floor else ""
        ratios += f"ref / ours {ref / ours:.2f}  " if ref else ""
        if "safetensors" in medians:
            ratios += f"{ours / medians['safetensors']:.2f} / safetensors"
        print(f"{data:<12} {what:<22} ms: {shown}   [{ratios.strip()}]", flush=True)

    def path(self, name: str) -> Path:
        """Return the path that a contestant writes to."""
        return self.folder / name

    def clear(self, name: str) -> None:
        """Remove the files of a contestant."""
        shutil.rmtree(self.path(name), ignore_errors=True)
        self.path(name).unlink(missing_ok=True)


def write_floor(folder: Path, leaves: list[tuple[tuple[str, ...], Tensor]]) -> None:
    """Write the bytes of each leaf to a separate file, in the directories that a save would create."""
    folder.mkdir()
    made = {()}
    for path, leaf in leaves:
        for depth in range(1, len(path)):
            if path[:depth] not in made:
                made.add(path[:depth])
                folder.joinpath(*path[:depth]).mkdir()
        fd = os.open(folder.joinpath(*path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, leaf.reshape(-1).view(torch.uint8).numpy())
        os.close(fd)


def saves(bench: Bench, name: str, tree: dict[str, Any]) -> None:
    """Measure saving and loading one tree."""
    leaves = leaves_of(tree)
    flat = {".".join(path): leaf.contiguous() for path, leaf in leaves}
    tds = {column: library.TensorDict(tree, []) for column, library in LIBRARIES.items()}
    ours = tds["ours"]
    contestants: dict[str, Callable[[], Any]] = {
        "floor": lambda: write_floor(bench.path("floor"), leaves),
        **{column: partial(td.memmap, bench.path(column)) for column, td in tds.items()},
        "ours 4 threads": lambda: ours.memmap(bench.path("ours 4 threads"), num_threads=4),
        "ours tdz": lambda: ours.memmap(bench.path("ours tdz"), archive=True),
    }
    loads: dict[str, Callable[[], Any]] = {
        column: partial(library.TensorDict.load_memmap, bench.path(column))
        for column, library in LIBRARIES.items()
    }
    loads["ours tdz"] = lambda: LIBRARIES["ours"].TensorDict.load_memmap(bench.path("ours tdz"))
    if SAFETENSORS is not None:
        contestants["safetensors"] = lambda: SAFETENSORS.save_file(flat, bench.path("safetensors"))
        loads["safetensors"] = lambda: SAFETENSORS.load_file(bench.path("safetensors"))
    contestants["torch"] = lambda: torch.save(flat, bench.path("torch"))
    loads["torch mmap"] = lambda: torch.load(bench.path("torch"), mmap=True, weights_only=True)
    bench.row(name, "fresh save", contestants, bench.clear)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours.memmap(bench.path("ours"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{name:<12} {'peak memory of a save':<22} grew by {grown / 1024:.0f} MB")
    bench.row(name, "save over a save", {column: contestants[column] for column in tds})
    bench.row(name, "load", loads)
    for contestant in contestants:
        bench.clear(contestant)


def consolidated(bench: Bench, name: str, tree: dict[str, Any]) -> None:
    """Measure consolidating a tree in memory and in a file, and pickling it."""
    leaves = leaves_of(tree)
    flat = {".".join(path): leaf.contiguous() for path, leaf in leaves}
    tds = {column: library.TensorDict(tree, []) for column, library in LIBRARIES.items()}
    data = torch.cat([leaf.reshape(-1).view(torch.uint8) for _, leaf in leaves])
    memory = {"floor": data.clone, **{column: td.consolidate for column, td in tds.items()}}
    writes: dict[str, Callable[[], Any]] = {
        "floor": lambda: bench.path("floor").write_bytes(data.numpy()),
        **{column: partial(td.consolidate, bench.path(column)) for column, td in tds.items()},
    }
    reads: dict[str, Callable[[], Any]] = {
        column: partial(library.TensorDict.from_consolidated, bench.path(column))
        for column, library in LIBRARIES.items()
    }
    if SAFETENSORS is not None:
        writes["safetensors"] = lambda: SAFETENSORS.save_file(flat, bench.path("safetensors"))
        reads["safetensors"] = lambda: SAFETENSORS.load_file(bench.path("safetensors"))
    bench.row(name, "consolidate", memory)
    bench.row(name, "consolidate to a file", writes, bench.clear)
    bench.row(name, "from_consolidated", reads)
    for contestant in writes:
        bench.clear(contestant)
    packed = {column: td.consolidate() for column, td in tds.items()}
    for what, each in (("plain", tds), ("one storage", packed)):
        pickles = {key: pickle.dumps(td, 5) for key, td in each.items()}
        bench.row(name, f"pickle {what}", {key: partial(pickle.dumps, td, 5) for key, td in each.items()})
        bench.row(
            name, f"unpickle {what}", {key: partial(pickle.loads, text) for key, text in pickles.items()}
        )
        bench.row(name, f"out of band {what}", {key: partial(out_of_band, td) for key, td in each.items()})


def out_of_band(td: Any) -> Any:
    """Pickle with out-of-band buffers, as Ray does."""
    return pickle.dumps(td, 5, buffer_callback=[].append)


def rows_of(bench: Bench) -> None:
    """Measure creating a data set on disk, and reading rows of it."""
    datum = {"image": torch.zeros(3, 32, 32, dtype=torch.uint8), "label": torch.zeros((), dtype=torch.int64)}
    create = {
        column: partial(library.TensorDict(datum, []).expand(ROWS).memmap_like, bench.path(column))
        for column, library in LIBRARIES.items()
    }
    bench.row("rows", "memmap_like", create, bench.clear)
    sources = {column: make() for column, make in create.items()}
    for source in sources.values():
        source["image"].random_()
    plain = {key: leaf.clone() for key, leaf in sources["ours"].items()}
    picks = [torch.randint(ROWS, (256,)) for _ in range(20)]

    def single(source: Any) -> Callable[[], Any]:
        return lambda: [source[i] for i in range(0, ROWS, 97)]

    def random(source: Any) -> Callable[[], Any]:
        return lambda: [source[pick] for pick in picks]

    floor = {"floor": lambda: [{key: leaf[i] for key, leaf in plain.items()} for i in range(0, ROWS, 97)]}
    bench.row(
        "rows", f"{ROWS // 97 + 1} single rows", {**floor, **{name: single(x) for name, x in sources.items()}}
    )
    floor = {"floor": lambda: [{key: leaf[pick] for key, leaf in plain.items()} for pick in picks]}
    bench.row("rows", "20 x 256 random rows", {**floor, **{name: random(x) for name, x in sources.items()}})


def checkpoints(bench: Bench, name: str, layers: int, width: int) -> None:
    """Measure the checkpoint of a model and its optimizer; the floor is torch.save or torch.load of the same dict."""
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    td, floor = LIBRARIES["ours"], bench.path("floor")
    write = {"floor": partial(torch.save, tree, floor)}
    read: dict[str, Callable[[], Any]] = {"floor": partial(torch.load, floor)}
    for what, suffix in (("directory", ""), ("archive", ".tdz"), ("safetensors file", ".safetensors")):
        place = bench.path("checkpoint" + suffix)
        bench.row(name, f"save to a {what}", {"ours": partial(td.save, tree, place), **write}, trim_memory)
        bench.row(name, f"load from a {what}", {"ours": partial(td.load, place), **read}, trim_memory)


def trim_memory(_: str) -> None:
    """Give freed memory back to the system: the first write to new memory costs more than the copy of a leaf."""
    # Otherwise the contestant after another one with the same shapes would get memory that it need not touch first.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def main() -> None:
    """Run the measurements that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where to write; a temporary directory without it")
    parser.add_argument("--only", help="name of one data set")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), options.rounds)
        for name, make in DATA.items():
            if options.only in (None, name):
                tree = make()
                saves(bench, name, tree)
                consolidated(bench, name, tree)
        if options.only in (None, "rows"):
            rows_of(bench)
        for name, layers, width in (("small checkpoint", 100, 16), ("large checkpoint", 20, 1024)):
            if options.only in (None, name):
                checkpoints(bench, name, layers, width)
    if options.json:
        Path(options.json).write_text(json.dumps(bench.results, indent=1))


if __name__ == "__main__":
    main()
