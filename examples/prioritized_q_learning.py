"""Q-learning on a chain with prioritised replay.

    python examples/prioritized_q_learning.py [STEPS]

The agent walks on a chain of states. Only the last state gives a reward, so that few transitions teach anything: their errors
are their priorities. The program ends with an error if what it learns is not near the exact values.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from td_core import TensorDict
from td_data import PrioritizedSampler, ReplayBuffer

STATES, SLIPS, DISCOUNT, RATE, BATCH_SIZE = 12, 0.1, 0.9, 1.0, 16


def move(state: int, action: int) -> tuple[int, float]:
    """Return the next state, which is the first one after the last, and the reward."""
    following = min(state + 1, STATES - 1) if action else max(state - 1, 0)
    return (0, 1.0) if following == STATES - 1 else (following, 0.0)


class Chain:
    """A row of states; action 1 goes right, action 0 left, and each slips to the other side sometimes."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = 0

    def step(self, action: int) -> tuple[int, float]:
        """Return the next state and the reward."""
        slips = bool(torch.rand((), generator=self.generator) < SLIPS)
        self.state, reward = move(self.state, action ^ slips)
        return self.state, reward

    def choose(self, values: torch.Tensor) -> int:
        """Return the better action; any of the two while none is better, and sometimes otherwise."""
        # An argmax would always take the first of two equal values, and never find the reward.
        explores = bool(torch.rand((), generator=self.generator) < 0.3 or values[0] == values[1])
        return int(torch.randint(2, (), generator=self.generator) if explores else values.argmax())


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
        storage, sampler=sampler or PrioritizedSampler(alpha=0.7, beta=0.5, eps=0.05), batch_size=BATCH_SIZE
    )
    chain, values, drawn = Chain(), torch.zeros(STATES, 2, dtype=torch.float64), []
    for step in range(steps):
        state = chain.state
        action = chain.choose(values[state])
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


def solve() -> torch.Tensor:
    """Return the exact values of states and actions, by value iteration."""
    values = torch.zeros(STATES, 2, dtype=torch.float64)
    for _ in range(300):
        best = values.amax(1)
        for state in range(STATES - 1):
            right, left = (
                reward + DISCOUNT * best[following] for following, reward in (move(state, 1), move(state, 0))
            )
            values[state, 1] = (1 - SLIPS) * right + SLIPS * left
            values[state, 0] = (1 - SLIPS) * left + SLIPS * right
    return values


def show(values: torch.Tensor) -> str:
    """Return the values of going right."""
    return " ".join(f"{value:.2f}" for value in values[:-1, 1].tolist())


def main(steps: int) -> int:
    """Learn, compare with the exact values, and return the exit status."""
    learned, exact = train(steps)[0], solve()
    print("value of going right, learned:", show(learned))
    print("value of going right, exact:  ", show(exact))
    goes_right = bool((learned[:-1].argmax(1) == 1).all())
    near = (learned - exact).abs()[:-1, 1].max().item()
    print(f"goes right everywhere: {goes_right}; largest error {near:.2f}")
    return 0 if goes_right and near < 0.2 else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000))
