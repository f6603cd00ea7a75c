"""First-class dims of torch as an index of tensorclasses, and of collections with values."""

from __future__ import annotations

import pytest
import torch

from td_core import CollectionIndexError, TensorDict
from td_tensorclass import NonTensorStack, TypedTensorDict, UnbatchedTensor, tensorclass

functorch_dim = pytest.importorskip("functorch.dim")


@tensorclass
class Record:
    x: torch.Tensor
    text: str


class Typed(TypedTensorDict):
    x: torch.Tensor


def make_dim():
    made = functorch_dim.dims(1)
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize(
    "data",
    [
        Record(x=torch.arange(8).view(4, 2), text="a", batch_size=[4]),
        Typed(x=torch.arange(8).view(4, 2), batch_size=[4]),
        TensorDict({"x": torch.arange(8).view(4, 2), "text": "a", "u": UnbatchedTensor(torch.ones(7))}, [4]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_index_with_dim_keeps_class_and_values(data):
    d = make_dim()
    found = data[d]
    assert type(found) is type(data) and found.batch_size == ()
    torch.testing.assert_close(found.get("x").order(d), data.get("x"))
    if "text" in data.keys():
        assert found.get("text").data == "a" if type(data) is TensorDict else found.text == "a"
    if "u" in data.keys():
        assert found["u"].shape == (7,)


def test_index_value_per_element_with_dim_raises():
    data = TensorDict({"s": NonTensorStack("a", "b")}, [2])
    with pytest.raises(CollectionIndexError, match="one for each element: exclude"):
        data[make_dim()]
