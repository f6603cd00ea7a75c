"""Any package may be imported first, and importing td_core stays light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._dynamo", "torch.distributed", "torch.export", "numpy.testing")

# torch itself loads some of these, so what counts is what comes on top.
REPORT = f"""
import sys
import torch
before = set(sys.modules)
import td_core
added = set(sys.modules) - before
print(*sorted(name for name in added if name.startswith({HEAVY})))
"""


def python(code: str) -> str:
    """Run a program in a fresh interpreter, warnings being errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


#: A name of each package, from the module that its plugin needs too.
NAMES = {
    "td_core": "TensorDict",
    "td_memmap": "load_memmap",
    "td_tensorclass": "NonTensorData",
    "td_distributed": "consolidate",
    "td": "TensorDict",
}


def test_a_package_can_be_imported_first(present: str) -> None:
    code = f"from {present} import {NAMES[present]}; import td_core; print(*(plugin.state for plugin in td_core.plugins()))"
    assert set(python(code).split()) <= {"active"}


def test_importing_core_loads_nothing_heavy_that_torch_had_not() -> None:
    assert python(REPORT) == ""
