"""Methods that factories build: names and docstrings, and classmethods made from functions."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from td_core import (
    TensorDict,
    hookimpl,
    make_classmethod,
)
from td_core._python.method_factories import name_method
from td_core.testing import installed


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
