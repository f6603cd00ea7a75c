"""The formats, their sources and opened collections pass the conformance suites of td-core and td-store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from td_arrow.plugin import ArrowFormat, ParquetFormat
from td_core import TensorDict, append, load, save
from td_core import open as open_save
from td_core.errors import TensorDictError, UnsupportedOperationError
from td_core.spi import Serializer
from td_core.testing import SerializerTests, assert_same
from td_core.typing import Source
from td_store.arrays import KeptSource
from td_store.testing import OpenTests, SourceTests


class TableTests(SerializerTests):
    def test_append_adds_rows(self, tmp_path: Path) -> None:
        """Rows are added to a directory; rows of another structure are refused and change nothing, as is a file."""
        collection, name = self.collections()["flat"], self.serializer().name
        save(collection, tmp_path / "x", format=name, max_rows_per_file=1)
        append(collection[:2], tmp_path / "x", format=name)
        expected = torch.cat([collection, collection[:2]])
        assert_same(load(tmp_path / "x"), expected)
        for rows in (collection.select("a"), collection.apply(lambda leaf: leaf.to(torch.int8))):
            with pytest.raises(TensorDictError):
                append(rows, tmp_path / "x", format=name)
        assert_same(load(tmp_path / "x"), expected)
        with pytest.raises(UnsupportedOperationError, match="which is one file: save with max_rows_per_file"):
            append(collection, self._save(tmp_path, collection), format=name)


@pytest.mark.filterwarnings("ignore:.* are gone:UserWarning")
class TestParquet(TableTests):
    suffix = ".parquet"

    def serializer(self) -> Serializer:
        return ParquetFormat()

    def _open(self, path: Path, **options: Any) -> Any:
        if options.get("mode") != "r+":
            return super()._open(path, **options)
        with pytest.raises(UnsupportedOperationError, match="a Parquet file cannot be changed in place"):
            super()._open(path, **options)
        return super()._open(path, mode="r")

    def test_open_mode_decides_where_writes_go(self, tmp_path: Path) -> None:
        """Writes stay in memory with mode ``"c"``, and are refused with ``"r"``."""
        path = self._save(tmp_path, self.collections()["flat"])
        with pytest.raises(TensorDictError, match="a Parquet file cannot be changed in place: clone"):
            self._open(path)["a"][0] = 7.0
        opened = self._open(path, mode="c")
        opened["a"][0] = 7.0
        assert (opened["a"][0], self._load(path)["a"][0]) == (7.0, 0.0)


@pytest.mark.filterwarnings("ignore:.* are gone:UserWarning")
class TestArrow(TableTests):
    suffix = ".arrow"

    def serializer(self) -> Serializer:
        return ArrowFormat()


class TestOpenMapped(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.arrow")
        return open_save(folder / "x.arrow", mode="r+")


class TestOpenBatches(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.arrow", batch_rows=2)
        return open_save(folder / "x.arrow", mode="c").unlock_()


class TestOpenParquet(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        save(data, folder / "x.parquet", row_group_size=2)
        return open_save(folder / "x.parquet", mode="c").unlock_()


class TestMappedColumn(SourceTests):
    dtypes: ClassVar[list[torch.dtype]] = [
        d for d in SourceTests.dtypes if d != torch.bool
    ]  # bools are bits in Arrow

    def make(self, array: Tensor, folder: Path) -> Source:
        if not array.ndim or not array.numel():  # these are in the header
            return KeptSource(array.clone())
        save(TensorDict({"a": array}, [len(array)]), folder / "x.arrow")
        source: Source = open_save(folder / "x.arrow", mode="r+")["a"].source
        return source
