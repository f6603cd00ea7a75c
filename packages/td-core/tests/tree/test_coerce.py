"""Coercion of values that are set: numbers, arrays, sequences, mappings, and values of registered types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    TensorDict,
)
from td_core.errors import BatchSizeError


class TestFromAny:
    def test_set_list_of_collections_stores_stack(self) -> None:
        items = [TensorDict({"a": torch.zeros(3)}, [3]), TensorDict({"a": torch.ones(3)}, [3])]
        td = TensorDict({"b": items}, batch_size=[2])
        assert td["b"].batch_size == (2, 3)
        assert td["b", "a"].tolist() == [[0.0] * 3, [1.0] * 3]
        with pytest.raises(
            BatchSizeError, match=r"key 'b': the batch size \[3\] does not fit: key 'a' has shape \[2, 3\]"
        ):
            TensorDict({"b": items}, batch_size=[3])


def test_set_structured_array_stores_node_of_its_shape() -> None:
    array = np.array([((1, 2.0), 3), ((4, 5.0), 6)], dtype=[("n", [("x", "i8"), ("y", "f8")]), ("z", "i8")])
    for td in (TensorDict({"k": array}), TensorDict(batch_size=[2]).set("k", array)):
        assert td.get("k").batch_size == td.get(("k", "n")).batch_size == (2,)
        assert td["k", "n", "y"].tolist() == [2, 5] and td["k", "z"].tolist() == [3, 6]
    assert TensorDict({"k": array[1]})["k", "n", "x"] == 4
    array["z"] = 7
    assert td["k", "z"].tolist() == [7, 7]
    with pytest.raises(BatchSizeError, match=r"key 'k': the batch size \[3\] does not fit"):
        TensorDict({"k": array}, [3])


@pytest.mark.parametrize(
    "value", [lambda x: [x, 2.5], lambda x: [[x, 1], (0.5, x)], lambda x: (1, x, np.float64(2))]
)
def test_set_list_of_tensors_and_numbers_keeps_dtype_and_grad(value: Callable[[Any], Any]) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    made = TensorDict({"a": value(x)})["a"]
    assert torch.equal(made, torch.tensor(value(3.0)))
    (grad,) = torch.autograd.grad(made.sum(), x)
    assert grad == str(value(3.0)).count("3.0")
    mapped = torch.vmap(lambda x: TensorDict({"a": value(x)})["a"])(torch.tensor([3.0, 3.0]))
    assert torch.equal(mapped[1], made)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, torch.tensor(1)),
        (2.5, torch.tensor(2.5)),
        (True, torch.tensor(True)),
        (np.float32(2), torch.tensor(2.0)),
        (np.arange(3), torch.arange(3)),
        ([1, 2], torch.tensor([1, 2])),
        ((1.0, 2.0), torch.tensor([1.0, 2.0])),
        ([[1], [2]], torch.tensor([[1], [2]])),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
    ],
)
def test_construct_number_array_or_sequence_stores_tensor(value, expected):
    entry = TensorDict({"a": value})["a"]
    assert entry.dtype == expected.dtype and torch.equal(entry, expected)


def test_construct_same_mapping_under_two_keys_stores_both() -> None:
    shared = {"x": 1}
    td = TensorDict({"n": {"a": shared, "b": shared}})
    assert list(td.keys(True, True)) == [("n", "a", "x"), ("n", "b", "x")]
