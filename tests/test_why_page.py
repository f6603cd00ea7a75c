"""The figures of the pages that say why are those that a program prints."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def read_figures() -> dict[str, str]:
    """Return the ratio of each row of the page, by name."""
    table = re.search(r"benchmarks/why.py. -->\n(.*)<!-- End of figures", read("docs/why.md"), re.DOTALL)
    assert table
    return dict(re.findall(r"^\| ([^|]+?) \| [\d.]+ \| [\d.]+ \| (\d+) \|$", table[1], re.MULTILINE))


def test_page_has_the_rows_of_the_program() -> None:
    pytest.importorskip("td_data")
    assert read_figures().keys() == runpy.run_path(str(ROOT / "benchmarks/why.py"))["COMPARISONS"].keys()


def test_readme_has_the_figures_of_the_pages() -> None:
    found = re.findall(r"(\d+) times faster", read("README.md"))
    assert found == [*read_figures().values()]
    times = dict(re.findall(r"^\| `import (\w+)` \| (\d+) ms", read("docs/comparison.md"), re.MULTILINE))
    assert f"{times['td']} ms, not {int(times['tensordict']):,} ms" in read("README.md")


def test_pages_do_not_promise_what_migrating_takes_back() -> None:
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")):
        assert not re.search(r"runs? unchanged|without (any )?changes", path.read_text(encoding="utf-8")), (
            path
        )
