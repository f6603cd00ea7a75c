"""The directory of a sub-collection of a save."""

from __future__ import annotations

from typing import Any

import torch

from td_core._keys import unravel_key_to_tuple
from td_core.typing import NestedKey

from . import _names
from ._fs import Parts
from ._meta import At, describe, read_json


def find(tree: Any, subpath: NestedKey, *, robust_key: bool) -> Parts:
    """Return where the sub-collection under a key is, in a directory or an archive.

    Raises:
        ValueError: there is none.
    """
    parts: Parts = ()
    for key in subpath.split("/") if isinstance(subpath, str) else unravel_key_to_tuple(subpath):
        below = _names_below(tree, parts, key, robust_key)
        # What a class wraps is no entry; an entry of that name is.
        if below is None and tree.stat((*parts, _names.INNER), _names.META) is not None:
            parts = (*parts, _names.INNER)
            below = _names_below(tree, parts, key, robust_key)
        # The members of a stack are no entries either.
        for name in (key,) if below is None else below:
            if _names.inside(name) == (name,) and any(
                tree.stat((*parts, name), meta) is not None for meta in (_names.META, _names.OLD_META)
            ):
                parts = (*parts, name)
                break
        else:
            raise ValueError(
                f"no collection is saved under the subpath {subpath!r} of {tree.path}: stopped at {key!r}"
            )
    return parts


def _names_below(tree: Any, parts: Parts, key: str, robust_key: bool) -> tuple[str, ...] | None:
    try:
        meta = read_json(tree, parts, _names.META)
    except FileNotFoundError:
        return None
    at = At(tree.show(parts, _names.META), parts)
    level = describe(meta, at, torch.Size(), robust_key=robust_key, strict=False)
    return level.nodes.get(key)
