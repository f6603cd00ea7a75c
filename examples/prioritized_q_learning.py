"""Q-learning on a chain with prioritised replay.

    python examples/prioritized_q_learning.py [STEPS]

The agent walks on a chain of states. Only the last state gives a reward, so that few transitions teach anything: their errors
are their priorities.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from td_core import TensorDict
from td_data import PrioritizedSampler, ReplayBuffer

STATES, DISCOUNT, RATE, BATCH_SIZE = 12, 0.9, 0.5, 16


class Chain:
    """A row of states; action 1 goes right, action 0 back to the start, and each fails sometimes."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = 0

    def step(self, action: int) -> tuple[int, float]:
        """Return the next state and the reward."""
        slips = bool(torch.rand((), generator=self.generator) < 0.1)
        self.state = min(self.state + 1, STATES - 1) if action != slips else 0
        reward = float(self.state == STATES - 1)
        if reward:
            self.state = 0
        return self.state, reward


def make_row(state: int, action: int, reward: float, following: int) -> TensorDict:
    """Return a transition."""
    return TensorDict(
        {
            "state": torch.tensor(state),
            "action": torch.tensor(action),
            "reward": torch.tensor(reward),
            "next": torch.tensor(following),
        }
    )


def train(steps: int, storage: Any = 2000, sampler: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the values of states and actions, and the numbers of the rows that were drawn."""
    buffer = ReplayBuffer(
        storage, sampler=sampler or PrioritizedSampler(alpha=0.7, beta=0.5), batch_size=BATCH_SIZE
    )
    chain, values, drawn = Chain(), torch.zeros(STATES, 2, dtype=torch.float64), []
    for step in range(steps):
        state, explores = chain.state, bool(torch.rand((), generator=chain.generator) < 0.3)
        action = step % 2 if explores else int(values[state].argmax())
        following, reward = chain.step(action)
        buffer.add(make_row(state, action, reward, following))
        if step % 4 == 0:
            batch = buffer.sample()
            target = batch["reward"] + DISCOUNT * values[batch["next"]].amax(1)
            error = target - values[batch["state"], batch["action"]]
            change = RATE * error * batch["priority_weight"] / BATCH_SIZE
            values.index_put_((batch["state"], batch["action"]), change, accumulate=True)
            buffer.update_priority(batch["index"], error.abs())
            drawn.append(batch["index"])
    return values, drawn


if __name__ == "__main__":
    found, _ = train(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    print("value of going right:", " ".join(f"{value:.2f}" for value in found[:-1, 1].tolist()))
