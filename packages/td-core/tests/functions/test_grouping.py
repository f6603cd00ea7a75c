"""Group equal rows, remove duplicates, and test membership."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import (
    TensorDict,
    group_by,
    isin,
    remove_duplicates,
)
from td_core.errors import KeyPathError, StructureError

TREE = TensorDict({"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3])


class TestRows:
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    def test_group_by_equals_python_grouping(self, values: list[int]) -> None:
        td = TensorDict({"a": torch.tensor(values), "i": torch.arange(len(values))}, [len(values)])
        distinct, groups = group_by(td, "a")
        assert distinct.tolist() == sorted(set(values))
        assert [group["i"].tolist() for group in groups] == [
            [i for i, other in enumerate(values) if other == value] for value in sorted(set(values))
        ]

    def test_group_by_row_values_returns_sorted_groups(self) -> None:
        td = TensorDict({"a": torch.tensor([[1, 0], [1, 0], [0, 2]]), "i": torch.arange(3)}, [3])
        distinct, groups = group_by(td, "a")
        assert distinct.tolist() == [[0, 2], [1, 0]]
        assert [group["i"].tolist() for group in groups] == [[2], [0, 1]]

    @pytest.mark.parametrize(
        ("td", "key", "error", "message"),
        [
            (TREE, "zz", KeyPathError, "key 'zz' not found"),
            (TREE, "b", TypeError, "'b' is a TensorDict"),
            (TensorDict(a=torch.ones(2)), "a", ValueError, "first batch dim"),
        ],
    )
    def test_group_by_invalid_arguments_raises(self, td: Any, key: str, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            group_by(td, key)

    def test_remove_duplicates_returns_unique_rows_and_indices(self) -> None:
        td = TensorDict({"a": torch.tensor([1, 0, 1, 2]), "b": torch.arange(4)}, [4])
        result, inverse = remove_duplicates(td, "a", return_indices=True)
        assert (result["a"].tolist(), result["b"].tolist()) == ([0, 1, 2], [1, 0, 3])
        assert inverse.tolist() == [1, 0, 1, 2]
        wide = TensorDict({"a": torch.tensor([[1, 0, 1], [1, 0, 1]])}, [2, 3])
        assert remove_duplicates(wide, "a", dim=-1)["a"].tolist() == [[0, 1], [0, 1]]

    def test_isin_returns_mask_per_row(self) -> None:
        td = TensorDict({"a": torch.tensor([[1, 0], [2, 3]])}, [2, 2])
        assert isin(td, TensorDict({"a": torch.tensor([[1, 0]])}, [1, 2]), "a").tolist() == [True, False]
        assert isin(td, TensorDict({"a": torch.tensor([[0], [3]])}, [2, 1]), "a", dim=1).tolist() == [
            False,
            True,
        ]

    def test_row_functions_invalid_arguments_raise(self) -> None:
        td = TREE
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            remove_duplicates(td, "zz")
        with pytest.raises(ValueError, match=r"dim 1 is not a batch dim of a collection of batch size \[3\]"):
            remove_duplicates(td, "a", dim=1)
        with pytest.raises(KeyPathError, match="key 'b' is not a tensor"):
            isin(td, td, "b")
        with pytest.raises(StructureError, match="rows of 2 elements in the input and 1 in the reference"):
            isin(td, TensorDict({"a": torch.ones(3)}, [3]), "a")
