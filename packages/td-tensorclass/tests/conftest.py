"""Shared settings of the tests of td-tensorclass."""

from __future__ import annotations

from hypothesis import settings

# torch is slow in the first test that uses it, which must not fail a hypothesis deadline.
settings.register_profile("td", deadline=None)
settings.load_profile("td")
