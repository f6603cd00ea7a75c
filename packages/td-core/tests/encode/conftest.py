"""Fixtures of the tests of encoded trees: a tree with every kind of td-core, and kinds that a plugin registers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core.plugins.manager import installed
from td_core.spi import NodeKind, hookimpl


def build_member(i: int) -> TensorDict:
    return TensorDict({"a": torch.full((3,), i), "m": {"c": torch.full((3, 2), i)}}, [3])


@pytest.fixture
def tree() -> TensorDict:
    """Return a tree of nested nodes, a lazy stack and parameters."""
    return TensorDict(
        {
            "z": torch.zeros(2),
            "n": {"b": torch.ones(2), "m": {"c": torch.full((2,), 2.0)}},
            "s": lazy_stack([build_member(0), build_member(1)]),
            "p": TensorDictParams(TensorDict({"w": torch.full((2,), 3.0)})),
        }
    )


@pytest.fixture(scope="session")
def provide() -> Callable[..., AbstractContextManager[Any]]:
    """Return a function that registers a kind during a ``with`` block, as a plugin does."""

    def install(kind: NodeKind, **options: Any) -> AbstractContextManager[Any]:
        return installed(SimpleNamespace(td_node_kinds=hookimpl(lambda: [kind])), **options)

    return install
