"""``python -m td``: print an environment report, or run a program written for tensordict with td."""

from __future__ import annotations

import argparse
import builtins
import os
import platform
import sys
import zipfile
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from td_core import plugins
from td_core.errors import FIRST_PARTY

from ._alias import STAND_IN_FILE, install_as_tensordict

PACKAGES = ("td-core", *FIRST_PARTY, "td-all")
BESIDE = ("numpy", "pluggy", "xxhash", "tqdm", "tensordict")

#: Folder on the import path of child processes, with a package ``tensordict`` that installs the alias.
STAND_IN = Path(STAND_IN_FILE).parents[1]


def report() -> str:
    """Format the versions, plugins and devices of this environment as text, for bug reports."""
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
    """Run ``script.py [args]`` or ``-m module [args]`` with td in place of tensordict."""
    is_module = arguments[:1] == ["-m"]
    words = arguments[1:] if is_module else arguments
    if not words or words[0].startswith("-"):
        raise SystemExit("python -m td run: needs a script or -m and a module, then their arguments")
    if not is_module and not Path(words[0]).exists():
        raise SystemExit(f"python -m td run: cannot find the file {words[0]}")
    install_as_tensordict()
    # Spawned children take sys.path of the parent, other child processes take PYTHONPATH: set both.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), *([inherited] if inherited else [])])
    sys.argv = words
    first = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    sys.path[0:1] = [first, str(STAND_IN)]
    if is_module:
        spec = _module_spec(words[0])
    elif Path(words[0]).is_file() and not zipfile.is_zipfile(words[0]):
        _run_file(os.path.abspath(words[0]))
        return
    else:
        sys.path[0] = words[0]
        spec = PathFinder.find_spec("__main__", [words[0]])
        if spec is None:
            raise SystemExit(f"python -m td run: there is no __main__.py in {words[0]}")
    _run_spec(spec, is_module)


def _module_spec(name: str) -> object:
    """Find the spec of the module that ``-m name`` runs: ``name``, or ``name.__main__`` for a package."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"python -m td run: cannot find the module {name}: {error}") from error
    if spec is None:
        raise SystemExit(f"python -m td run: cannot find the module {name}")
    return spec if spec.submodule_search_locations is None else _module_spec(f"{name}.__main__")


def _run_file(path: str) -> None:
    """Run a script, source or compiled, as the main module."""
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    if isinstance(loader, SourceFileLoader):
        code: object = loader.source_to_code(loader.get_data(path), path)
    else:
        code = loader.get_code("__main__")
    _become_main(code, __file__=path, __loader__=loader, __cached__=None)


def _run_spec(spec: Any, is_module: bool) -> None:
    """Run the module of an import spec as the main module."""
    sys.argv[0] = spec.origin if is_module else sys.argv[0]
    code = spec.loader.get_code(spec.name)
    told = {"__file__": spec.origin, "__loader__": spec.loader, "__spec__": spec, "__package__": spec.parent}
    _become_main(code, **told, __cached__=spec.cached)


def _become_main(code: Any, **told: object) -> None:
    """Run code as ``__main__``."""
    # The module stays in sys.modules for threads and for pickles at exit, also as __mp_main__, its name in pickles of
    # spawned child processes.
    module = ModuleType("__main__")
    vars(module).update(told, __builtins__=builtins)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, vars(module))


def main(arguments: list[str]) -> None:
    """Parse the command line: print the report, or run a program."""
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
