"""Samplers and a network of ranks, for the tests of order and resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from td_core import TensorDict
from td_data import (
    BlockSampler,
    Loader,
    MixtureSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

ROWS = 103


def make_data(rows: int = ROWS) -> TensorDict:
    """Return rows that have their number, and a nested entry."""
    return TensorDict({"row": torch.arange(rows), "n": {"x": torch.arange(rows * 2.0).view(rows, 2)}}, [rows])


#: Samplers of ROWS rows, by name.
SAMPLERS: dict[str, Any] = {
    "sequential": lambda rows: SequentialSampler(rows),
    "random": lambda rows: RandomSampler(rows, seed=3),
    "replacement": lambda rows: RandomSampler(rows, replacement=True, num_samples=rows + 5, seed=3),
    "passes": lambda rows: RandomSampler(rows, num_samples=2 * rows + 5, seed=3),
    "weighted": lambda rows: WeightedRandomSampler(torch.arange(rows) + 1.0, rows, seed=3),
    "weighted once": lambda rows: WeightedRandomSampler(torch.arange(rows) + 1.0, rows, False, seed=3),
    "blocks": lambda rows: BlockSampler([range(i, min(i + 7, rows)) for i in range(0, rows, 7)], lanes=12),
    "ordered blocks": lambda rows: BlockSampler([range(rows)], shuffle=False, lanes=12),
    "mixture": lambda rows: MixtureSampler([rows // 3, rows - rows // 3], [1, 2], run=4, seed=3),
}


def take_rows(batches: Any) -> list[Tensor]:
    """Return the numbers of the rows of each batch."""
    return [batch["row"] for batch in batches]


def run_ranks(
    data: Any, world: int, batch_size: int, state: Any = None, **options: Any
) -> list[list[Tensor]]:
    """Return the batches of each rank in one epoch."""
    found = []
    for rank in range(world):
        options["sampler"] = options["make"]() if "make" in options else options.get("sampler")
        chosen = {name: value for name, value in options.items() if name != "make"}
        loader = Loader(data, batch_size, rank=rank, world_size=world, prefetch=0, **chosen)
        if state is not None:
            loader.load_state_dict(state)
        found.append(take_rows(loader))
    return found


def join_ranks(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return the batches of all ranks together, concatenated by rank."""
    steps = max(map(len, ranks), default=0)
    return [torch.cat([rank[step] for rank in ranks if step < len(rank)]) for step in range(steps)]


def iterate(sampler: Sampler, epoch: int, page: int = 17) -> Iterator[int]:
    """Iterate over the positions of an epoch."""
    order, count = sampler.order(epoch), len(sampler)
    for start in range(0, count, page):
        yield from order(start, min(start + page, count)).tolist()
