"""A parameter server and a worker, two processes on one machine.

The server owns the parameters. In each round it sends them as one message; the worker computes the gradient on its own
data and sends it back; the server takes a step. The program checks that the loss falls, and that both ends hold the
same parameters at the end.

    python examples/parameter_server.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from td_core import TensorDict

ROUNDS = 40
SERVER, WORKER = 0, 1


def make_model() -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def connect(rank: int, store: Path) -> None:
    """Join the group of the two processes."""
    dist.init_process_group("gloo", store.as_uri(), world_size=2, rank=rank)


def work(store: Path) -> None:
    """Answer parameters with gradients."""
    connect(WORKER, store)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 8, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True)
    model = make_model()
    params = TensorDict.from_module(model)
    for _ in range(ROUNDS):
        params.data.recv(SERVER)
        loss = nn.functional.mse_loss(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        # The receiver knows nothing about the answer: structure and content travel together.
        TensorDict({"loss": loss.detach(), "grad": params.grad}).init_remote(SERVER)
    dist.destroy_process_group()


def serve(store: Path) -> list[float]:
    """Send parameters, take a step for each gradient, and return the losses."""
    connect(SERVER, store)
    params = TensorDict.from_module(make_model()).data.clone()
    losses = []
    for _ in range(ROUNDS):
        params.send(WORKER, consolidated=True)
        answer = TensorDict.from_remote_init(WORKER)
        params.sub_(answer["grad"] * 0.1)
        losses.append(answer["loss"].item())
    dist.destroy_process_group()
    return losses


def main() -> int:
    """Start the worker, serve it, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        worker = mp.get_context("spawn").Process(target=work, args=(store,))
        worker.start()
        losses = serve(store)
        worker.join()
    print(f"The loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {ROUNDS} rounds.")
    return 0 if worker.exitcode == 0 and losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
