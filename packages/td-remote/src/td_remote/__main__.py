"""Command line of ``python -m td_remote``: list and copy objects, and look at the cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from td_core.spi import run_command

from ._block_cache import cache_info, open_cache
from ._copy_objects import copy, list_objects


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m td_remote",
        description="Look at objects, and copy them; options of servers come from the environment.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("ls", help="print the objects at a location, with their sizes")
    look.add_argument("location", help="path or URL")
    change = commands.add_parser("cp", help="copy an object, or all objects of a tree")
    change.add_argument("source", help="path or URL")
    change.add_argument("target", help="path or URL of the copy")
    change.add_argument("--overwrite", action="store_true", help="replace what is at the target")
    change.add_argument("--progress", action="store_true", help="show a progress bar")
    cache = commands.add_parser("cache", help="print what a cache directory has")
    cache.add_argument("path", nargs="?", help="the directory; that of TD_REMOTE_CACHE without it")
    cache.add_argument("--clear", action="store_true", help="remove its blocks")
    for command in (look, change, cache):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``python -m td_remote`` and return its exit code."""
    return run_command(_parser(), {"ls": _list, "cp": _copy, "cache": _cache}, arguments)


def _list(options: argparse.Namespace) -> tuple[bool, str, object]:
    infos = list_objects(options.location)
    lines = [f"{info.size:>14,}  {info.name or options.location}" for info in infos]
    return bool(infos), "\n".join(lines) or "there is nothing", [info._asdict() for info in infos]


def _copy(options: argparse.Namespace) -> tuple[bool, str, object]:
    count = copy(options.source, options.target, progress=options.progress, overwrite=options.overwrite)
    return True, f"copied {count} objects", {"objects": count}


def _cache(options: argparse.Namespace) -> tuple[bool, str, object]:
    if options.clear:
        open_cache(options.path).clear()
    info = cache_info(options.path)
    return True, f"{info.path}: {info.blocks} blocks, {info.size:,} bytes", info._asdict()


if __name__ == "__main__":
    raise SystemExit(main())
