"""Pad collections of different lengths to one length, and remove the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    assert_close,
    pad_sequence,
    unpad_sequence,
)
from td_core.errors import KeyPathError, StructureError


class TestPadSequence:
    def items(self) -> list[TensorDict]:
        return [
            TensorDict({"a": torch.full((n,), float(n)), "n": {"b": torch.full((n, 3), n)}}, [n])
            for n in (2, 4, 1)
        ]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_pad_sequence_equals_torch(self, side: str) -> None:
        items = self.items()
        result = pad_sequence(items, padding_value=-1, padding_side=side)
        assert result.batch_size == result["n"].batch_size == (3, 4)
        for key in ("a", ("n", "b")):
            expected = torch.nn.utils.rnn.pad_sequence(
                [item[key] for item in items], batch_first=True, padding_value=-1, padding_side=side
            )
            torch.testing.assert_close(result[key], expected)

    @pytest.mark.parametrize(
        ("return_mask", "where"), [(True, "masks"), ("m", "m"), (("m", "k"), ("m", "k"))]
    )
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_unpad_sequence_with_masks_returns_items(self, return_mask: Any, where: Any, side: str) -> None:
        items = self.items()
        padded = pad_sequence(items, return_mask=return_mask, padding_side=side)
        masks = padded[where]
        assert masks["n", "b"].sum(1).tolist() == [2, 4, 1]
        for mask in (masks, masks["a"]):
            again = unpad_sequence(padded.exclude("masks", "m"), mask)
            assert isinstance(again, LazyStackedTensorDict)
            for item, other in zip(items, again.tensordicts, strict=True):
                assert_close(item, other)
                assert item.batch_size == other.batch_size

    def test_unpad_sequence_uses_stored_masks(self) -> None:
        again = unpad_sequence(pad_sequence(self.items(), return_mask=True))
        assert [len(item["a"]) for item in again.tensordicts] == [2, 4, 1]
        assert "masks" not in again

    def test_pad_sequence_pad_dim_pads_that_dim(self) -> None:
        items = [TensorDict({"a": torch.ones(1, n), "b": torch.ones(1, 3)}, [1]) for n in (2, 4)]
        for dim in (1, -1):
            padded = pad_sequence(items, pad_dim=dim, return_mask=True)
            assert padded.batch_size == (2, 1)
            assert padded["a"].sum(-1).tolist() == [[2], [4]]
            assert padded["masks", "b"].shape == (2, 1, 3)
            assert [list(item["a"].shape) for item in unpad_sequence(padded, pad_dim=dim).tensordicts] == [
                [1, 2],
                [1, 4],
            ]

    def test_pad_sequence_padding_value_per_key(self) -> None:
        result = pad_sequence(self.items(), padding_value={("n", "b"): 7})
        assert result["n", "b"][0, 3].tolist() == [7] * 3
        assert result["a"][0, 3] == 0
        with pytest.raises(KeyPathError, match=r"padding_value names \[\('zz',\)\]"):
            pad_sequence(self.items(), padding_value={"zz": 7})

    def test_pad_sequence_drops_keys_missing_in_some_items(self) -> None:
        items = [TensorDict(a=torch.ones(2), b=torch.ones(2)), TensorDict(a=torch.ones(3))]
        assert list(pad_sequence(items).keys(True, True)) == ["a"]

    def test_pad_sequence_out_is_written_inplace(self) -> None:
        out = TensorDict({"a": torch.full((3, 4), 9.0)}, [3, 4])
        leaf = out["a"]
        assert pad_sequence(self.items(), out=out) is out
        assert out["a"] is leaf
        assert leaf[2].tolist() == [1, 0, 0, 0]

    @pytest.mark.parametrize(
        ("items", "kwargs", "error", "message"),
        [
            ([], {}, StructureError, "at least one item"),
            ([TensorDict(a=1)], {}, StructureError, "key 'a' has 0 dims"),
            (
                [TensorDict(a=torch.ones(2, 1)), TensorDict(a=torch.ones(3, 2))],
                {},
                StructureError,
                "differ in other dims",
            ),
            ([TensorDict(a=torch.ones(2))], {"padding_side": "x"}, ValueError, "'left' or 'right'; got 'x'"),
            (
                [TensorDict({"a": torch.ones(2)}, [2]), TensorDict(a=torch.ones(2))],
                {},
                StructureError,
                r"the batch sizes \[\[2\], \[\]\] differ in their dims",
            ),
            (
                [TensorDict(a=torch.ones(2)), TensorDict(a={})],
                {},
                StructureError,
                "the structures differ at key 'a'",
            ),
        ],
    )
    def test_pad_sequence_invalid_arguments_raises(
        self, items: Any, kwargs: Any, error: type, message: str
    ) -> None:
        with pytest.raises(error, match=message):
            pad_sequence(items, **kwargs)

    def test_unpad_sequence_invalid_mask_raises(self) -> None:
        padded = pad_sequence(self.items())
        with pytest.raises(ValueError, match="needs a mask"):
            unpad_sequence(padded)
        with pytest.raises(ValueError, match=r"shape \[3, length\], or a collection; got shape \[3\]"):
            unpad_sequence(padded, torch.tensor([2, 4, 1]))
        mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
        with pytest.raises(ValueError, match="data in more than one place"):
            unpad_sequence(padded, mask)

    def test_unpad_sequence_row_without_data_is_empty(self) -> None:
        padded = TensorDict({"a": torch.ones(2, 3)}, [2])
        again = unpad_sequence(padded, torch.tensor([[True, True, False], [False] * 3]))
        assert [item["a"].shape for item in again.tensordicts] == [(2,), (0,)]

    @given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
    def test_pad_and_unpad_random_lengths_round_trip(self, lengths: list[int], side: str) -> None:
        items = [TensorDict({"a": torch.arange(n * 2).view(n, 2)}, [n]) for n in lengths]
        again = unpad_sequence(pad_sequence(items, return_mask=True, padding_side=side))
        assert [item["a"].tolist() for item in again.tensordicts] == [item["a"].tolist() for item in items]
