"""Measure messages between two processes over gloo with td and with tensordict, relative to a floor.

The *floor* sends the same bytes as one tensor. The rows *send leaf by leaf* and *unchecked* use the wire format of
tensordict, which sends no structure, so that a mismatch hangs or is not detected; the other rows of td send and check the
structure. A round of sending goes to the peer and back, and its time is halved. The contestants alternate, and each time is
a median over the rounds. No result makes the script fail.

Run ``python benchmarks/distributed.py --help``; columns of a package that is not installed stay empty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Call = Callable[[], Any]

DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "200 small": lambda: {f"l{i:03}": torch.randn(16) for i in range(200)},
    "20 large": lambda: {f"l{i:02}": torch.randn(1 << 18) for i in range(20)},
}


def libraries() -> dict[str, Any]:
    """Return the installed libraries by column of the table."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for column, name in (("ours", "td_core"), ("ref", "tensordict")):
            try:
                found[column] = import_module(name)
            except ModuleNotFoundError:
                continue
    return found


def there_and_back(rank: int, send: Call, recv: Call) -> Call:
    """Build the call of one rank for an exchange from rank 0 to rank 1 and back."""
    return lambda: (send(), recv()) if rank == 0 else (recv(), send())


def contestants(rank: int, tree: dict[str, Any]) -> dict[str, tuple[int, dict[str, Call]]]:
    """Return (number of messages in a round, contestants) by row; both ranks build the same rows."""
    peer = 1 - rank
    flat = torch.cat(list(tree.values()))
    single = there_and_back(rank, lambda: dist.send(flat, peer), lambda: dist.recv(flat, peer))
    rows: dict[str, tuple[int, dict[str, Call]]] = {
        "send leaf by leaf": (2, {"floor": single}),
        "send": (2, {"floor": single}),
        "send consolidated": (2, {"floor": single}),
        "... unchecked": (2, {"floor": single}),
        "all_reduce": (1, {"floor": lambda: dist.all_reduce(flat)}),
        "broadcast": (1, {"floor": lambda: dist.broadcast(flat, 0)}),
        "all_gather": (
            1,
            {"floor": lambda: dist.all_gather([torch.empty_like(flat) for _ in range(2)], flat)},
        ),
    }
    for column, library in libraries().items():
        plain, packed = library.TensorDict(tree, []), library.TensorDict(tree, []).consolidate()
        wire = {"wire": "reference"} if column == "ours" else {}
        for row, td, options in (
            ("send leaf by leaf", plain, wire),
            ("send", plain, {}),
            ("send consolidated", packed, {"consolidated": True}),
            ("... unchecked", packed, {"consolidated": True, **wire}),
        ):
            rows[row][1][column] = there_and_back(
                rank, lambda td=td, o=options: td.send(peer, **o), lambda td=td, o=options: td.recv(peer, **o)
            )
        # Each round adds the tensors of both ranks, so only zeros stay finite.
        zeros = library.TensorDict({key: torch.zeros_like(value) for key, value in tree.items()}, [])
        rows["all_reduce"][1][column] = lambda td=zeros: td.all_reduce()
        rows["broadcast"][1][column] = lambda td=plain: td.broadcast(0)
        rows["all_gather"][1][column] = lambda td=plain: td.all_gather()
    return rows


def member(rank: int, store: str, rounds: int, into: Path | None) -> None:
    """Run one of the two processes. The first one prints the results and writes them as JSON to ``into``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    results = []
    for name, make in DATA.items():
        for row, (messages, calls) in contestants(rank, make()).items():
            times: dict[str, list[float]] = {column: [] for column in calls}
            for _ in range(rounds):
                for column, call in calls.items():
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    times[column].append((time.perf_counter() - start) / messages)
            medians = {column: statistics.median(each) * 1e3 for column, each in times.items()}
            results.append({"data": name, "row": row, "median_ms": medians})
            if rank == 0:
                report(name, row, medians)
    if rank == 0 and into is not None:
        into.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def report(name: str, row: str, medians: dict[str, float]) -> None:
    """Print one row."""
    shown = "  ".join(f"{column} {value:.3f}" for column, value in medians.items())
    ratios = f"{medians['ours'] / medians['floor']:.2f} / floor"
    if "ref" in medians:
        ratios += f"  ref / ours {medians['ref'] / medians['ours']:.2f}"
    print(f"{name:<10} {row:<18} ms: {shown}   [{ratios}]", flush=True)


def main() -> None:
    """Start both processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(member, (str(Path(folder) / "store"), options.rounds, options.json), nprocs=2)


if __name__ == "__main__":
    main()
