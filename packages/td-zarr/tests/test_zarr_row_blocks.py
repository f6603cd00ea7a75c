"""Rows in blocks that end where chunks end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import BatchSizeError, TensorDict, lazy_stack
from td_zarr import open as open_group
from td_zarr import save


def make_data(count: int = 10) -> TensorDict:
    leaves = {"a": torch.arange(count * 2).view(count, 2), "h": torch.ones(count).bfloat16()}
    return TensorDict({**leaves, "n": {"z": torch.ones(count, 3) + 1j}}, [count])


#: Chunks of a save, an operation on the opened collection, and the first rows of the blocks.
BLOCKS: dict[str, tuple[Any, Any, list[int]]] = {
    "all": (4, lambda td: td, [0, 4, 8]),
    "no chunks": (None, lambda td: td, [0]),
    "multiples": ({"a": 2, None: 4}, lambda td: td, [0, 4, 8]),
    "other sizes": ({"a": 2, "h": 3, None: 6}, lambda td: td, [0, 6]),
    "one leaf": ({"a": 3}, lambda td: td, [0, 3, 6, 9]),
    "slice": (4, lambda td: td[1:9], [0, 3, 7]),
    "steps": (4, lambda td: td[1::3], [0, 1]),
    "long steps": (2, lambda td: td[::4], [0, 1, 2]),
    "one row": (4, lambda td: td[3:4], [0]),
    "in memory": (4, lambda td: td.clone(), [0]),
    "columns": ((4, 1), lambda td: td.select("a"), [0, 4, 8]),
    "other dim": (
        (4, 1),
        lambda td: TensorDict({"a": td["a"].t()}, [2]),
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_row_blocks_end_where_chunks_end(name: str, path: Path) -> None:
    chunks, change, starts = BLOCKS[name]
    save(make_data(), path, chunks=chunks)
    td = change(open_group(path))
    blocks = td.row_blocks()
    assert [block.start for block in blocks] == starts
    assert [row for block in blocks for row in block] == list(range(len(td)))


def test_row_blocks_of_shards_are_shards(path: Path) -> None:
    save(make_data(), path, chunks=1, shards=5)
    assert open_group(path).row_blocks() == [range(5), range(5, 10)]


def test_row_blocks_of_lazy_stack_are_those_of_members(path: Path) -> None:
    save(make_data(), path, chunks=4)
    opened = open_group(path)
    assert lazy_stack([opened, opened], 1).row_blocks() == [range(4), range(4, 8), range(8, 10)]
    assert lazy_stack([opened, opened], 0).row_blocks() == [range(2)]


def test_row_blocks_without_rows_or_batch_dim(path: Path) -> None:
    assert TensorDict({"a": torch.zeros(0)}, [0]).row_blocks() == []
    with pytest.raises(BatchSizeError, match="has no rows: give it a batch size"):
        TensorDict({"a": torch.zeros(3)}).row_blocks()
