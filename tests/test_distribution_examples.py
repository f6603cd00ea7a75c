"""The examples with distributions run, learn, and write the files that they announce."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("td_nn") is None, reason="needs td-nn"),
]


def run(name: str, *arguments: str) -> str:
    """Run an example and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_variational_autoencoder_example_learns(tmp_path: Path) -> None:
    has_figures = importlib.util.find_spec("matplotlib") is not None
    figure = tmp_path / "images.png"
    shown = run("variational_autoencoder.py", *([str(figure)] if has_figures else []))
    assert "ProbabilisticTensorDictSequential: image -> loc, scale, code, logits, reconstruction" in shown
    assert "right" in shown
    assert figure.exists() is has_figures


@pytest.mark.skipif(importlib.util.find_spec("td") is None, reason="needs td-all")
def test_policy_gradient_example_learns_from_disk_buffer(tmp_path: Path) -> None:
    shown = run("policy_gradient.py", str(tmp_path))
    assert "buffer: 2560 transitions in replay/" in shown
    assert (tmp_path / "replay" / "action.memmap").exists()
