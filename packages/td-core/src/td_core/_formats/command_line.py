"""Run the commands of a package: print what a command returns, or its error, and return an exit code."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from .._encode.inspection import make_printable
from ..errors import FormatError, TensorDictError

#: Exit codes: success, a damaged save, a failed command.
GOOD, DAMAGED, FAILED = 0, 1, 2


def run_command(
    parser: ArgumentParser,
    commands: Mapping[str, Callable[[Namespace], tuple[bool, str, object]]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one command of ``python -m package`` and return its exit code: 0, 1 for a damaged save, 2 for an error.

    A command takes the parsed arguments, and returns whether the save is good, the text to print and the data to print as
    JSON. The parser stores the name of the command as ``command``; the option ``--json`` selects JSON.
    """
    options = parser.parse_args(arguments)
    try:
        ok, text, data = commands[options.command](options)
        shown = json.dumps(data) if getattr(options, "json", False) else text
    except (OSError, ValueError, TypeError, TensorDictError, RecursionError) as error:
        _print_safely(f"{type(error).__name__}: {error}", sys.stderr)
        return DAMAGED if isinstance(error, FormatError) else FAILED
    _print_safely(shown, sys.stdout)
    return GOOD if ok else DAMAGED


def _print_safely(text: str, stream: TextIO) -> None:
    """Print text, with characters escaped that the encoding of the stream lacks or that control a terminal."""
    encoding = stream.encoding or "utf-8"
    shown = "\n".join(map(make_printable, text.split("\n")))
    print(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
