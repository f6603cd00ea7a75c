"""Data-parallel training by hand: each process trains on a part of the data, and one call averages the gradients.

    torchrun --nproc-per-node 2 examples/data_parallel.py

All ranks end with the same parameters. The program checks that a single process with all the data gets them too.
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
    """Build the model, with the same parameters in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data() -> TensorDict:
    """Build the whole data set."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return TensorDict({"input": inputs, "target": inputs.sin().sum(1, keepdim=True)}, batch_size=[SAMPLES])


def train(data: TensorDict, ranks: int) -> tuple[TensorDict, float]:
    """Train a model on ``data``; return its parameters and the last loss."""
    model = make_model()
    params = TensorDict.from_module(model)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(data["input"]), data["target"])
        model.zero_grad()
        loss.backward()
        grads = params.grad
        if ranks > 1:
            # One bucket for all layers. If the model of a rank differs, all ranks raise an error that names the layer.
            grads.all_reduce()
            grads /= ranks
        params.data.sub_(grads * 0.1)
    return params.data, loss.item()


def main() -> int:
    """Train on all ranks, compare with one process, and return the exit status."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Only rank 0 has the data; each rank receives a part.
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
