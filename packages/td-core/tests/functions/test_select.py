"""Masking, gathering, padding and packing elements equal torch on each leaf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core._functions.packing import PackLayout
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


def make_packable(batch: tuple[int, ...] = (2,)) -> TensorDict:
    def leaf(*tail: int) -> Tensor:
        return torch.arange(math.prod((*batch, *tail))).view((*batch, *tail)) + 0.5

    return TensorDict({"b": {"d": leaf(2, 2), "c": leaf()}, "a": leaf(3), "e": {}}, batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_pack_nested_tensor_raises(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(StructureError, match=r"cannot pack key \('n', 'b'\)"):
        TensorDict({"a": torch.ones(2), "n": {"b": ragged}}).pack()


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize("at", ["first", "last"])
def test_pack_unpack_round_trip(batch: tuple[int, ...], at: str) -> None:
    td = make_packable(batch)
    dim = 0 if at == "first" else -1
    packed, layout = td.pack(dim)
    assert packed.shape == ((8, *batch) if at == "first" else (*batch, 8))
    assert (layout.keys, layout.shapes) == (("a", ("b", "c"), ("b", "d")), ((3,), (), (2, 2)))
    assert (layout.offsets, layout.numel, layout.dim) == (
        (0, 3, 4),
        8,
        -1 if at == "last" else -1 - len(batch),
    )
    first = packed.movedim(layout.dim, -1)
    assert torch.equal(first[..., :3], td["a"])
    assert torch.equal(first[..., 4:], td["b", "d"].reshape(*batch, 4))
    restored = layout.unpack(packed)
    assert restored.batch_size == restored["b"].batch_size == batch
    assert "e" in restored
    for key in td.keys(True, True):
        assert torch.equal(restored[key], td[key])


def test_pack_layout_is_comparable_and_reusable() -> None:
    packed, layout = make_packable().pack()
    assert layout == PackLayout(layout.keys, layout.shapes, nested=layout.nested)
    again, same = (make_packable() + 1).pack(layout=layout)
    assert same == layout
    assert torch.equal(again, packed + 1)
    assert layout.unpack(torch.zeros(5, 6, 8))["b", "d"].shape == (5, 6, 2, 2)


def test_pack_bad_entries_raises() -> None:
    _, layout = make_packable().pack()
    with pytest.raises(KeyMismatchError, match=r"missing keys \[\('a',\)\], extra keys \[\]"):
        make_packable().exclude("a").pack(layout=layout)
    with pytest.raises(
        BatchSizeError, match=r"key 'a' has shape \[1\] behind the batch dims, the layout has \[3\]"
    ):
        make_packable().set("a", torch.zeros(2, 1)).pack(layout=layout)
    with pytest.raises(
        TypeError, match=r"key 'a' has torch.int64, key \('b', 'c'\) has torch.float32; convert"
    ):
        make_packable().set("a", torch.zeros(2, dtype=torch.long)).pack()
    with pytest.raises(ValueError, match="must have 8 entries along dim -1; got 3"):
        layout.unpack(torch.zeros(5, 3))
    with pytest.raises(IndexError, match=r"range of \[-2, 1\], but got 2"):
        make_packable().pack(2)


def test_to_padded_tensor_uneven_batch_returns_mask() -> None:
    members = [TensorDict({"x": torch.ones(n, 2), "n": {"q": torch.ones(n)}}, [n]) for n in (1, 3, 2)]
    padded = LazyStackedTensorDict(*members).to_padded_tensor(padding=-1, mask_key=("n", "mask"))
    assert type(padded) is TensorDict
    assert padded.batch_size == padded["n"].batch_size == (3, 3)
    assert padded["n", "q"].tolist() == [[1, -1, -1], [1, 1, 1], [1, 1, -1]]
    assert padded["n", "mask"].tolist() == [[True, False, False], [True] * 3, [True, True, False]]
    assert padded["x"].shape == (3, 3, 2)


def test_to_padded_tensor_pads_nested_uneven_entries() -> None:
    members = [TensorDict({"x": torch.ones(n), "same": torch.ones(2)}) for n in (1, 2)]
    inner = LazyStackedTensorDict(*members)
    outer = TensorDict({"in": LazyStackedTensorDict(inner, inner.clone(), stack_dim=1)})
    padded = outer.to_padded_tensor(5.0)
    assert padded["in", "x"].tolist() == [[[1, 5], [1, 5]], [[1, 1], [1, 1]]]
    assert padded["in", "same"].shape == (2, 2, 2)
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert TensorDict({"x": nested}).to_padded_tensor(5.0)["x"].tolist() == [[1, 5], [1, 1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_to_padded_tensor_nested_tensor_sets_batch_size(layout: torch.layout) -> None:
    members = [TensorDict({"n": {"a": torch.ones(n, 2)}}, [n]) for n in (1, 3)]
    ragged = LazyStackedTensorDict(*members)
    expected = ragged.to_padded_tensor(-1.0, mask_key=("n", "mask"))
    padded = ragged.densify(layout).to_padded_tensor(-1.0, mask_key=("n", "mask"))
    assert padded.batch_size == padded["n"].batch_size == (2, 3)
    assert torch.equal(padded["n", "a"], expected["n", "a"])
    assert padded["n", "mask"].tolist() == [[True, False, False], [True, True, True]]


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
