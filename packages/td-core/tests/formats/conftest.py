"""Fixtures of the tests of formats: two formats that replace the registered ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import Report, TensorDict, Tree
from td_core._formats.serializers import SERIALIZERS
from td_core.spi import Serializer


class Memory(Serializer):
    """A format that keeps collections in a dict, and implements every operation."""

    name = "memory"
    suffixes = (".mem",)
    schemes = ("mem", "cache")
    locations = (io.BytesIO, "zipfile.ZipInfo")

    def __init__(self) -> None:
        self.saved: dict[Any, Any] = {}
        self.heads: list[bytes] = []
        self.calls: list[Any] = []

    def save(self, data: Any, location: Any, *, level: int = 0) -> Any:
        self.saved[location] = data
        if isinstance(location, Path):
            location.write_bytes(b"MEMORY" + bytes(1000))
        return data

    def load(self, location: Any) -> Any:
        return self.saved[location]

    def detect(self, location: Any, head: bytes) -> bool:
        self.heads.append(head)
        return location in self.saved

    def open(self, location: Any, *, mode: str = "r", keys: Any = None, part: int = 0) -> Any:
        self.calls.append(("open", mode, keys, part))
        return self.saved[location]

    def create(self, like: Any, location: Any, *, chunk: int = 0) -> Any:
        self.calls.append(("create", chunk))
        self.saved[location] = like.apply(torch.zeros_like)
        return self.saved[location]

    def append(self, rows: Any, location: Any, *, flush: bool = False) -> None:
        self.saved[location] = torch.cat([self.saved[location], rows])

    def inspect(self, location: Any) -> Tree:
        leaf = Tree("a", "leaf", [3], "torch.float32", 12, place="bytes 0 to 12")
        return Tree("x", "TensorDict", [3], nbytes=12, children={"a": leaf})

    def verify(self, location: Any, *, progress: bool = False) -> Report:
        return Report(str(location), 1, 0)


class Plain(Serializer):
    """A format that implements only what is required."""

    name = "plain"

    def save(self, data: Any, location: Any) -> Any:
        location.write_text("plain")
        return data

    def load(self, location: Any) -> Any:
        return TensorDict({"a": torch.zeros(3)}, [3])

    def detect(self, location: Any, head: bytes) -> bool:
        return head == b"plain"


class Default(Plain):
    name = "memmap"
    suffixes = (".tdz",)

    def detect(self, location: Any, head: bytes) -> bool:
        return False


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Replace the registered formats by those above, and return the one that implements every operation."""
    monkeypatch.setattr(SERIALIZERS, "_by_name", {})
    memory = Memory()
    for serializer in (Default(), Plain(), memory):
        SERIALIZERS.add(serializer)
    return memory


@pytest.fixture
def data() -> TensorDict:
    """Return a collection of three rows."""
    return TensorDict({"a": torch.arange(3.0)}, [3])
