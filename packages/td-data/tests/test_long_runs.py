"""Whole programs: language model, priorities, replay under fire, memory of many epochs."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from order_samples import make_data
from torch import Tensor

from td_core import TensorDict
from td_data import Concat, Loader, MixtureSampler, Packed, PrioritizedSampler
from td_data._ring_samplers import RingSampler

EXAMPLES = Path(__file__).parents[3] / "examples"


class CumulativeSums(RingSampler):
    """Prioritised sampling as it is usually written: a cumulative sum for each batch."""

    def start(self, capacity: int) -> None:
        super().start(capacity)
        self.priority = torch.zeros(capacity, dtype=torch.float64)
        self.largest = 1.0

    def add(self, first: int, stop: int, values: Tensor | None) -> None:
        super().add(first, stop, values)
        self.priority[torch.arange(first, stop) % self.capacity] = (self.largest + 1e-8) ** 0.7

    def draw(
        self, low: int, high: int, count: int, generator: torch.Generator
    ) -> tuple[Tensor, dict[Any, Tensor]]:
        sums = self.priority.cumsum(0)
        target = torch.rand(count, dtype=torch.float64, generator=generator) * sums[-1]
        places = torch.searchsorted(sums, target, right=True)
        least = self.priority[self.priority > 0].min()
        weight = ((self.priority[places] / least) ** -0.5).float()
        return places + (high - 1 - places) // self.capacity * self.capacity, {"priority_weight": weight}

    def update(self, numbers: Tensor, priority: Tensor, low: int, high: int) -> int:
        self.largest = max(self.largest, float(priority.max()))
        highest: dict[int, float] = {}
        for number, value in zip(numbers.tolist(), priority.tolist()):
            highest[number] = max(value, highest.get(number, 0.0))
        for number, value in highest.items():
            self.priority[number % self.capacity] = (value + 1e-8) ** 0.7
        return len(numbers)


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the example is in the repository")
def test_prioritized_learning_equals_that_with_cumulative_sums() -> None:
    train = runpy.run_path(str(EXAMPLES / "prioritized_q_learning.py"))["train"]
    steps = int(os.environ.get("TD_LONG_STEPS", "1500"))
    values, drawn = train(steps, 400, PrioritizedSampler(alpha=0.7, beta=0.5))
    wanted, wanted_drawn = train(steps, 400, CumulativeSums())
    assert torch.equal(torch.stack(drawn), torch.stack(wanted_drawn))
    assert torch.equal(values, wanted)


@pytest.mark.once  # takes seconds
@pytest.mark.skipif(not EXAMPLES.exists(), reason="the example is in the repository")
@pytest.mark.parametrize(("steps", "status"), [(5000, 0), (100, 1)])
def test_prioritized_learning_ends_with_an_error_unless_it_has_learned(
    steps: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "prioritized_q_learning.py"))["main"]
    assert main(steps) == status
    assert "largest error" in capsys.readouterr().out


@pytest.mark.once  # starts processes, for seconds
@pytest.mark.skipif(not EXAMPLES.exists(), reason="the example is in the repository")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")
def test_rows_that_readers_get_are_whole_whenever_the_writer_is_killed() -> None:
    run = runpy.run_path(str(EXAMPLES / "replay_processes.py"))["run"]
    written, rows, wrong, kills = run(float(os.environ.get("TD_LONG_SECONDS", "2")))
    assert wrong == 0
    assert kills >= 2
    assert min(written, rows) > 100


def make_corpus(documents: int, first: int, seed: int) -> tuple[list[Tensor], Packed]:
    """Return documents, and the same in blocks of 256 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(20, 600, (documents,), generator=generator)
    tokens = torch.randint(50_000, (int(sizes.sum()),), generator=generator) + first
    data = TensorDict({"token": tokens}, [len(tokens)])
    return list(tokens.split(sizes.tolist())), Packed(data, 256, ends=sizes.cumsum(0), extra=1, seed=seed)


def test_language_model_gets_the_plain_concatenation_in_shares() -> None:
    texts, web = make_corpus(2000, 0, 1)
    _, books = make_corpus(500, 100_000, 2)
    view = web.at_epoch(3)
    stream = torch.cat([texts[number] for number in view._documents.tolist()])
    blocks = view[torch.arange(len(view))]["token"]
    assert blocks[:, :256].flatten().equal(stream[: 256 * len(view)])
    assert blocks[:, 256].equal(stream[256::256][: len(view)])
    parts = Concat({"web": web, "books": books})

    def make(batch_size: int, rank: int = 0, world: int = 1) -> Loader:
        sampler = MixtureSampler(parts, [3, 1], num_samples=3000, seed=5)
        return Loader(parts, batch_size, sampler=sampler, rank=rank, world_size=world)

    loader = make(8)
    batches = iter(loader)
    for _ in range(100):
        next(batches)
    state, rest = loader.state_dict(), torch.cat([batch["token"] for batch in batches])
    ranks = []
    for rank in range(2):
        other = make(4, rank, 2)
        other.load_state_dict(state)
        ranks.append([batch["token"] for batch in other])
    together = torch.cat([torch.cat(step) for step in zip(*ranks)])
    assert together.equal(rest)
    shares = torch.cat([batch["source"][:, 0] for batch in make(100)]).bincount()
    assert abs(int(shares[0]) - 2250) < 3 * (3000 * 0.75 * 0.25) ** 0.5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files of Linux")
def test_m2_many_epochs_leave_nothing_behind() -> None:
    loader = Loader(make_data(), 20, shuffle=True, num_threads=2)

    def count() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), threading.active_count(), pages

    for _ in loader:
        pass
    for _ in loader:
        pass
    before = count()
    for _ in range(300):
        for _ in loader:
            pass
    after = count()
    assert after[:2] == before[:2]
    assert (after[2] - before[2]) * 4096 < 8 << 20
