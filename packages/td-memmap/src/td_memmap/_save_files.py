"""Determine which files of a directory belong to a save: those that its metadata lists.

All other files are kept, including a ``meta.json`` that no save wrote and the files next to it. The metadata is
read leniently: unreadable metadata lists no files. The manifest is used only if metadata is damaged. Anyone can
write a manifest, and a listed file may have been replaced since. So a file that only the manifest lists belongs to
the save if it is as recorded there, or if it is metadata that is no longer JSON.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from td_core.errors import FormatError
from td_core.spi import parse_json, visit

from . import _file_names
from ._fs import Parts
from ._meta import LIMIT, FileTree, is_view, is_written

_FIXED = (_file_names.META, *_file_names.SIDECARS)
#: Names of temporary files that remain if a process is killed while it adds a leaf or writes a value.
_LITTER = re.compile(rf"{_file_names.TEMPORARY}[0-9a-f]{{8}}|\..*\.tmp-[0-9a-f]{{8}}")
_LEAF_ENDINGS = (".memmap", ".shape.memmap", ".offsets.memmap", ".lengths.memmap")
_OURS = (*_FIXED, _file_names.MANIFEST, _file_names.UNFINISHED_META)


class SaveFiles:
    """Files and directories of a save, as paths below its root."""

    def __init__(self) -> None:
        self.files: set[Parts] = set()
        self.directories: set[Parts] = {()}

    def add(self, path: Parts) -> None:
        """Add a file and its parent directories."""
        self.files.add(path)
        while (path := path[:-1]) not in self.directories:
            self.directories.add(path)


_NO_JSON = object()


def _read(tree: FileTree, parts: Parts, name: str) -> Any:
    """Parse a JSON file; return ``_NO_JSON`` if it cannot be read."""
    try:
        return parse_json(tree.read(parts, name, LIMIT))
    except (OSError, FormatError, ValueError, RecursionError):
        return _NO_JSON


def find_save_files(tree: FileTree, wanted: Collection[Parts] = ()) -> SaveFiles:
    """Return the files of the save in ``tree``; ``wanted`` names child directories for releases that did not list them."""
    result = SaveFiles()
    # Ignore a ``%saving`` that is missing or unreadable.
    with contextlib.suppress(FileNotFoundError, FormatError):
        unfinished = _file_names.parse_listing(tree.read((), _file_names.SAVING, LIMIT))
        result.files.add((_file_names.SAVING,))
        for place in unfinished:
            if place[-1].endswith(".memmap") or place[-1] in _OURS:
                result.add(place)
    if tree.stat((), _file_names.META) is None:
        if tree.stat((), _file_names.OLD_META) is not None:
            from .compat import _old_saves

            _old_saves.add_old_files(tree, result)
        return result
    manifest = _read(tree, (), _file_names.MANIFEST)
    recorded = manifest.get("files") if isinstance(manifest, dict) else None
    recorded = recorded if isinstance(recorded, dict) else {}

    def add(parts: Parts) -> Iterator[tuple[Parts]]:
        listing = tree.entries(parts)
        meta = _read_level(tree, parts, listing, recorded)
        if meta is None:
            return
        if not parts:
            result.files.add((_file_names.MANIFEST,))
        result.directories.add(parts)
        leaves, levels = _stems(meta)
        result.files.update((*parts, name) for name in _FIXED if name in listing)
        mapping = _has_entries(meta)
        unlisted = mapping and not levels and "_format_version" not in meta
        for name, is_directory in listing.items():
            path = (*parts, name)
            if not is_directory:
                if _is_leaf_file(name, leaves):
                    result.files.add(path)
                continue
            known = name in levels or (not mapping and _is_member(name, meta.get("_members")))
            if (known or (unlisted and path in wanted)) and tree.stat(path, _file_names.META) is not None:
                yield (path,)

    visit(add, ())
    _add_recorded(tree, result, recorded)
    return result


def _read_level(
    tree: FileTree, parts: Parts, listing: Collection[str], recorded: Mapping[str, object]
) -> dict[str, Any] | None:
    """Return the metadata of a directory, empty if it is damaged; None if no save wrote it."""
    meta = _read(tree, parts, _file_names.META)
    if meta is _NO_JSON and "/".join((*parts, _file_names.META)) in recorded:
        return {}
    return meta if is_written(meta, listing) else None


def _has_entries(meta: dict[str, object]) -> bool:
    """Return True if metadata describes a node of entries, in the plain or the general form."""
    return (isinstance(meta.get("shape"), list) and not is_view(meta)) or "entries" in meta


def _is_leaf_file(name: str, stems: set[str]) -> bool:
    """Return True for a file of a leaf or of values by rows, and for one that an interrupted write left."""
    cut = (name.removesuffix(ending) for ending in _LEAF_ENDINGS if name.endswith(ending))
    left = _LITTER.fullmatch(name) is not None or _file_names.is_row_file(name)
    return left or not stems.isdisjoint(cut)


def _add_recorded(tree: FileTree, result: SaveFiles, recorded: Mapping[str, object]) -> None:
    """Add files that only the manifest lists, if their size and time are as recorded."""
    written = tree.stat((), _file_names.MANIFEST)
    if written is None:
        return
    for name, row in recorded.items():
        path = _file_names.split_relative(name)
        if path is None or path in result.files or not isinstance(row, list) or len(row) != 2:
            continue
        match = tree.stat_path(path)
        if match is None or match.st_size != row[0]:
            continue
        if path[-1].endswith(".memmap"):
            same = match.st_mtime_ns == row[1]
        else:
            # The manifest has no times of metadata. Metadata that was replaced since then has a later change time
            # than the manifest.
            same = path[-1] in _FIXED and match.st_ctime_ns <= written.st_ctime_ns
        if same:
            result.add(path)


def _is_member(name: str, count: object) -> bool:
    """Return True if a directory is a member; ``count`` is the number of members, None if unknown."""
    if name.isascii() and name.isdigit():
        return type(count) is not int or int(name) < count
    return name in (_file_names.INNER, _file_names.SOURCE)


def _stems(meta: dict[str, object]) -> tuple[set[str], set[str]]:
    """Return the possible stems of a node's leaf files, and the possible names of its subdirectories."""
    leaves: set[str] = set()
    levels: set[str] = set()
    for key, entry in meta.items():
        if isinstance(entry, dict) and ("dtype" in entry or "type" in entry):
            (leaves if entry.get("type") is None else levels).update((_file_names.encode_key(key), key))
    entries = meta.get("entries")
    for row in entries if isinstance(entries, list) else ():
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict):
            (leaves if row[1].get("type") is None else levels).add(str(row[1].get("file")))
    members = meta.get("members")
    if isinstance(members, list):
        levels.update(name for name in members if isinstance(name, str))
    return leaves, levels


def find_unknown_files(
    tree: FileTree, left: SaveFiles, others: Collection[Parts] = ()
) -> tuple[list[Parts], list[Parts]]:
    """Return the files and topmost directories that do not belong to the save; search directories in ``others`` too."""
    files: list[Parts] = []
    directories: list[Parts] = []

    def collect(parts: Parts) -> Iterator[tuple[Parts]]:
        for name, is_directory in tree.entries(parts).items():
            path = (*parts, name)
            if is_directory and (path in left.directories or path in others):
                yield (path,)
            elif is_directory:
                directories.append(path)
            elif path not in left.files:
                files.append(path)

    visit(collect, ())
    return files, directories
