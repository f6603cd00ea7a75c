"""Operations of td-core on collections with stored leaves that td-core implements for leaves in memory, too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core import typing as td_typing
from td_store import StoredTensor
from td_store.testing import MemorySource, RawFile


def test_describe_stored_leaf_reads_nothing(tmp_path: Path) -> None:
    source = RawFile.create(tmp_path / "a.bin", torch.arange(6.0).view(3, 2))
    td = TensorDict({"a": StoredTensor(source)}, batch_size=[3])
    (tmp_path / "a.bin").unlink()
    assert [(row.shape, row.nbytes) for row in td.describe()] == [((3, 2), 24)]


class Chunked(MemorySource):
    """A source that is read in blocks of rows."""

    def __init__(self, rows: int, size: Any, *tail: int) -> None:
        super().__init__(torch.zeros(rows, *tail))
        self.chunks = (size, *tail)


def store(rows: int, size: Any, *tail: int) -> StoredTensor:
    return StoredTensor(Chunked(rows, size, *tail))


@pytest.mark.parametrize(
    ("entries", "stops"),
    [
        ({"a": torch.zeros(7)}, [7]),
        ({"a": store(7, 3)}, [3, 6, 7]),
        ({"a": store(7, 3, 2), "n": {"b": torch.zeros(7)}}, [3, 6, 7]),
        ({"a": store(7, 1), "b": store(7, 2)}, [2, 4, 6, 7]),
        ({"a": store(7, 2), "n": {"b": store(7, 3)}}, [6, 7]),
        ({"a": store(7, 9)}, [7]),
        ({"a": store(7, 3)[1:]}, [2, 5, 6]),
        ({"a": StoredTensor(MemorySource(torch.zeros(7)))}, [7]),
        ({"a": torch.zeros(0)}, []),
        ({"a": store(7, (3, 2, 2))}, [3, 5, 7]),
        ({"a": store(7, (3, 2, 2), 2)[1:]}, [2, 4, 6]),
        ({"a": store(9, (3, 3, 2, 1))[::2]}, [2, 3, 4, 5]),
        ({"a": store(7, (3, 2, 2)), "b": store(7, (1, 2, 4))}, [3, 7]),
        ({"a": store(7, (3, 2, 2)), "b": store(7, 1)}, [3, 5, 7]),
    ],
    ids=[
        "memory",
        "chunks",
        "beside memory",
        "multiples",
        "no multiples",
        "one chunk",
        "view",
        "no chunks",
        "no rows",
        "sizes",
        "view of sizes",
        "steps of sizes",
        "two sizes",
        "sizes beside chunks",
    ],
)
def test_row_blocks_end_where_chunks_of_all_leaves_end(entries: Any, stops: list[int]) -> None:
    td = TensorDict(entries).auto_batch_size_(1)
    starts = [0, *stops[:-1]]
    assert td.row_blocks() == [range(start, stop) for start, stop in zip(starts, stops)]


class Squares:
    """A source with only the members that the protocol requires."""

    shape, dtype = torch.Size([5]), torch.int64

    def read(self, index: Any) -> torch.Tensor:
        return torch.arange(5)[index] ** 2

    def write(self, index: Any, value: torch.Tensor) -> None:
        raise td_core.LockedError("the squares cannot be written")

    def flush(self) -> None:
        pass


def test_source_needs_only_members_of_the_protocol() -> None:
    members = {name for name in vars(td_typing.Source) if not name.startswith("_")}
    assert members == {"shape", "dtype", "read", "write", "flush"}
    assert all(hasattr(Squares, name) for name in members)
    leaf = StoredTensor(Squares())
    assert leaf[1:4].tolist() == [1, 4, 9]
    with pytest.raises(td_core.LockedError, match="the squares cannot be written"):
        leaf[0] = 3


@pytest.mark.parametrize("name", ["read", "write", "flush"])
def test_methods_of_a_source_have_the_parameters_of_the_protocol(name: str) -> None:
    expected = list(inspect.signature(getattr(td_typing.Source, name)).parameters)
    assert list(inspect.signature(getattr(RawFile, name)).parameters) == expected
