"""Names imported at first use, public names of modules for pickles, and the names of methods that factories build."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core._python.public_names import LazyFunction, lazy_names, name_method, set_module
from td_core.spi import hookimpl, make_classmethod
from td_core.testing import installed


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


class Own(TensorDict):
    """A subclass without a kind."""


def from_range(stop: int, *, step: int = 1) -> TensorDict:
    """Make an entry ``a`` from a range."""
    return TensorDict({"a": torch.arange(0, stop, step)})


def test_make_classmethod_returns_instance_of_class() -> None:
    class Plugin:
        @hookimpl
        def td_methods(self) -> dict[str, Any]:
            return {
                "from_range": make_classmethod(from_range, dense=True),
                "class_and_range": make_classmethod(from_range, with_class=lambda cls, stop: (cls, stop)),
            }

    with installed(Plugin()):
        made = Own.from_range(6, step=2)  # type: ignore[attr-defined]
        assert (type(made), made["a"].tolist()) == (Own, [0, 2, 4])
        assert type(TensorDict.from_range(2)) is TensorDict  # type: ignore[attr-defined]
        assert Own.class_and_range(3) == (Own, 3)  # type: ignore[attr-defined]
        assert Own.from_range.__doc__ == "Make an entry ``a`` from a range."  # type: ignore[attr-defined]


def make_method(name: str, factor: int) -> Any:
    def method(self: int) -> int:
        return self * factor

    return name_method(method, name, f"Multiply by {factor}.")


def test_name_method_sets_name_doc_and_own_code() -> None:
    double, triple = make_method("double", 2), make_method("triple", 3)
    assert [(m.__name__, m.__doc__, m(5)) for m in (double, triple)] == [
        ("double", "Multiply by 2.", 10),
        ("triple", "Multiply by 3.", 15),
    ]
    # torch.compile keeps graphs by code object.
    assert double.__code__ is not triple.__code__ and double.__code__.co_name == "double"


def test_make_classmethod_has_signature_with_class() -> None:
    made = make_classmethod(from_range)
    assert str(inspect.signature(made.__func__)) == "(cls, stop: 'int', *, step: 'int' = 1) -> 'TensorDict'"
    bound = made.__get__(None, Own)
    assert list(inspect.signature(bound).parameters) == ["stop", "step"]
    assert type(bound(3)) is TensorDict, "not converted without dense"
