"""Names imported at first use, and public names of modules for pickles."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from td_core._python.public_names import lazy_names


def test_lazy_names_imports_value_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    find, names = lazy_names("lazy_package", {"json": ["dumps"], "pickle": ["loads", "dumps"]})
    assert names() == ["dumps", "loads"]
    assert find("dumps") is sys.modules["pickle"].dumps is vars(package)["dumps"]
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'missing'"):
        find("missing")
