"""Names imported at first use, and public names of modules for pickles."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import sys
from types import ModuleType

import pytest
import torch

from td_core._python.public_names import LazyFunction, lazy_names, set_module


def test_lazy_names_imports_value_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    find, names = lazy_names("lazy_package", {"json": ["dumps"], "pickle": ["loads", "dumps"]})
    assert names() == ["dumps", "loads"]
    assert find("dumps") is sys.modules["pickle"].dumps is vars(package)["dumps"]
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'missing'"):
        find("missing")


HERE = "public_names_home"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(HERE)
    monkeypatch.setitem(sys.modules, HERE, module)
    return module


def test_lazy_names_mapping_gives_names_from_relative_module(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("json")
    package.__path__ = json.__path__
    monkeypatch.setitem(sys.modules, "json", package)
    find, names = lazy_names("json", {".decoder": {"Error": "JSONDecodeError"}})
    assert names() == ["Error"]
    assert find("Error") is package.Error is json.JSONDecodeError


def test_lazy_function_imports_at_first_use(monkeypatch: pytest.MonkeyPatch, home: ModuleType) -> None:
    monkeypatch.delitem(sys.modules, HERE)
    function = LazyFunction("package", HERE, "double")
    assert repr(function) == "<lazy function double of package>" and function.__name__ == "double"
    with pytest.raises(ModuleNotFoundError, match=HERE):
        function(1)
    monkeypatch.setitem(sys.modules, HERE, home)
    home.double = lambda value, *, times=1: value * 2 * times  # type: ignore[attr-defined]
    assert function(2, times=3) == 12
    assert str(inspect.signature(function)) == "(value, *, times=1)"


def test_set_module_names_public_module_in_pickles(home: ModuleType) -> None:
    @set_module(HERE)
    class Point:
        pass

    home.Point = Point  # type: ignore[attr-defined]
    Point.__qualname__ = "Point"
    data = pickle.dumps(Point())
    assert HERE.encode() in data and __name__.encode() not in data
    assert type(pickle.loads(data)) is Point


@pytest.mark.parametrize("in_files", [False, True])
def test_set_module_in_files_allows_loading_weights_only(in_files: bool, home: ModuleType) -> None:
    class Point:
        pass

    Point.__qualname__ = Point.__name__ = f"Point{in_files}"
    set_module(HERE, in_files=in_files)(Point)
    setattr(home, Point.__name__, Point)
    torch.save(Point(), file := io.BytesIO())
    file.seek(0)
    if in_files:
        assert type(torch.load(file, weights_only=True)) is Point
    else:
        with pytest.raises(pickle.UnpicklingError, match=f"{HERE}.PointFalse"):
            torch.load(file, weights_only=True)
