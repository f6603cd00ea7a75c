"""Tests of stored tensors, on a source in memory and on one in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from td_core import StoredTensor, TensorDict
from td_core.testing import MemorySource, OpenTests, RawFile, SourceTests


class TestMemorySource(SourceTests):
    is_shared = False

    def make(self, array: Tensor, folder: Path) -> MemorySource:
        return MemorySource(array)


class TestRawFile(SourceTests):
    def make(self, array: Tensor, folder: Path) -> RawFile:
        return RawFile.create(folder / "array.bin", array)


class TestOpenMemory(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        return data.apply(lambda leaf: StoredTensor(MemorySource(leaf)))


class TestOpenRawFile(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        def store(key: Any, leaf: Tensor) -> Tensor:
            return StoredTensor(RawFile.create(folder / f"{'.'.join(key)}.bin", leaf))

        return data.named_apply(store, nested_keys=True)
