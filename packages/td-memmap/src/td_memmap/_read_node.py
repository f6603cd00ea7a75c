"""Reading the metadata of one node of a save: no leaf is opened and no class is needed."""

from __future__ import annotations

from typing import Any

import torch

from td_core.errors import FormatError

from . import _names
from ._fs import Parts
from ._meta import At, Level, describe, read_json


def list_subdirectories(tree: Any, parts: Parts) -> list[str]:
    """Return the directories that hold collections, sorted."""
    return [
        name
        for name, is_directory in sorted(tree.entries(parts).items())
        if is_directory and tree.stat((*parts, name), _names.META) is not None
    ]


def list_members(listing: dict[str, bool], at: At) -> list[str]:
    """Return the directories that hold members: ``_tensordict``, ``_source``, or 0, 1, 2... without a gap."""
    named = [name for name in (_names.INNER, _names.SOURCE) if listing.get(name)]
    numbers = sorted(
        int(name)
        for name, is_directory in listing.items()
        if is_directory and name.isascii() and name.isdigit() and len(name) < 10
    )
    for expected, number in enumerate(numbers):
        if number != expected:
            raise at.damaged("the members", numbers[:20], f"a member {expected}: its directory is missing")
    return [*named, *map(str, numbers)]


def read_node(files: Any, parts: Parts) -> tuple[dict[str, Any], Level, dict[str, bool], dict[str, Parts]]:
    """Return the metadata of a node as it stands there and checked, the names beside it, and the nodes below.

    No class is needed for it, and nothing is unpickled.

    Raises:
        FileNotFoundError: the root has no metadata.
        FormatError: the metadata is damaged.
    """
    at = At(files.show(parts, _names.META), parts)
    try:
        meta = read_json(files, parts, _names.META)
    except FileNotFoundError:
        if files.stat(parts, _names.OLD_META) is not None:
            raise FormatError(
                f"{files.path} was written by a release before 0.3, whose metadata is pickled; load it and save it again"
            ) from None
        if not parts:
            raise
        raise FormatError(f"{at.file} is missing") from None
    level = describe(meta, at, torch.Size(), robust_key=True, strict=False)
    listing = files.entries(parts)
    if not level.sized and not level.general:
        level.members = level.members or list_members(listing, at)
    below = {}
    for name, names in level.nodes.items():
        below[name] = (*parts, next((each for each in names if each in listing), names[0]))
    below.update({name: (*parts, name) for name in level.members or ()})
    if level.sized and level.version == 0 and not level.nodes:
        for name in list_subdirectories(files, parts):
            below[name] = (*parts, name)
    return meta, level, listing, below
