"""Run all comparisons with tensordict and write ``docs/comparison.md`` from the results.

Run it as ``nox -s comparison``, or in an environment that has the packages and tensordict. It takes about eight minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "comparison.md"
COMMANDS = {
    "import": ["bench_import.py --rounds 5"],
    "size": ["bench_size.py"],
    "ops": ["ops.py --rounds 9"],
    "io": [
        "io.py --only transformer --rounds 5 --folder /dev/shm",
        "io.py --only '2000 small' --rounds 5 --folder /dev/shm",
        "io.py --only rows --rounds 5",
    ],
    "safety": ["bench_safety.py"],
    "packed": ["packed.py --rounds 15"],
    "scale": ["scale.py --rounds 3"],
    "programs": ["programs.py --steps 40"],
}
TEMPLATE = """\
# How it compares

The command above each table prints its figures. `nox -s comparison` runs all commands, with td {td} and
tensordict {tensordict} in one environment, and writes this page. The machine has
{machine}.
Times depend on the machine; ratios of times depend on it much less.

## Import

{import_command}

{import_table}

Heavy modules are modules of `torch._dynamo`, `torch.distributed`, `torch.export` and `numpy.testing` that `import torch`
does not load. `import torch` takes {torch_ms:.0f} ms and {torch_mb:.0f} MB here.

## Installation

{size_command}

{size_table}

All packages also need torch and numpy.

## Operations

{ops_command}

