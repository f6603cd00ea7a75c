"""Selection by a column of values: the column gives a mask, its list gives False."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_tensorclass import NonTensorData, tensorclass


@tensorclass
class Record:
    x: torch.Tensor
    s: str


@pytest.mark.parametrize(
    "data",
    [
        TensorDict({"x": torch.zeros(2), "s": ["a", "b"]}, [2]),
        TensorDict({"n": {"x": torch.zeros(2), "s": ["a", "b"]}}, [2])["n"],
        TensorDictParams(TensorDict({"x": torch.zeros(2), "s": ["a", "b"]}, [2])),
        lazy_stack([TensorDict({"x": torch.zeros(()), "s": name}) for name in "ab"]),
    ],
    ids=["dense", "node", "params", "lazy"],
)
def test_index_of_a_list_compared_with_a_value_warns(data: TensorDict) -> None:
    """torch has no such index: a list of strings does not equal a string, so the index is False."""
    with pytest.warns(UserWarning, match=r"data\.get\(key\) == value"):
        assert data[data["s"] == "a"].batch_size == (0, 2)
    assert data[data.get("s") == "a"].batch_size == (1,)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"data\.get\(key\) == value"):
        data[data["s"] == "a"] = {"x": 1.0}
    assert not data["x"].any()


def test_mask_of_a_list_selects_records() -> None:
    data = Record(x=torch.arange(3), s=["a", "b", "a"], batch_size=[3])
    with pytest.warns(UserWarning, match=r"torch\.tensor\(\[x == value for x in column\]\)"):
        assert data[data.s == "a"].batch_size == (0, 3)
    assert data[torch.tensor([s == "a" for s in data.s])].x.tolist() == [0, 2]


@pytest.mark.parametrize(
    "data", [TensorDict({"s": ["a", "b"]}, [2]), lazy_stack([TensorDict(s=name) for name in "ab"])]
)
def test_value_is_in_column(data: TensorDict) -> None:
    column = data.get("s")
    assert "a" in column and "c" not in column
    assert "c" not in NonTensorData("a", batch_size=[2]) and "a" in NonTensorData("a")


def test_array_of_objects_that_are_text_is_a_column() -> None:
    text = np.array(["a", None], dtype=object)
    data = TensorDict(
        {"s": text, "grid": np.array([["a"], ["b"]], dtype=object), "mixed": np.array(["a", 1], object)}, [2]
    )
    assert list(data["s"]) == ["a", None] and data[1]["grid"] == ["b"]
    assert data[0]["mixed"].tolist() == ["a", 1]
    data["s"] = text[::-1]
    assert data[1]["s"] == "a"
    assert TensorDict({"s": text})["s"] is text


def test_sorted_list_of_a_column_is_written() -> None:
    data = TensorDict({"s": ["b", "a"], "x": torch.arange(2)}, [2])
    data["s"].sort()
    assert (data[0]["s"], data[0]["x"].item()) == ("a", 0)
