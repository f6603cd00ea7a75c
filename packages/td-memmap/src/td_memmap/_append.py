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
from pathlib import Path
from typing import Any

from td_core import TensorCollection
from td_core.errors import FormatError
from td_core.spi import add_check_line, is_same_value, show_path
from td_store.files import Checksum

from . import _file_names, _fs
from ._chunks import write_chunks
from ._commit import Staging, lock_prefix
from ._errors import AppendError
from ._fs import DirectoryTree, Parts
from ._load import LoadOptions, Node, Reader
from ._manifest import read_file_chunks, read_manifest, verify_tree
from ._meta import (
    LeafEntry,
    format_manifest,
    has_level,
    is_view,
    parse_json,
    read_if_there,
    read_node,
)
from ._plan import LeafFile, Plan, encode_node, make_plan

#: Path of a leaf's file, the leaf's new rows, and the size of the saved elements in bytes.
_Grown = tuple[Parts, LeafFile, int]


def append_memmap(prefix: str | Path, rows: TensorCollection, *, allow_pickle: bool | None = None) -> None:
    """Append rows to a saved directory, along the first batch dim.

    ``prefix`` is the root of a save, or a node below it whose parents have no batch dims.

    Collections that are mapped already keep their rows. Non-tensor values must equal the saved ones, and dim names
    are kept. Lazy stacks, stacks of values, nested tensors and nodes in the general form (of another package, or
    with a key such as ``"shape"``) cannot grow. A save with checksums is read completely, to verify it and to
    compute new checksums.

    Args:
        prefix: the directory.
        rows: a collection with the same structure, dtypes and shapes after the first dim.
        allow_pickle: whether saved values may be unpickled to compare them; None means False.

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
    path = _fs.make_absolute(prefix)
    if _fs.is_file(path):
        raise AppendError(f"cannot append to {path}: an archive cannot grow; unpack_memmap() it first")
    _check_levels_match(_fs.resolve_path(path))
    # Without the lock, two appending processes would write their rows to the same bytes of a file.
    with lock_prefix(path), DirectoryTree.at_path(path) as tree:
        _append(tree, rows, bool(allow_pickle))


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


def _append(tree: DirectoryTree, rows: TensorCollection, allow_pickle: bool) -> None:
    reader = Reader(tree, LoadOptions(allow_pickle=allow_pickle))
    reader.read()
    if not rows.batch_size:
        raise AppendError(f"cannot append to {tree.path}: the rows have no batch dim")
    planned = _Rows(make_plan(rows, robust_key=True, allow_pickle=True), rows.batch_size[0])
    texts: dict[Parts, bytes] = {}
    kept: list[Parts] = []
    grown: list[_Grown] = []
    for node in reader.nodes:
        pair = _Pair(tree, node, planned)
        texts.update(pair.make_texts())
        kept += [place for place in pair.list_sidecars() if place not in texts]
        for key, entry in node.leaves.items():
            place = (*node.parts, entry.files[0] + ".memmap")
            grown.append((place, pair.find_leaf_rows(key, entry), entry.nbytes))
    _publish(tree, reader.nodes, texts, kept, grown)


class _Rows:
    """Planned files of the appended rows: leaf files, texts and nodes by path."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.count = count
        self.files = {file.path: file for file in plan.leaves}
        self.texts = {(*parts, name): text for parts, name, text in plan.texts}
        self.nodes = {parts: node for node, parts in plan.nodes}

    def show(self, place: Parts) -> str:
        """Describe the node or leaf at a path, for error messages."""
        node = self.nodes.get(place)
        if node is not None:
            return _show(type(node).__name__, encode_node(node).values)
        return "a tensor" if place and (*place[:-1], f"{place[-1]}.memmap") in self.files else "nothing"


