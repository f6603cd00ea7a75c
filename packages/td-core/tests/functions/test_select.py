"""where, masks, gather and pad equal torch on each leaf; where of uneven members replaces whole entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._functions.select import pad
from td_core.errors import BatchSizeError, CollectionIndexError, KeyMismatchError, LockedError, StructureError

BATCH = (2, 3)


def make_td(start: float = 0.0, **more: Any) -> TensorDict:
    x = torch.arange(24.0).view(2, 3, 4) + start
    return TensorDict({"x": x, "n": {"y": x[..., 0].long()}, **more}, BATCH)


KINDS: dict[str, Callable[[float], Any]] = {
    "dense": make_td,
    "lazy0": lambda start: LazyStackedTensorDict(*make_td(start).unbind(0), stack_dim=0),
    "lazy1": lambda start: LazyStackedTensorDict(*make_td(start).unbind(1), stack_dim=1),
    "lazy inside": lambda start: make_td(
        start, stack=LazyStackedTensorDict(*make_td(start).unbind(1), stack_dim=1)
    ),
}
MASK = torch.tensor([[True, False, True], [False, False, True]])
ROWS = torch.tensor([True, False])


def list_leaves(td: Any) -> list[Tensor]:
    return [td[key] for key in sorted(td.keys(True, True), key=str)]


def expand_to_leaf(mask: Tensor, leaf: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [MASK, ROWS, MASK[:, :1]])
def test_masked_fill_equals_torch(kind: str, mask: Tensor) -> None:
    td = KINDS[kind](0.0)
    before = [leaf.clone() for leaf in list_leaves(td)]
    filled = td.masked_fill(mask, -1)
    expected = [leaf.masked_fill(expand_to_leaf(mask, leaf), -1) for leaf in before]
    for leaf, want in zip(list_leaves(filled), expected, strict=True):
        assert torch.equal(leaf, want)
    for leaf, want in zip(list_leaves(td), before, strict=True):
        assert torch.equal(leaf, want)
    assert td.masked_fill_(mask, -1) is td
    for leaf, want in zip(list_leaves(td), expected, strict=True):
        assert torch.equal(leaf, want)


@pytest.mark.parametrize("form", [list, np.array])
def test_masked_methods_accept_mask_as_list_or_array(form: Callable[[Any], Any]) -> None:
    td, mask = TensorDict({"a": torch.arange(3)}, [3]), form([True, False, True])
    assert td.masked_select(mask)["a"].tolist() == [0, 2]
    assert td.masked_fill(mask, 9)["a"].tolist() == [9, 1, 9]
    assert td.where(mask, td * 2)["a"].tolist() == [0, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_masked_fill_vmap_mask_equals_torch(kind: str) -> None:
    td, masks = KINDS[kind](0.0), torch.stack([MASK, ~MASK])
    filled = torch.vmap(lambda mask: td.masked_fill(mask, -1))(masks)
    for leaf, source in zip(list_leaves(filled), list_leaves(td), strict=True):
        assert torch.equal(
            leaf, torch.stack([source.masked_fill(expand_to_leaf(mask, source), -1) for mask in masks])
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [MASK, ROWS])
def test_masked_select_equals_torch(kind: str, mask: Tensor) -> None:
    td = KINDS[kind](0.0)
    for leaf, source in zip(list_leaves(td.masked_select(mask)), list_leaves(td), strict=True):
        assert torch.equal(leaf, source[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, -1])
def test_gather_equals_torch(kind: str, dim: int) -> None:
    td = KINDS[kind](0.0)
    index = torch.tensor([[1, 0, 1]]) if dim == 0 else torch.tensor([[2, 0], [1, 1]])
    result = td.gather(dim, index)
    assert result.batch_size == index.shape
    for leaf, source in zip(list_leaves(result), list_leaves(td), strict=True):
        full = expand_to_leaf(index, source).expand(index.shape + source.shape[2:])
        assert torch.equal(leaf, source.gather(dim % 2, full))
    out = result.apply(torch.zeros_like)
    assert td.gather(dim, index, out) is out
    assert all(torch.equal(a, b) for a, b in zip(list_leaves(out), list_leaves(result), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("condition", [MASK, ROWS, MASK[:, :1]])
@pytest.mark.parametrize("other", ["collection", "number", "tensor"])
def test_where_equals_torch(kind: str, condition: Tensor, other: str) -> None:
    td = KINDS[kind](0.0)
    value: Any = {"collection": KINDS[kind](100.0), "number": 0.5, "tensor": torch.tensor(3)}[other]
    values = list_leaves(value) if other == "collection" else [value] * len(list_leaves(td))
    result = td.where(condition, value)
    for leaf, mine, theirs in zip(list_leaves(result), list_leaves(td), values, strict=True):
        want = torch.where(expand_to_leaf(condition, mine), mine, theirs)
        assert torch.equal(leaf, want)
        assert leaf.dtype == want.dtype
    assert type(result) is type(td)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_where_tensor_broadcasts_to_every_leaf(kind: str, shape: tuple[int, ...]) -> None:
    td, value = KINDS[kind](0.0).select("x"), torch.full(shape, 0.5)
    (leaf,) = list_leaves(td)
    assert torch.equal(td.where(MASK, value)["x"], torch.where(expand_to_leaf(MASK, leaf), leaf, value))


def test_where_mixed_kinds_equals_dense() -> None:
    expected = make_td().where(MASK, make_td(100.0))
    for first, second in [("dense", "lazy0"), ("lazy0", "dense"), ("lazy0", "lazy1")]:
        result = KINDS[first](0.0).where(MASK, KINDS[second](100.0))
        assert all(torch.equal(a, b) for a, b in zip(list_leaves(result), list_leaves(expected), strict=True))


def test_where_pad_fills_missing_entries() -> None:
    more = make_td(100.0, z=torch.ones(BATCH), m={"q": torch.ones(BATCH)})
    assert make_td().where(MASK, more, pad=7)["z"].tolist() == [[7, 1, 7], [1, 1, 7]]
    assert more.where(MASK, make_td(), pad=7)["m", "q"].tolist() == [[1, 7, 1], [7, 7, 1]]
    assert more.where(MASK, make_td(), pad=False)["z"].tolist() == [[1, 0, 1], [0, 0, 1]]
    with pytest.raises(KeyMismatchError, match=r"extra keys \['z', 'm'\]"):
        make_td().where(MASK, more)


@pytest.mark.parametrize("kind", [lambda td: td, lambda td: lazy_stack(td.unbind(0))], ids=["dense", "lazy"])
def test_where_broadcasts_batch_size_of_other(kind: Any) -> None:
    td = kind(TensorDict({"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3]))
    mask = torch.tensor([True, False])
    for size in ([], [3], [1, 3], [2, 3]):
        other = TensorDict({"a": torch.arange(4.0).expand(*size, 4), "n": {"b": torch.ones(size)}}, size)
        result = td.where(mask, other)
        assert result.batch_size == (2, 3) and result["a"][0].count_nonzero() == 0
        assert torch.equal(result["a"][1], torch.arange(4.0).expand(3, 4))
        assert result["n", "b"].tolist() == [[0.0] * 3, [1.0] * 3]
    with pytest.raises(
        BatchSizeError, match=r"of shape \[4\] does not broadcast against the batch size \[2, 3\]"
    ):
        td.where(mask, TensorDict({"a": torch.ones(4, 4), "n": {"b": torch.ones(4)}}, [4]))


@pytest.mark.parametrize("kind", [lambda td: td, lambda td: lazy_stack(td.unbind(0))], ids=["dense", "lazy"])
def test_where_broadcasts_feature_dims(kind: Any) -> None:
    td = kind(
        TensorDict(
            {"a": torch.zeros(2, 3, 3), "n": TensorDict({"b": torch.zeros(2, 3, 2, 2)}, [2, 3, 2])}, [2, 3]
        )
    )
    b = torch.arange(6.0).view(3, 2)
    other = TensorDict({"a": torch.arange(3.0), "n": TensorDict({"b": b}, [3, 2])}, [3])
    result = td.where(torch.tensor([True, False]), other)
    assert torch.equal(result["a"], torch.stack([torch.zeros(3, 3), torch.arange(3.0)[:, None].expand(3, 3)]))
    assert torch.equal(result["n", "b"][1], b[..., None].expand(3, 2, 2))
    padded = td.exclude("n").where(torch.tensor([True, False]), other, pad=7)
    assert padded["n", "b"].tolist() == [[[7.0, 7.0]] * 3, b.tolist()]


@pytest.mark.parametrize("locked", [False, True])
def test_where_out_stores_result(locked: bool) -> None:
    out = make_td(-1.0)
    leaf = out["x"]
    if locked:
        out.lock_()
    assert make_td().where(MASK, make_td(100.0), out=out) is out
    assert torch.equal(out["x"], make_td().where(MASK, make_td(100.0))["x"])
    # An unlocked ``out`` receives new leaves; the leaves of a locked one are written in place.
    assert torch.equal(leaf, out["x"] if locked else make_td(-1.0)["x"])
    with pytest.raises(BatchSizeError, match=r"out= has batch size \[2\], the result has \[2, 3\]"):
        make_td().where(MASK, 0, out=TensorDict(batch_size=[2]))
    grown = TensorDict(batch_size=[2])
    make_td().where(MASK, 0, out=grown, update_batch_size=True)
    assert grown.batch_size == BATCH
    stack = LazyStackedTensorDict(TensorDict({"a": 1}))
    result = TensorDict({"a": torch.tensor([1, 2])}, [2])
    assert result.where(torch.tensor([True, False]), 0, out=stack, update_batch_size=True) is stack
    assert [member["a"].item() for member in stack.tensordicts] == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad_size", [[0, 1], [1, 0, 2, 3], [0, 0, 1, 1], [-1, 0], []])
def test_pad_equals_torch(kind: str, pad_size: list[int]) -> None:
    td = KINDS[kind](0.0)
    amounts = pad_size + [0] * (4 - len(pad_size))
    result = td.pad(pad_size, value=9)
    for leaf, source in zip(list_leaves(result), list_leaves(td), strict=True):
        flat = [0, 0] * (source.ndim - 2) + [*amounts[2:], *amounts[:2]]
        assert torch.equal(leaf, torch.nn.functional.pad(source, flat, value=9))
    assert result.batch_size == list_leaves(result)[0].shape[:2]


@pytest.mark.parametrize("safe", [True, False])
def test_pad_inplace_changes_batch_size(safe: bool) -> None:
    td = make_td()
    assert pad(td, [0, 1], 9, True, safe) is td
    assert td.batch_size == td["n"].batch_size == (3, 3)
    assert (td["x"][2] == 9).all()
    with pytest.raises(LockedError, match="cannot pad in place"):
        make_td().lock_().pad([0, 1], inplace=True, safe=safe)
    with pytest.raises(
        StructureError, match="cannot pad in place: the members of a LazyStackedTensorDict hold"
    ):
        KINDS["lazy0"](0.0).pad([0, 1], inplace=True, safe=safe)


@pytest.mark.parametrize(
    ("call", "batch"),
    [
        (lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.long), inplace=True), (1, 3)),
        (lambda td: td.masked_select(MASK, inplace=True), (3,)),
    ],
)
def test_gather_and_select_inplace_change_batch_size(
    call: Callable[[Any], Any], batch: tuple[int, ...]
) -> None:
    td = make_td()
    assert call(td) is td
    assert td.batch_size == td["n"].batch_size == batch


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda td: td.masked_fill(torch.ones(3).bool(), 1),
            BatchSizeError,
            r"got shape \[3\] for the batch size \[2, 3\]",
        ),
        (
            lambda td: td.masked_fill(torch.ones(2, 3, 4).bool(), 1),
            BatchSizeError,
            r"got shape \[2, 3, 4\] for",
        ),
        (
            lambda td: td.where(torch.ones(3).bool(), 1),
            BatchSizeError,
            r"got shape \[3\] for the batch size \[2, 3\]",
        ),
        (
            lambda td: td.where(MASK, TensorDict(batch_size=[2])),
            BatchSizeError,
            r"of shape \[2\] does not broadcast against the batch size \[2, 3\]",
        ),
        (
            lambda td: td.masked_select(torch.ones(3).bool()),
            CollectionIndexError,
            r"got \[3\] for batch dim 0",
        ),
        (
            lambda td: td.gather(0, torch.zeros(2).long()),
            BatchSizeError,
            r"got shape \[2\] for the batch size \[2, 3\]",
        ),
        (
            lambda td: td.gather(0, torch.zeros(2, 3).long(), make_td().flatten()),
            BatchSizeError,
            r"out= has batch size \[6\]",
        ),
        (lambda td: td.pad([1]), BatchSizeError, r"two numbers for each dim; got \[1\]"),
        (lambda td: td.pad([1] * 6), BatchSizeError, r"numbers for 3 dims, .* the batch size \[2, 3\] has 2"),
        (
            lambda td: td.pad([-1, -2]),
            BatchSizeError,
            r"\(-1, -2\) takes more from batch dim 0 than its size, 2",
        ),
    ],
)
def test_select_bad_argument_raises(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make_td())


def test_where_and_masked_fill_ignore_default_device() -> None:
    td, mask = TensorDict({"a": torch.arange(3)}, [3]), torch.tensor([True, False, True])
    with torch.device("meta"):
        results = (
            td.where(mask, -1),
            td.where(mask, td * 2),
            td.masked_fill(mask, -1),
            td.clone().masked_fill_(mask, 5),
        )
    expected = [[0, -1, 2], [0, 2, 2], [-1, 1, -1], [5, 1, 5]]
    assert [result["a"].tolist() for result in results] == expected


KEEP = torch.tensor([True, False])


def make_stack(sizes: Any, value: float, **more: Any) -> Any:
    """Build a lazy stack of members with leaves of these sizes."""
    return lazy_stack(
        [
            TensorDict(
                {
                    "x": torch.full((size,), float(value)),
                    "n": {"y": torch.full((size, 2), float(value))},
                    **more,
                }
            )
            for size in sizes
        ]
    )


def read(stack: Any) -> list[list[float]]:
    """Return the leaves of the members."""
    return [member["x"].tolist() for member in stack.unbind(0)]


@pytest.mark.parametrize("start", [[1, 1], [1, 2], [2, 1], [5, 4], [0, 2]], ids=str)
@pytest.mark.parametrize("sizes", [[3, 4], [3, 3]], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_where_lazy_stack_takes_whole_entries_of_other(
    sizes: list[int], start: list[int], nested: bool
) -> None:
    stack, other = make_stack(sizes, 5), make_stack(start, 0)
    if nested:
        stack, other = (TensorDict({"in": item}, batch_size=[2]) for item in (stack, other))
    for result in (stack.where(KEEP, other), torch.where(KEEP, stack, other)):
        result = result["in"] if nested else result
        assert read(result) == [[5.0] * sizes[0], [0.0] * start[1]]
        assert [member["n", "y"].shape[0] for member in result.unbind(0)] == [sizes[0], start[1]]
    stack.where(~KEEP, other, out=stack, update_batch_size=True)
    assert read(stack["in"] if nested else stack) == [[0.0] * start[0], [5.0] * sizes[1]]


def test_where_lazy_stack_takes_whole_rows_of_dense_other() -> None:
    other = TensorDict({"x": torch.zeros(2, 1), "n": {"y": torch.zeros(2, 1, 2)}}, batch_size=[2])
    assert read(make_stack([3, 4], 5).where(KEEP, other)) == [[5.0] * 3, [0.0]]


def test_where_lazy_stack_promotes_dtype_of_whole_entries() -> None:
    stack, other = make_stack([3, 4], 5), make_stack([1, 1], 0).apply(lambda leaf: leaf.to(torch.int64))
    assert stack.where(KEEP, other)[1]["x"].dtype == torch.float32
    assert other.where(KEEP, stack)[0]["x"].dtype == torch.float32


def test_where_lazy_stack_condition_within_member_broadcasts_leaves() -> None:
    members = [TensorDict({"x": torch.ones(2, size)}, batch_size=[2]) for size in (3, 4)]
    others = [TensorDict({"x": torch.zeros(2, 1)}, batch_size=[2])] * 2
    result = lazy_stack(members).where(torch.tensor([[True, False], [False, False]]), lazy_stack(others))
    assert [member["x"].tolist() for member in result.unbind(0)] == [[[1.0] * 3, [0.0] * 3], [[0.0], [0.0]]]


def test_where_lazy_stack_pads_entries_of_uneven_members() -> None:
    result = make_stack([3, 4], 5).where(KEEP, make_stack([1, 2], 0, z=torch.ones(2)), pad=7)
    assert [member["z"].tolist() for member in result.unbind(0)] == [[7.0, 7.0], [1.0, 1.0]]
    assert read(result) == [[5.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("value", [0, torch.tensor(0)], ids=["number", "0-d tensor"])
@pytest.mark.parametrize("nested", [False, True])
def test_where_uneven_members_and_a_number_keep_shapes(value: Any, nested: bool) -> None:
    stack = make_stack([3, 4], 5)
    data = TensorDict({"in": stack}, batch_size=[2]) if nested else stack
    result = data.where(KEEP, value)
    assert read(result["in"] if nested else result) == [[5.0] * 3, [0.0] * 4]


def test_where_uneven_members_and_a_tensor_with_dims_raises() -> None:
    with pytest.raises(StructureError, match=r"where: a tensor is broadcast with whole leaves.*key 'x'"):
        make_stack([3, 4], 5).where(KEEP, torch.zeros(2))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("other", ["nested", "uneven", 0, torch.tensor(0.0)], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_where_nested_tensors_selects_components(layout: torch.layout, other: Any) -> None:
    def make(value: float, sizes: tuple[int, ...]) -> TensorDict:
        parts = [torch.full((size,), value) for size in sizes]
        return TensorDict({"x": torch.nested.nested_tensor(parts, layout=layout)}, batch_size=[2])

    sizes = (2, 4) if other == "uneven" else (2, 3)
    value = make(0, sizes) if isinstance(other, str) else other
    result = make(1, (2, 3)).where(KEEP, value)["x"]
    assert [part.tolist() for part in result.unbind()] == [[1.0] * 2, [0.0] * sizes[1]]
    assert result.layout is layout


def make_dense(size: int, value: float) -> Any:
    leaves = {"x": torch.full((2, size), value), "n": {"y": torch.full((2, size, 2), value)}}
    return TensorDict(leaves, batch_size=[2])


PLACES: dict[str, Any] = {
    "root": lambda data: data,
    "nested": lambda data: TensorDict({"in": data, "z": torch.ones(2)}, batch_size=[2]),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_dense_takes_whole_rows_of_uneven_members(place: str) -> None:
    put = PLACES[place]
    left, right = put(make_dense(3, 5)), put(make_stack([1, 2], 0))
    for result in (left.where(KEEP, right), torch.where(KEEP, left, right), right.where(~KEEP, left)):
        result = result if place == "root" else result["in"]
        assert read(result) == [[5.0] * 3, [0.0] * 2]
        assert [member["n", "y"].shape[0] for member in result.unbind(0)] == [3, 2]


def test_where_parameters_take_whole_rows_of_uneven_members() -> None:
    result = TensorDictParams(make_dense(3, 5)).where(KEEP, make_stack([1, 2], 0))
    assert read(result) == [[5.0] * 3, [0.0] * 2]


def test_where_dense_in_dense_out_of_uneven_members_raises() -> None:
    with pytest.raises(StructureError, match="'x'"):
        make_dense(3, 5).where(KEEP, make_stack([1, 2], 0), out=make_dense(3, 5))


@pytest.mark.parametrize("place", ["root", "nested"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "__gt__", "__eq__"])
def test_operation_of_dense_with_uneven_members_broadcasts_members(name: str, place: str) -> None:
    left, right = PLACES[place](make_dense(1, 3)), PLACES[place](make_stack([1, 2], 2))
    result = getattr(left, name)(right)
    wanted = getattr(torch.tensor(3.0), name)(torch.tensor(2.0)).item()
    assert read(result if place == "root" else result["in"]) == [[wanted], [wanted] * 2]
