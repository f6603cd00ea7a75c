"""``is_memmap`` is True for a save, which has a path; ``is_shared`` where every leaf is in shared memory or a mapped file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_memmap import MemoryMappedTensor


def make() -> TensorDict:
    return TensorDict({"a": torch.zeros(4, 3), "n": {"b": torch.zeros(4)}}, [4])


def make_stack() -> Any:
    return lazy_stack([make(), make()])


#: How a collection is made from the path of a save of ``make()``; is_memmap() and is_shared() of it.
CASES: dict[str, tuple[Callable[[Any], Any], bool, bool]] = {
    "in memory": (lambda path: make(), False, False),
    "without leaves": (lambda path: TensorDict(), False, False),
    "shared": (lambda path: make().share_memory_(), False, True),
    "node of shared": (lambda path: make().share_memory_()["n"], False, True),
    "index of shared": (lambda path: make().share_memory_()[0], False, True),
    "clone of shared": (lambda path: make().share_memory_().clone(), False, False),
    "shared leaf": (lambda path: TensorDict({"a": torch.zeros(2).share_memory_()}), False, True),
    "one of two leaves shared": (
        lambda path: TensorDict({"a": torch.zeros(2).share_memory_(), "b": torch.zeros(2)}),
        False,
        False,
    ),
    "mapped leaf": (
        lambda path: TensorDict({"n": {"a": MemoryMappedTensor.from_tensor(torch.zeros(2))}}),
        False,
        True,
    ),
    "save": (lambda path: make().memmap(path + "x"), True, True),
    "save in place": (lambda path: make().memmap_(), True, True),
    "save without leaves": (lambda path: TensorDict().memmap_(), True, False),
    "node of a save": (lambda path: make().memmap_()["n"], True, True),
    "created save": (lambda path: make().memmap_like(path + "y"), True, True),
    "unlocked save": (lambda path: make().memmap_().unlock_(), False, True),
    "loaded": (lambda path: TensorDict.load_memmap(path), False, True),
    "loaded for reading": (lambda path: TensorDict.load_memmap(path, mode="r"), False, True),
    "index": (lambda path: make().memmap_()[0], False, True),
    "slice": (lambda path: make().memmap_()[:2], False, True),
    "rows": (lambda path: make().memmap_()[[0, 1]], False, False),
    "view": (lambda path: make().memmap_().view(2, 2), False, True),
    "part": (lambda path: make().memmap_().split(2)[1], False, True),
    "selection": (lambda path: make().memmap_().select("a"), False, True),
    "flat": (lambda path: make().memmap_().flatten_keys(), False, True),
    "shallow copy": (lambda path: make().memmap_().clone(False), False, True),
    "clone": (lambda path: make().memmap_().clone(), False, False),
    "sum": (lambda path: make().memmap_() + 1, False, False),
    "parameters": (lambda path: TensorDictParams(make().memmap_()), False, True),
    "save of a lazy stack": (lambda path: make_stack().memmap_(), True, True),
    "member of a saved stack": (lambda path: make_stack().memmap_()[0], True, True),
    "slice of a saved stack": (lambda path: make_stack().memmap_()[:1], False, True),
    "lazy stack of saves": (lambda path: lazy_stack([make().memmap_(), make().memmap_()]), False, True),
    "stack of saves": (lambda path: torch.stack([make().memmap_(), make().memmap_()]), False, False),
    "shared lazy stack": (lambda path: make_stack().share_memory_(), False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_is_memmap_and_is_shared_follow_their_rules(name, tmp_path):
    path = str(tmp_path / "save")
    make().memmap(path)
    build, is_save, is_shared = CASES[name]
    data = build(path)
    assert (data.is_memmap(), data.is_shared()) == (is_save, is_shared)
    # Programs read the path of a collection that says it is a save.
    if is_save:
        assert data.saved_path is None or data.saved_path.exists()
    else:
        with pytest.raises(AttributeError, match="has no saved path"):
            data.saved_path  # noqa: B018
