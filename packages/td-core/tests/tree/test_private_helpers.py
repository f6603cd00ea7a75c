"""Private predicates of td-core: which functions copy or share leaves, and which tensors share memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core._functions.shape import same_memory
from td_core._kinds.parameters import is_copying
from td_core._python.public_names import lazy_names
from td_core._tree.defaults import call_once_per_leaf, is_aliasing
from td_core._tree.node import copy_leaf, identity
from td_core._writes.run import is_overlapping


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (copy_leaf, True),
        (partial(copy_leaf, memory_format=torch.preserve_format), True),
        (torch.clone, False),
        (identity, False),
    ],
)
def test_is_copying_returns_true_only_for_copy_leaf(fn: Callable[..., Any], expected: bool) -> None:
    assert is_copying(fn) is expected


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (identity, True),
        (Tensor.detach, True),
        (call_once_per_leaf(Tensor.detach), True),
        (copy_leaf, False),
        (call_once_per_leaf(copy_leaf), False),
    ],
)
def test_is_aliasing_returns_true_if_storage_is_shared(
    fn: Callable[[Tensor], Tensor], expected: bool
) -> None:
    assert is_aliasing(fn) is expected


def test_call_once_per_leaf_maps_tied_leaf_once() -> None:
    tied, other = torch.ones(2), torch.ones(2)
    fn = call_once_per_leaf(torch.clone)
    assert fn(tied) is fn(tied) is not tied
    assert fn(other) is not fn(tied)


def test_lazy_names_imports_value_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    find, names = lazy_names("lazy_package", {"json": ["dumps"], "pickle": ["loads", "dumps"]})
    assert names() == ["dumps", "loads"]
    assert find("dumps") is sys.modules["pickle"].dumps is vars(package)["dumps"]
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'missing'"):
        find("missing")


BASE = torch.arange(16.0)
SQUARE = BASE.view(4, 4)


@pytest.mark.parametrize(
    ("leaf", "other", "expected"),
    [
        (BASE[1:], BASE[:-1], True),
        (SQUARE, SQUARE.t(), True),
        (BASE, BASE.view(16), False),
        (BASE[:8], BASE[8:], False),
        (BASE[:0], BASE, False),
        (BASE, BASE.clone(), False),
        (BASE, 1.0, False),
    ],
    ids=["shifted", "transposed", "same", "disjoint", "empty", "copy", "number"],
)
def test_is_overlapping_returns_true_for_partial_overlap(leaf: Tensor, other: Any, expected: bool) -> None:
    assert is_overlapping(leaf, other) is expected


META = torch.zeros(4, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (BASE, BASE, True),
        (BASE, BASE.view(16), True),
        (BASE, BASE.clone(), False),
        (BASE, BASE[:-1], False),
        (SQUARE, SQUARE.t(), False),
        (BASE, BASE.view(torch.int32), False),
        (META, META.view(4), True),
        (META, torch.zeros(4, device="meta"), False),
    ],
    ids=["itself", "view", "copy", "part", "transposed", "other dtype", "meta view", "meta copy"],
)
def test_same_memory_returns_true_for_equal_views(left: Tensor, right: Tensor, expected: bool) -> None:
    assert same_memory(left, right) is expected
