"""Register the format ``"safetensors"`` and its methods with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from td_core import TensorCollection, save
from td_core.spi import LazyFunction, Serializer, hookimpl, make_classmethod
from td_core.typing import ObjectLocation

CollectionT = TypeVar("CollectionT", bound=TensorCollection)

#: The file or the index in a directory.
_NAMES = ("model.safetensors", "model.safetensors.index.json")


class SafetensorsFormat(Serializer):
    """Safetensors files, and directories of them with an index.

    >>> SafetensorsFormat().detect(Path("x.safetensors"), b"")
    False
    """

    name = "safetensors"
    stores_kinds = True
    suffixes = (".safetensors", ".safetensors.index.json")
    reads_objects = True

    save = LazyFunction(__package__, "._write_save", "save")
    load = LazyFunction(__package__, "._read_save", "load")
    load_ = LazyFunction(__package__, "._read_save", "load_into")
    open = LazyFunction(__package__, "._open", "open_collection")
    create = LazyFunction(__package__, "._open", "create")
    inspect = LazyFunction(__package__, "._tree_and_checks", "inspect")
    verify = LazyFunction(__package__, "._tree_and_checks", "verify")

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a safetensors file, an index of shards, or a directory with one of them."""
        if head:
            if head[8:9] == b"{":
                # In a consolidated file whose storage has eight bytes, the structure begins there.
                consolidated = head[8:].startswith((b'{"cls": "', b'{"cls":"'))
                return not consolidated and int.from_bytes(head[:8], "little") <= 100_000_000
            return head[:1] == b"{" and b'"weight_map"' in head
        if isinstance(location, ObjectLocation):
            return not location.marks.isdisjoint(_NAMES)
        if not isinstance(location, Path) or not location.is_dir():
            return False
        with os.scandir(location) as entries:
            return any(
                (entry.name.endswith(".safetensors.index.json") or entry.name == "model.safetensors")
                and not entry.is_dir()  # which another format has named after a key
                for entry in entries
            )


_FORMAT = SafetensorsFormat()


def to_safetensors(self: CollectionT, path: str | os.PathLike[str], **options: object) -> CollectionT:
    """Save the collection as a safetensors file; see :func:`td_safetensors.save`.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_safetensors("data.safetensors")
    """
    saved: CollectionT = save(self, path, format=_FORMAT.name, **options)
    return saved


def from_safetensors(path: str | os.PathLike[str], **options: object) -> Any:
    """Load a safetensors file; see :func:`td_safetensors.load`. A class with declared entries returns an instance of itself.

    Example:
        >>> _ = TensorDict({"a": torch.ones(2)}).to_safetensors("data.safetensors")
        >>> TensorDict.from_safetensors("data.safetensors")["a"]
        tensor([1., 1.])
    """
    return _FORMAT.load(path, **options)


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that save and load."""
    return {
        "to_safetensors": to_safetensors,
        "from_safetensors": make_classmethod(from_safetensors, with_class=_FORMAT.load_as),
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"safetensors"``."""
    return [_FORMAT]
