"""Types of coercers, value types and locations by name, and what from_any makes of coerced objects."""

from __future__ import annotations

import subprocess
import sys
import types
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from td_core import BatchSizeError, PluginError, TensorDict, from_any, from_dict
from td_core._python.type_names import has_name, is_type_name
from td_core.spi import Coercer, LeafSerializer, hookimpl, join_value, split_value
from td_core.testing import installed


class Series:
    """A column of a library whose public name is ``frames.Series``."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


class GeoSeries(Series):
    """A subclass in another library."""


class Frame(UserDict):  # type: ignore[type-arg]
    """A mapping of columns, which a coercer converts."""


class Timestamp:
    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timestamp) and other.seconds == self.seconds

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the classes above those of the package ``frames``, as if it were imported."""
    package = types.ModuleType("frames")
    for cls in (Series, Frame, Timestamp):
        monkeypatch.setattr(cls, "__module__", "frames.core.private")
        setattr(package, cls.__name__, cls)
    monkeypatch.setattr(GeoSeries, "__module__", "geo")
    monkeypatch.setitem(sys.modules, "frames", package)


def to_leaf(value: Any, batch_size: torch.Size, device: torch.device | None) -> torch.Tensor:
    return torch.tensor(value.values)


def to_node(value: Any, batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    rows = len(next(iter(value.values())).values)
    return TensorDict({key: to_leaf(item, batch_size, device) for key, item in value.items()}, [rows])


class Plugin:
    @hookimpl
    def td_coercers(self) -> list[Coercer]:
        return [Coercer(("frames.Series",), to_leaf), Coercer(("frames.Frame", "absent.Table"), to_node)]

    @hookimpl
    def td_serializers(self) -> list[LeafSerializer]:
        return [LeafSerializer("frames.Timestamp", "frames.Timestamp", lambda t: t.seconds, Timestamp)]


@pytest.mark.parametrize(
    ("cls", "name", "expected"),
    [
        (Series, "frames.Series", True),
        (Series, "frames.core.private.Series", True),
        (Series, "frames.core.Series", False),
        (Series, "frames.Frame", False),
        (Series, "geo.Series", False),
        (Series, "frames", False),
        (GeoSeries, "frames.Series", False),
        (dict, "builtins.dict", True),
        (np.ndarray, "numpy.ndarray", True),
        (torch.nn.Module, "torch.nn.Module", True),
    ],
)
def test_has_name_compares_module_and_public_names(cls: type, name: str, expected: bool) -> None:
    assert has_name(cls, name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pandas.Series", True),
        ("a.b.C", True),
        ("Series", False),
        ("a.", False),
        ("a.1b", False),
        ("a b.c", False),
        (3, False),
    ],
)
def test_is_type_name_requires_module_and_class(name: Any, expected: bool) -> None:
    assert is_type_name(name) is expected


@pytest.mark.parametrize("cls", [Series, GeoSeries])
def test_coercer_by_name_converts_values(cls: Any) -> None:
    with installed(Plugin()):
        td = TensorDict({"a": cls([1.0, 2.0])}, [2])
        td["b"] = cls([3.0, 4.0])
        td["n", "c"] = cls([5.0, 6.0])
        assert {key: leaf.tolist() for key, leaf in td.items(True, True)} == {
            "a": [1.0, 2.0],
            "b": [3.0, 4.0],
            ("n", "c"): [5.0, 6.0],
        }
        with pytest.raises(BatchSizeError, match=r"key 'a' has shape \[3\]"):
            TensorDict({"a": cls([1.0, 2.0, 3.0])}, [2])


