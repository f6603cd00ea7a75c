"""The tests of public programs run in the session ``clients``, which installs the programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"

if find_spec("torchrl") is None:
    collect_ignore_glob = ["test_*.py"]


def run_program(*command: str) -> list[Any]:
    """Run a program and return what it reports."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "RL_LOGGING_LEVEL": "ERROR",
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=PROGRAMS,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line]


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Any]]:
    """Return the function that runs a program."""
    return run_program
