"""The glossary: its size, its terms, and the names of code that it contains."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once  # the sources are the same in every environment

PAGE = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| (?!term\b|-)", line)]
TERMS = [row[0].strip() for row in ROWS]
PLACES = sorted({row[-1].strip().strip("`") for row in ROWS})
MOST = 60


def find_place(dotted: str) -> Any:
    """Import the object with a dotted name. Raise AttributeError if it does not exist."""
    package = dotted.split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    module, names = dotted, []
    while True:
        try:
            place: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        place = getattr(place, name)
    return place


def test_glossary_has_at_most_sixty_terms() -> None:
    assert 0 < len(TERMS) <= MOST


def test_glossary_defines_each_term_once() -> None:
    terms = [term for row in TERMS for term in row.split(", ")]
    assert sorted(set(terms)) == sorted(terms)


@pytest.mark.parametrize("row", ROWS, ids=TERMS)
def test_glossary_row_has_four_cells(row: list[str]) -> None:
    assert len(row) == 4
    assert all(cell.strip() for cell in row)


@pytest.mark.parametrize("place", PLACES)
def test_glossary_names_code_that_exists(place: str) -> None:
    find_place(place)
