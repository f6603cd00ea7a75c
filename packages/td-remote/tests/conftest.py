"""Register the plugin if it is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from td_core.testing import installed
from td_remote import plugin


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="remote", distribution="td-remote", if_missing=True):
        yield
