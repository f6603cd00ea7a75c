"""Measure the stores beside the raw library on the same bytes, in its fastest spelling, and beside tensordict.

The contestants alternate in one process. Each time is the least of the rounds, after one round that is not counted; the
ratios are of these. Files are written without sync, so saves write to the page cache, and loads map pages in it. No result
makes the script fail.

Run ``python benchmarks/stores.py --help``; columns of libraries that are not installed stay empty.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

import td_core
from td_core import TensorDict

ROWS = 100_000
Contestants = dict[str, Callable[[], Any]]


def optional(name: str) -> Any:
    """Import a module, or return None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ModuleNotFoundError:
            return None


def transformer() -> dict[str, torch.Tensor]:
    """Build the parameters of ``torch.nn.Transformer``: 184 tensors, 177 MB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: leaf.detach() for name, leaf in torch.nn.Transformer().state_dict().items()}


def make_small() -> dict[str, torch.Tensor]:
    """Build 2,000 tensors of 1 kB."""
    return {f"g{i}.l{j}": torch.randn(256) for i in range(40) for j in range(50)}


def nest(flat: dict[str, torch.Tensor], module: Any) -> Any:
    """Build a collection from names with dots."""
    td = module.TensorDict()
    for name, leaf in flat.items():
        td[tuple(name.split("."))] = leaf
    return td


def measure(contestants: Contestants, rounds: int) -> dict[str, float]:
    """Return the least time of each contestant in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            gc.collect()
            start = time.perf_counter()
            result = run()
            times[name].append((time.perf_counter() - start) * 1e3)
            del result
    return {name: min(found[1:]) for name, found in times.items()}


def safetensors_rows(folder: str) -> dict[str, Contestants]:
    """Return the contestants of the format ``"safetensors"`` by row of the table."""
    raw, reference = optional("safetensors.torch"), optional("tensordict")
    rows: dict[str, Contestants] = {}
    for name, flat in (("transformer", transformer()), ("2000 small", make_small())):
        paths = {who: os.path.join(folder, f"{name} {who}.safetensors") for who in ("raw", "ours", "ref")}
        ours = nest(flat, td_core)
        save: Contestants = {"ours": lambda td=ours, p=paths: td.to_safetensors(p["ours"])}
        load: Contestants = {"ours": lambda p=paths: td_core.load(p["ours"])}
        read: Contestants = {"ours": lambda p=paths: td_core.load(p["ours"], strategy="read")}
        if raw is not None:
            # save_file checks for shared memory, which a raw user with a state dict needs as well.
            save["raw"] = lambda flat=flat, p=paths: raw.save_file(flat, p["raw"])
            load["raw"] = lambda p=paths: raw.load_file(p["raw"])
            read["raw"] = lambda p=paths: {key: leaf.clone() for key, leaf in raw.load_file(p["raw"]).items()}
        if reference is not None:
            theirs = nest(flat, reference)
            save["ref"] = lambda td=theirs, p=paths: reference.to_safetensors(td, p["ref"])
            load["ref"] = lambda p=paths: reference.from_safetensors(p["ref"])
        rows[f"save {name}"], rows[f"load {name}, mapped"], rows[f"load {name}, read"] = save, load, read
        rows[f"open {name}"] = {
            "ours": lambda p=paths: td_core.open(p["ours"]),
            **{k: load[k] for k in load if k != "ours"},
        }
    return {**rows, **random_rows(folder, raw)}


def random_rows(folder: str, raw: Any) -> dict[str, Contestants]:
    """Return the contestants that read 256 random rows. The raw library is compared with the rows in memory."""
    path = os.path.join(folder, "rows.safetensors")
    memory = TensorDict({"x": torch.randn(ROWS, 64)}, [ROWS])
    memory.to_safetensors(path)
    opened, writable = td_core.open(path), td_core.open(path, mode="r+")
    index = torch.randint(ROWS, (256,), generator=torch.Generator().manual_seed(0))
    rows: dict[str, Contestants] = {
        "256 rows of 100,000, opened": {"ours": lambda: opened[index], "raw": lambda: memory[index]},
        "256 rows of 100,000, opened r+": {"ours": lambda: writable[index], "raw": lambda: memory[index]},
        "256 rows of 100,000, open and read": {
            "ours": lambda: td_core.load(path, rows=index),
            **({} if raw is None else {"raw": lambda: raw.load_file(path)["x"][index]}),
        },
    }
    return rows


def save_with_tensorstore(stores: Any, flat: dict[str, torch.Tensor], path: str) -> None:
    """Write tensors as arrays of one chunk, all at the same time."""
    opened = [
        stores.open(
            {
                "driver": "zarr3",
                "kvstore": {
                    "driver": "file",
                    "path": f"{path}/{name.replace('.', '/')}/",
                    "file_io_sync": False,
                },
                "metadata": {"shape": list(leaf.shape), "data_type": str(leaf.dtype).removeprefix("torch.")},
            },
            create=True,
        )
        for name, leaf in flat.items()
    ]
    writes = [array.result().write(leaf.numpy()) for array, leaf in zip(opened, flat.values())]
    for write in writes:
        write.result()


