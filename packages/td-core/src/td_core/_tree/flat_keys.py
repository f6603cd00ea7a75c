"""Flatten nested keys by joining them with a separator, and unflatten them.

Each node's entries are copied before they are traversed, so that writes of other threads cannot break the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .._torch.kernels import PLAIN
from ..errors import KeyTakenError
from .keys import unravel_key_to_tuple
from .node import Child, Core, get_all_entries, make_dense
from .views import IsLeaf, is_leaf_or_value
from .walks import has_entries


def flatten_entries(root: Core, separator: str, is_leaf: IsLeaf | None) -> dict[str, Child]:
    """Return the leaves of ``root`` by keys joined with ``separator``; KeyTakenError if two leaves get the same key.

    Raise KeyMismatchError if a lazy stack has entries that only some members have, which would be lost.
    """
    entries = {**get_all_entries(root)}
    if PLAIN.issuperset(map(type, entries.values())):
        return entries
    flat: dict[str, Child] = {}
    count, prefix, level = len(entries), "", iter(entries.items())
    above: list[tuple[str, Iterator[tuple[str, Child]]]] = []
    # By hand: the row `flatten_keys` of benchmarks/ops.py.
    while True:
        for key, child in level:
            if isinstance(child, Tensor) or child._is_value or (is_leaf is not None and is_leaf(type(child))):
                flat[prefix + key] = child
            else:
                above.append((prefix, level))
                entries = {**get_all_entries(child)}
                count += len(entries) - 1
                prefix, level = prefix + key + separator, iter(entries.items())
                break
        else:
            if not above:
                break
            prefix, level = above.pop()
    if len(flat) != count:
        raise _find_collision(root, separator, is_leaf)
    return flat


def _find_collision(root: Core, separator: str, is_leaf: IsLeaf | None) -> KeyTakenError:
    def is_kept(cls: type) -> bool:
        return is_leaf_or_value(cls) or (is_leaf is not None and is_leaf(cls))

    seen: dict[str, object] = {}
    for key in root.keys(True, True, is_kept):
        joined = separator.join(unravel_key_to_tuple(key))
        other = seen.setdefault(joined, key)
        if other is not key:
            return KeyTakenError(
                f"cannot flatten the keys: {other!r} and {key!r} would both be {joined!r}; use another separator than "
                f"{separator!r}"
            )
    # The caller found a collision, so only a concurrent write can have removed it.
    return KeyTakenError(
        "cannot flatten the keys: another thread changed them meanwhile; lock_() the collection"
    )


def unflatten_entries(root: Core, separator: str, own: bool) -> dict[str, Child]:
    """Split the keys of ``root`` at ``separator`` and return the entries as nested nodes.

    With ``own``, existing nested nodes are copied (shallowly) first.
    """
    # New nodes are plain dicts until all keys are set: an entry is never a dict, so the type marks a new node.
    top: dict[str, Any] = {}
    levels: list[tuple[dict[str, object], str, dict[str, Child], Core | None]] = []
    for key, child in dict(root._children()).items():
        if own and not isinstance(child, Tensor):
            child = child._shallow_copy()
        if separator not in key:
            if key not in top:
                top[key] = child
            elif has_entries(child):
                _add_all(top[key], child, key)
            else:
                raise _key_taken_error(key, key)
            continue
        *parents, last = key.split(separator)
        level = top
        for part in parents:
            below = level.get(part)
            if type(below) is not dict:
                if below is None:
                    levels.append((level, part, inner := {}, None))
                elif has_entries(below):
                    levels.append((level, part, inner := dict(below._children()), below))
                else:
                    raise _key_taken_error(key, part)
                below = level[part] = inner
            level = below
        if last in level:
            raise _key_taken_error(key, last)
        level[last] = child
    if not levels:
        return top
    size, device, names = root.batch_size, root.device, root._names
    for level, part, entries, origin in reversed(levels):
        level[part] = (
            make_dense(entries, size, device, names) if origin is None else origin._with_children(entries)
        )
    return top


def _add_all(level: dict[str, Child], node: Core, key: str) -> None:
    for part, child in dict(node._children()).items():
        if part in level:
            raise _key_taken_error(key, part)
        level[part] = child


def _key_taken_error(key: str, part: str) -> KeyTakenError:
    return KeyTakenError(
        f"cannot unflatten the keys: key {key!r} needs {part!r} where there is another entry; rename one"
    )
