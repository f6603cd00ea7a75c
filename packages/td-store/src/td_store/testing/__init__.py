"""Suites for authors of stores, and sources to test with.

Needs the extra ``testing`` (pytest, hypothesis). In a test module, subclass :class:`SourceTests` and define ``make``, to test a
source of stored tensors, or subclass :class:`OpenTests` and define ``open``, to test the collections that a format opens, or
subclass :class:`ObjectStoreTests` and define ``make``, to test a store of objects.
"""

from __future__ import annotations

import pytest

# Enables pytest's detailed assertion messages, which it otherwise enables only in test modules.
pytest.register_assert_rewrite(
    f"{__name__}._object_store_tests", f"{__name__}._open_tests", f"{__name__}._source_tests"
)

from ._memory_store import MemoryStore  # noqa: E402
from ._object_store_tests import ObjectStoreTests  # noqa: E402
from ._open_tests import OpenTests  # noqa: E402
from ._source_tests import SourceTests  # noqa: E402
from ._sources import LoggedSource, MemorySource, RawFile  # noqa: E402

__all__ = [
    "LoggedSource", "MemorySource", "MemoryStore", "ObjectStoreTests", "OpenTests", "RawFile", "SourceTests",
]  # fmt: skip
