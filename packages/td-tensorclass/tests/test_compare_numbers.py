"""Equality of collections of which one has a tensor where the other has a number as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass


class Record(TensorClass):
    n: object
    x: torch.Tensor


def make_lazy(*numbers: Any) -> Any:
    return lazy_stack([TensorDict({"n": number}) for number in numbers])


#: A collection with a tensor under "n", one with a value there, and which elements are equal.
PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "number": (TensorDict({"n": 3}), TensorDict({"n": NonTensorData(3)}), True),
    "other number": (TensorDict({"n": 3}), TensorDict({"n": NonTensorData(4)}), False),
    "float and int": (TensorDict({"n": 3.0}), TensorDict({"n": NonTensorData(3)}), True),
    "bool": (TensorDict({"n": True}), TensorDict({"n": NonTensorData(True)}), True),
    "string": (TensorDict({"n": 3}), TensorDict({"n": "three"}), False),
    "none": (TensorDict({"n": 3.0}), TensorDict({"n": None}), False),
    "list": (
        TensorDict({"n": torch.tensor([1, 2])}),
        TensorDict({"n": NonTensorData([1, 3])}),
        [True, False],
    ),
    "array": (
        TensorDict({"n": torch.tensor([1, 2])}),
        TensorDict({"n": NonTensorData(np.array([1, 2]))}),
        [True, True],
    ),
    "one for the batch": (
        TensorDict({"n": torch.tensor([3, 4])}, [2]),
        TensorDict({"n": NonTensorData(3, batch_size=[2])}, [2]),
        [True, False],
    ),
    "one per element": (
        TensorDict({"n": torch.tensor([[1.0, 1.0], [1.0, 2.0]])}, [2]),
        TensorDict({"n": NonTensorStack.from_list([1.0, 2.0])}, [2]),
        [[True, True], [False, True]],
    ),
    "fewer batch dims": (
        TensorDict({"n": torch.tensor([3, 4])}, [2]),
        TensorDict({"n": NonTensorData(3)}),
        [True, False],
    ),
    "lazy": (make_lazy(3, 4), make_lazy(NonTensorData(3), NonTensorData(5)), [True, False]),
    "lazy and dense": (
        TensorDict({"n": torch.tensor([3, 4])}, [2]),
        make_lazy(NonTensorData(3), NonTensorData(4)),
        [True, True],
    ),
    "some members": (make_lazy(3, 4), make_lazy(3, NonTensorData(5)), [True, False]),
}


@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: TensorDict({"below": td}, td.batch_size)])
@pytest.mark.parametrize("pair", PAIRS)
def test_compare_tensor_with_value_compares_elements(pair: str, wrap: Callable[[Any], Any]) -> None:
    first, second, equal = PAIRS[pair]
    for left, right in [(first, second), (second, first)]:
        same, differ = wrap(left) == wrap(right), wrap(left) != wrap(right)
        same, differ = same.get("below", same), differ.get("below", differ)
        assert same["n"].tolist() == equal
        assert differ["n"].tolist() == (~torch.tensor(equal)).tolist()


def test_compare_collection_after_round_trip_is_equal() -> None:
    data = TensorDict({"n": NonTensorData(3), "s": "text", "x": torch.ones(2)})
    assert (TensorDict.from_dict(data.to_dict()) == data).all()
    assert (data == {"n": 3, "s": "text", "x": torch.ones(2)}).all()


def test_compare_tensorclass_with_value_keeps_class() -> None:
    result = Record(torch.tensor(3), torch.ones(2)) == Record(NonTensorData(3), torch.zeros(2))
    assert type(result) is Record and result.n.item() is True and result.x.tolist() == [False, False]


@pytest.mark.parametrize("compare", [lambda a, b: a < b, lambda a, b: a + b, lambda a, b: a & b])
def test_combine_tensor_with_value_raises(compare: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(StructureError, match="key 'n': a tensor there, a NonTensorData here"):
        compare(TensorDict({"n": 3}), TensorDict({"n": NonTensorData(3)}))
