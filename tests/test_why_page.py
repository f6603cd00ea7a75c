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


#: What no page promises about programs of tensordict, since docs/migrating.md lists differences, and why.
PROMISES = {
    r"runs? unchanged|without (any )?changes?\b": "some programs need one",
    r"(all|every|each|any|existing) programs? (of|for|that import|written for) tensordict": "some need a change",
    r"drop-in|fully compatible|full compatibility|100 ?% compatible": "it lists differences",
    r"(same|identical|exactly) (API )?(as|to) tensordict|no differences?\b": "it lists differences",
    r"(whole|complete|entire|all of the) (API|interface) of tensordict": "it lists names that td lacks",
    r"(all|every) (names?|methods?|functions?) of tensordict": "it lists names that td lacks",
    r"(all|every|any) (files?|saves?) of td (load|can be read|open)s? (in|with|by) tensordict": "only what its format can hold",
}


@pytest.mark.parametrize("words", PROMISES)
def test_pages_do_not_promise_what_migrating_takes_back(words: str) -> None:
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")):
        assert not re.search(words, " ".join(read(str(path.relative_to(ROOT))).split())), path


def test_migrating_names_what_the_pages_hold_back() -> None:
    page, start = (" ".join(read(path).split()) for path in ("docs/migrating.md", "README.md"))
    assert "## Not in td" in page
    assert "Most programs need one change" in page
    for text in (page, start):
        assert "as far as its format can hold their content" in text


@pytest.mark.parametrize(
    "words", ["runs unchanged", "every program of tensordict", "a drop-in", "the same API as tensordict"]
)
def test_promises_are_found(words: str) -> None:
    assert any(re.search(pattern, words) for pattern in PROMISES)
