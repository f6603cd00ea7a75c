"""What the tests of this package share."""

from __future__ import annotations

from hypothesis import settings

# A test that is slow once, while torch warms up, is no failure.
settings.register_profile("td", deadline=None)
settings.load_profile("td")
