"""Run the tests that a change can break, nearest first, in less than a minute.

    python tools/near.py          the files that differ from HEAD, and those that git does not track
    python tools/near.py PATH...  these files

A test is near if it has the name of a changed module, imports it, or does so with a module that imports it. The examples of
the changed modules, the smoke cases and the checks of layers and names always run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from project_imports import ROOT, SOURCES, imports, modules, own_module, read_imports

ALWAYS = (
    "tests/test_layers.py",
    "tests/api/test_surface.py",
    "tests/api/test_smoke_kinds.py",
    "tests/api/test_parameters.py::test_first_parameter_changes_result_or_raises",
)
#: Tests that compile, start processes or fill disks: they run only if they changed, or have the name of a changed module.
SLOW = re.compile(
    r"compil|cuda|parallel|process|distributed|plugin_loading|limits|damage|disks|killed|interrupted"
)
MOST_FILES = 12
#: The distance from which on tests are ranked by the names that they share with the changed modules.
INDIRECT = 2
FAR = 99


class Near(NamedTuple):
    """A test file and what makes it near; smaller is nearer. ``foreign``: of another package than the change."""

    distance: int
    foreign: bool
    relevance: float
    path: Path


def find_changed(arguments: list[str]) -> list[Path]:
    """Return the files given, or those that differ from HEAD."""
    names = arguments
    for command in ("diff --name-only HEAD", "ls-files --others --exclude-standard") if not arguments else ():
        done = subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True, check=True)
        names = [*names, *(str(ROOT / name) for name in done.stdout.splitlines())]
    return [path for path in (Path(name).resolve() for name in names) if path.suffix == ".py"]


def resolve(target: str) -> str:
    """Return the module, with its package, that a dotted name belongs to."""
    package = target.partition(".")[0]
    return f"{package}.{own_module(package, target)}"


def measure_distances(changed: Iterable[str]) -> dict[str, int]:
    """Return the modules that import changed ones, with the number of imports between."""
    importers: dict[str, set[str]] = {}
    for package in SOURCES:
        for name in modules(package):
            for found in imports(package, name):
                importers.setdefault(resolve(found.target), set()).add(f"{package}.{name}")
    distances = dict.fromkeys(changed, 0)
    todo = list(distances)
    for module in todo:  # which grows
        for importer in sorted(importers.get(module, ())):
            if importer not in distances:
                distances[importer] = distances[module] + 1
                todo.append(importer)
    return distances


def rank(changed: list[Path]) -> list[Near]:
    """Return the tests that can see a change, nearest first; of equals, those that name most of the changed functions."""
    paths = {path: f"{package}.{name}" for package in SOURCES for name, path in modules(package).items()}
    sources = {path: paths[path] for path in changed if path in paths}
    distances = measure_distances(sources.values())
    named = {
        f"test_{module.rpartition('.')[2].strip('_')}.py": far for module, far in [*distances.items()][::-1]
    }
    owners = {path.relative_to(ROOT).parts[1] for path in sources}
    tests = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/test_*.py")]
    words = {test: set(re.findall(r"\w+", test.read_text(encoding="utf-8"))) for test in tests}
    defined = {
        name for path in sources for name in re.findall(r"(?:def|class) (\w+)", path.read_text("utf-8"))
    }
    weights = {name: 1 / max(1, sum(name in found for found in words.values())) for name in defined}
    parts = {part for name in defined for part in name.split("_")}
    ranked = []
    for test in tests:
        seen = {resolve(found.target) for found in read_imports(test)} & distances.keys()
        steps = [INDIRECT if each.endswith(".__init__") else distances[each] + 1 for each in seen]
        distance = 0 if test in changed else min([*steps, named.get(test.name, FAR)])
        if distance < FAR and not (distance and SLOW.search(test.name)):
            foreign = test.relative_to(ROOT).parts[1] not in owners
            subjects = set(test.stem.split("_")) & parts
            relevance = -len(subjects) - sum(weights[name] for name in words[test] & defined)
            ranked.append(Near(min(distance, INDIRECT), foreign, relevance, test))
    return sorted(ranked)


def main(arguments: list[str]) -> int:
    """Print the tests that are near, run them, and return the status of pytest."""
    changed = find_changed(arguments)
    near = rank(changed)
    chosen = [each for index, each in enumerate(near) if index < MOST_FILES or not each.distance]
    for each in chosen:
        print(f"{each.distance}  {each.path.relative_to(ROOT)}")
    print(f"{len(near) - len(chosen)} other files can see the change; slow ones are left out: {SLOW.pattern}")
    examples = [f"{p}.{n}" for p in SOURCES for n, path in modules(p).items() if path in changed]
    options = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "--doctest-modules", "--pyargs"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    selected = [*(str(each.path) for each in chosen), *ALWAYS, *examples]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *selected], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
