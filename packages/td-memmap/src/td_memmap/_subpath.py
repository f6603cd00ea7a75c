"""The directory of a sub-collection of a save."""

from __future__ import annotations

from td_core._keys import unravel_key_to_tuple
from td_core.typing import NestedKey

from . import _names
from ._fs import Tree
from ._load import Loading
from ._meta import LIMIT, parse_json

__all__ = ["steps", "subdirectory"]


def steps(subpath: NestedKey) -> tuple[str, ...]:
    """Return the keys on the way to a sub-collection.

    >>> steps("a/b"), steps(("a", ("b",)))
    (('a', 'b'), ('a', 'b'))
    """
    if isinstance(subpath, str):
        return tuple(subpath.split("/"))
    return unravel_key_to_tuple(subpath)


def subdirectory(prefix: str, subpath: NestedKey, options: Loading) -> str:
    """Return the path of the directory of the sub-collection under a key.

    Raises:
        ValueError: there is none.
    """
    parts: tuple[str, ...] = ()
    with Tree.at_path(prefix) as tree:
        for key in steps(subpath):
            if tree.stat((*parts, _names.INNER), _names.META) is not None:
                parts = (*parts, _names.INNER)
            below = _one_step(tree, parts, key, options)
            if below is None:
                raise ValueError(
                    f"no collection is saved under the subpath {subpath!r} of {prefix}: stopped at {key!r}"
                )
            parts = (*parts, below)
        return tree.show(parts)


def _one_step(tree: Tree, parts: tuple[str, ...], key: str, options: Loading) -> str | None:
    try:
        meta = parse_json(tree.read(parts, _names.META, LIMIT), tree.show(parts, _names.META))
    except FileNotFoundError:
        return None
    entries = meta.get("entries", []) if isinstance(meta, dict) else []
    listed = [row[1].get("file") for row in entries if isinstance(row, list) and row[0] == key]
    names = listed or [_names.encode_key(key) if options.robust_key else key, _names.raw_name(key)]
    for name in names:
        safe = isinstance(name, str) and _names.inside(name) == (name,)
        if safe and tree.stat((*parts, name), _names.META) is not None:
            return str(name)
    return None
