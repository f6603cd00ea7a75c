"""Compare the speed of two versions of the packages, each given as a folder of wheels.

    python benchmarks/compare.py OLD_WHEELS NEW_WHEELS

Each script runs in several processes, alternately with the old and the new version. The figure of a row is the time of td
divided by the time of the hand-written loop (or of the floor) in the same process. The ratio of a row is the median of the
new figures divided by the median of the old figures: 1.10 is ten percent slower. No result makes the script fail.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("ops", "io", "distributed")


def read_figures(script: str, results: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield (name of a row, our time / time of its loop or floor) for the rows that have both."""
    for row in results:
        if script == "ops":
            yield f"{row['shape']}: {row['row']}", row["ours_over_loop"]
        elif "floor" in row["median_ms"]:
            yield f"{row['data']}: {row['row']}", row["median_ms"]["ours"] / row["median_ms"]["floor"]


def unpack(wheels: Path, folder: Path) -> Path:
    """Extract all wheels of a folder into one folder for the import path."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no wheels in {wheels}: `nox -s build` writes them into dist/")
    return folder


def measure(script: str, version: Path, options: list[str]) -> list[dict[str, Any]]:
    """Run one script with one version on the import path, and return its results."""
    into = version.parent / "results.json"
    command = [sys.executable, str(HERE / f"{script}.py"), *options, "--json", str(into)]
    env = {**os.environ, "PYTHONPATH": str(version), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    results: list[dict[str, Any]] = json.loads(into.read_text())
    return results


def main() -> None:
    """Print the ratio of every row, and the geometric mean of each script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder with the wheels of the old version")
    parser.add_argument("new", type=Path, help="folder with the wheels of the new version")
    parser.add_argument("--scripts", nargs="*", default=SCRIPTS, choices=SCRIPTS)
    parser.add_argument("--runs", type=int, default=5, help="processes of each version (default: 5)")
    parser.add_argument("--rows", default="", help="regular expression of the rows of ops.py to measure")
    parser.add_argument("--rounds", type=int, help="rounds of each process; each script has its own default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        versions = [unpack(options.old, Path(temporary, "old")), unpack(options.new, Path(temporary, "new"))]
        for script in options.scripts:
            words = ["--rows", options.rows] if script == "ops" else []
            if options.rounds:
                words += ["--rounds", str(options.rounds)]
            figures: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
            for run in range(options.runs):
                for which in (0, 1) if run % 2 else (1, 0):
                    for name, figure in read_figures(script, measure(script, versions[which], words)):
                        figures[name][which].append(figure)
            print(f"\n{script:44} {'old':>8} {'new':>8} {'new / old':>10}")
            ratios = []
            for name, pair in figures.items():
                old, new = map(statistics.median, pair)
                ratios.append(new / old)
                print(f"{name:44} {old:8.2f} {new:8.2f} {new / old:10.3f}{'  slower' * (new > 1.1 * old)}")
            print(
                f"{'geometric mean':44} {'':8} {'':8} {statistics.geometric_mean(ratios):10.3f}", flush=True
            )


if __name__ == "__main__":
    main()
