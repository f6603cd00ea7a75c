"""A replay buffer with one writer and several readers; the writer is killed again and again.

    python examples/replay_processes.py [SECONDS]

Each row has its number, and a checksum of it in many elements, so that a row that is not whole is seen.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from typing import Any

import torch

from td_core import TensorDict
from td_data import ReplayBuffer

CAPACITY, WIDTH = 2000, 200


def make_rows(first: int, count: int) -> TensorDict:
    """Return rows that have a checksum of their number."""
    number = torch.arange(first, first + count)
    return TensorDict(
        {"number": number, "check": (number * 7919)[:, None].expand(-1, WIDTH).clone()}, [count]
    )


def write(storage: Any, path: str) -> None:
    """Write rows until the process is killed."""
    buffer = ReplayBuffer(storage, path=path)
    while True:
        buffer.extend(make_rows(buffer.write_count, random.randint(1, 300)))


def read(storage: Any, path: str, seed: int, end: float, results: Any) -> None:
    """Sample until a time, and report how many rows were read, and how many of them were not whole."""
    buffer = ReplayBuffer(storage, path=path, batch_size=64, seed=seed)
    rows = wrong = 0
    while time.monotonic() < end:
        if not len(buffer):
            continue
        batch = buffer.sample()
        whole = (batch["check"] == batch["index"][:, None] * 7919).all(1) & (
            batch["number"] == batch["index"]
        )
        rows, wrong = rows + len(batch), wrong + int((~whole).sum())
    results.put((rows, wrong))


def run(seconds: float, readers: int = 3) -> tuple[int, int, int, int]:
    """Return how many rows were written and read, how many were not whole, and how often the writer was killed."""
    context = multiprocessing.get_context("fork")
    storage = make_rows(0, CAPACITY).zero_().share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        path, results, kills = os.path.join(folder, "counters"), context.Queue(), 0
        end = time.monotonic() + seconds
        processes = [
            context.Process(target=read, args=(storage, path, i, end, results)) for i in range(readers)
        ]
        for process in processes:
            process.start()
        while time.monotonic() < end:
            writer = context.Process(target=write, args=(storage, path))
            writer.start()
            time.sleep(random.uniform(0.05, 0.3))
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            kills += 1
        found = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        buffer = ReplayBuffer(storage, path=path)
        buffer.extend(make_rows(buffer.write_count, 10))
        return buffer.write_count, sum(rows for rows, _ in found), sum(wrong for _, wrong in found), kills


if __name__ == "__main__":
    written, rows, wrong, kills = run(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
    print(f"{written} rows written, {rows} read, {wrong} not whole; the writer was killed {kills} times")
    sys.exit(1 if wrong or not rows else 0)
