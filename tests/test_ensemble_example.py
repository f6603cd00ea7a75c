"""The ensemble example runs, and its members disagree more in the range without training data."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "examples" / "ensemble_uncertainty.py"


@pytest.mark.once
@pytest.mark.skipif(importlib.util.find_spec("td_nn") is None, reason="needs td-nn")
def test_ensemble_example_is_uncertain_without_data(tmp_path: Path) -> None:
    picture = tmp_path / "ensemble.png"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(picture)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 copies of 4353 parameters, trained together" in done.stdout
    assert "less sure in the gap: True" in done.stdout
    assert picture.exists() is (importlib.util.find_spec("matplotlib") is not None)
