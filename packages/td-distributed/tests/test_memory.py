"""Memory for storages and messages."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from td_core import TensorDict
from td_distributed import _memory


@pytest.mark.parametrize("nbytes", [0, 1, _memory.LARGE - 1, _memory.LARGE, _memory.LARGE + 1])
def test_allocate_returns_memory_writable_to_end(nbytes: int) -> None:
    room = _memory.allocate(nbytes)
    room.fill_(7)
    assert room.shape == (nbytes,)
    assert room.dtype == torch.uint8
    assert (room == 7).all()
    assert room.untyped_storage().nbytes() % 16 == 0


def test_consolidate_large_collection_keeps_content() -> None:
    td = TensorDict({"a": torch.arange(_memory.LARGE // 8), "b": {"c": torch.ones(3)}})
    found = td.consolidate()
    assert (found == td).all()


def test_allocate_fake_tensor_skips_madvise() -> None:
    with FakeTensorMode():
        room = _memory.allocate(_memory.LARGE)
    assert isinstance(room, FakeTensor)