def load_with_tensorstore(stores: Any, flat: dict[str, torch.Tensor], path: str) -> list[Any]:
    """Read the arrays, all at the same time."""
    specs = [
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name.replace('.', '/')}/"}}
        for name in flat
    ]
    reads = [array.result().read() for array in [stores.open(spec) for spec in specs]]
    return [read.result() for read in reads]


def name_new_groups(folder: str, name: str) -> Iterator[str]:
    """Yield a new path for each round: some file systems take milliseconds to remove each directory of an old group."""
    for i in itertools.count():
        yield os.path.join(folder, f"new {name} {i}.zarr")


def zarr_rows(folder: str) -> dict[str, Contestants]:
    """Return the contestants of the format ``"zarr"``. The raw library is tensorstore, the fastest one."""
    stores, reference = optional("tensorstore"), optional("tensordict")
    if optional("td_zarr") is None or optional("zarr") is None:
        return {}
    rows: dict[str, Contestants] = {}
    for name, flat in (("transformer", transformer()), ("2000 small", make_small())):
        paths = {who: os.path.join(folder, f"{name} {who}.zarr") for who in ("raw", "ours", "ref")}
        ours = nest(flat, td_core)
        new = name_new_groups(folder, name)
        save: Contestants = {"ours": lambda td=ours, p=new: td_core.save(td, next(p), format="zarr")}
        td_core.save(ours, paths["ours"], format="zarr")
        load: Contestants = {"ours": lambda p=paths: td_core.load(p["ours"])}
        read: Contestants = {"ours": lambda p=paths: td_core.load(p["ours"]).clone()}
        if stores is not None:
            save["raw"] = lambda flat=flat, p=new: save_with_tensorstore(stores, flat, next(p))
            save_with_tensorstore(stores, flat, paths["raw"])
            read["raw"] = lambda flat=flat, p=paths: load_with_tensorstore(stores, flat, p["raw"])
        if reference is not None and name == "transformer":  # 2,000 arrays take it 8 seconds
            theirs = nest(flat, reference)
            save["ref"] = lambda td=theirs, p=new: td.to_zarr(next(p))
            theirs.to_zarr(paths["ref"])
            read["ref"] = lambda p=paths: reference.TensorDict.from_zarr(p["ref"]).to_tensordict()
        rows[f"save zarr {name}"], rows[f"load zarr {name}, mapped"] = save, load
        rows[f"load zarr {name}, read"] = read
        rows[f"open zarr {name}"] = {"ours": lambda p=paths: td_core.open(p["ours"])}
    return {**rows, **random_zarr_rows(folder, stores, reference)}


