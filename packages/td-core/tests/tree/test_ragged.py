"""Uneven members of lazy stacks: shapes, holders of an entry, and ragged leaves as lists, nested and padded tensors."""

from __future__ import annotations

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_core._tree.ragged import fill_gaps
from td_core.errors import (
    StructureError,
)


def test_get_ragged_entry_returns_requested_form_else_raises(make_ragged_stack):
    with pytest.raises(StructureError, match=r"\[\(1,\), \(2,\), \(3,\)\].*as_nested_tensor=True"):
        make_ragged_stack()["a"]
    nested = make_ragged_stack().get("a", as_nested_tensor=True)
    assert [part.tolist() for part in nested.unbind()] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    padded = make_ragged_stack().get("a", as_padded_tensor=True, padding_value=-1.0)
    assert padded.tolist() == [[0, -1, -1], [1, 1, -1], [2, 2, 2]]
    left = make_ragged_stack().get("a", as_padded_tensor=True, padding_side="left")
    assert left.tolist() == [[0, 0, 0], [0, 1, 1], [2, 2, 2]]
    assert [part.shape for part in make_ragged_stack().get("a", as_list=True)] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("path", [("a",), ("s", "a")])
def test_get_as_list_or_padded_of_nested_stacks_equals_torch(path, dim, make_ragged_stack):
    stack = LazyStackedTensorDict(make_ragged_stack(), make_ragged_stack(), stack_dim=dim)
    if len(path) == 2:
        stack = LazyStackedTensorDict(*[TensorDict({"s": make_ragged_stack()}) for _ in range(2)])
    assert [[leaf.shape for leaf in part] for part in stack.get(path, as_list=True)] == [
        [(1,), (2,), (3,)]
    ] * 2
    padded = torch.stack(
        [make_ragged_stack().get("a", as_padded_tensor=True, padding_side="left", padding_value=-1.0)] * 2, 0
    )
    padded = padded.transpose(0, stack.stack_dim)
    form = {"as_padded_tensor": True, "padding_side": "left", "padding_value": -1.0}
    torch.testing.assert_close(stack.get(path, **form), padded)
    with pytest.raises(StructureError, match=r"ragged in stacks inside the stack.*flatten\(\)"):
        stack.get(path, as_nested_tensor=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_get_as_padded_of_dense_entry_returns_entry():
    td = TensorDict(
        {"a": torch.ones(2, 3), "r": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, [2]
    )
    assert td.get("a", as_padded_tensor=True, padding_value=5) is td["a"]
    assert td.get("zz", 7, as_padded_tensor=True) == 7
    padded = td.get("r", as_padded_tensor=True, padding_value=5.0, padding_side="left")
    assert padded.tolist() == [[5, 1], [1, 1]]
    for collection in (td, TensorDict.lazy_stack([td, td])):
        assert collection.get("a", as_list=False, as_padded_tensor=False).shape == collection["a"].shape


def test_fill_gaps_gives_members_without_the_entry_no_rows():
    members = [TensorDict(b=torch.ones(1)), TensorDict(a=torch.ones(2, 3))]
    assert [part.shape for part in fill_gaps("a", members)] == [(0, 3), (2, 3)]
    with pytest.raises(RuntimeError, match="another thread"):
        fill_gaps("a", [TensorDict(a=torch.ones(()))] * 2)
    with pytest.raises(RuntimeError, match="another thread"):
        fill_gaps("c", members)
