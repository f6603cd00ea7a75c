"""The layouts of ``meta.json``: what they keep of a node, and the class names that they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, kinds, lazy_stack
from td_memmap._directory_layouts import FORMAT

NODES: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict({"a": torch.zeros(2, 3)}, [2], names=["row"]).lock_(),
    "lazy stack": lambda: lazy_stack([TensorDict({"a": 1}), TensorDict({"b": 2})]).lock_(),
    "named lazy stack": lambda: LazyStackedTensorDict(TensorDict({"a": 1}), stack_dim_name="row"),
    "empty lazy stack": lambda: LazyStackedTensorDict(batch_size=[3, 0], stack_dim=1),
}


@pytest.mark.parametrize("name", NODES)
def test_layout_of_tensordict_keeps_the_node(name: str) -> None:
    node = NODES[name]()
    layout = kinds.of(node).layouts[FORMAT]
    again = layout.unflatten(layout.flatten(node))
    assert (type(again), again.batch_size, again.names) == (type(node), node.batch_size, node.names)
    assert again.is_locked == node.is_locked
    assert len(again._leaves()) == len(node._leaves())
    assert all(map(torch.equal, again._leaves(), node._leaves()))


def test_layout_of_parameters_stores_the_wrapped_collection() -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2)}))
    record = kinds.of(params).layouts[FORMAT].flatten(params)
    assert record.meta["_type"] == "<class 'tensordict._td.TensorDict'>"
    assert record.entries["w"] is params._tensordict._children()["w"]


def test_layout_of_stack_writes_number_of_members() -> None:
    stack = LazyStackedTensorDict(batch_size=[3, 0], stack_dim=1).lock_()
    assert kinds.record_of(stack, FORMAT).meta == {
        "_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:LazyStackedTensorDict",
        "stack_dim": 1,
        "stack_dim_name": None,
        "_members": 0,
        "_batch_size": [3, 0],
        "_locked": True,
    }
