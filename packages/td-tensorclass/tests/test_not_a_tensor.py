"""torch and numpy functions raise for tensorclasses and value nodes, with a message that names an alternative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, TypedTensorDict, UnbatchedTensor


class Sample(TensorClass):
    a: torch.Tensor


class Typed(TypedTensorDict):
    a: torch.Tensor


KINDS: dict[str, Callable[[], Any]] = {
    "tensorclass": lambda: Sample(a=torch.ones(3), batch_size=[3]),
    "tensorclass without batch dims": lambda: Sample(a=torch.ones(3)),
    "typed": lambda: Typed(a=torch.ones(3), batch_size=[3]),
    "value": lambda: NonTensorData(5),
    "value of a batch": lambda: NonTensorData(5, batch_size=[3]),
    "values": lambda: NonTensorStack(1, 2, 3),
}
TORCH = [torch.as_tensor, torch.tensor, torch.asarray]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", TORCH)
def test_torch_function_on_non_tensor_raises(function: Callable[[Any], Any], kind: str) -> None:
    node = KINDS[kind]()
    with pytest.raises(TypeError, match=rf"a {type(node).__name__} is not one tensor.*tolist\(\)"):
        function(node)
    for items in ([node, node], [[node]]):
        with pytest.raises(TypeError, match="has no length and is not a sequence"):
            function(items)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [np.asarray, np.array])
def test_numpy_function_on_non_tensor_raises(function: Callable[[Any], Any], kind: str) -> None:
    node = KINDS[kind]()
    for value in (node, [node, node], [[node]]):
        with pytest.raises(TypeError, match=rf"a {type(node).__name__} is not one array.*tolist\(\)"):
            function(value)


@pytest.mark.parametrize("function", [torch.as_tensor, torch.asarray])
def test_unbatched_tensor_is_a_tensor(function: Callable[[Any], Any]) -> None:
    value = UnbatchedTensor(torch.arange(3.0))
    assert function(value).tolist() == [0.0, 1.0, 2.0]
    assert np.asarray(value).tolist() == [0.0, 1.0, 2.0]


def test_tensor_field_with_collection_raises() -> None:
    class Strict(TensorClass, autocast=True):
        a: torch.Tensor

    with pytest.raises(TypeError, match="the field 'a'"):
        Strict(a=[NonTensorData(5)])