def random_zarr_rows(folder: str, stores: Any, reference: Any) -> dict[str, Contestants]:
    """Return the contestants that read 256 random rows, and one row; of one chunk beside the rows in memory."""
    memory = TensorDict({"x": torch.randn(ROWS, 64)}, [ROWS])
    index = torch.randint(ROWS, (256,), generator=torch.Generator().manual_seed(0))
    rows: dict[str, Contestants] = {}
    for name, options in (("one chunk", {}), ("chunks of 256", {"chunks": 256})):
        path = os.path.join(folder, f"rows {name}.zarr")
        td_core.save(memory, path, format="zarr", **options)
        opened = td_core.open(path)
        many: Contestants = {"ours": lambda td=opened: td[index]}
        one: Contestants = {"ours": lambda td=opened: td[7].clone()}
        if not options:
            many["raw"], one["raw"] = lambda: memory[index], lambda: memory[7].clone()
        elif stores is not None:
            array = stores.open(
                {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/x/"}}
            ).result()
            many["raw"] = lambda x=array: x[index.numpy()].read().result()
            one["raw"] = lambda x=array: x[7].read().result()
        if reference is not None:
            theirs = reference.TensorDict.from_zarr(path)
            many["ref"], one["ref"] = lambda td=theirs: td[index], lambda td=theirs: td[7].to_tensordict()
        rows[f"256 rows of 100,000, zarr, {name}"], rows[f"one row, zarr, {name}"] = many, one
    return rows


def save_with_h5py(raw: Any, flat: dict[str, torch.Tensor], path: str) -> None:
    """Write tensors as contiguous datasets."""
    with raw.File(path, "w") as file:
        for name, leaf in flat.items():
            file.create_dataset(name.replace(".", "/"), data=leaf.numpy())


def load_with_h5py(raw: Any, flat: dict[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Read the datasets into memory."""
    with raw.File(path) as file:
        return {name: torch.from_numpy(file[name.replace(".", "/")][()]) for name in flat}


def hdf5_rows(folder: str) -> dict[str, Contestants]:
    """Return the contestants of the format ``"hdf5"`` by row of the table. The raw library is h5py."""
    raw, reference = optional("h5py"), optional("tensordict")
    if optional("td_hdf5") is None or raw is None:
        return {}
    rows: dict[str, Contestants] = {}
    for name, flat in (("transformer", transformer()), ("2000 small", make_small())):
        paths = {who: os.path.join(folder, f"{name} {who}.h5") for who in ("raw", "ours", "ref")}
        ours = nest(flat, td_core)
        save: Contestants = {
            "ours": lambda td=ours, p=paths: td_core.save(td, p["ours"], format="hdf5"),
            "raw": lambda flat=flat, p=paths: save_with_h5py(raw, flat, p["raw"]),
        }
        read: Contestants = {
            "ours": lambda p=paths: td_core.load(p["ours"], strategy="read"),
            "raw": lambda flat=flat, p=paths: load_with_h5py(raw, flat, p["raw"]),
        }
        if reference is not None:
            theirs = nest(flat, reference)
            save["ref"] = lambda td=theirs, p=paths: td.to_h5(p["ref"]).close()
            read["ref"] = lambda p=paths: reference.TensorDict.from_h5(p["ref"]).to_tensordict()
        rows[f"save hdf5 {name}"], rows[f"load hdf5 {name}, read"] = save, read
        rows[f"load hdf5 {name}, mapped"] = {**read, "ours": lambda p=paths: td_core.load(p["ours"])}
        rows[f"load hdf5 {name}, opened"] = {
            **read,
            "ours": lambda p=paths: TensorDict.from_h5(p["ours"]).to_tensordict(),
        }
        rows[f"open hdf5 {name}"] = {"ours": lambda p=paths: td_core.open(p["ours"])}
    return {**rows, **random_hdf5_rows(folder, raw, reference)}


def random_hdf5_rows(folder: str, raw: Any, reference: Any) -> dict[str, Contestants]:
    """Return the contestants that read 256 random rows, and one row; of contiguous datasets beside the rows in memory."""
    memory = TensorDict({"x": torch.randn(ROWS, 64)}, [ROWS])
    index = torch.randint(ROWS, (256,), generator=torch.Generator().manual_seed(0))
    increasing = index.unique().numpy()
    rows: dict[str, Contestants] = {}
    for name, options in (
        ("contiguous", {}),
        ("chunks of 256", {"chunks": 256}),
        ("gzip", {"chunks": 256, "compression": "gzip", "compression_opts": 1}),
    ):
        path = os.path.join(folder, f"rows {name}.h5")
        td_core.save(memory, path, format="hdf5", **options)
        opened, dataset = td_core.open(path), raw.File(path)["x"]
        many: Contestants = {"ours": lambda td=opened: td[index], "raw": lambda: memory[index]}
        one: Contestants = {"ours": lambda td=opened: td[7].clone(), "raw": lambda: memory[7].clone()}
        if options:
            many["raw"], one["raw"] = lambda x=dataset: x[increasing], lambda x=dataset: x[7]
        if reference is not None:
            theirs = reference.TensorDict.from_h5(path)
            many["ref"] = lambda td=theirs: td[index].to_tensordict()
            one["ref"] = lambda td=theirs: td[7].to_tensordict()
        rows[f"256 rows of 100,000, hdf5, {name}"], rows[f"one row, hdf5, {name}"] = many, one
    return rows


def measure_import(rounds: int) -> tuple[float, float]:
    """Return the time of ``import td_core`` without and with the plugin, after ``import torch``, in milliseconds."""
    code = "import torch, time; s = time.perf_counter(); import td_core; print(time.perf_counter() - s)"
    found: dict[str, list[float]] = {"-safetensors": [], "": []}
    for _ in range(rounds):
        for plugins in found:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "TD_PLUGINS": plugins},
                capture_output=True,
                text=True,
                check=True,
            )
            found[plugins].append(float(done.stdout) * 1e3)
    return min(found["-safetensors"]), min(found[""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of the name of the rows to measure")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="stores-")
    try:
        print("| row | ours ms | raw ms | tensordict ms | ours / raw | ours / tensordict |")
        print("|---|---|---|---|---|---|")
        for name, contestants in {
            **safetensors_rows(folder),
            **zarr_rows(folder),
            **hdf5_rows(folder),
        }.items():
            if options.only not in name and not name.startswith("save"):
                continue
            times = measure(contestants, options.rounds)
            cells = [f"{times[who]:.2f}" if who in times else "" for who in ("ours", "raw", "ref")]
            cells += [f"{times['ours'] / times[who]:.2f}" if who in times else "" for who in ("raw", "ref")]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        without, with_plugin = measure_import(options.rounds)
        print(f"| import td_core | {with_plugin:.1f} | {without:.1f} | | {with_plugin / without:.2f} | |")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