A collection replaces loops over a dict, so the times are compared with hand-written loops. Each number is the geometric mean
over the rows of [Every operation](#every-operation).

{ops_table}

## Packed collections

{packed_command}

The leaves of a [packed collection](guide/packed.md) are views of one storage. Each cell is the time of an operation on it as a
part of the time on a plain collection, by `torch._foreach_*`, by a loop, and by tensordict. The last column is the least that
the check of the leaves and the kernel can take, as a part of the time. `*` marks what is above its aim. It is 1 for a plain
collection, and 0.5 for `mul_` and `lerp_` of 10 leaves. For 200 leaves written in place, it is 0.4 and 0.3 for fills by
`torch._foreach_*` and by a loop, 0.15 and 0.1 for `lerp_` and `update_`, and 0.1 for the others: what is left above it is the
comparison of 200 leaves with what they were.

{packed_table}

## Many items, deep and wide trees

{scale_command}

Times are in ms. {scale_summary} They are marked with `*`, and buy:

- `update_` checks all leaves before it writes the first.
- A deep copy of a list or of a lazy stack keeps which leaves share memory. tensordict copies each leaf alone.
- The members of a lazy stack at a slice or at positions are new nodes with the same leaves: an entry that is set in the result is
  not set in the stack, and a member that is taken twice gets two values. tensordict returns the members themselves.
- A file of `torch.save` names one function, and `weights_only=True` reads it.

{scale_table}

## Whole programs

{programs_command}

Times are those of one step in ms. The last two columns are what the step takes more than with dicts of tensors; `*` marks more
than 3%. The ensemble pays for what `torch.vmap` does with nested collections: it takes the weights apart and builds them again,
node by node. The ragged batch pays for 64 new collections with a string in each step, about 0.3 ms.

{programs_table}

## Saving, loading, pickling

{io_command}

Times are medians in ms, on a file system in memory, which avoids the noise of a disk; *rows* is on disk. The floor of a save
is a plain `write()` per leaf; the floor of reading rows is indexing plain tensors in memory. *transformer* has 184 leaves and
177 MB, *2000 small* has leaves of 1 kB, *rows* is a data set of 100,000 rows. Saves of td are atomic, saves of tensordict
are not.

{io_table}

## Failures

{safety_command}

{safety_table}

## Every operation

Each cell is *time of td / time of the loop* (lower is better), then *time of tensordict / time of td* (higher is better).

td checks all leaves before it writes the first, so that an error leaves the collection unchanged; tensordict does not, and is
then up to a third faster: in `update_`, and in `setitem` and `replay write` of few leaves.

{rows_table}
"""


def run(name: str, folder: Path) -> list[Any]:
    """Run the commands of one section and return their results."""
    results = []
    for number, command in enumerate(COMMANDS[name]):
        into = folder / f"{name}{number}.json"
        words = [sys.executable, *shlex.split(f"benchmarks/{command}"), "--json", str(into)]
        print(f"\n$ python benchmarks/{command}", flush=True)
        subprocess.run(words, cwd=ROOT, check=True)
        results.append(json.loads(into.read_text()))
    return results


def shown(name: str) -> str:
    """Format the commands of one section as a Markdown code block."""
    return "\n".join(["```bash", *(f"python benchmarks/{command}" for command in COMMANDS[name]), "```"])


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a Markdown table."""
    lines = [list(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Describe the machine: processor, system, versions of Python and torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    return (
        f"{os.cpu_count()} cores of {processor}, {platform.system()}, Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


def imports(found: dict[str, Any]) -> str:
    """Format the table of import times."""
    rows = (
        [f"`import {name}`", f"{x['ms']:.0f} ms", f"{x['mb']:.0f} MB", f"{x['heavy']:.0f}"]
        for name, x in found.items()
    )
    return table(["after `import torch`", "time", "memory", "heavy modules"], rows)


def sizes(found: dict[str, Any]) -> str:
    """Format the table of package sizes."""
    rows = []
    for name, x in found.items():
        lines = f"{x['lines']:,}" if x["lines"] else ""
        rows.append([name, f"{x['kb']:,.0f} kB", f"{x['source_kb']:,.0f} kB", lines, ", ".join(x["needs"])])
    return table(["distribution", "installed", "Python source", "lines", "also needs"], rows)


def operations(found: list[dict[str, Any]]) -> str:
    """Format the table of geometric means per shape of collection."""
    rows = []
    for shape in [*dict.fromkeys(row["shape"] for row in found), ""]:
        part = [row for row in found if shape in ("", row["shape"])]
        loop = statistics.geometric_mean(row["ours_over_loop"] for row in part if row["kind"] == "torch")
        gain = statistics.geometric_mean(row["reference_over_ours"] for row in part)
        faster = sum(row["reference_over_ours"] > 1 for row in part)
        rows.append([shape or "all", f"{loop:.2f}", f"{gain:.2f}", f"{faster} of {len(part)}"])
    return table(["shape", "our time / loop", "tensordict / our time", "rows where ours is faster"], rows)


def every_row(found: list[dict[str, Any]]) -> str:
    """Format the table of both ratios of each operation."""
    shapes = list(dict.fromkeys(row["shape"] for row in found))
    cells = {
        (r["row"], r["shape"]): f"{r['ours_over_loop']:.2f}, {r['reference_over_ours']:.2f}" for r in found
    }
    names = dict.fromkeys(row["row"] for row in found)
    return table(
        ["", *shapes], ([name, *(cells.get((name, shape), "") for shape in shapes)] for name in names)
    )


def storage(found: list[dict[str, Any]]) -> str:
    """Format the table of times of saving and loading."""
    rows = []
    for row in found:
        times = row["median_ms"]
        gain = f"{times['ref'] / times['ours']:.2f}" if "ref" in times else ""
        others = (
            f"{times[name]:.2f}" if name in times else "" for name in ("ours", "ref", "floor", "safetensors")
        )
        rows.append([row["data"], row["row"], *others, gain])
    return table(["data", "", "ours", "tensordict", "floor", "safetensors", "tensordict / ours"], rows)


#: The aims of operations on packed collections of 200 leaves, as parts of the time by ``torch._foreach_*`` and by a loop.
_AIMS = {"zero_": (0.4, 0.3), "fill_": (0.4, 0.3), "lerp_": (0.15, 0.1), "update_": (0.15, 0.1)}


def find_aims(shape: str, name: str) -> dict[str, float]:
    """Return the aims of an operation on a packed collection, by contestant."""
    if shape.startswith("10 "):
        return {"plain": 0.5 if name in ("mul_", "lerp_") else 1.0}
    if not name.endswith("_"):
        return {"plain": 1.0}
    fused, loop = _AIMS.get(name, (0.1, 0.1))
    return {"plain": 1.0, "foreach": fused, "loop": loop}


def mark(figure: float, most: float, form: str = ".2f", unit: str = "") -> str:
    """Format a figure, with a mark if it is above its aim."""
    return f"{figure:{form}}{unit}{' *' if figure > most else ''}"


def packed_rows(found: list[dict[str, Any]]) -> str:
    """Format the table of operations on packed collections."""
    names = ("plain", "foreach", "loop", "tensordict")
    rows = []
    for row in found:
        ratio, aims = row["ratio"], find_aims(row["shape"], row["row"].split()[0])
        cells = [mark(ratio[name], aims.get(name, math.inf)) if name in ratio else "" for name in names]
        rows.append(
            [row["shape"], row["row"], f"{row['us']['packed']:.1f}", *cells, f"{1 / ratio['bound']:.2f}"]
        )
    return table(["leaves", "", "us", "/ plain", "/ foreach", "/ loop", "/ tensordict", "bound"], rows)


def scale_rows(found: list[dict[str, Any]]) -> str:
    """Format the table of many items and large trees."""
    rows = []
    for row in found:
        cells = [f"{row['ms'][name]:.3f}" if name in row["ms"] else "" for name in ("ours", "ref", "loop")]
        gain = row["reference_over_ours"]
        rows.append([row["row"], *cells, f"{gain:.2f}{' *' if gain < 1 else ''}" if gain else ""])
    return table(["", "ours", "tensordict", "loop", "tensordict / ours"], rows)


def scale_mean(found: list[dict[str, Any]]) -> str:
    """Return a sentence with the mean of the table of many items."""
    gains = [row["reference_over_ours"] for row in found if row["reference_over_ours"]]
    slower = sum(gain < 1 for gain in gains)
    return f"Over {len(gains)} rows, td is {statistics.geometric_mean(gains):.2f} times faster; {slower} rows are slower."


def program_rows(found: list[dict[str, Any]]) -> str:
    """Format the table of whole programs."""
    rows = []
    for row in found:
        times = [f"{row['ms'][name]:.3f}" for name in ("plain", "td", "tensordict")]
        above = [mark(row["above"][name], 3, "+.1f", "%") for name in ("td", "tensordict")]
        rows.append([row["program"], *times, *above])
    return table(["", "dicts", "td", "tensordict", "td above dicts", "tensordict above dicts"], rows)


def main() -> None:
    """Run all measurements and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(name, Path(folder)) for name in COMMANDS}
    imported, ops, safety = results["import"][0], results["ops"][0], results["safety"][0]
    text = TEMPLATE.format(
        td=version("td-core"),
        tensordict=version("tensordict"),
        machine=machine(),
        torch_ms=imported["td_core"]["torch_ms"],
        torch_mb=imported["td_core"]["torch_mb"],
        import_table=imports(imported),
        size_table=sizes(results["size"][0]),
        ops_table=operations(ops),
        io_table=storage([row for part in results["io"] for row in part]),
        safety_table=table(
            ["", "td", "tensordict"],
            ([name, what, safety["tensordict"][name]] for name, what in safety["td"].items()),
        ),
        rows_table=every_row(ops),
        packed_table=packed_rows(results["packed"][0]),
        scale_table=scale_rows(results["scale"][0]),
        scale_summary=scale_mean(results["scale"][0]),
        programs_table=program_rows(results["programs"][0]),
        **{f"{name}_command": shown(name) for name in COMMANDS},
    )
    options.page.write_text(text, encoding="utf-8")
    print(f"\nwrote {options.page}")


if __name__ == "__main__":
    main()
