"""The cache of the metadata of leaves that passed a check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._known_looks import KnownLooks


class Special(Tensor):
    """A subclass of Tensor without overrides."""


def test_known_metadata_after_two_equal_calls_matches() -> None:
    known = KnownLooks()
    leaves, others = [torch.zeros(2), torch.ones(3)], [torch.zeros(2), torch.ones(4)]
    known.add(leaves)
    assert known.of(leaves) is None
    known.add(leaves)
    same = known.of([torch.ones(2), torch.zeros(3)])
    assert same is not None
    assert same(leaves)
    assert not same(others)
    assert known.of(others) is None
    known.add(others)
    assert known.of(leaves) is None
    known.add(others)
    assert known.of(others) is not None


def test_known_metadata_subclass_tied_or_no_leaves_is_none() -> None:
    known = KnownLooks()
    for leaves in ([torch.zeros(2).as_subclass(Special)], [torch.zeros(2)] * 2, []):
        for _ in range(3):
            known.add(leaves)
            assert known.of(leaves) is None
            assert not known._looks


def test_known_metadata_cache_is_bounded() -> None:
    known = KnownLooks()
    for size in range(1000):
        leaves = [torch.zeros(size)]
        known.add(leaves)
        known.add(leaves)
        assert known.of(leaves) is not None
        assert len(known._looks) <= 256


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("change", ["mul_", "update_"])
def test_write_strided_nested_leaf_raises_without_crash(change: str, side: int) -> None:
    # torch crashes the process if it guards the metadata of such a tensor.
    pair = [TensorDict({"a": torch.ones(3), "b": torch.ones(2)}) for _ in range(2)]
    for _ in range(4):
        pair[0].add_(1)
        getattr(pair[0], change)(pair[1])
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    pair[side] = TensorDict({"a": torch.full((3,), 5.0), "b": ragged})
    pair[side].add_(1)
    assert torch.equal(pair[side]["b"][1], torch.full((2,), 2.0))
    before = pair[0]["a"].clone()
    with pytest.raises(RuntimeError):
        getattr(pair[0], change)(pair[1])
    assert torch.equal(pair[0]["a"], before)


def test_known_metadata_non_tensor_does_not_match() -> None:
    known, leaves = KnownLooks(), [torch.zeros(2), torch.zeros(3)]
    known.add(leaves)
    known.add(leaves)
    same = known.of(leaves)
    assert same is not None and not same([torch.zeros(2), 1])  # type: ignore[list-item]
