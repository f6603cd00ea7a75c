"""The examples that exchange collections between processes run and check their results."""

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
    pytest.mark.skipif(importlib.util.find_spec("td_distributed") is None, reason="needs td-distributed"),
]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_parameter_server_example_learns() -> None:
    assert "in 40 rounds" in run(str(EXAMPLES / "parameter_server.py"))


def test_data_parallel_example_equals_single_process() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "2 ranks" in run(*launcher, str(EXAMPLES / "data_parallel.py"))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray, which is not installed")
def test_ray_example_reads_without_copy() -> None:
    assert "without a copy: True" in run(str(EXAMPLES / "ray_actors.py"))
