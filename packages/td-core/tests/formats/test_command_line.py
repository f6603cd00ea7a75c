"""The commands of ``python -m``: exit codes, text and JSON, errors, and names that a terminal must not interpret."""

from __future__ import annotations

import io
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

import td_core
from td_core import (
    FormatError,
    StructureError,
    TensorDict,
)
from td_core.__main__ import main
from td_core._formats.command_line import DAMAGED, FAILED, GOOD, run_command


def test_command_line_runs_operations_of_format(
    formats: Any, data: TensorDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    td_core.save(data, "mem://x", format="memory")
    assert main(["inspect", "mem://x"]) == GOOD
    assert capsys.readouterr().out == "x: TensorDict [3], 12 bytes\n    a: leaf [3] torch.float32, 12 bytes\n"
    assert main(["verify", "mem://x", "--json", "--progress"]) == GOOD
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["convert", "mem://x", "mem://y", "--format", "memory"]) == GOOD
    assert formats.saved["mem://y"] is data
    assert main(["convert", "mem://x", str(tmp_path / "z"), "--from", "memory", "--format", "plain"]) == GOOD
    assert (tmp_path / "z").read_text() == "plain"
    capsys.readouterr()
    for arguments, code, message in [
        (["inspect", str(tmp_path / "z")], FAILED, "UnsupportedOperationError: the format 'plain' does not"),
        (["verify", "mem://no"], DAMAGED, "FormatError: no registered format recognises 'mem://no'"),
        (["inspect", str(tmp_path / "no")], FAILED, "FileNotFoundError: cannot load: there is nothing at"),
        (["convert", "mem://x", "s3://y"], FAILED, "TypeError: the format 'memmap' does not accept 's3://y'"),
    ]:
        assert main(arguments) == code
        assert capsys.readouterr().err.startswith(message)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--json", action="store_true")
    return parser


def run(result: Any, *arguments: str) -> int:
    """Run a command that returns a result, or raises it if it is an exception."""

    def command(_: Namespace) -> tuple[bool, str, object]:
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[no-any-return]

    return run_command(make_parser(), {"look": command}, ["look", *arguments])


@pytest.mark.parametrize(
    ("result", "arguments", "code", "printed"),
    [
        ((True, "text", [1]), [], GOOD, "text\n"),
        ((True, "text", [1]), ["--json"], GOOD, "[1]\n"),
        ((False, "damaged", None), [], DAMAGED, "damaged\n"),
        ((True, "a\nb\x1b[31m", None), [], GOOD, "a\nb\\x1b[31m\n"),
    ],
)
def test_run_command_prints_what_a_command_returns(
    result: Any, arguments: list[str], code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(result, *arguments) == code
    assert capsys.readouterr() == (printed, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FormatError("a"), DAMAGED),
        (OSError("a"), FAILED),
        (ValueError("a"), FAILED),
        (TypeError("a"), FAILED),
        (StructureError("a"), FAILED),
        (RecursionError("a"), FAILED),
    ],
)
def test_run_command_prints_error_and_returns_its_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(error) == code
    assert capsys.readouterr() == ("", f"{type(error).__name__}: a\n")


def test_run_command_raises_faults_of_the_program() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())


def test_run_command_escapes_what_the_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    assert run((True, "\u00e9", None)) == GOOD
    assert shown.getvalue() == b"\\xe9\n"
