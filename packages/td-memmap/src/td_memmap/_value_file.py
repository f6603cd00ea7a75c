"""Write non-tensor values that are changed in place back to their save.

A leaf shares the memory of its file. The values of a node are small files next to its ``meta.json``; each change
rewrites them, with one rename for the metadata at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from td_core import split_value
from td_core.errors import CodecError, StructureError
from td_core.spi import Keeper, Node, set_module

from . import _file_names, _fs
from ._fs import DirectoryTree
from ._load import LoadOptions, load_directory
from ._meta import LIMIT, Location, read_level
from ._plan import plan_values


@set_module("td_memmap.memmap_pickles")
@dataclass(slots=True, eq=False)
class ValueFile(Keeper):
    """Directory of a value node in a save.

    Attributes:
        path: the directory.
        above: batch size of the parent.
        allow_pickle: whether values may be pickled.
        shared: whether values are reloaded whenever the file changes.
        folder: device, inode and time of birth of the directory, to detect that another save replaced it; pickles of older
            releases lack the last one.
        refused: why the values cannot be written; None if they can.
        seen: inode and time of the file that was last read or written.
    """

    path: str
    above: torch.Size = torch.Size()
    allow_pickle: bool = False
    shared: bool = False
    folder: tuple[int | None, ...] | None = None
    refused: str | None = None
    seen: object = None

    def reload(self, node: Node, *, writes: bool = False) -> Node | None:
        """Reload the values if their file was replaced and they are ``shared`` or about to be written, else return None."""
        if self.refused is not None or not (self.shared or writes):
            return None
        file = self._file()
        if file is None or file == self.seen:
            return None
        loaded: Node = load_directory(self.path, LoadOptions(allow_pickle=self.allow_pickle))
        # Mark the file as seen only if it still has the class of the node; otherwise the next call tries again.
        if type(loaded) is type(node):
            self.seen = file
        return loaded

    def check(self, node: Node, values: Sequence[object]) -> None:
        """Raise StructureError if the values cannot be written, and CodecError for a value that cannot be stored."""
        if self.refused is not None:
            raise StructureError(self.refused)
        found = _fs.identify_path(self.path)
        if found is None or (self.folder is not None and found[: len(self.folder)] != self.folder):
            raise self._stale_error(node)
        for value in () if self.allow_pickle else values:
            try:
                split_value(value)
            except CodecError as error:
                raise self._codec_error(error) from error

    @contextlib.contextmanager
    def lock(self, node: Node) -> Iterator[None]:
        """Lock the values against writes of other processes inside the ``with`` block."""
        self.check(node, ())
        with DirectoryTree.at_path(self.path) as tree, _fs.lock_directory(tree.root):
            yield

    def write(self, node: Node) -> None:
        """Write the values of a node; the rename of the metadata comes last.

        Raises CodecError if a value cannot be stored, and StructureError if another node is saved there now.
        """
        try:
            texts: dict[str, Any] = plan_values(node, self.above, allow_pickle=self.allow_pickle)
        except CodecError as error:
            raise self._codec_error(error) from error
        with DirectoryTree.at_path(self.path) as tree:
            location = Location(tree.show((), _file_names.META), ())
            there = read_level(
                tree.read((), _file_names.META, LIMIT), location, self.above, robust_key=True, strict=False
            )
            if there.kind is None or not getattr(there.kind.type, "_is_value", False):
                raise self._stale_error(node)
            meta = texts.pop(_file_names.META)
            for name, content in texts.items():
                tree.replace((), name, content)
            tree.replace((), _file_names.META, meta)
            for name in _file_names.SIDECARS:
                if name not in texts:
                    tree.remove((), name)
        self.seen = self._file()

    def of_each(self) -> ValueFile:
        """Return a copy for a node that now has one value per element instead of one for the batch."""
        return replace(self)

    def of_part(self) -> ValueFile:
        """Return a copy that refuses writes, for a view of a part of a batch that has a single value."""
        why = (
            f"cannot write the value that is saved at {self.path} through this view: it is one for the whole batch there; "
            "write through the collection that was loaded or mapped, or clone() the view first"
        )
        return replace(self, refused=self.refused or why)

    def _file(self) -> tuple[int, int] | None:
        result = _fs.get_status(os.path.join(self.path, _file_names.META))
        return None if result is None else (result.st_ino, result.st_mtime_ns)

    def _stale_error(self, node: Node) -> StructureError:
        return StructureError(
            f"cannot write a {type(node).__name__}: {self.path} holds something else by now; load it again, or call "
            "memmap_refresh_() on the collection that holds this"
        )

    def _codec_error(self, error: CodecError) -> CodecError:
        return CodecError(f"cannot write what is saved at {self.path}: {error}")
