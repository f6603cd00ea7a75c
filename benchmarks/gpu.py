"""Measure operations between host, GPU and files with td, with tensordict, and with a loop over a dict.

Each number is a median over rounds in which the contestants alternate; a call ends when the GPU is idle. No result makes
the script fail. ``ops.py --device cuda`` measures operations on the GPU only.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import td_core
import td_distributed  # noqa: F401 - the import adds methods to collections
import td_memmap  # noqa: F401
import td_nn

try:
    import tensordict
    import tensordict.nn
except ModuleNotFoundError:
    tensordict = None

Leaves = dict[str, torch.Tensor]
Call = Callable[[Any], Any]

TREES = {
    "200 leaves of 16 floats": lambda: {str(i): torch.randn(16) for i in range(200)},
    "20 leaves of 4 MB": lambda: {str(i): torch.randn(1 << 20) for i in range(20)},
}
ROWS = 4096


def moves(folder: Path) -> Iterator[tuple[str, Call, Call, Callable[[Leaves], Any] | None]]:
    """Yield (name, function that prepares a CPU collection, function to time on its result, loop over a dict or None)."""

    def there(td: Any) -> Any:
        return td.to("cuda")

    def pair(td: Any) -> Any:
        return there(td), there(td)

    def packed_pair(td: Any) -> Any:
        return there(td).consolidate(), there(td).consolidate()

    def saved(td: Any) -> tuple[Any, str]:
        at = there(td), tempfile.mkdtemp(dir=folder)
        at[0].memmap(at[1])
        return at

    def to_dict(d: Leaves) -> Any:
        return {k: v.to("cuda") for k, v in d.items()}

    yield "to the GPU", lambda td: td, there, to_dict
    yield "pinned, to the GPU", lambda td: td.pin_memory(), there, None
    yield "to the host", there, lambda td: td.cpu(), None
    yield "consolidate there", there, lambda td: td.consolidate(), None
    yield "consolidate onto the GPU", lambda td: td, lambda td: td.consolidate(device="cuda"), None
    yield "consolidate onto the host", there, lambda td: td.consolidate(device="cpu"), None
    yield "consolidated, to the GPU", lambda td: td.consolidate(), there, None
    yield "update_ from the GPU", pair, lambda two: two[0].update_(two[1]), None
    yield "packed: mul_", packed_pair, lambda two: two[0].mul_(1.0), None
    yield "packed: lerp_", packed_pair, lambda two: two[0].lerp_(two[1], 0.1), None
    yield "packed: update_", packed_pair, lambda two: two[0].update_(two[1]), None
    yield "packed: zero_", packed_pair, lambda two: two[0].zero_(), None
    yield "norm", there, lambda td: td.norm(), None
    yield "memmap", saved, lambda at: at[0].memmap(at[1]), None
    yield "memmap, 4 threads", saved, lambda at: at[0].memmap(at[1], num_threads=4), None
    yield "load_memmap", saved, lambda at: at[0].load_memmap(at[1], device=torch.device("cuda")), None


def indices() -> dict[str, Any]:
    """Return indices of rows, by a name for the table."""
    rows, mask = torch.randint(0, ROWS, (256,)), torch.rand(ROWS) < 0.1
    return {
        "a list": rows.tolist(),
        "positions of the host": rows,
        "positions of the GPU": rows.cuda(),
        "a mask of the host": mask,
        "a mask of the GPU": mask.cuda(),
    }


def graphs() -> Iterator[tuple[str, list[Call | None], Call]]:
    """Yield (name, calls of each library, hand-written call) for modules in CUDA graphs."""
    network = torch.nn.Sequential(
        *[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    )
    network = network.cuda().requires_grad_(False)
    x = torch.randn(32, 64, device="cuda")
    static = x.clone()
    network(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = network(static)

    def replay(_: Any) -> Any:
        static.copy_(x)
        graph.replay()
        return result.clone()

    pairs = [(td_core, td_nn)] if tensordict is None else [(td_core, td_nn), (tensordict, tensordict.nn)]
    with_tensors: list[Call | None] = []
    with_collections: list[Call | None] = []
    for lib, modules in pairs:
        data = lib.TensorDict({"x": x}, batch_size=[32])
        on_tensors = modules.CudaGraphModule(network, warmup=3)
        on_data = modules.CudaGraphModule(modules.TensorDictModule(network, ["x"], ["y"]), warmup=3)
        for _ in range(4):
            on_tensors(x), on_data(data)
        with_tensors.append(lambda _, call=on_tensors: call(x))
        with_collections.append(lambda _, call=on_data, data=data: call(data))
    missing: list[Call | None] = [None] * (2 - len(pairs))
    yield "a function of a tensor", with_tensors + missing, replay
    yield "a module of a collection", with_collections + missing, replay


def measured(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median time of each call, in milliseconds."""
    samples: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, found in zip(calls, samples, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = call()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
            del result
    return [statistics.median(found) * 1e3 for found in samples]


def show(name: str, calls: list[Callable[[], Any] | None], rounds: int) -> None:
    """Print one row: the loop, td and tensordict; nan for a missing one."""
    times = iter(measured([call for call in calls if call is not None], rounds))
    ours, reference, loop = (float("nan") if call is None else next(times) for call in calls)
    print(f"{name:40}{loop:10.3f}{ours:10.3f}{reference:10.3f}{reference / ours:12.2f}", flush=True)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", help="where files are written; a temporary folder by default")
    options = parser.parse_args()
    rounds = options.rounds
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device on this machine")
    libraries = [td_core] if tensordict is None else [td_core, tensordict]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for title, make in TREES.items():
            print(f"\n{title}\n{'':40}{'loop ms':>10}{'ours ms':>10}{'ref ms':>10}{'ref / ours':>12}")
            for name, prepare, call, loop in moves(folder):
                made = [prepare(lib.TensorDict(make())) for lib in libraries]
                calls: list[Any] = [lambda x=x: call(x) for x in made] + [None] * (2 - len(made))  # noqa: B023
                d = make()
                show(name, [*calls, None if loop is None else lambda: loop(d)], rounds)  # noqa: B023
    finally:
        shutil.rmtree(folder)
    print(f"\n256 of {ROWS} rows of 20 leaves on the GPU")
    d = {str(i): torch.randn(ROWS, 32, device="cuda") for i in range(20)}
    made = [lib.TensorDict(d, [ROWS]) for lib in libraries]
    for name, index in indices().items():
        calls = [lambda x=x: x[index] for x in made] + [None] * (2 - len(made))  # noqa: B023
        show(f"read by {name}", [*calls, lambda: {k: v[index] for k, v in d.items()}], rounds)  # noqa: B023
        calls = [lambda x=x: x.__setitem__(index, 1.0) for x in made] + [None] * (2 - len(made))  # noqa: B023
        show(f"write by {name}", [*calls, None], rounds)
    print("\nfour small layers in a CUDA graph")
    for name, calls_of_graph, by_hand in graphs():
        many = [None if call is None else partial(repeat, call) for call in calls_of_graph]
        show(f"{name}, 100 times", [*many, partial(repeat, by_hand)], rounds)


def repeat(call: Call) -> None:
    """Run ``call`` 100 times."""
    for _ in range(100):
        call(None)


if __name__ == "__main__":
    main()
