"""new_zeros and the like of collections with values: one value per element becomes None, one for all stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_tensorclass import MetaData, NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor


class Named(TensorClass):
    x: Tensor
    name: str


ROWS = [TensorDict({"x": torch.ones(3), "name": name}) for name in ("a", "b")]

#: Collections of batch size [2] with one name per row.
SOURCES: dict[str, Callable[[], Any]] = {
    "dense": lambda: torch.stack(ROWS),
    "lazy stack": lambda: lazy_stack(ROWS),
    "tensorclass": lambda: torch.stack([Named(torch.ones(3), name) for name in ("a", "b")]),
    "stack of tensorclasses": lambda: lazy_stack([Named(torch.ones(3), name) for name in ("a", "b")]),
    "names of dims": lambda: TensorDict(
        {"x": torch.ones(2, 3), "name": NonTensorStack("a", "b")}, [2], names=["t"]
    ),
    "view": lambda: torch.stack([*ROWS, *ROWS])[1:3],
}

FACTORIES: dict[str, Callable[[Any, Any], Any]] = {
    "new_zeros": lambda td, size: td.new_zeros(size),
    "new_ones": lambda td, size: td.new_ones(*size),
    "new_empty": lambda td, size: td.new_empty(size),
    "new_full": lambda td, size: td.new_full(size, 7),
    "new_tensor": lambda td, size: td.new_tensor(torch.zeros(size)),
}


@pytest.mark.parametrize(
    ("size", "names"),
    [((4,), [None] * 4), ((1, 2), [[None, None]]), ((0,), []), ((), None)],
)
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("source", SOURCES)
def test_new_batch_of_rows_with_values_has_none(source: str, factory: str, size: Any, names: Any) -> None:
    td = SOURCES[source]()
    result = FACTORIES[factory](td, size)
    assert (type(result).__name__, result.batch_size) == (
        {"lazy stack": "TensorDict"}.get(source, type(td).__name__),
        size,
    )
    assert result.get("x").shape[: len(size)] == size
    node = result._get_child("name")
    assert node.tolist() == names and node.batch_size == size
    assert type(node) is (NonTensorStack if size else NonTensorData)
    if source == "names of dims" and len(size) == 1:
        assert result.names == ["t"] and node.names == ["t"]


def test_new_batch_takes_rows() -> None:
    result = torch.stack(ROWS).new_zeros((3,))
    for i, row in enumerate([ROWS[1], ROWS[0]]):
        result[i] = row
    assert result["name"] == ["b", "a", None] and result["x"].tolist() == [[1] * 3, [1] * 3, [0] * 3]


def test_new_batch_of_nested_values_keeps_inner_dims() -> None:
    words = NonTensorStack(NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f"))
    result = TensorDict({"n": TensorDict({"words": words}, [2, 3])}, [2]).new_zeros((1,))
    assert result["n", "words"] == [[None] * 3] and result["n"].batch_size == (1, 3)


def test_new_batch_of_old_size_keeps_values() -> None:
    for result in (torch.stack(ROWS).new_ones(2), torch.zeros_like(torch.stack(ROWS))):
        assert result["name"] == ["a", "b"]


@pytest.mark.parametrize("value", [NonTensorData("a"), MetaData("a"), "a"])
def test_new_batch_keeps_one_value(value: Any) -> None:
    td = TensorDict({"v": value, "u": UnbatchedTensor(torch.ones(7)), "x": torch.ones(2, 3)}, [2])
    result = td.new_zeros((4,))
    assert result["v"] == "a" and result.get("v").batch_size == (4,)
    assert result["u"].tolist() == [0] * 7
