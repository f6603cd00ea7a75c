"""Measure the time, memory and modules that an import adds to ``import torch``, in new interpreters.

The modules counted as heavy are those under ``torch._dynamo``, ``torch.distributed``, ``torch.export`` and
``numpy.testing`` that ``import torch`` had not loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULES = ("td_core", "td", "tensordict")
CODE = """
import json, sys, time
HEAVY = ("torch._dynamo", "torch.distributed", "torch.export", "numpy.testing")

def resident():
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20
    except OSError:
        return 0.0

def heavy():
    return {name for name in sys.modules if name.startswith(HEAVY)}

empty, start = resident(), time.perf_counter()
import torch
end, memory, before = time.perf_counter(), resident(), heavy()
result = {"torch_ms": (end - start) * 1e3, "torch_mb": memory - empty}
start = time.perf_counter()
import MODULE
end = time.perf_counter()
result |= {"ms": (end - start) * 1e3, "mb": resident() - memory, "heavy": len(heavy() - before)}
print(json.dumps(result))
"""


def once(module: str) -> dict[str, float]:
    """Measure the import of a module in a new interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", CODE.replace("MODULE", module)]
    # Allow bytecode files: an installed package is compiled only at its first import.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "TD_PLUGINS")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one line per module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    modules = [name for name in MODULES if find_spec(name)]
    for name in MODULES:
        if name not in modules:
            print(f"{name:11} is not installed", flush=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in modules}
    for number in range(options.rounds + 1):
        for name in modules:
            measured = once(name)
            if number:  # the first round writes bytecode and fills the caches of the file system
                rounds[name].append(measured)
    results: dict[str, Any] = {}
    for name, of_one in rounds.items():
        medians = {key: statistics.median(each[key] for each in of_one) for key in of_one[0]}
        results[name] = medians
        print(
            f"{name:11} {medians['ms']:7.0f} ms and {medians['mb']:4.0f} MB after torch ({medians['torch_ms']:.0f} ms, "
            f"{medians['torch_mb']:.0f} MB), ratio {medians['ms'] / medians['torch_ms']:.2f}, "
            f"{medians['heavy']:.0f} heavy modules",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
