"""Train one module on two ranks in three ways, and compare with one process; run by torchrun in a test."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from td_core import TensorDict
from td_nn import TensorDictModule, TensorDictSequential

STEPS = 3


def make_model() -> TensorDictSequential:
    """Build the same model in every process."""
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(4, 8), ["x"], ["h"]),
        TensorDictModule(nn.Tanh(), ["h"], ["h"]),
        TensorDictModule(nn.Linear(8, 2), ["h"], [("out", "y")]),
    )


def train(model: nn.Module, data: TensorDict, by_keyword: bool) -> float:
    """Train a model and return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        result = model(x=data["x"])[-1] if by_keyword else model(data.copy())["out", "y"]
        loss = (result - data["target"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def main() -> int:
    """Return 0 if the trained parameters equal those of training in one process."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = TensorDict({"x": torch.randn(8, 4), "target": torch.randn(8, 2)}, [8])
    mine = data.chunk(ranks)[rank]
    alone = make_model()
    train(alone, data, False)
    expected = TensorDict.from_module(alone).data
    worst = 0.0
    for by_keyword in (False, True):
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        train(wrapped, mine, by_keyword)
        got = TensorDict.from_module(wrapped.module).data
        worst = max(worst, float((got - expected).abs().max().max(reduce=True)))
        sharded = make_model()
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        train(sharded, mine, by_keyword)
        for value, right in zip(sharded.state_dict().values(), alone.state_dict().values()):
            worst = max(worst, float((value.full_tensor() - right).abs().max()))
    dist.destroy_process_group()
    if rank == 0:
        print(f"{ranks} ranks, largest difference {worst:.1e}", flush=True)
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # fully_shard of torch 2.13 keeps the group alive, whose threads can abort the process while the interpreter exits.
    os._exit(main())
