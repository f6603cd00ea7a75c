"""The example of an averaged model runs, and its average equals that of the loop."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "examples" / "averaged_model.py"


@pytest.mark.once
@pytest.mark.skipif(importlib.util.find_spec("td_distributed") is None, reason="needs td-distributed")
def test_averaged_model_example_equals_loop() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "10"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 parameters, packed: True\nboth averages are equal: True\n" in done.stdout
