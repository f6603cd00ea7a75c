"""The programs of ``examples/incumbent`` print the same with the reference implementation and with td."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "examples" / "incumbent").glob("*.py"))


def printed(*command: object, cwd: Path) -> list[str]:
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
def test_a_program_prints_the_same_on_both(program: Path, tmp_path: Path) -> None:
    assert not re.search(r"\btd\b", program.read_text(encoding="utf-8")), (
        "the program has to be an unchanged one"
    )
    expected = printed(program, cwd=tmp_path)
    assert len(expected) > 3
    assert printed("-m", "td", "run", program, cwd=tmp_path) == expected


def test_there_are_five_of_them() -> None:
    assert len(PROGRAMS) == 5