class _Pair:
    """A node of the save, and what the rows have in its place.

    Attributes:
        where: the key path of the node, for messages.
        place: path of the node in the plan of the rows, where keys are always encoded.
    """

    def __init__(self, tree: DirectoryTree, node: Node, rows: _Rows) -> None:
        self.tree, self.node, self.rows = tree, node, rows
        self.where = show_path(node.key)
        self.place = tuple(map(_file_names.encode_key, node.key))

    def make_texts(self) -> dict[Parts, bytes]:
        """Check that the rows match the node, and return its metadata files with the new number of rows."""
        level, (meta, right) = self.node.level, self._read_texts(_file_names.META)
        if not right:
            raise self._make_error(f"{self.where} is {self._show()}, the rows have {self._show_rows()} there")
        if level.general or (not level.sized and ("stack_dim" in meta or is_view(meta))):
            raise self._make_error(
                f"{self.where} is of a kind that cannot grow; load the save, join it with the rows, and save that"
            )
        sidecar, other = ({}, {}) if level.sized else self._read_texts(_file_names.VALUES)
        if level.sized:
            self._grow_sizes(meta, right)
        else:
            self._check_values(
                {**meta, "types": sidecar.get("values")}, {**right, "types": other.get("values")}
            )
        texts = {(*self.node.parts, _file_names.META): add_check_line(json.dumps(meta).encode())}
        size, added = sidecar.get("batch_size"), other.get("batch_size")
        if size or added:  # a value has a separate batch size
            if not size or not added or size[1:] != added[1:]:
                raise self._make_error(
                    f"the value of {self.where} has the batch size {size or 'of its level'}, the rows have "
                    f"{added or 'that of theirs'}"
                )
            sidecar["batch_size"] = [size[0] + self.rows.count, *size[1:]]
            texts |= {(*self.node.parts, _file_names.VALUES): add_check_line(json.dumps(sidecar).encode())}
        return texts

    def _read_texts(self, name: str) -> list[Any]:
        """Return the parsed file of the save, and the planned one of the rows; {} for one that is missing."""
        texts = read_if_there(self.tree, self.node.parts, name), self.rows.texts.get((*self.place, name))
        return [parse_json(text, name) if text else {} for text in texts]

    def _grow_sizes(self, meta: Any, right: dict[str, Any]) -> None:
        """Add the number of rows to the sizes in the metadata of a plain collection."""
        level, count = self.node.level, self.rows.count
        if not isinstance(right.get("shape"), list):
            raise self._make_error(
                f"{self.where} is a plain collection, the rows have {self._show_rows()} there"
            )
        keys, other = set(level.keys), {name for name, entry in right.items() if isinstance(entry, dict)}
        if keys != other:
            raise self._make_error(f"{self.where} has the keys {sorted(keys)}, the rows have {sorted(other)}")
        size = list(level.batch_size)
        if not size or right["shape"] != [count, *size[1:]]:
            raise self._make_error(f"{self.where} has the batch size {size}, the rows have {right['shape']}")
        if size[0] + count >= 1 << 63:
            raise self._make_error(
                f"{self.where} has {size[0]} rows, and {count} more are more than a tensor can have"
            )
        for entry in (meta, *(meta[name] for name in self.node.leaves)):
            entry["shape"][0] += count

    def _check_values(self, left: dict[str, Any], right: dict[str, Any]) -> None:
        """Raise AppendError if the non-tensor values of the rows differ from the saved values."""
        pickled = self.rows.texts.get((*self.place, _file_names.PICKLE))
        saved = self.node.values or {}
        if pickled != read_if_there(self.tree, self.node.parts, _file_names.PICKLE):
            # Equal values can have different pickles, so compare the values. The pickle of the rows was made by this
            # call, so it is safe to load; the saved pickle was loaded only with allow_pickle=True.
            left, right = {**saved, **left}, {**(pickle.loads(pickled) if pickled else {}), **right}
        names = {*left, *right} - {"_metadata", "_is_non_tensor"}
        if all(is_same_value(left.get(name), right.get(name)) for name in names):
            return
        given = self.rows.nodes[self.place]
        values = encode_node(given).values
        if self._get_class() == type(given).__name__ and "data" in saved:
            shown = _shorten_text(saved["data"]), _shorten_text(values.get("data"))
        else:
            shown = self._show(), self._show_rows()
        raise self._make_error(
            f"the value of {self.where} must stay; it is {shown[0]}, the rows have {shown[1]}"
        )

    def find_leaf_rows(self, key: str, entry: LeafEntry) -> LeafFile:
        """Return the file with the rows of a leaf, or raise AppendError if they do not fit it."""
        what, place = f"cannot append to {show_path((*self.node.key, key))}: ", _file_names.encode_key(key)
        file = self.rows.files.get((*self.place, f"{place}.memmap"))
        if file is None:
            raise AppendError(
                f"{what}it is a tensor, the rows have {self.rows.show((*self.place, place))} there"
            )
        tensor = file.tensor
        if entry.nested or entry.jagged is not None or tensor.is_nested:
            raise AppendError(f"{what}nested tensors cannot grow")
        if tensor.dtype != entry.dtype or tensor.shape[1:] != entry.shape[1:]:
            raise AppendError(
                f"{what}it has the shape {list(entry.shape)} of {entry.dtype}, the rows have {list(tensor.shape)} of "
                f"{tensor.dtype}"
            )
        return file

    def list_sidecars(self) -> list[Parts]:
        """Return the files of a value next to its metadata."""
        names = () if self.node.level.sized else _file_names.SIDECARS
        return [
            (*self.node.parts, name) for name in names if self.tree.stat(self.node.parts, name) is not None
        ]

    def _get_class(self) -> str:
        level = self.node.level
        return "view" if level.kind is None else (level.cls or level.kind.type).__name__

    def _show(self) -> str:
        return _show(self._get_class(), self.node.values or {})

    def _show_rows(self) -> str:
        return self.rows.show(self.place)

    def _make_error(self, what: str) -> AppendError:
        return AppendError(f"cannot append to {self.tree.path}: {what}")


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


