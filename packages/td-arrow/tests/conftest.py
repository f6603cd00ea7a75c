"""Register the plugin if it is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyarrow")

from td_arrow import plugin
from td_core.testing import installed


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="arrow", distribution="td-arrow", if_missing=True):
        yield
