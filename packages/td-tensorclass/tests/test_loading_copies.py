"""load_state_dict copies non-tensor values, as it copies tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor


class Point(TensorClass):
    x: Tensor
    tags: dict | None = None
    n: TensorDict | None = None


def make_point() -> Point:
    return Point(torch.ones(2), tags={"k": ["a"]}, n=TensorDict({"y": torch.ones(2)}, [2]), batch_size=[2])


#: A value, a function that changes it in place, and the expected repr of the loaded value.
VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda value: value.append(3), list),
    "nested list": (lambda: [[1], 2], lambda value: value[0].append(3), lambda value: next(iter(value))),
    "dict": (lambda: {"k": [1]}, lambda value: value["k"].append(2), lambda value: value["k"]),
    "array": (lambda: np.zeros(2), lambda value: value.fill(1), lambda value: value.tolist()),
    "tensor in a dict": (lambda: {"t": torch.zeros(2)}, lambda v: v["t"].fill_(1), lambda v: v["t"].tolist()),
    "set": (lambda: {1}, lambda value: value.add(2), set),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_load_state_dict_copies_non_tensor_values(name: str, flatten: bool, strict: bool) -> None:
    make, change, show = VALUES[name]
    value = make()
    source = TensorDict({"x": torch.ones(2), "n": {"v": NonTensorData(value, batch_size=[2])}}, [2])
    target = TensorDict({"n": {}}, [2]) if not strict else source.clone()
    target.load_state_dict(source.state_dict(flatten=flatten), strict=strict)
    before = show(make())
    change(value)
    assert show(target["n", "v"]) == before


@pytest.mark.parametrize("strict", [False, True])
def test_load_state_dict_copies_non_tensor_stack(strict: bool) -> None:
    source = TensorDict({"n": {"v": NonTensorStack([1], [2])}, "s": NonTensorStack("a", "b")}, [2])
    target = source.clone() if strict else TensorDict(batch_size=[2])
    target.load_state_dict(source.state_dict(), strict=strict)
    source["s"] = ["x", "y"]
    source[0] = TensorDict({"n": {"v": NonTensorData([9])}, "s": "z"})
    assert target["s"] == ["a", "b"] and [list(value) for value in target["n", "v"]] == [[1], [2]]


def test_non_tensor_data_load_state_dict_copies_value() -> None:
    value = [1]
    loaded = NonTensorData([0]).load_state_dict(NonTensorData(value).state_dict())
    value.append(2)
    assert list(loaded.data) == [1]


def test_load_state_dict_uncopyable_value_is_shared() -> None:
    lock = threading.Lock()
    source = TensorDict({"v": NonTensorData(lock)})
    assert TensorDict().load_state_dict(source.state_dict(), strict=False)["v"] is lock


def test_load_state_dict_assign_shares_non_tensor_values() -> None:
    value = {"k": 1}
    source = TensorDict({"v": NonTensorData(value)})
    assert TensorDict().load_state_dict(source.state_dict(), strict=False, assign=True)["v"] is value


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_load_state_dict_copies_tensorclass(strict: bool, flatten: bool) -> None:
    source = make_point()
    target = Point(torch.zeros(2), tags={}, n=TensorDict({"y": torch.zeros(2)}, [2]), batch_size=[2])
    if not strict:
        target = Point(torch.zeros(2), batch_size=[2])
    nested = TensorDict({"p": target}, [2]), TensorDict({"p": source}, [2])
    target.load_state_dict(source.state_dict(flatten=flatten), strict=strict)
    nested[0].load_state_dict(nested[1].state_dict(flatten=flatten), strict=strict)
    source.x.fill_(7)
    source.n["y"].fill_(7)
    source.tags["k"].append("z")
    for loaded in (target, nested[0]["p"]):
        assert loaded.x.tolist() == loaded.n["y"].tolist() == [1, 1] and loaded.tags == {"k": ["a"]}


def test_load_state_dict_copies_unbatched_tensor() -> None:
    source = TensorDict({"n": {"u": UnbatchedTensor(torch.ones(3))}, "x": torch.ones(2)}, [2])
    members = [TensorDict({"x": torch.zeros(())}) for _ in range(2)]
    for target in (TensorDict(batch_size=[2]), lazy_stack(members)):
        target.load_state_dict(source.state_dict(), strict=False)
        source["n", "u"].fill_(7)
        assert target["n", "u"].tolist() == [1, 1, 1]
        source["n", "u"].fill_(1)


def test_params_load_state_dict_not_strict_adds_no_values() -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2), "v": "old", "n": {"b": torch.zeros(2)}}))
    given = TensorDict({"w": torch.ones(2), "v": "new", "z": "more", "n": {"z": "more", "b": torch.ones(2)}})
    params.load_state_dict(given.state_dict(), strict=False)
    assert params["v"] == "new" and params["w"].tolist() == params["n", "b"].tolist() == [1, 1]
    assert "z" not in params.keys() and "z" not in params["n"].keys()
