"""Append rows to a save.

New rows are written to the leaf files after the rows that the metadata lists. Then a directory that links to the
same files, with new metadata, replaces the old one in one step. A reader, and a recovery after a crash, finds all
new rows or no new row.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from td_core import TensorCollection, TensorDict, kinds
from td_core.errors import CodecError, FormatError, StructureError
from td_core.spi import RULES, add_check_line, is_same_value, show_path
from td_store.arrays import refuse_objects
from td_store.files import Checksum

from . import _file_names, _fs
from ._chunks import write_chunks
from ._commit import Staging, lock_prefix
from ._errors import AppendError
from ._fs import DirectoryTree, Parts
from ._grow_leaves import Growth, LeafGrowth, find_leaves, list_row_growth
from ._load import LoadOptions, Node, Reader
from ._manifest import read_manifest, verify_tree
from ._meta import (
    LeafEntry,
    format_manifest,
    has_level,
    is_view,
    parse_json,
    read_if_there,
    read_node,
)
from ._plan import GENERAL, JsonObject, KeyPath, Plan, encode_node, make_plan, plan_values


def append_memmap(
    prefix: str | Path,
    rows: TensorCollection,
    *,
    allow_pickle: bool | None = None,
    compatible: bool = False,
) -> None:
    """Append rows to a saved directory, along the first batch dim.

    ``prefix`` is the root of a save, or a node below it whose parents have no batch dims.

    Collections that are mapped already keep their rows, and dim names are kept. Values that differ from row to row are
    stored by rows: the first append that needs it rewrites those of a save that stores them otherwise, and the next ones
    only add the new values. Lazy stacks, strided nested tensors, and nodes and values of other packages cannot grow. A
    save with checksums is read completely, to verify it and to compute new checksums.

    Args:
        prefix: the directory.
        rows: a collection with the same structure, dtypes and shapes after the first dim.
        allow_pickle: whether saved values may be unpickled to compare them; None means False.
        compatible: whether tensordict must read the save afterwards: a value then must equal the saved one, and stacks of
            values cannot grow. True in programs that use td in place of tensordict.

    Raises:
        AppendError: the rows have another structure than the save, or it is an archive. Nothing was written.
        FormatError: the save is damaged.
        FileNotFoundError: ``prefix`` has no save.
        OSError: the disk is full. The save is unchanged.
        TypeError: ``rows`` is not a collection.

    >>> _ = TensorDict({"a": torch.arange(2)}, batch_size=[2]).memmap("save")
    >>> append_memmap("save", TensorDict({"a": torch.tensor([7])}, batch_size=[1]))
    >>> TensorDict.load_memmap("save")["a"]
    MemoryMappedTensor([0, 1, 7])
    """
    if not isinstance(rows, TensorCollection):
        raise TypeError(f"append_memmap takes a collection of rows; got {type(rows).__name__}")
    refuse_objects(prefix, "append to", "save() the rows to another location, or use the format 'zarr'")
    path = _fs.make_absolute(prefix)
    if _fs.is_file(path):
        raise AppendError(f"cannot append to {path}: an archive cannot grow; unpack_memmap() it first")
    _check_levels_match(_fs.resolve_path(path))
    # Without the lock, two appending processes would write their rows to the same bytes of a file.
    with lock_prefix(path), DirectoryTree.at_path(path) as tree:
        _append(tree, rows, bool(allow_pickle), compatible or RULES.follows_tensordict)


def _check_levels_match(path: str) -> None:
    """Raise AppendError if a node's number of rows is fixed by the node or stack that contains it."""
    above, name = os.path.split(path)
    with contextlib.suppress(OSError, FormatError), DirectoryTree.at_path(above) as tree:
        if not has_level(tree):
            return
        _, level, _, below = read_node(tree, ())
        if (name,) not in below.values() or (level.sized and not level.batch_size):
            return
        if level.sized or name != _file_names.INNER:
            what = (
                f"has the batch size {list(level.batch_size)}"
                if level.sized
                else "is put together of its members"
            )
            raise AppendError(
                f"cannot append to {path}: it is a part of what is saved at {above}, which {what}, and would not fit there "
                "any more; append to the whole save"
            )
        # A tensorclass keeps its entries in a subdirectory, so check the directory of the class too.
        _check_levels_match(above)


