"""DistributedDataParallel of modules that take and return collections, on two ranks, with unused parameters too."""

from __future__ import annotations

import socket
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import td_core
from td_core import TensorDict
from td_nn import TensorDictModule

warnings.simplefilter("ignore")
RANKS = 2


class Partial(nn.Module):
    """A module of which each call uses one of two layers, and that returns a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, batch: TensorDict) -> TensorDict:
        """Write the prediction."""
        return batch.set("y", self.used(batch["x"]))


class Tensors(nn.Module):
    """The same module, which returns tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Partial()

    def forward(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Return the prediction in a dict."""
        return {"y": self.inner(batch)["y"]}


def train(model: nn.Module, rank: int, **options: Any) -> Any:
    """Train for three steps; return True if all ranks have the same gradients."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model, **options)
    try:
        for step in range(3):
            batch = TensorDict({"x": torch.full((4, 2), rank + step + 1.0)}, batch_size=[4])
            wrapped(batch)["y"].sum().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            means = [grad.clone() for grad in grads]
            for mean in means:
                dist.all_reduce(mean)
            if not all(torch.allclose(mean / RANKS, grad) for mean, grad in zip(means, grads, strict=True)):
                return "gradients differ"
            model.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:70]}"
    return f"{len(grads)} gradients"


def run(rank: int, port: int) -> None:
    """Run all cases on one rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    module = TensorDictModule(nn.Linear(2, 1), ["x"], ["y"])
    for name in ("plain", "mapping"):
        report(f"{rank} all used, {name}", train(module, rank))
        report(f"{rank} unused, {name}", train(Partial(), rank, find_unused_parameters=True))
        report(f"{rank} unused, tensors, {name}", train(Tensors(), rank, find_unused_parameters=True))
        td_core.count_as_mapping()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port,), nprocs=RANKS)
    sys.exit(0)
