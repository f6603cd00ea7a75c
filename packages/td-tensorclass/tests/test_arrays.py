"""Fields set to arrays whose memory torch cannot share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_tensorclass import TypedTensorDict, UnbatchedTensor, tensorclass

BASE = np.arange(12, dtype=np.float32).reshape(3, 4)
ARRAYS = {
    "reversed": BASE[::-1],
    "other byte order": BASE.astype(">f4"),
    "read only": np.broadcast_to(BASE[1], (3, 4)),
    "of records": np.array([(0, i) for i in range(12)], "u1,f4")["f1"].reshape(3, 4),
}


@tensorclass
class Pair:
    a: Tensor


@tensorclass(autocast=True)
class Cast:
    a: Tensor


@tensorclass(tensor_only=True)
class Only:
    a: Tensor


class Typed(TypedTensorDict):
    a: Tensor


def assigned(td: Any, value: Any) -> Any:
    td.a = value
    return td


def written(td: Any, value: Any) -> Any:
    td[:] = {"a": value}
    return td


WAYS: dict[str, Callable[[Any], Any]] = {
    "constructor": lambda x: Pair(a=x, batch_size=[3]),
    "attribute": lambda x: assigned(Pair(a=torch.zeros(3, 4), batch_size=[3]), x),
    "from_dict": lambda x: Pair.from_dict({"a": x}),
    "from_any": lambda x: Pair.from_any({"a": x}),
    "autocast": lambda x: Cast(a=x, batch_size=[3]),
    "tensor_only": lambda x: Only(a=x, batch_size=[3]),
    "typed": lambda x: Typed(a=x, batch_size=[3]),
    "set": lambda x: Pair(a=torch.zeros(3, 4), batch_size=[3]).set("a", x),
    "set_": lambda x: Pair(a=torch.zeros(3, 4), batch_size=[3]).set_("a", x),
    "set_at_": lambda x: Pair(a=torch.zeros(3, 4), batch_size=[3]).set_at_("a", x, slice(None)),
    "update_": lambda x: Pair(a=torch.zeros(3, 4), batch_size=[3]).update_({"a": x}),
    "index": lambda x: written(Pair(a=torch.zeros(3, 4), batch_size=[3]), x),
}


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("way", WAYS)
def test_set_array_stores_equal_tensor(way: str, array: str) -> None:
    assert torch.equal(WAYS[way](ARRAYS[array]).a, torch.tensor(ARRAYS[array].tolist()))


@pytest.mark.parametrize("array", ARRAYS)
def test_unbatched_tensor_from_array_has_same_elements(array: str) -> None:
    td = TensorDict({"u": UnbatchedTensor(ARRAYS[array])}, [2])
    assert torch.equal(torch.Tensor(td["u"]), torch.tensor(ARRAYS[array].tolist()))
