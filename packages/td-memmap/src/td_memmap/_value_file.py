"""Write non-tensor values that are changed in place back to their save.

A leaf shares the memory of its file. The values of a node are small files next to its ``meta.json``; each change
rewrites them, with one rename for the metadata at the end. Of values by rows, only those that change are written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from td_core.errors import CodecError, FormatError, StructureError
from td_core.spi import Keeper, Node, Record, add_check_line, set_module, split_value

from . import _file_names, _fs
from ._fs import DirectoryTree
from ._load import LoadOptions, load_directory
from ._meta import LIMIT, Level, Location, read_json, read_level
from ._plan import JsonObject, plan_values
from ._value_rows import SavedRows, list_row_files


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
        rows: whether one value for a batch may become values by rows when a part of the batch is written.
        known: the number of the files of values by rows, the slots and the values that were read last; not in a pickle.
    """

    path: str
    above: torch.Size = torch.Size()
    allow_pickle: bool = False
    shared: bool = False
    folder: tuple[int | None, ...] | None = None
    refused: str | None = None
    seen: object = None
    rows: bool = False
    known: Any = None

    def __getstate__(self) -> tuple[object, JsonObject]:
        return None, {name: getattr(self, name) for name in ValueFile.__slots__ if name != "known"}

    def __setstate__(self, state: tuple[object, JsonObject]) -> None:
        # Pickles of older releases lack the last attributes.
        for name, value in {"rows": False, "known": None, **state[1]}.items():
            setattr(self, name, value)

    def reload(self, node: Node, *, writes: bool = False) -> Node | None:
        """Reload the values if their file was replaced and they are ``shared`` or about to be written, else return None."""
        return self._load_changed(node) if self.refused is None and (self.shared or writes) else None

    def read_again(self, node: Node) -> Node | None:
        """Return a node with the values that are in the files now; None for a part of the batch of one value."""
        if self.refused is not None:
            return None
        loaded = self._load_changed(node)
        if loaded is None:
            return node
        size = loaded.batch_size
        if not loaded._is_value or size != node.batch_size[: len(size)]:
            raise self._stale_error(node, "read")
        if size != node.batch_size:  # one value for a batch, which its parent has
            loaded = loaded._with_batch_size(node.batch_size)
        loaded._keeper = self.of_each()
        return loaded

    def _load_changed(self, node: Node) -> Node | None:
        """Load the values if the metadata was replaced, or its time was set, since they were read."""
        file = self._file()
        if file is None or file == self.seen:
            return None
        loaded: Node | None = self._load_rows(node)
        if loaded is None:
            loaded = load_directory(self.path, LoadOptions(allow_pickle=self.allow_pickle))
        # Mark the file as seen only if it still has the class of the node; otherwise the next call tries again.
        if type(loaded) is type(node):
            self.seen = file
        return loaded

    def _load_rows(self, node: Node) -> Any:
        """Return a node with the values by rows whose slots differ from those read last; None if all must be loaded."""
        try:
            with DirectoryTree.at_path(self.path) as tree:
                level = self._read_level(tree)
                saved = self._find_rows(tree, level, node)
                if saved is None or level.kind is None or "joints" in level.meta:
                    return None
                number, old, known = self.known or (None, None, [None] * saved.count)
                slots, values = saved.read_slots(), list(known)
                changed = np.arange(len(slots)) if number != saved.number else np.flatnonzero(slots != old)
                for place, value in zip(changed.tolist(), saved.read(slots[changed]), strict=True):
                    values[place] = value
        except (FormatError, FileNotFoundError):
            return None  # Another process has replaced the files; a damaged one is an error of the load.
        self.known = saved.number, slots, values
        return level.kind.node_of(Record(level.meta, values={"data": list(values)}))

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
            if tree.is_replaced():
                raise self._stale_error(node)
            yield

    def write_rows(
        self,
        node: Node,
        places: Sequence[int],
        values: Sequence[object],
        separate: Sequence[bool] | None = None,
    ) -> bool:
        """Write the values at ``places`` if the save has values by rows. Return False if all values must be written."""
        try:
            with DirectoryTree.at_path(self.path) as tree:
                saved = self._find_rows(tree, self._read_level(tree), node)
                if saved is None:
                    return False
                before = self._file()
                if saved.write(places, values, separate):
                    saved.replace(partial(self._replace_rows, tree))
                # Processes that share the values compare the time of the metadata.
                _fs.set_time(_file_names.META, tree.root)
        except CodecError as error:
            if self.allow_pickle:
                return False
            raise self._codec_error(error) from error
        if self.seen == before:
            self.seen = self._file()
        return True

    def _find_rows(self, tree: DirectoryTree, level: Level, node: Node) -> SavedRows | None:
        """Return the values by rows in a directory; None if there are none, or not those of ``node``."""
        value = level.values.get("data") if level.general else None
        count = node.batch_size.numel()
        if (
            not isinstance(value, dict)
            or "rows" not in value
            or not (level.kind is not None and isinstance(node, level.kind.type))
            or level.batch_size.numel() != count
        ):
            return None
        return SavedRows(tree, count, value["rows"], value["heap"])

    def _replace_rows(self, tree: DirectoryTree, described: dict[str, int]) -> None:
        """Replace the metadata by one that names other files of the values."""
        meta = read_json(tree, (), _file_names.META)
        meta["values"]["data"] = described
        tree.replace((), _file_names.META, add_check_line(json.dumps(meta).encode()))

    def _read_level(self, tree: DirectoryTree) -> Level:
        """Return the checked metadata of a directory."""
        location = Location(tree.show((), _file_names.META), ())
        content = tree.read((), _file_names.META, LIMIT)
        return read_level(content, location, self.above, robust_key=True, strict=False)

    def write(self, node: Node) -> None:
        """Write the values of a node; the rename of the metadata comes last.

        Raises CodecError if a value cannot be stored, and StructureError if another node is saved there now.
        """
        with DirectoryTree.at_path(self.path) as tree:
            there = self._read_level(tree)
            if there.kind is None or not getattr(there.kind.type, "_is_value", False):
                raise self._stale_error(node)
            value = there.values.get("data") if there.general else None
            number = value["rows"] + 1 if isinstance(value, dict) and "rows" in value else 0
            try:
                texts = plan_values(
                    node,
                    self.above,
                    allow_pickle=self.allow_pickle,
                    rows=number if number or self.rows else None,
                )
            except CodecError as error:
                raise self._codec_error(error) from error
            meta = texts.pop(_file_names.META)
            for name, content in texts.items():
                tree.replace((), name, content)
            tree.replace((), _file_names.META, meta)
            for name in _file_names.SIDECARS:
                if name not in texts:
                    tree.remove((), name)
            for name in list_row_files(number - 1) if number else ():
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

    def _stale_error(self, node: Node, what: str = "write") -> StructureError:
        return StructureError(
            f"cannot {what} a {type(node).__name__}: {self.path} holds something else by now; load it again, or call "
            "memmap_refresh_() on the collection that holds this"
        )

    def _codec_error(self, error: CodecError) -> CodecError:
        return CodecError(f"cannot write what is saved at {self.path}: {error}")


@set_module("td_memmap.memmap_pickles")
class CopiedValues(ValueFile):
    """Directory of a value node whose writes remain in memory, as those to leaves that are mapped with the mode ``"r"``."""

    __slots__ = ()

    def reload(self, node: Node, *, writes: bool = False) -> None:
        """Return None: the values are those of the load until :meth:`read_again`."""

    def check(self, node: Node, values: Sequence[object]) -> None:
        """Accept all values."""

    @contextlib.contextmanager
    def lock(self, node: Node) -> Iterator[None]:
        """Lock nothing."""
        yield

    def write_rows(
        self,
        node: Node,
        places: Sequence[int],
        values: Sequence[object],
        separate: Sequence[bool] | None = None,
    ) -> bool:
        """Return True: nothing is to be written."""
        return True

    def write(self, node: Node) -> None:
        """Write nothing."""
