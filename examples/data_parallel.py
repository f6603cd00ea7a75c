"""Data-parallel training by hand: every process has its part of the data, gradients are averaged in one call.

    torchrun --nproc-per-node 2 examples/data_parallel.py

Each rank ends with the same parameters, which the program checks against a single process that sees all the data.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from td_core import TensorDict

STEPS = 20
SAMPLES = 240  # divides evenly among up to six ranks


def make_model() -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data() -> TensorDict:
    """Return all the data."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return TensorDict({"input": inputs, "target": inputs.sin().sum(1, keepdim=True)}, batch_size=[SAMPLES])


def train(data: TensorDict, ranks: int) -> tuple[TensorDict, float]:
    """Return the parameters and the last loss."""
    model = make_model()
    params = TensorDict.from_module(model)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(data["input"]), data["target"])
        model.zero_grad()
        loss.backward()
        grads = params.grad
        if ranks > 1:
            # One bucket for all layers. A rank whose model differed would make every rank raise, naming the layer.
            grads.all_reduce()
            grads /= ranks
        params.data.sub_(grads * 0.1)
    return params.data, loss.item()


def main() -> int:
    """Train on each rank and compare; return the exit status."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Rank 0 has the data; each rank gets its part.
    parts = list(make_data().chunk(ranks)) if rank == 0 else None
    mine = TensorDict().scatter(0, parts)
    params, _ = train(mine, ranks)
    alone, loss = train(make_data(), 1)
    same = all(torch.allclose(a, b) for a, b in zip(params.values(True, True), alone.values(True, True)))
    answers = TensorDict({"same": torch.tensor(same)}).all_gather()
    dist.destroy_process_group()
    if rank == 0:
        print(f"{ranks} ranks, loss {loss:.4f}; as one process with all the data: {same}.")
    return 0 if all(answer["same"] for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
