"""In-place operations change a tensor once if it is tied to several fields or nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_tensorclass import NonTensorData, TensorClass, UnbatchedTensor, tensorclass


@tensorclass
class Pair:
    a: Tensor
    b: Tensor


class Named(TensorClass):
    a: Tensor
    b: Any
    name: str = "x"


def member_twice(x: Tensor) -> Any:
    member = Pair(a=x, b=torch.zeros(2), batch_size=[2])
    return LazyStackedTensorDict(member, member)


def unbatched(x: Tensor) -> TensorDict:
    node = UnbatchedTensor(x)
    return TensorDict({"a": node, "b": node, "c": UnbatchedTensor(x.data)}, [5])


SHARING: dict[str, Callable[[Tensor], Any]] = {
    "fields": lambda x: Pair(a=x, b=x, batch_size=[2]),
    "data in a field": lambda x: Pair(a=x, b=x.data, batch_size=[2]),
    "nested": lambda x: Named(a=x, b=Pair(a=x, b=x.view(2, 3, 1), batch_size=[2]), batch_size=[2]),
    "in a mapping": lambda x: TensorDict(
        {"p": Pair(a=x, b=x, batch_size=[2]), "x": x, "v": NonTensorData(1)}, [2]
    ),
    "member twice": member_twice,
    "unbatched": unbatched,
    "unbatched beside a leaf": lambda x: TensorDict({"a": UnbatchedTensor(x), "b": x}, []),
}

CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "neg_": (lambda td: td.neg_(), Tensor.neg_),
    "imul": (lambda td: td.__imul__(3), lambda x: x.mul_(3)),
    "add_ copy": (lambda td: td.add_(td.clone()), lambda x: x.mul_(2)),
    "lerp_": (lambda td: td.lerp_(td * 0, 0.5), lambda x: x.mul_(0.5)),
    "apply_": (lambda td: td.apply_(lambda leaf: leaf.mul_(2)), lambda x: x.mul_(2)),
    "apply inplace": (lambda td: td.apply(lambda leaf: leaf * 2, inplace=True), lambda x: x.mul_(2)),
    "named_apply": (lambda td: td.named_apply(lambda k, leaf: leaf.mul_(2), inplace=True), lambda x: x.mul_(2)),
    "update_": (lambda td: td.update_(td * 2), lambda x: x.mul_(2)),
    "data": (lambda td: td.data.mul_(2), lambda x: x.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", SHARING)
def test_inplace_operation_tied_tensor_changes_once(kind: str, change: str) -> None:
    x, expected = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
    on_collection, on_tensor = CHANGES[change]
    on_collection(SHARING[kind](x))
    assert torch.equal(x, on_tensor(expected))
