"""The node of a checkpoint: its tensors by name."""

from __future__ import annotations

from typing import Any

import torch

from td_core import TensorDict, decode, encode
from td_core._formats.checkpoints import make_checkpoint


def test_checkpoint_results_of_operations_are_plain() -> None:
    node: Any = make_checkpoint({"a": torch.ones(2), "b": 3})
    assert list(node.keys()) == ["a"]
    assert type(node.select("a")) is TensorDict
    assert type(node + 1) is type(node.clone()) is type(node)


def test_checkpoint_copies_keep_values() -> None:
    node: Any = make_checkpoint({"a": torch.ones(2), "b": 3})
    for copied in (node.clone(), node.copy(), decode(encode(node)), node._unflatten(node._leaves())):
        assert copied._as_loaded()["b"] == 3
        assert copied._as_loaded()["a"].tolist() == [1, 1]


def test_checkpoint_loaded_has_memory_of_its_own() -> None:
    value = torch.ones(2)
    make_checkpoint({"a": value})._as_loaded()["a"].zero_()
    assert value.tolist() == [1, 1]
