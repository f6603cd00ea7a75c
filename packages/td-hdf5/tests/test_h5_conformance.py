"""The format, its sources and opened collections pass the conformance suites of td-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.spi import Serializer
from td_core.testing import SerializerTests
from td_core.typing import Source
from td_hdf5 import DatasetSource, save
from td_hdf5 import open as open_h5
from td_hdf5.plugin import Hdf5Format
from td_store.testing import OpenTests, SourceTests


class TestHdf5(SerializerTests):
    suffix = ".h5"

    def serializer(self) -> Serializer:
        return Hdf5Format()

    def collections(self) -> dict[str, Any]:
        def member(i: int) -> TensorDict:
            return TensorDict({"a": torch.full((2, 3), i), "n": {"b": torch.full((2,), float(i))}}, [2])

        return {
            **super().collections(),
            "stack": LazyStackedTensorDict(*(member(i) for i in range(3)), stack_dim=1),
            "params": TensorDictParams(TensorDict({"w": torch.zeros(2, 2)})),
        }


class TestContiguousSource(SourceTests):
    def make(self, array: Tensor, folder: Path) -> Source:
        save(TensorDict({"a": array}), folder / "x.h5")
        return DatasetSource(str(folder / "x.h5"), None, "a", array.shape, array.dtype)


class TestChunkedSource(SourceTests):
    def make(self, array: Tensor, folder: Path) -> Source:
        save(TensorDict({"a": array}), folder / "x.h5", chunks=2, compression="gzip")
        return DatasetSource(str(folder / "x.h5"), None, "a", array.shape, array.dtype)


class TestOpenContiguous(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.h5")
        return open_h5(folder / "x.h5", mode="r+")


class TestOpenChunked(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.h5", chunks=2, compression="gzip", shuffle=True)
        return open_h5(folder / "x.h5", mode="r+")
