"""Measure what ``import td_core`` adds to ``import torch``, each in fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys

ROUNDS = 7
CODE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import {module}
print(middle - start, time.perf_counter() - middle)
"""


def measure(module: str) -> tuple[float, float]:
    """Return the median seconds that torch takes, and that ``module`` takes after it."""
    rounds = []
    for _ in range(ROUNDS + 1):
        command = [sys.executable, "-c", CODE.format(module=module)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rounds.append([float(part) for part in done.stdout.split()])
    torch, added = zip(*rounds[1:], strict=True)  # the first round fills the caches of the file system
    return statistics.median(torch), statistics.median(added)


for name in ("td_core", "td"):
    base, added = measure(name)
    print(f"import torch {base * 1e3:.0f} ms, then {name} {added * 1e3:.1f} ms, ratio {added / base:.3f}")
