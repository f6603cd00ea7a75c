"""Command line of ``python -m td_core``: list plugins; inspect, verify and convert saves."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ._formats.command_line import run_command
from ._formats.object_locations import find_place
from ._formats.saving import inspect, verify
from ._formats.serializers import SERIALIZERS, list_options
from ._kinds.checkpoint import load, save
from .plugins.manager import plugins


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m td_core", description="Look at plugins and saves.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="print the installed plugins")
    look = commands.add_parser(
        "inspect", help="print the tree of a save: shapes, dtypes, sizes, kinds; reads no leaf"
    )
    check = commands.add_parser("verify", help="check a save for missing and damaged parts")
    change = commands.add_parser("convert", help="load a save and save it in another format")
    for command in (look, check, change):
        command.add_argument("path", help="path or URL of the save")
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (look, check):
        command.add_argument("--format", help="format of the save; detected without it")
    change.add_argument("target", help="path or URL to write")
    change.add_argument("--format", help="format to write; that of the suffix of the target without it")
    change.add_argument("--from", dest="source", help="format of the save; detected without it")
    check.add_argument("--progress", action="store_true", help="show a progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``python -m td_core`` and return its exit code."""
    return run_command(_parser(), _COMMANDS, arguments)


def _plugins(_: argparse.Namespace) -> tuple[bool, str, object]:
    if not plugins():
        return True, "no plugins are installed", []
    rows = [("id", "distribution", "version", "state", "hooks", "import")]
    for plugin in plugins():
        state = f"{plugin.state}: {plugin.reason}" if plugin.reason else plugin.state
        hooks, seconds = ", ".join(plugin.hooks), f"{plugin.seconds * 1000:.1f} ms"
        rows.append(
            (plugin.id, plugin.distribution or "-", plugin.version or "-", state, hooks or "-", seconds)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return True, "\n".join(lines), None


def _inspect(options: argparse.Namespace) -> tuple[bool, str, object]:
    tree = inspect(options.path, format=options.format)
    return True, str(tree), tree.as_dict()


def _verify(options: argparse.Namespace) -> tuple[bool, str, object]:
    more = {"progress": True} if options.progress else {}
    report = verify(options.path, format=options.format, **more)
    return report.ok, str(report), {**asdict(report), "ok": report.ok}


def _convert(options: argparse.Namespace) -> tuple[bool, str, object]:
    serializer = SERIALIZERS.for_saving(find_place(options.target), options.format)
    # td-memmap refuses to save leaves that are mapped from another save, unless it is to copy them.
    more = {"copy_existing": True} if "copy_existing" in (list_options(serializer, "save") or ()) else {}
    save(load(options.path, format=options.source), options.target, format=options.format, **more)
    return True, options.target, {"path": options.target}


_COMMANDS = {"plugins": _plugins, "inspect": _inspect, "verify": _verify, "convert": _convert}


if __name__ == "__main__":
    # Exit quietly on SIGPIPE, as other commands do when their output is piped into ``head``.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
