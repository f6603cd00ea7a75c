"""Accelerate with batches that are collections, in two processes: prepare, dispatch_batches, gather, slice_tensors."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from typing import Any

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, slice_tensors
from report import report
from torch import nn
from torch.utils.data import DataLoader

import td_core
from td_core import TensorDict, collate

warnings.simplefilter("ignore")
RANKS = 2


def make_data() -> TensorDict:
    """Build the rows."""
    x = torch.arange(16.0).view(8, 2)
    return TensorDict({"x": x, "n": {"y": x.sum(1, keepdim=True)}}, batch_size=[8])


def as_dict(rows: Any) -> dict[str, Any]:
    """Collate rows to a plain dict, which every library takes apart."""
    return collate(rows).to_dict()


def train(config: DataLoaderConfiguration, collate_fn: Any) -> Any:
    """Train for one epoch; return what this rank received, and whether all ranks have the same parameters."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = DataLoader(make_data(), batch_size=2, collate_fn=collate_fn)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["x"]), batch["n"]["y"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([type(batch).__name__, list(getattr(batch, "batch_size", ())), batch["x"][:, 0].tolist()])
    weights = accelerator.gather(next(model.parameters()).data)
    return [seen, bool((weights[0] == weights[1]).all())]


def run(rank: int, port: int) -> None:
    """Run all cases on one rank."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="1",
    )  # fmt: skip
    whole, halves = (
        DataLoaderConfiguration(dispatch_batches=False),
        DataLoaderConfiguration(dispatch_batches=True),
    )
    data = make_data()
    report(f"{rank} prepare", train(whole, collate))
    report(f"{rank} dispatch dicts", train(halves, as_dict))
    report(f"{rank} slice_tensors", list(slice_tensors(data, slice(0, 2)).shape))
    td_core.count_as_mapping()
    sliced = slice_tensors(data, slice(0, 2))
    report(f"{rank} slice_tensors, mapping", list(sliced["n", "y"].shape), list(sliced.batch_size))
    report(f"{rank} slice_tensors, size set", list(sliced.auto_batch_size_(1).batch_size))
    report(f"{rank} prepare, mapping", train(whole, collate))


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port,), nprocs=RANKS)
    sys.exit(0)