def _append(tree: DirectoryTree, rows: TensorCollection, allow_pickle: bool, compatible: bool) -> None:
    reader = Reader(tree, LoadOptions(allow_pickle=allow_pickle, reads_rows=False))
    reader.read()
    if not rows.batch_size:
        raise AppendError(f"cannot append to {tree.path}: the rows have no batch dim")
    planned = _Rows(make_plan(rows, robust_key=True, allow_pickle=True), rows.batch_size[0], compatible)
    change = _Change()
    with contextlib.ExitStack() as locks:
        for node in reader.nodes:
            _Pair(reader, node, planned, locks).plan(change)
        _publish(tree, reader.nodes, change)


@dataclass(slots=True)
class _Change:
    """What an append writes.

    Attributes:
        texts: new files of metadata and values by path, the root's metadata first.
        kept: files of values that remain as they are.
        grown: what is added to files.
    """

    texts: dict[Parts, bytes] = field(default_factory=dict)
    kept: list[Parts] = field(default_factory=list)
    grown: list[Growth] = field(default_factory=list)


class _Rows:
    """The appended rows: their leaves, nodes and planned texts by key path."""

    def __init__(self, plan: Plan, count: int, compatible: bool) -> None:
        self.count, self.compatible = count, compatible
        self.leaves = find_leaves(plan)
        self.places = plan.places
        self.texts = {(*parts, name): text for parts, name, text in plan.texts}
        nodes = {parts: node for node, parts in plan.nodes}
        self.nodes = {key: nodes[parts] for key, parts in plan.places.items()}

    def show(self, key: KeyPath) -> str:
        """Describe the node or leaf at a key path, for error messages."""
        node = self.nodes.get(key)
        if node is not None:
            return _show(type(node).__name__, encode_node(node).values)
        return "a tensor" if key in self.leaves else "nothing"


