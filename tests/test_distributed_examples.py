"""The examples that exchange collections between processes run and check their results."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("td_distributed") is None, reason="needs td-distributed"),
]

RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray, which is not installed")


def run(*command: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_AUTH_MODE": "disabled",
    }
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


@RAY
def test_ray_example_reads_without_copy() -> None:
    assert "without a copy: True" in run(str(EXAMPLES / "ray_actors.py"))


@RAY
def test_ray_page_computes_a_mean_for_each_collector(tmp_path: Path) -> None:
    page = EXAMPLES.parent / "docs/cookbook/ray.md"
    [code] = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(f"{code}\nprint(data.batch_size)\n", encoding="utf-8")
    assert re.search(r"\[-?\d\S+, -?\d\S+\]\ntorch.Size\(\[2000\]\)", run(str(script)))
