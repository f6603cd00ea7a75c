"""An exponential moving average of the weights of a model, by one kernel instead of one for each parameter.

    python examples/averaged_model.py [LAYERS]

``consolidate(inplace=True)`` moves all parameters into one storage; they stay the parameters of the model. The average is a
clone, with its own storage. ``lerp_`` is then one kernel, and its result equals that of the loop over both. The target network
of Q-learning is updated in the same way. The program ends with a non-zero status if a parameter differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import td_distributed  # noqa: F401 -- adds consolidate()
from td_core import TensorDict

DECAY = 0.01
STEPS = 20


def measure(update: Callable[[], object]) -> float:
    """Return the microseconds of one call, the fastest of many."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def main(layers: int) -> None:
    """Train a model, average its weights in both ways, and compare results and times."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    weights = TensorDict.from_module(model)
    weights.consolidate(inplace=True)
    average = weights.data.clone()
    looped = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.no_grad()
    def update() -> None:
        average.lerp_(weights, DECAY)

    @torch.no_grad()
    def update_each() -> None:
        for mean, parameter in zip(looped, model.parameters()):
            mean.lerp_(parameter, DECAY)

    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        update()
        update_each()

    names = [name for name, _ in model.named_parameters()]
    averaged = [average[tuple(name.split("."))] for name in names]
    same = all(map(torch.equal, averaged, looped))
    print(f"{len(names)} parameters, packed: {weights.is_packed and average.is_packed}")
    print(f"both averages are equal: {same}")
    print(f"one lerp_ {measure(update):.0f} us, the loop {measure(update_each):.0f} us")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