class _Pair:
    """A node of the save, and what the rows have in its place.

    Attributes:
        where: the key path of the node, for messages.
        given: the node of the rows; None if they have none there.
    """

    def __init__(self, reader: Reader, node: Node, rows: _Rows, locks: contextlib.ExitStack) -> None:
        self.reader, self.tree, self.node, self.rows, self.locks = reader, reader.tree, node, rows, locks
        self.where = show_path(node.key)
        self.given = rows.nodes.get(node.key)

    def plan(self, change: _Change) -> None:
        """Check that the rows match the node, and add its files with the new rows to ``change``."""
        if self.given is None:
            raise self._make_error(f"{self.where} is {self._show()}, the rows have {self._show_rows()} there")
        level = self.node.level
        if any("rows" in value for value in level.values.values() if level.general):
            self._grow_rows(change)
        elif level.sized and (not level.general or level.kind is kinds.of(TensorDict)):
            self._grow_sizes(change)
        elif not self._becomes_rows():
            self._grow_values(change)
        else:
            self._convert_to_rows(change)

    def _grow_sizes(self, change: _Change) -> None:
        """Add the number of rows to the sizes in the metadata of a plain collection, and the rows of its leaves."""
        level, count = self.node.level, self.rows.count
        (meta, right), general = self._read_texts(_file_names.META), level.general
        other, keys = _read_sizes(right), set(level.keys)
        if other is None:
            raise self._make_error(
                f"{self.where} is a plain collection, the rows have {self._show_rows()} there"
            )
        if keys != other[0]:
            raise self._make_error(
                f"{self.where} has the keys {sorted(keys)}, the rows have {sorted(other[0])}"
            )
        size = list(level.batch_size)
        if not size or other[1] != [count, *size[1:]]:
            raise self._make_error(f"{self.where} has the batch size {size}, the rows have {other[1]}")
        if size[0] + count >= 1 << 63:
            raise self._make_error(
                f"{self.where} has {size[0]} rows, and {count} more are more than a tensor can have"
            )
        (meta["meta"]["batch_size"] if general else meta["shape"])[0] += count
        entries = dict(meta["entries"]) if general else meta
        for key, entry in self.node.leaves.items():
            change.grown += self._list_leaf_files(key, entry, entries[key])
        self._add_text(change, _file_names.META, meta)

    def _list_leaf_files(self, key: str, entry: LeafEntry, meta: JsonObject) -> list[Growth]:
        path = (*self.node.key, key)
        leaf = self.rows.leaves.get(path)
        if leaf is None:
            raise AppendError(
                f"cannot append to {show_path(path)}: it is a tensor, the rows have {self.rows.show(path)} there"
            )
        return LeafGrowth(self.tree, self.node.parts, path, entry).list_files(leaf, meta)

    def _grow_values(self, change: _Change) -> None:
        """Check that the values of a node are those of the rows; only the batch size of a value changes."""
        level, (meta, right) = self.node.level, self._read_texts(_file_names.META)
        if level.general or "stack_dim" in meta or is_view(meta):
            raise self._make_error(
                f"{self.where} is of a kind that cannot grow; load the save, join it with the rows, and save that"
            )
        sidecar, other = self._read_texts(_file_names.VALUES)
        if not self._has_equal_values(meta, right, sidecar, other):
            raise self._make_value_error()
        self._add_text(change, _file_names.META, meta)
        size, added = sidecar.get("batch_size"), other.get("batch_size")
        if size or added:  # a value has a separate batch size
            if not size or not added or size[1:] != added[1:]:
                raise self._make_error(
                    f"the value of {self.where} has the batch size {size or 'of its level'}, the rows have "
                    f"{added or 'that of theirs'}"
                )
            sidecar["batch_size"] = [size[0] + self.rows.count, *size[1:]]
            self._add_text(change, _file_names.VALUES, sidecar)
        places = [(*self.node.parts, name) for name in _file_names.SIDECARS]
        change.kept += [
            place for place in places if place not in change.texts and self.tree.stat_path(place) is not None
        ]

    def _has_equal_values(
        self, meta: JsonObject, right: JsonObject, sidecar: JsonObject, other: JsonObject
    ) -> bool:
        """Return True if the non-tensor values of the rows equal the saved values."""
        left = {**meta, "types": sidecar.get("values")}
        right = {**right, "types": other.get("values")}
        pickled = self.rows.texts.get((*self.rows.places[self.node.key], _file_names.PICKLE))
        saved = self.node.values or {}
        if pickled != read_if_there(self.tree, self.node.parts, _file_names.PICKLE):
            # Equal values can have different pickles, so compare the values. The pickle of the rows was made by this
            # call, so it is safe to load; the saved pickle was loaded only with allow_pickle=True.
            left, right = {**saved, **left}, {**(pickle.loads(pickled) if pickled else {}), **right}
        names = {*left, *right} - {"_metadata", "_is_non_tensor"}
        return all(is_same_value(left.get(name), right.get(name)) for name in names)

    def _becomes_rows(self) -> bool:
        """Return True if the node has values which, with those of the rows, must be stored by rows."""
        meta, right = self._read_texts(_file_names.META)
        if self.rows.compatible or self.given is None or self.node.members:
            return False
        if "data" not in (self.node.values or {}) or not _has_values(self.given):
            return False
        general = self.node.level.general or right.get("_format_version") in GENERAL
        if general or "stack_dim" in meta or "stack_dim" in right:
            return True
        sidecar, other = self._read_texts(_file_names.VALUES)
        return not self._has_equal_values(meta, right, sidecar, other)

    def _convert_to_rows(self, change: _Change) -> None:
        """Join the values of a node with those of the rows, and plan the files of all values by rows."""
        parts: list[Any] = [self.reader.build(self.node), self.given]
        try:
            joined: Any = torch.cat(parts)
            texts = plan_values(joined, torch.Size(), allow_pickle=False, rows=0)
        except (StructureError, CodecError) as error:
            raise self._make_value_error(f": {error}") from error
        change.texts.update({(*self.node.parts, name): text for name, text in texts.items()})

    def _grow_rows(self, change: _Change) -> None:
        """Add the values of the rows to saved values by rows."""
        given, size = self.given, self.node.level.batch_size
        if given is None or not _has_values(given) or given.batch_size[1:] != size[1:]:
            raise self._make_error(
                f"{self.where} has one value for each element of {list(size)}, the rows have {self._show_rows()} there"
            )
        # Without the lock, a process that writes a value at the same time would write it to the same bytes.
        folder = self.tree.reopen(self.node.parts)
        self.locks.callback(_fs.close, folder)
        self.locks.enter_context(_fs.lock_directory(folder))
        meta, _ = self._read_texts(_file_names.META)
        change.grown += list_row_growth(self.tree, self.node.parts, self.node.key, meta, given, size.numel())
        self._add_text(change, _file_names.META, meta)

    def _add_text(self, change: _Change, name: str, content: object) -> None:
        place = (*self.node.parts, name)
        change.texts[place] = add_check_line(json.dumps(content).encode())

    def _read_texts(self, name: str) -> list[JsonObject]:
        """Return the parsed file of the save, and the planned one of the rows; {} for one that is missing."""
        place = (*self.rows.places[self.node.key], name)
        texts = read_if_there(self.tree, self.node.parts, name), self.rows.texts.get(place)
        return [parse_json(text, name) if text else {} for text in texts]

    def _make_value_error(self, why: str = "") -> AppendError:
        given, saved = self.given, self.node.values or {}
        values = {} if given is None else encode_node(given).values
        if self._get_class() == type(given).__name__ and "data" in saved:
            shown = _shorten_text(saved["data"]), _shorten_text(values.get("data"))
        else:
            shown = self._show(), self._show_rows()
        return self._make_error(
            f"the value of {self.where} must stay; it is {shown[0]}, the rows have {shown[1]}{why}"
        )

    def _get_class(self) -> str:
        level = self.node.level
        return "view" if level.kind is None else (level.cls or level.kind.type).__name__

    def _show(self) -> str:
        return _show(self._get_class(), self.node.values or {})

    def _show_rows(self) -> str:
        return self.rows.show(self.node.key)

    def _make_error(self, what: str) -> AppendError:
        return AppendError(f"cannot append to {self.tree.path}: {what}")


