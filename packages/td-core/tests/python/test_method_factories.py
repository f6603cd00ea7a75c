"""Methods that factories build: names and docstrings, and classmethods made from functions."""

from __future__ import annotations

from typing import Any

import torch

from td_core import (
    TensorDict,
    hookimpl,
    make_classmethod,
)
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
