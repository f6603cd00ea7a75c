"""Which files of a directory belong to a save: those that its metadata or its manifest name.

Everything else is somebody else's, and is kept. The metadata is read leniently: what cannot be understood names
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from td_core.errors import FormatError

from . import _names
from ._fs import Parts, Tree
from ._meta import is_view

__all__ = ["Owned", "foreign", "owned"]

_LIMIT = 1 << 29
_FIXED = (_names.META, *_names.SIDECARS)
#: What a process that was killed may have left while it wrote a value, or a new leaf, to a live save.
_LITTER = re.compile(rf"{_names.TEMPORARY}[0-9a-f]{{8}}|\..*\.td-file-[0-9a-f]{{8}}")
_LEAF_ENDINGS = (".memmap", ".shape.memmap", ".offsets.memmap", ".lengths.memmap")


class Owned:
    """The files and directories of one save, as paths below its root."""

    def __init__(self) -> None:
        self.files: set[Parts] = set()
        self.directories: set[Parts] = {()}

    def add(self, path: Parts) -> None:
        """Add a file and the directories that lead to it."""
        self.files.add(path)
        while (path := path[:-1]) not in self.directories:
            self.directories.add(path)


def _read(tree: Tree, parts: Parts, name: str) -> dict[str, Any]:
    try:
        content = json.loads(tree.read(parts, name, _LIMIT))
    except (OSError, FormatError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def owned(tree: Tree) -> Owned:
    """Return what belongs to the save in ``tree``; nothing where there is no save."""
    result = Owned()
    if tree.stat((), _names.SAVING) is not None:
        result.files.add((_names.SAVING,))
        for place in _names.listed(tree.read((), _names.SAVING, _LIMIT)):
            result.add(place)
    if tree.stat((), _names.META) is None:
        return result
    manifest = _read(tree, (), _names.MANIFEST).get("files", {})
    for path in manifest if isinstance(manifest, dict) else ():
        inside = _names.inside(path)
        if inside is not None:
            result.add(inside)
    result.files.add((_names.MANIFEST,))
    todo: list[Parts] = [()]
    while todo:
        parts = todo.pop()
        result.directories.add(parts)
        listing = tree.entries(parts)
        meta = _read(tree, parts, _names.META)
        stems = _stems(meta)
        result.files.update((*parts, name) for name in _FIXED if name in listing)
        mapping = (isinstance(meta.get("shape"), list) and not is_view(meta)) or "entries" in meta
        for name, is_directory in listing.items():
            if not is_directory:
                ours = not stems.isdisjoint(_cut(name)) or _LITTER.fullmatch(name) is not None
                if ours and (*parts, name) not in result.files:
                    result.files.add((*parts, name))
                continue
            fixed = name in (_names.INNER, _names.SOURCE) or name.isdigit()
            if (name in stems or (fixed and not mapping)) and tree.stat(
                (*parts, name), _names.META
            ) is not None:
                todo.append((*parts, name))
    return result


def _cut(name: str) -> list[str]:
    return [name[: -len(ending)] for ending in _LEAF_ENDINGS if name.endswith(ending)]


def _stems(meta: dict[str, Any]) -> set[str]:
    """Return the names, without endings, that the entries of a level may have."""
    stems: set[str] = set()
    for key, entry in meta.items():
        if isinstance(entry, dict) and ("dtype" in entry or "type" in entry):
            stems.update((_names.encode_key(key), key))
    entries = meta.get("entries")
    for row in entries if isinstance(entries, list) else ():
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict):
            stems.add(str(row[1].get("file")))
    members = meta.get("members")
    stems.update(name for name in members if isinstance(name, str)) if isinstance(members, list) else None
    return stems


def foreign(tree: Tree, mine: Owned, others: Collection[Parts] = ()) -> tuple[list[Parts], list[Parts]]:
    """Return the files, and the topmost directories, that belong to no save.

    Args:
        tree: where to look.
        mine: what belongs to the save there.
        others: directories of another save; a directory of that name is looked into, not taken as a whole.
    """
    files: list[Parts] = []
    directories: list[Parts] = []
    todo: list[Parts] = [()]
    while todo:
        parts = todo.pop()
        for name, is_directory in tree.entries(parts).items():
            path = (*parts, name)
            if is_directory:
                (todo if path in mine.directories or path in others else directories).append(path)
            elif path not in mine.files:
                files.append(path)
    return files, directories
