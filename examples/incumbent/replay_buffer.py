"""Train a value function by Q-learning, with a memory-mapped replay buffer.

A walker on a line of cells gets a reward at the right end. The files of the buffer are allocated before the first
transition is written, and training batches are read from them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from torch import nn

CELLS = 8
CAPACITY = 512
GAMMA = 0.8
STEPS = 300


class ReplayBuffer:
    """A ring buffer of transitions on disk."""

    def __init__(self, example: TensorDictBase, folder: Path) -> None:
        self.storage = example.expand(CAPACITY).memmap_like(folder)
        self.written = 0

    def extend(self, transitions: TensorDictBase) -> None:
        """Write transitions over the oldest ones."""
        index = torch.arange(self.written, self.written + len(transitions)) % CAPACITY
        self.storage[index] = transitions
        self.written += len(transitions)

    def sample(self, count: int) -> TensorDictBase:
        """Return random transitions."""
        return self.storage[torch.randint(min(self.written, CAPACITY), (count,))]


def observe(cell: torch.Tensor) -> torch.Tensor:
    """Encode cells as one-hot vectors."""
    return nn.functional.one_hot(cell, CELLS).float()


def walk(model: nn.Module, walkers: int, epsilon: float) -> TensorDict:
    """Sample one transition per walker from random cells."""
    cell = torch.randint(CELLS - 1, (walkers,))
    with torch.no_grad():
        greedy = model(observe(cell)).argmax(-1)
    action = torch.where(torch.rand(walkers) < epsilon, torch.randint(2, (walkers,)), greedy)
    after = (cell + 2 * action - 1).clamp_(0, CELLS - 1)
    return TensorDict(
        {
            "observation": observe(cell),
            "action": action,
            "next": {
                "observation": observe(after),
                "reward": (after == CELLS - 1).float(),
                "done": after == CELLS - 1,
            },
        },
        batch_size=[walkers],
    )


def main(folder: Path) -> None:
    """Train, and print the learned policy and the files of the buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(CELLS, 32), nn.Tanh(), nn.Linear(32, 2))
    weights = TensorDict.from_module(model)
    target = weights.data.clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    buffer = ReplayBuffer(walk(model, 1, 1.0)[0], folder)
    for step in range(STEPS):
        buffer.extend(walk(model, 64, epsilon=0.5))
        batch = buffer.sample(128)
        with torch.no_grad(), target.to_module(model):
            future = model(batch["next", "observation"]).amax(-1)
        wanted = batch["next", "reward"] + GAMMA * future * ~batch["next", "done"]
        value = model(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target.lerp_(weights.data, 0.2)
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}, {min(buffer.written, CAPACITY)} transitions")

    with torch.no_grad():
        policy = model(observe(torch.arange(CELLS - 1))).argmax(-1)
    print("right of every cell:", bool(policy.all()))

    stored = TensorDict.load_memmap(folder)
    print("on disk:", isinstance(stored["next", "reward"], MemoryMappedTensor), stored.batch_size)
    print("keys:", sorted(stored.keys(include_nested=True, leaves_only=True), key=str))
    print("files:", sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.memmap")))
    print("same rewards:", bool((stored["next", "reward"] == buffer.storage["next", "reward"]).all()))
    print("share of rewards:", round(stored["next"].float().mean(dim=0)["reward"].item(), 4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "buffer")