def _has_values(node: Any) -> bool:
    """Return True if a node has one value, or one for each element."""
    record = encode_node(node)
    return "data" in record.values and not record.members


def _read_sizes(meta: JsonObject) -> tuple[set[str], list[int]] | None:
    """Return the keys and the batch size in the metadata of a dense collection; None for others."""
    if isinstance(meta.get("shape"), list):
        return {name for name, entry in meta.items() if isinstance(entry, dict)}, meta["shape"]
    if meta.get("kind") != kinds.of(TensorDict).tag or "batch_size" not in meta["meta"]:
        return None
    return {name for name, _ in meta["entries"]}, meta["meta"]["batch_size"]


def _show(cls: str, values: Mapping[str, object]) -> str:
    """Describe a node for error messages: its class, and its value if it has a value."""
    return f"a {cls} of {_shorten_text(values['data'])}" if "data" in values else f"a {cls}"


def _shorten_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _read_verified_manifest(tree: DirectoryTree) -> Any:
    """Return the manifest of a save that is not damaged, or None if it has none."""
    manifest = read_manifest(tree)
    if manifest is not None:
        # New hashes of a file that is already damaged would hide the damage.
        report = verify_tree(tree, manifest)
        if not report.ok:
            raise FormatError(str(report))
    return manifest


