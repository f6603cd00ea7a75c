"""The installed packages and active plugins are those that the session expects, so that no test is skipped by mistake."""

from __future__ import annotations

import os

import pytest

import td_core


@pytest.fixture
def expected() -> set[str]:
    """Return the distributions that the session installed, from ``TD_EXPECT_PLUGINS``."""
    names = os.environ.get("TD_EXPECT_PLUGINS")
    if names is None:
        pytest.skip("TD_EXPECT_PLUGINS is not set: the nox sessions set it")
    return set(names.split(","))


def test_installed_distributions_equal_expected(installed: set[str], expected: set[str]) -> None:
    assert installed == expected


def test_active_plugins_equal_expected(expected: set[str]) -> None:
    active = {plugin.distribution for plugin in td_core.plugins() if plugin.state == "active"}
    assert active == expected - {
        "td-core",
        "td-all",
    }  # td-core loads the plugins, and td-all has none
