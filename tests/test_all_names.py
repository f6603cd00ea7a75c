"""``__all__`` of each package equals the names that ``dir`` shows, except names of builtins."""

from __future__ import annotations

import builtins
from importlib import import_module
from types import ModuleType


def test_all_equals_visible_names(present: str) -> None:
    package = import_module(present)
    visible = {
        name
        for name in dir(package)
        if not name.startswith("_")
        and name != "annotations"
        and not hasattr(builtins, name)
        and not isinstance(getattr(package, name), ModuleType)
    }
    public = {name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)}
    assert {name for name in public if not name.startswith("_")} == visible


def test_all_lists_each_name_once(present: str) -> None:
    names = import_module(present).__all__
    assert sorted(set(names)) == sorted(names)


def test_star_import_hides_no_builtin(present: str) -> None:
    assert [
        name for name in import_module(present).__all__ if hasattr(builtins, name) and name[0] != "_"
    ] == []