def _publish(tree: DirectoryTree, nodes: list[Node], change: _Change) -> None:
    metas, sidecars = change.texts, change.kept
    places = [growth.place for growth in change.grown if growth.has_file]
    manifest = _read_verified_manifest(tree)
    if manifest is not None:
        places.append((_file_names.MANIFEST,))
    tree.close_spare()
    with Staging(tree.path, [*metas, *sidecars, *places], alone=True) as staging:
        if staging.in_place:
            raise FormatError(f"cannot append to {tree.path}: it cannot be replaced in one step")
        staging.tree.share_fds(tree)
        for node in nodes[1:]:
            staging.make(node.parts)
        for place in sidecars:
            staging.tree.link(tree, place, place)
        before: list[tuple[Parts, int]] = []
        try:
            for growth in change.grown:
                _grow(tree, staging, growth, before)
            for place, text in reversed(metas.items()):
                if place != (_file_names.META,):
                    staging.tree.write(place[:-1], place[-1], text)
            if manifest is not None:
                _write_manifest(staging.tree, metas, sidecars, places[:-1], manifest.get("algorithm"))
        except BaseException:
            # Truncate the files, to free the space again if the disk is full.
            for place, length in before:
                _shorten(tree, place, length)
            raise
        staging.write_last(_file_names.META, metas[(_file_names.META,)])
        staging.publish()


def _write_manifest(
    tree: DirectoryTree, metas: dict[Parts, bytes], sidecars: list[Parts], leaves: list[Parts], algorithm: Any
) -> None:
    """Write the manifest of the save with the new rows, with hashes if the old manifest had hashes."""
    sizes: dict[Parts, list[object]] = {place: [len(text), None] for place, text in metas.items()}
    for place in (*sidecars, *leaves):
        status = tree.stat_path(place)
        assert status is not None
        sizes[place] = [status.st_size, status.st_mtime_ns]
    hashes: dict[Parts, str] = {}
    if algorithm is not None:
        hashes = {place: Checksum(algorithm, [text]).hexdigest() for place, text in metas.items()}
        hashes |= {
            place: Checksum(algorithm, tree.chunks(place)).hexdigest()
            for place in sizes
            if place not in metas
        }
    texts = {place: f"{zlib.crc32(text):08x}" for place, text in metas.items()}
    texts |= {place: Checksum("crc32", tree.chunks(place)).hexdigest() for place in sidecars}
    tree.write((), _file_names.MANIFEST, format_manifest(sizes, algorithm, hashes, texts))


def _grow(tree: DirectoryTree, staging: Staging, growth: Growth, before: list[tuple[Parts, int]]) -> None:
    """Append rows to a file, or to a copy if its leaf is tied; add the old file length to ``before``."""
    if not growth.has_file:
        return
    place, start = growth.place, growth.start
    result = tree.stat_path(place) if start else None
    # Copy a file with several hard links: appending to it would also grow the leaves that are tied to this leaf.
    own = result is not None and result.st_nlink == 1
    if result is not None and own:
        before.append((place, result.st_size))
        fd, _ = tree.open(place[:-1], place[-1], writable=True)
    else:
        fd = staging.tree.create(place[:-1], place[-1])
    try:
        if start and not own:
            _copy(tree, place, start, fd)
        write_chunks(fd, growth.tensor, start)
    except OSError as error:
        what = f"cannot append to {show_path(growth.key)}, {growth.nbytes} bytes"
        raise _fs.add_path(error, what, tree.show(place)) from error
    finally:
        _fs.close(fd)
    if own:
        staging.tree.link(tree, place, place)


def _shorten(tree: DirectoryTree, place: Parts, length: int) -> None:
    with contextlib.suppress(OSError):
        fd, _ = tree.open(place[:-1], place[-1], writable=True)
        with _fs.closing(fd):
            _fs.set_size(fd, length)


def _copy(tree: DirectoryTree, place: Parts, size: int, target: int) -> None:
    position = 0
    for piece in tree.chunks(place):
        kept = piece[: size - position]
        _fs.write_at(target, kept, position)
        position += len(kept)
