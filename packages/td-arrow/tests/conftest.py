"""Register the plugin if it is not installed, and find out what pyarrow can do."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from td_arrow import plugin
from td_core.testing import installed


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="arrow", distribution="td-arrow", if_missing=True):
        yield


@pytest.fixture(scope="session")
def reads_null_cells() -> bool:
    """Return True if pyarrow reads null cells of a fixed size from Parquet, which releases such as 16 cannot."""
    file = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))}), file)
    try:
        return bool(pq.read_table(file).num_rows)
    except pa.ArrowInvalid:
        return False
