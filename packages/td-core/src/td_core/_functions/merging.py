"""Merge collections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._collection import Child, Core, identity, leaf_node_mismatch_error
from .._keys import unravel_key_to_tuple
from .._walks import get_path, has_entries, walk_levels
from ..errors import StructureError
from ..typing import NestedKey

__all__ = ["merge_tensordicts"]


def merge_tensordicts(
    *tensordicts: Any,
    callback_exist: Callable[..., object] | Mapping[NestedKey, Callable[..., object]] | None = None,
) -> Any:
    """Merge the entries of several collections into a new one; leaves are shared.

    Args:
        *tensordicts: two or more collections; the result has the class and batch size of the first.
        callback_exist: called with the entries of a key that all collections have, in order; returns the entry to keep. Or a
            mapping from keys to such functions. Without it, and for keys that some collections lack, the first entry is kept.

    Raises:
        StructureError: fewer than two collections; or a key has a leaf in one collection and a node in another.

    >>> merge_tensordicts(TensorDict(a=1, n={"b": 1}), TensorDict(n={"c": 2}))
    TensorDict(batch_size=[], fields={a: i64[], n: {b: i64[], c: i64[]}})
    """
    if len(tensordicts) < 2:
        raise StructureError(f"merge_tensordicts needs two collections or more, got {len(tensordicts)}")
    callbacks: Any = callback_exist
    if isinstance(callback_exist, Mapping):
        callbacks = {unravel_key_to_tuple(key): call for key, call in callback_exist.items()}
    match, levels = _collect_entries(tensordicts)
    # _map returns a shallow copy, and a plain collection for TensorDictParams.
    result = tensordicts[0]._map(identity)
    for path, level in levels.items():
        if path not in result.keys(True):
            result._set_path(path, level._with_children({}))
    for path, entries in match.items():
        call = callbacks.get(path) if isinstance(callbacks, dict) else callbacks
        if len(entries) == len(tensordicts) and call is not None:
            result._set_path(path, call(*entries))
        elif path not in result.keys(True):
            result._set_path(path, entries[0])
    return result


def _collect_entries(
    tensordicts: Sequence[Core],
) -> tuple[dict[tuple[str, ...], list[Child]], dict[tuple[str, ...], Core]]:
    """Return the entries of all collections that are not nodes of entries, and the first node at each other key path."""
    match: dict[tuple[str, ...], list[Child]] = {}
    levels: dict[tuple[str, ...], Core] = {}
    for td in tensordicts:
        if not has_entries(td):
            raise StructureError(f"merge_tensordicts takes collections of entries, got a {type(td).__name__}")
        for _, position, children in walk_levels(td):
            for key, child in children.items():
                path = get_path(position, key)
                leaf = not has_entries(child)
                if path in (levels if leaf else match):
                    other = levels[path] if leaf else match[path][0]
                    raise leaf_node_mismatch_error(other, child, path)
                if leaf:
                    match.setdefault(path, []).append(child)
                else:
                    levels.setdefault(path, child)
    return match, levels
