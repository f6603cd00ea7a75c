"""``share_memory_`` of collections with values, which it does not share."""

from __future__ import annotations

import pytest
import torch

from td_core import TensorCollection, TensorDict, TensorDictParams, lazy_stack
from td_tensorclass import UnbatchedTensor, tensorclass


@tensorclass
class Record:
    x: torch.Tensor
    s: str


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (TensorDict({"x": torch.zeros(2), "s": ["a", "b"]}, [2]), "'s'"),
        (TensorDict({"x": torch.zeros(2), "s": "one"}, [2]), "'s'"),
        (TensorDict({"n": {"x": torch.zeros(2), "s": ["a", "b"]}}, [2]), r"\('n', 's'\)"),
        (TensorDictParams(TensorDict({"x": torch.zeros(2), "s": ["a", "b"]}, [2])), "'s'"),
        (lazy_stack([TensorDict({"x": torch.zeros(()), "s": name}) for name in "ab"]), "'s'"),
        (Record(x=torch.zeros(2), s=["a", "b"], batch_size=[2]), "'s'"),
    ],
    ids=["column", "one value", "nested", "params", "lazy", "tensorclass"],
)
def test_share_memory_of_values_warns_with_key(data: TensorCollection, key: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"the values of key {key} are not shared: .*share_non_tensor=True"
    ) as warned:
        assert data.share_memory_() is data
    assert [warning.filename for warning in warned] == [__file__]
    assert data.is_shared() and data.is_locked


def test_share_memory_of_tensors_does_not_warn() -> None:
    data = TensorDict({"x": torch.zeros(2), "u": UnbatchedTensor(torch.ones(3))}, [2])
    assert data.share_memory_().is_shared()
