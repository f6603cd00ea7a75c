"""A parameter server and a worker, two processes on one machine.

In each round, the server sends the parameters as one message. The worker computes the gradients on its data and sends them
back, and the server updates the parameters. The program ends with a non-zero status unless the loss falls to less than half.

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
    """Build the model, with the same parameters in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def connect(rank: int, store: Path) -> None:
    """Join the process group of server and worker."""
    dist.init_process_group("gloo", store.as_uri(), world_size=2, rank=rank)


def work(store: Path) -> None:
    """Receive parameters and send gradients back, in each round."""
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
        # init_remote sends the structure too, since the server does not have a collection to receive into.
        TensorDict({"loss": loss.detach(), "grad": params.grad}).init_remote(SERVER)
    dist.destroy_process_group()


def serve(store: Path) -> list[float]:
    """Send parameters, update them with the received gradients, and return the losses of all rounds."""
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
    """Start the worker, run the server, and return the exit status."""
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
