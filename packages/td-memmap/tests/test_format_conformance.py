"""The conformance suite of formats on directories and archives of td-memmap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from td_core import append
from td_core.spi import Serializer
from td_core.testing import SerializerTests
from td_memmap import AppendError
from td_memmap.plugin import DirectoryFormat


class TestDirectory(SerializerTests):
    def serializer(self) -> Serializer:
        return DirectoryFormat()

    def collections(self) -> dict[str, Any]:
        # Parameters load as plain tensors in a TensorDict.
        return {name: data for name, data in super().collections().items() if name != "params"}

    def damage(self, path: Path) -> Iterator[str]:
        # A save loads without its manifest, and can only be verified in part.
        return (damage for damage in super().damage(path) if not damage.startswith("%manifest"))


class TestArchive(TestDirectory):
    suffix: ClassVar[str] = ".tdz"

    def test_append_adds_rows(self, tmp_path: Path) -> None:
        path = self._save(tmp_path, self.collections()["flat"])
        with pytest.raises(AppendError, match="an archive cannot grow"):
            append(self.collections()["flat"], path)
