"""The format, its sources and its opened collections pass the conformance suites of td-core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import td_core
from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.spi import Serializer, Source
from td_core.testing import SerializerTests
from td_store.testing import OpenTests, SourceTests
from td_zarr import open as open_group
from td_zarr import save
from td_zarr.plugin import ZarrFormat


class TestZarr(SerializerTests):
    suffix = ".zarr"
    most_kills = 15

    def serializer(self) -> Serializer:
        return ZarrFormat()

    def collections(self) -> dict[str, Any]:
        def member(i: int) -> TensorDict:
            return TensorDict({"a": torch.full((2, 3), i), "n": {"b": torch.full((2,), float(i))}}, [2])

        return {
            **super().collections(),
            "stack": LazyStackedTensorDict(*(member(i) for i in range(3)), stack_dim=1),
            "params": TensorDictParams(TensorDict({"w": torch.zeros(2, 2)})),
        }

    def damage(self, path: Path) -> Iterator[str]:
        """Damage the files that td reads: the metadata of each array has a copy in the root."""
        copies = list(path.rglob("*/zarr.json"))
        contents = {file: file.read_bytes() for file in copies}
        for file in copies:
            file.unlink()
        try:
            yield from super().damage(path)
        finally:
            for file, content in contents.items():
                file.write_bytes(content)


class TestRawSource(SourceTests):
    def make(self, array: Tensor, folder: Path) -> Source:
        save(TensorDict({"a": array}), folder / "x.zarr")
        source: Source = open_group(folder / "x.zarr", mode="r+")["a"].source
        return source


class TestChunkSource(SourceTests):
    def make(self, array: Tensor, folder: Path) -> Source:
        save(TensorDict({"a": array}), folder / "x.zarr", chunks=(2, 3), checksums=True)
        source: Source = open_group(folder / "x.zarr", mode="r+")["a"].source
        return source


class TestOpenMapped(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        td_core.save(data, folder / "x.zarr", format="zarr")
        return td_core.open(folder / "x.zarr", mode="r+")


class TestOpenChunks(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        td_core.save(data, folder / "x.zarr", format="zarr", chunks=2)
        return td_core.open(folder / "x.zarr", mode="r+")
