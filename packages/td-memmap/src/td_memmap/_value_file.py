"""Values that are written in place, and reach the save that they come from.

A leaf is the memory of its file. The values of a node are small files beside its ``meta.json``, written anew with each
change: what describes them last, in one step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from td_core._attachments import Keeper
from td_core._collection import Core
from td_core._lazy_names import set_module
from td_core._values import split
from td_core.errors import CodecError, StructureError

from . import _fs, _names
from ._fs import Tree
from ._load import Loading, load_directory
from ._meta import LIMIT, At, read_level
from ._plan import plan_values


@set_module("td_memmap.memmap_pickles")
@dataclass(slots=True, eq=False)
class ValueFile(Keeper):
    """The directory of a node of values in a save.

    Attributes:
        path: the directory.
        above: batch size of the level above.
        allow_pickle: whether values may be pickled.
        shared: whether values are read each time the file changes.
        folder: device and inode of the directory: another one is that of another save.
        refused: why the values cannot be written; None where they can.
        seen: the file that they were read from last.
    """

    path: str
    above: torch.Size = torch.Size()
    allow_pickle: bool = False
    shared: bool = False
    folder: tuple[int, int] | None = None
    refused: str | None = None
    seen: Any = None

    def current(self, node: Core, *, writes: bool = False) -> Core | None:
        """Read the values again, if their file was replaced since the last time, and they are ``shared`` or to be written."""
        if self.refused is not None or not (self.shared or writes):
            return None
        file = self._file()
        if file is None or file == self.seen:
            return None
        loaded: Core = load_directory(self.path, Loading(allow_pickle=self.allow_pickle))
        # What could not be read, or is nothing that the node can take, is no better the next time.
        if type(loaded) is type(node):
            self.seen = file
        return loaded

    def check(self, node: Core, values: Sequence[Any]) -> None:
        """Raise StructureError where nothing can be written, CodecError for a value that cannot be stored."""
        if self.refused is not None:
            raise StructureError(self.refused)
        found = _fs.status(self.path)
        if found is None or (self.folder is not None and _fs.identity(found) != self.folder):
            raise self._replaced(node)
        for value in () if self.allow_pickle else values:
            try:
                split(value)
            except CodecError as error:
                raise self._unsaid(error) from error

    @contextlib.contextmanager
    def alone(self, node: Core) -> Iterator[None]:
        """Keep other processes from writing the values meanwhile."""
        self.check(node, ())
        with Tree.at_path(self.path) as tree, _fs.held(tree.root):
            yield

    def write(self, node: Core) -> None:
        """Write the values of a node, those that describe them last, in one step.

        Raises:
            CodecError: a value cannot be stored; the save is as before.
            StructureError: something else is saved there by now.
        """
        try:
            texts: dict[str, Any] = plan_values(node, self.above, allow_pickle=self.allow_pickle)
        except CodecError as error:
            raise self._unsaid(error) from error
        with Tree.at_path(self.path) as tree:
            at = At(tree.show((), _names.META), ())
            there = read_level(
                tree.read((), _names.META, LIMIT), at, self.above, robust_key=True, strict=False
            )
            if there.kind is None or not getattr(there.kind.type, "_opaque", False):
                raise self._replaced(node)
            meta = texts.pop(_names.META)
            for name, content in texts.items():
                tree.replace((), name, content)
            tree.replace((), _names.META, meta)
            for name in _names.SIDECARS:
                if name not in texts:
                    tree.remove((), name)
        self.seen = self._file()

    def of_each(self) -> ValueFile:
        """Return what keeps one value for each element; who still shows one for the whole batch finds the file changed."""
        return replace(self)

    def of_part(self) -> ValueFile:
        """Return what refuses to write the one value of a batch through a part of it."""
        why = (
            f"cannot write the value that is saved at {self.path} through this view: it is one for the whole batch there; "
            "write through the collection that was loaded or mapped, or clone() the view first"
        )
        return replace(self, refused=self.refused or why)

    def _file(self) -> Any:
        found = _fs.status(os.path.join(self.path, _names.META))
        return None if found is None else (found.st_ino, found.st_mtime_ns)

    def _replaced(self, node: Core) -> StructureError:
        return StructureError(
            f"cannot write a {type(node).__name__}: {self.path} holds something else by now; load it again, or call "
            "memmap_refresh_() on the collection that holds this"
        )

    def _unsaid(self, error: CodecError) -> CodecError:
        return CodecError(f"cannot write what is saved at {self.path}: {error}")
