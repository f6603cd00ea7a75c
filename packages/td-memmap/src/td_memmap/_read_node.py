"""Read the metadata of one node of a save, without opening leaves or looking up classes."""

from __future__ import annotations

from typing import Any

import torch

from td_core.errors import FormatError

from . import _file_names
from ._fs import Parts
from ._meta import FileTree, Level, Location, parse_level, read_json


def list_subdirectories(tree: FileTree, parts: Parts) -> list[str]:
    """Return the sorted names of the subdirectories that have a ``meta.json``."""
    return [
        name
        for name, is_directory in sorted(tree.entries(parts).items())
        if is_directory and tree.stat((*parts, name), _file_names.META) is not None
    ]


def list_members(listing: dict[str, bool], location: Location) -> list[str]:
    """Return the directories of members: ``_tensordict``, ``_source``, or 0, 1, 2... without a gap."""
    named = [name for name in (_file_names.INNER, _file_names.SOURCE) if listing.get(name)]
    numbers = sorted(
        int(name)
        for name, is_directory in listing.items()
        if is_directory and name.isascii() and name.isdigit() and len(name) < 10
    )
    for expected, number in enumerate(numbers):
        if number != expected:
            raise location.error(
                "the members", numbers[:20], f"a member {expected}: its directory is missing"
            )
    return [*named, *map(str, numbers)]


def read_node(
    files: FileTree, parts: Parts
) -> tuple[dict[str, Any], Level, dict[str, bool], dict[str, Parts]]:
    """Return a node's raw metadata, its checked metadata, its directory listing, and its child directories by key."""
    location = Location(files.show(parts, _file_names.META), parts)
    try:
        meta = read_json(files, parts, _file_names.META)
    except FileNotFoundError:
        if files.stat(parts, _file_names.OLD_META) is not None:
            raise FormatError(
                f"{files.path} was written by a release before 0.3, whose metadata is pickled; load it and save it again"
            ) from None
        if not parts:
            raise
        raise FormatError(f"{location.file} is missing") from None
    level = parse_level(meta, location, torch.Size(), robust_key=True, strict=False)
    listing = files.entries(parts)
    if not level.sized and not level.general:
        level.members = level.members or list_members(listing, location)
    below = {}
    for name, names in level.nodes.items():
        below[name] = (*parts, next((item for item in names if item in listing), names[0]))
    below.update({name: (*parts, name) for name in level.members or ()})
    if level.sized and level.version == 0 and not level.nodes:
        for name in list_subdirectories(files, parts):
            below[name] = (*parts, name)
    return meta, level, listing, below
