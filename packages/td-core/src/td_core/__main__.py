"""``python -m td_core plugins``: print the installed plugins."""

from __future__ import annotations

import argparse

from .plugins.manager import plugins


def main() -> None:
    """Print one line per installed plugin: id, distribution, version, state, hooks, import time."""
    parser = argparse.ArgumentParser(prog="python -m td_core")
    parser.add_subparsers(dest="command", required=True).add_parser(
        "plugins", help="print the installed plugins"
    )
    parser.parse_args()
    if not plugins():
        print("no plugins are installed")
        return
    rows = [("id", "distribution", "version", "state", "hooks", "import")]
    for plugin in plugins():
        state = f"{plugin.state}: {plugin.reason}" if plugin.reason else plugin.state
        hooks, seconds = ", ".join(plugin.hooks), f"{plugin.seconds * 1000:.1f} ms"
        rows.append(
            (plugin.id, plugin.distribution or "-", plugin.version or "-", state, hooks or "-", seconds)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
