"""pack puts all leaves into one tensor, and the layout unpacks it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._functions.packing import PackLayout
from td_core.errors import BatchSizeError, KeyMismatchError, StructureError


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


def test_pack_without_leaves_returns_empty_tensor() -> None:
    packed, layout = TensorDict({"e": {}}, [2, 3]).pack(0)
    assert (packed.shape, layout.keys, layout.numel) == ((0, 2, 3), (), 0)
    assert list(layout.unpack(packed).keys(True)) == ["e"]
