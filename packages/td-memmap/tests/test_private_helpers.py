"""Private helpers of td-memmap: temporary names, batch dims of nested lists, and sizes in messages."""

from __future__ import annotations

from typing import Any

import pytest

from td_core.spi import show_size
from td_memmap._file_names import list_temporary_prefixes
from td_memmap._plan import count_list_dims


def test_temporary_prefix_contains_short_name() -> None:
    assert list_temporary_prefixes("a.memmap") == ".a.memmap.td-"


def test_temporary_prefix_of_long_name_is_digest() -> None:
    first, second = list_temporary_prefixes("k" * 201), list_temporary_prefixes("k" * 202)
    assert len(first) == len(second) == len(".") + 40 + len(".td-")
    assert first != second


@pytest.mark.parametrize(
    ("values", "dims"),
    [
        ("a", 0),
        (["a", "b"], 1),
        ([["a", "b"], ["c", "d"]], 2),
        ([["a", "b"], ["c"]], 1),
        ([["a"], "b"], 1),
        ([], 1),
        ([[], []], 2),
    ],
    ids=str,
)
def test_count_list_dims_counts_dims_of_even_lists(values: Any, dims: int) -> None:
    assert count_list_dims(values) == dims


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KB"),
        (1_709_179, "1.63 MB"),
        (2**60, "1024.00 PB"),
    ],
)
def test_show_size_of_bytes_selects_unit(nbytes: int, text: str) -> None:
    assert show_size(nbytes) == text
