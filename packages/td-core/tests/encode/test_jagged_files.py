"""Files of torch.save with jagged leaves: ``torch.load`` reads them with ``weights_only``, and checks what they say."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from td_core import TensorDict, lazy_stack

SHORT = torch.tensor([0, 2, 5])


def make(values: Tensor, offsets: Tensor = SHORT, **options: Any) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, **options)


def reload(data: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


LEAVES = {
    "vector": lambda: make(torch.arange(5.0)),
    "rows": lambda: make(torch.arange(10).view(5, 2)),
    "ragged last dim": lambda: make(torch.arange(15.0).view(3, 5), jagged_dim=2),
    "gaps": lambda: make(torch.arange(5), SHORT, lengths=torch.tensor([1, 2])),
    "empty row": lambda: make(torch.arange(5), torch.tensor([0, 0, 5])),
    "bf16": lambda: make(torch.arange(5).to(torch.bfloat16)),
    "gradient": lambda: make(torch.arange(5.0)).requires_grad_(),
    "parameter": lambda: Parameter(make(torch.arange(5.0))),
    "frozen parameter": lambda: Parameter(make(torch.arange(5.0)), requires_grad=False),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(
    "place",
    [
        lambda leaf: TensorDict({"x": leaf}, [2]),
        lambda leaf: TensorDict({"n": {"x": leaf}}),
        lambda leaf: lazy_stack([TensorDict({"x": leaf}), TensorDict({"x": torch.ones(2)})]),
    ],
)
def test_jagged_leaf_comes_back(name: str, place: Any) -> None:
    leaf = LEAVES[name]()
    found = reload(place(leaf))._leaves()[0]
    assert (found.layout, found.requires_grad, found.dtype) == (torch.jagged, leaf.requires_grad, leaf.dtype)
    assert isinstance(found, Parameter) == isinstance(leaf, Parameter)
    assert [row.tolist() for row in found.unbind()] == [row.tolist() for row in leaf.unbind()]


def test_jagged_leaves_with_the_same_offsets_keep_them() -> None:
    x = make(torch.arange(5.0))
    data = reload(TensorDict({"x": x, "y": make(torch.ones(5), x.offsets()), "again": x}, [2]))
    assert data["again"] is data["x"]
    assert (data["x"] + data["y"]).values().tolist() == [1, 2, 3, 4, 5]


def test_jagged_leaf_is_loaded_to_a_device() -> None:
    loaded = reload(TensorDict({"x": make(torch.arange(5.0))}, [2]), map_location="meta")
    assert loaded["x"].device.type == "meta"


def test_offsets_outside_of_the_values_raise() -> None:
    wrong = make(torch.arange(5.0), torch.tensor([0, 2, 500]))
    with pytest.raises(Exception, match="the rows of a jagged tensor lie outside of its 5 values"):
        reload(TensorDict({"x": wrong}, [2]))