def test_coercer_by_name_does_not_import_library() -> None:
    code = (
        "import sys; import td_core; from td_core import TensorDict; from td_core.spi import Coercer, hookimpl\n"
        "class P:\n"
        "    @hookimpl\n"
        "    def td_coercers(self): return [Coercer(('wave.Nothing', 'colorsys.Nothing'), lambda v, b, d: v)]\n"
        "from td_core.plugins.manager import installed\n"
        "class Odd: pass\n"
        "with installed(P()):\n"
        "    try: TensorDict({'a': Odd()})\n"
        "    except AttributeError: pass\n"
        "assert not {'wave', 'colorsys'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_value_type_by_name_round_trips() -> None:
    with installed(Plugin(), distribution="td-frames", version="1.0"):
        plain, kinds = split_value([Timestamp(3)])
        assert (plain, kinds) == ([3], {"c": {"0": "frames.Timestamp@td-frames==1.0"}})
        assert join_value(plain, kinds) == [Timestamp(3)]
    with pytest.raises(TypeError, match="no serializer is registered for its type"):
        split_value(Timestamp(3))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            Coercer(("frames.Series",), to_leaf),
            Coercer(("frames.Series",), to_leaf),
            "already have a coercer",
        ),
        (Coercer(("absent.Table",), to_leaf), Coercer(("absent.Table",), to_leaf), "already have a coercer"),
        (Coercer((Series,), to_leaf), Coercer(("frames.Series",), to_leaf), "already have a coercer"),
        (Coercer(("frames.Series",), to_leaf), Coercer((Series,), to_leaf), "already have a coercer"),
        (None, Coercer(("numpy.ndarray",), to_leaf), "'numpy.ndarray' become entries without a coercer"),
        (None, Coercer(("td_core.TensorDict",), to_leaf), "'td_core.TensorDict' become entries without"),
        (None, Coercer(("torch.nn.Parameter",), to_leaf), "needs the class itself, not its name"),
        (None, Coercer(("builtins.object",), to_leaf), "needs the class itself, not its name"),
        (None, Coercer(("Series",), to_leaf), "the name of a class includes its module"),
        (None, Coercer("frames.Series", to_leaf), "a tuple of classes"),  # type: ignore[arg-type]
        (
            None,
            LeafSerializer("t.x", "Word", str, str),
            "the name of a class includes its module",
        ),
        (None, LeafSerializer("t.x", "builtins.str", str, str), "already have a serializer"),
        (None, LeafSerializer("t.x", "numpy.float32", str, str), "already have a serializer"),
        (
            LeafSerializer("t.x", "absent.Word", str, str),
            LeafSerializer("t.y", "absent.Word", str, str),
            "values of 'absent.Word' already have a serializer",
        ),
        (
            LeafSerializer("t.x", "frames.Timestamp", str, str),
            LeafSerializer("t.y", Timestamp, str, str),
            "already have a serializer",
        ),
    ],
)
def test_register_taken_or_malformed_name_raises(first: Any, second: Any, message: str) -> None:
    def plugin(item: Any) -> Any:
        hook = "td_coercers" if isinstance(item, Coercer) else "td_serializers"
        return type("P", (), {hook: hookimpl(lambda self: [] if item is None else [item], specname=hook)})()

    with (
        installed(plugin(first), id="first"),
        pytest.raises(PluginError, match=message),
        installed(plugin(second), id="second"),
    ):
        pass


def make_frame() -> Frame:
    return Frame(x=Series([1.0, 2.0]), y=Series([3.0, 4.0]))


@pytest.mark.parametrize("method", [from_any, TensorDict.from_any])
def test_from_any_asks_coercers(method: Any) -> None:
    with installed(Plugin()):
        td = method(make_frame())
        assert (td.batch_size, td["x"].tolist(), td["y"].tolist()) == ((2,), [1.0, 2.0], [3.0, 4.0])
        assert method(make_frame(), batch_size=[2]).batch_size == (2,)
        assert method(make_frame(), batch_dims=1).batch_size == (2,)
        assert method(make_frame(), device="cpu").device == torch.device("cpu")
        assert method(Series([1.0])).tolist() == [1.0]
        assert method(GeoSeries([1.0])).tolist() == [1.0]
        with pytest.raises(BatchSizeError):
            method(make_frame(), batch_size=[3])
        with pytest.raises(ValueError, match="give batch_size or batch_dims, not both"):
            method(make_frame(), batch_size=[2], batch_dims=1)


def test_from_any_and_from_dict_ask_coercers_for_nested_objects() -> None:
    with installed(Plugin()):
        for td in (
            from_any({"f": make_frame(), "s": (Series([1.0]),)}),
            from_dict({"f": make_frame(), "s": {"0": Series([1.0])}}),
        ):
            assert (td["f"].batch_size, td["f", "x"].tolist(), td["s", "0"].tolist()) == (
                (2,),
                [1.0, 2.0],
                [1.0],
            )


@pytest.mark.parametrize("value", ["text", b"x", None, 3, 2.5, torch.ones(2), np.ones(2), object], ids=repr)
def test_from_any_returns_other_values_unchanged(value: Any) -> None:
    with installed(Plugin()):
        assert from_any(value) is value
