"""The programs in ``examples/incumbent`` print the same output with tensordict and with td."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "examples" / "incumbent").glob("*.py"))


def run_and_read_output(*command: object, cwd: Path) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_prints_same_output_with_td_and_tensordict(program: Path, tmp_path: Path) -> None:
    assert not re.search(r"\btd\b", program.read_text(encoding="utf-8")), (
        "the program has to be an unchanged one"
    )
    expected = run_and_read_output(program, cwd=tmp_path)
    assert len(expected) > 3
    assert run_and_read_output("-m", "td", "run", program, cwd=tmp_path) == expected


def test_program_folder_has_five_programs() -> None:
    assert len(PROGRAMS) == 5
