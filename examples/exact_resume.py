"""Train a small network, and resume it after a kill at any step: the result is that of a run without interruption.

    python examples/exact_resume.py run              train three epochs, with a checkpoint after each step
    python examples/exact_resume.py run --kill 17    the same, killed after 17 steps; start it again without --kill
    torchrun --nproc-per-node 2 examples/exact_resume.py run

The data are made at the first start, and mapped from files.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from td_core import TensorDict
from td_data import Loader

EPOCHS, ROWS, BATCH_SIZE = 3, 96, 8


def make_data(folder: Path) -> Any:
    """Return noisy pictures of ten digits of 8 x 8, mapped from files; make them if they are missing."""
    path = folder / "digits"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        digits = torch.rand(10, 64, generator=generator)
        label = torch.arange(ROWS) % 10
        pictures = digits[label] + 0.3 * torch.randn(ROWS, 64, generator=generator)
        TensorDict({"picture": pictures, "label": label}, batch_size=[ROWS]).memmap(path)
    return TensorDict.load_memmap(path)


def add_noise(batch: Any, generator: torch.Generator) -> Any:
    """Change pictures at random, the same in each run."""
    noise = torch.randn(batch["picture"].shape, generator=generator)
    return batch.set("picture", batch["picture"] + 0.1 * noise)


class Training:
    """A network, its optimizer, and the position in the data."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.path = folder / "checkpoint.pt"
        self.model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.is_distributed = torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if self.is_distributed else 1
        data = make_data(folder)
        self.loader = Loader(
            data, BATCH_SIZE // world, shuffle=True, seed=7, transform=add_noise, drop_last=True, **options
        )
        self.losses: list[float] = []
        if self.path.exists():
            self.load()

    def step(self, batch: Any) -> None:
        """Train with one batch."""
        loss = nn.functional.cross_entropy(self.model(batch["picture"]), batch["label"])
        self.optimizer.zero_grad()
        loss.backward()
        if self.is_distributed:
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        self.optimizer.step()
        self.losses.append(loss.item())

    def run(self, kill: int = 0) -> None:
        """Train to the end of the last epoch; be killed after ``kill`` steps."""
        while self.loader.epoch < EPOCHS:
            for batch in self.loader:
                self.step(batch)
                self.save()
                kill -= 1
                if not kill:
                    os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        """Write the checkpoint, in one step; one rank is enough, since all have the same position."""
        if self.is_distributed and torch.distributed.get_rank():
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        new = self.path.with_suffix(".new")
        torch.save({**state, "loader": self.loader.state_dict(), "losses": self.losses}, new)
        os.replace(new, self.path)

    def load(self) -> None:
        """Continue after the last step that was saved."""
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.losses = state["losses"]


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, default=0, help="be killed after so many steps")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    training = Training(arguments.folder, num_threads=arguments.threads)
    print(f"begins with row {training.loader.rows} of epoch {training.loader.epoch}")
    training.run(arguments.kill)
    losses = training.losses
    print(f"{len(losses)} steps, last loss {losses[-1]:.6f}")
    if len(losses) != EPOCHS * (ROWS // BATCH_SIZE) or losses[-1] > losses[0] / 2:
        raise SystemExit("the training missed a step, or has not learned")


if __name__ == "__main__":
    main()
