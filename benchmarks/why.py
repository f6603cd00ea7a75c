"""The figures of the page "Why": what a user of dicts waits for, and the same with td, in one process, in turns.

    python benchmarks/why.py

Each row prints the medians of both ways in milliseconds, and their ratio. Compare the ratios, not the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset

from td_core import TensorDict
from td_data import Loader

ROWS = 20_000
Ways = tuple[Callable[[], object], Callable[[], object]]
#: By name of the row: a function that makes a dict's way and td's way.
COMPARISONS: dict[str, Callable[[], Ways]] = {}


def row(name: str) -> Callable[[Callable[[], Ways]], Callable[[], Ways]]:
    """Register a row."""

    def register(make: Callable[[], Ways]) -> Callable[[], Ways]:
        COMPARISONS[name] = make
        return make

    return register


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The data set that most programs write: tensors, of which it returns one row as a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return {key: tensor[position] for key, tensor in self.tensors.items()}


@row(
    "an epoch of shuffled batches of 256 rows: DataLoader over rows that are dicts / Loader over a collection"
)
def compare_loaders() -> Ways:
    tensors = {"obs": torch.randn(ROWS, 64), "reward": torch.randn(ROWS), "step": torch.arange(ROWS)}
    data = TensorDict(tensors, batch_size=[ROWS])
    return (
        lambda: sum(len(batch["obs"]) for batch in DataLoader(Rows(tensors), 256, shuffle=True)),
        lambda: sum(len(batch["obs"]) for batch in Loader(data, 256, shuffle=True)),
    )


@row("average of a model with 200 tensors: loop of lerp_ / lerp_ of a packed collection")
def compare_averages() -> Ways:
    fresh = {f"layer{i}": torch.randn(64) for i in range(200)}
    average = {key: leaf.clone() for key, leaf in fresh.items()}
    packed, other = TensorDict(fresh).consolidate(), TensorDict(fresh).consolidate()

    def loop() -> None:
        for key, leaf in average.items():
            leaf.lerp_(fresh[key], 0.01)

    return loop, lambda: packed.lerp_(other, 0.01)


def measure(way: Callable[[], object]) -> float:
    """Return the milliseconds that a way takes."""
    start = time.perf_counter()
    way()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print all rows."""
    torch.set_num_threads(1)
    print("| | dicts, ms | td, ms | ratio |\n|---|---|---|---|")
    for name, make in COMPARISONS.items():
        dicts, collections = make()
        dicts(), collections()
        times = [(measure(dicts), measure(collections)) for _ in range(9)]
        first, second = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {first:.2f} | {second:.2f} | {first / second:.0f} |", flush=True)


if __name__ == "__main__":
    main()
