"""``python -m td``: print an environment report, or run a program written for the reference implementation."""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from td_core import plugins

from ._alias import install_as_tensordict

PACKAGES = ("td-core", "td-memmap", "td-tensorclass", "td-distributed", "td-all")
BESIDE = ("numpy", "pluggy", "xxhash", "tqdm", "tensordict")

#: Holds the module ``tensordict`` that child processes find.
STAND_IN = Path(__file__).parent / "_stand_in"


def report() -> str:
    """Return the versions, plugins and devices of this environment, ready to be pasted."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = f"{torch.version.cuda}, {', '.join(devices) or 'no device'}" if torch.version.cuda else "-"
    rows = [(name, _version(name)) for name in PACKAGES]
    for plugin in plugins():
        state = f"{plugin.state}: {plugin.reason}" if plugin.reason else plugin.state
        rows.append((f"plugin {plugin.id}", f"{plugin.distribution or '-'} {plugin.version or '-'}, {state}"))
    rows += [
        ("TD_PLUGINS", os.environ.get("TD_PLUGINS", "-")),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", platform.platform()),
        ("torch", torch.__version__),
        ("CUDA", cuda),
        *((name, _version(name)) for name in BESIDE),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "-"


def run(arguments: list[str]) -> None:
    """Run ``script.py [args]`` or ``-m module [args]`` with td in the place of the reference implementation."""
    is_module = arguments[:1] == ["-m"]
    words = arguments[1:] if is_module else arguments
    if not words or words[0].startswith("-"):
        raise SystemExit("python -m td run: needs a script or -m and a module, then their arguments")
    if not is_module and not Path(words[0]).exists():
        raise SystemExit(f"python -m td run: there is no file {words[0]}")
    install_as_tensordict()
    # A child process takes the import path of its parent, or what the environment says.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *([inherited] if inherited else [])])
    sys.argv = words
    first = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    sys.path[0:1] = [first, str(STAND_IN)]
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def main(arguments: list[str]) -> None:
    """Act on the words of the command line."""
    if arguments[:1] == ["run"]:
        run(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m td",
        description="Print an environment report: versions, plugins, torch, Python, CUDA.",
        epilog="python -m td run script.py [args] | -m module [args]: run a program written for tensordict with td",
    )
    parser.parse_args(arguments)
    print(report())


if __name__ == "__main__":
    main(sys.argv[1:])
