"""Measure the size of each installed package: files, bytes, lines of code, and dependencies other than torch and numpy.

Bytecode is not counted. For tensordict, only sizes are measured.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCES = sorted(Path(__file__).parents[1].glob("packages/*/src/*/__init__.py"))
MODULES = {**{path.parents[2].name: path.parent.name for path in SOURCES}, "tensordict": "tensordict"}


def folder_of(module: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(module)
    return Path(spec.origin).parent if spec and spec.origin else None


def needed(distribution: str) -> list[str]:
    """Return the required dependencies of a distribution, except torch, numpy and packages of the project."""
    try:
        lines = [
            line
            for line in requires(distribution) or ()
            if "extra ==" not in line and "python_version <" not in line
        ]
    except PackageNotFoundError:
        return []
    names = [re.split(r"[^\w-]", line)[0] for line in lines]
    return [name for name in names if name not in ("torch", "numpy", *MODULES)]


def measure(distribution: str, module: str) -> dict[str, Any] | None:
    """Return the sizes of one distribution, or None if it is not installed."""
    folder = folder_of(module)
    if folder is None:
        return None
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    source = [path for path in files if path.suffix == ".py"]
    ours = module != "tensordict"
    return {
        "kb": sum(path.stat().st_size for path in files) / 1e3,
        "source_kb": sum(path.stat().st_size for path in source) / 1e3,
        "source_files": len(source),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in source) if ours else None,
        "needs": needed(distribution),
    }


def main() -> None:
    """Print one line for each distribution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    results = {name: measured for name, module in MODULES.items() if (measured := measure(name, module))}
    for name, found in results.items():
        lines = f", {found['lines']:,} lines" if found["lines"] else ""
        print(
            f"{name:15} {found['kb']:7,.0f} kB, of which {found['source_kb']:6,.0f} kB in {found['source_files']:3} "
            f"files of Python{lines}; needs {', '.join(found['needs']) or 'nothing'} beside torch and numpy"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
