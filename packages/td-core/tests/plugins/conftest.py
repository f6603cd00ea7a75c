"""Fixtures that the tests of declared methods share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from td_core import MissingPluginError
from td_core.plugins.siblings import METHODS, PROTOCOLS, SiblingMethods


@pytest.fixture
def no_sibling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove every provided method during a test, if the siblings are installed."""
    for package in METHODS.values():
        monkeypatch.delitem(MissingPluginError.unavailable, package, raising=False)
    names = {*METHODS, *PROTOCOLS} & vars(SiblingMethods).keys()
    provided = {name: vars(SiblingMethods)[name] for name in names}
    for name in provided:
        delattr(SiblingMethods, name)
    yield
    for name, member in provided.items():
        setattr(SiblingMethods, name, member)
