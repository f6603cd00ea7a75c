"""The index of the search has one entry with a short title for each thing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the hook is the same in every environment

SEARCH = runpy.run_path(str(Path(__file__).parents[1] / "docs/search_index.py"))
OWN = "reference/collections/entries/#td_core.TensorDict.get"
FILE = "reference/td_hdf5/PersistentTensorDict/#td_hdf5.PersistentTensorDict"


@pytest.mark.parametrize(
    ("location", "title", "expected"),
    [
        (OWN, "get  <code>classmethod</code> <code>writable</code>", "get"),
        (f"{FILE}.file", "file  <code>property</code>", "PersistentTensorDict.file"),
        (FILE, "PersistentTensorDict", "PersistentTensorDict"),
        ("reference/td_core/#td_core.save", "save", "save"),
        ("guide/indexing/#one", "What is <code>data[0]</code>", "What is <code>data[0]</code>"),
    ],
)
def test_shorten_keeps_the_name(location: str, title: str, expected: str) -> None:
    assert [*SEARCH["shorten"]([{"location": location, "title": title, "text": ""}])] == [
        {"location": location, "title": expected, "text": ""}
    ]


@pytest.mark.parametrize(("text", "expected"), [("the same", [OWN]), ("its own", [OWN, f"{FILE}.get"])])
def test_shorten_drops_what_a_class_inherits(text: str, expected: list[str]) -> None:
    entries = [
        {"location": OWN, "title": "get", "text": "the same"},
        {"location": f"{FILE}.get", "title": "get", "text": text},
    ]
    assert [entry["location"] for entry in SEARCH["shorten"](entries)] == expected


def test_check_names_missing_method_raises() -> None:
    with pytest.raises(ValueError, match="has no entry for .*'get'"):
        SEARCH["check_names"]([])