def _publish(
    tree: DirectoryTree,
    nodes: list[Node],
    metas: dict[Parts, bytes],
    sidecars: list[Parts],
    grown: list[_Grown],
) -> None:
    places = [place for place, file, size in grown if size or file.nbytes]
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
            for place, file, size in grown:
                _grow(tree, staging, place, file, size, before)
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
            place: Checksum(algorithm, read_file_chunks(tree, place)).hexdigest()
            for place in sizes
            if place not in metas
        }
    texts = {place: f"{zlib.crc32(text):08x}" for place, text in metas.items()}
    texts |= {place: Checksum("crc32", read_file_chunks(tree, place)).hexdigest() for place in sidecars}
    tree.write((), _file_names.MANIFEST, format_manifest(sizes, algorithm, hashes, texts))


def _grow(
    tree: DirectoryTree,
    staging: Staging,
    place: Parts,
    file: LeafFile,
    size: int,
    before: list[tuple[Parts, int]],
) -> None:
    """Append rows to a leaf's file, or to a copy if the leaf is tied; add the old file length to ``before``."""
    if not size and not file.nbytes:
        return
    result = tree.stat_path(place) if size else None
    # Copy a file with several hard links: appending to it would also grow the leaves that are tied to this leaf.
    own = result is not None and result.st_nlink == 1
    if result is not None and own:
        before.append((place, result.st_size))
        fd, _ = tree.open(place[:-1], place[-1], writable=True)
    else:
        fd = staging.tree.create(place[:-1], place[-1])
    try:
        if size and not own:
            _copy(tree, place, size, fd)
        write_chunks(fd, file.tensor, size)
    except OSError as error:
        what = f"cannot append to {show_path(file.key)}, {file.nbytes} bytes"
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
    for piece in read_file_chunks(tree, place):
        kept = piece[: size - position]
        _fs.write_at(target, kept, position)
        position += len(kept)
