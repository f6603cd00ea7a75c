"""The example of modules runs, prints the data flow, and trains both models."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "examples" / "one_training_loop.py"


@pytest.mark.once
@pytest.mark.skipif(importlib.util.find_spec("td_nn") is None, reason="needs td-nn")
def test_training_loop_example_trains_both_models() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TensorDictSequential: image -> features, logits" in done.stdout
    assert '["pool"]     TensorDictModule(AvgPool2d)' in done.stdout
    assert "both learned: True" in done.stdout
