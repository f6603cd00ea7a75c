"""What is installed and active is what was meant to be: a silent skip must not look like a pass."""

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


def test_the_installed_distributions_are_the_expected_ones(installed: set[str], expected: set[str]) -> None:
    assert installed == expected


def test_the_active_plugins_are_the_expected_ones(expected: set[str]) -> None:
    active = {plugin.distribution for plugin in td_core.plugins() if plugin.state == "active"}
    assert active == expected - {
        "td-core",
        "td-all",
    }  # the one is what they plug into, the other brings no own
