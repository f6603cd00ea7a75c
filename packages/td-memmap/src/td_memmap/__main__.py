"""Command line of ``python -m td_memmap``: inspect and verify saves, pack and unpack archives."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from td_core import inspect, verify
from td_core.spi import run_command

from ._archive import pack_memmap, unpack_memmap


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m td_memmap", description="Look at saves of collections.")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser(
        "inspect", help="print the tree of a save: shapes, dtypes, sizes, kinds; opens no leaf"
    )
    look.add_argument("path", help="directory or archive, or a directory inside a save")
    check = commands.add_parser("verify", help="check the size of every file, and every recorded hash")
    check.add_argument("path", help="directory or archive")
    pack = commands.add_parser("pack", help="write the files of a saved directory into an archive")
    pack.add_argument("prefix", help="the directory")
    pack.add_argument("archive", help="the archive to write")
    pack.add_argument("--compression", help="deflate, bzip2 or lzma; stored without it")
    unpack = commands.add_parser("unpack", help="write the files of an archive into a directory")
    unpack.add_argument("archive", help="the archive")
    unpack.add_argument("prefix", help="the directory to write")
    for command in (look, check, pack, unpack):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (check, pack, unpack):
        command.add_argument("--progress", action="store_true", help="show a progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``python -m td_memmap`` and return its exit code."""
    return run_command(_parser(), _COMMANDS, arguments)


def _inspect(options: argparse.Namespace) -> tuple[bool, str, object]:
    tree = inspect(options.path, format="memmap")
    return True, str(tree), tree.as_dict()


def _verify(options: argparse.Namespace) -> tuple[bool, str, object]:
    report = verify(options.path, format="memmap", progress=options.progress)
    return report.ok, str(report), {**asdict(report), "ok": report.ok}


def _pack(options: argparse.Namespace) -> tuple[bool, str, object]:
    path = pack_memmap(
        options.prefix, options.archive, compression=options.compression, progress=options.progress
    )
    return True, str(path), {"archive": str(path)}


def _unpack(options: argparse.Namespace) -> tuple[bool, str, object]:
    path = unpack_memmap(options.archive, options.prefix, progress=options.progress)
    return True, str(path), {"prefix": str(path)}


_COMMANDS = {"inspect": _inspect, "verify": _verify, "pack": _pack, "unpack": _unpack}


if __name__ == "__main__":
    # Exit quietly on SIGPIPE, as other commands do when their output is piped into ``head``.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
