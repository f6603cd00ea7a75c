"""Uneven members of lazy stacks: shapes, holders of an entry, and ragged leaves as lists, nested and padded tensors."""

from __future__ import annotations

import pytest
import torch

from td_core import NO_DEFAULT, LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._tree.components import JaggedParts
from td_core._tree.ragged import fill_gaps
from td_core.errors import KeyPathError, StructureError


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


#: The sizes of the first dim, and those of the others: few leaves and many, small and large ones, without elements.
ROWS = {
    "few": ([1, 0, 3, 2], ()),
    "small": ([1, 0, 3, 2] * 6, ()),
    "small with dims": ([2, 5, 1] * 6, (2, 3)),
    "empty": ([0] * 17, (2,)),
    "large": ([700, 300] * 8, ()),
    "few with dims": ([3, 1], (40, 30)),
}
DTYPES = [
    torch.float32,
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
    torch.uint16,
    torch.float8_e5m2,
]


def make_rows(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return leaves that differ in the first dim, with other elements in each."""
    sizes, rest = ROWS[case]
    return [(torch.arange(n * torch.Size(rest).numel()) % 7 + 1).reshape(n, *rest).to(dtype) for n in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_get_padded_of_many_rows_equals_loop(case, dtype):
    rows = make_rows(case, dtype)
    stack = LazyStackedTensorDict(*[TensorDict({"a": row}) for row in rows])
    value = 0.0 if dtype is torch.bool else 2.0
    found = stack.get("a", as_padded_tensor=True, padding_value=value)
    longest = max(map(len, rows))
    for row, part in zip(rows, found, strict=True):
        assert part.dtype is dtype
        assert part.shape == (longest, *row.shape[1:])
        wanted = [
            *row.flatten().tolist(),
            *[torch.tensor(value).to(dtype).item()] * (part.numel() - row.numel()),
        ]
        assert part.flatten().tolist() == wanted


@pytest.mark.filterwarnings("ignore:.*is_fx_tracing")
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_get_jagged_of_many_rows_equals_as_nested_tensor(case, dtype):
    rows = make_rows(case, dtype)
    stack = LazyStackedTensorDict(*[TensorDict({"a": row}) for row in rows])
    found = stack.get("a", as_nested_tensor=True, layout=torch.jagged)
    wanted = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    assert found.layout is torch.jagged
    for name in ("values", "offsets"):
        part, wanted_part = getattr(found, name)(), getattr(wanted, name)()
        assert torch.equal(part, wanted_part)
        assert part.dtype is wanted_part.dtype
    assert JaggedParts.of(found).seqlens == JaggedParts.of(wanted).seqlens
    assert JaggedParts.of(found).dim == JaggedParts.of(wanted).dim


@pytest.mark.parametrize("form", ["as_padded_tensor", "as_nested_tensor"])
def test_get_form_of_rows_gives_gradient_to_each_member(form):
    rows = [torch.arange(n * 1.0, requires_grad=True) for n in (1, 3)]
    stack = LazyStackedTensorDict(*[TensorDict({"a": row}) for row in rows])
    found = stack.get("a", **{form: True})
    (found.values() if found.is_nested else found).pow(2).sum().backward()
    assert [row.grad.tolist() for row in rows] == [[0.0], [0.0, 2.0, 4.0]]


def test_get_form_of_members_of_other_kinds_reads_through_them():
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    params.register_get_post_hook(lambda td, value: value * 2)
    stack = LazyStackedTensorDict(TensorDict({"a": torch.ones(1)}), params)
    assert [row.tolist() for row in stack.get("a", as_list=True)] == [[1.0], [2.0, 2.0]]


def test_get_form_of_key_that_a_member_lacks_returns_default_else_raises():
    stack = LazyStackedTensorDict(TensorDict({"a": torch.ones(1)}), TensorDict({"b": 1}))
    assert stack.get("a", 5, as_list=True) == 5
    assert stack.get("a", as_list=True) is None
    with pytest.raises(KeyPathError, match="'a'"):
        stack.get("a", NO_DEFAULT, as_padded_tensor=True)
