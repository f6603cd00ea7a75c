"""Pair the leaves of two collections where one of them may lack what holds no such leaf, as gradients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..errors import KeyMismatchError, StructureError
from .defaults import check_same_form, show_path
from .node import LEAF_KINDS, Core
from .walks import has_entries, visit

Pairs = list[tuple[Tensor, Tensor]]


def pair_leaves(first: Core, second: Core, is_needed: Callable[[Tensor], object]) -> Pairs:
    """Pair each leaf of ``first`` that ``is_needed`` accepts with the leaf of ``second``; KeyMismatchError if it is missing.

    Values, and nodes without such leaves, may be missing in ``second``, which may have more entries.
    """
    pairs: Pairs = []

    def pair(left: Core, right: Core, path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        _check_members(left, right, path)
        for own, other in left._zip_members(right):
            missing = []
            for key, child in dict(own._children()).items():
                leaf = _get_leaf(child)
                given = other._get_child(key) if key in other._children() else None
                if has_entries(child) and given is not None and has_entries(given):
                    yield child, given, (*path, key)
                elif not any(map(is_needed, child._leaves() if leaf is None else [leaf])):
                    continue  # values, or a node that holds no such leaf
                elif given is None:
                    missing.append(key)
                else:
                    check_same_form(child, given, (*path, key))
                    pairs.append((leaf, _get_leaf(given)))
            if missing:
                raise KeyMismatchError(
                    f"the structures differ at {show_path(path)}: missing keys {missing}, of which each holds a leaf that "
                    "needs a counterpart"
                )

    visit(pair, first, second, ())
    return pairs


def _get_leaf(child: Any) -> Any:
    """Return the tensor of an entry, which may be in a node that represents one leaf; None for any other node."""
    if isinstance(child, Tensor):
        return child
    return child._leaves()[0] if type(child) in LEAF_KINDS else None


def _check_members(left: Core, right: Core, path: tuple[str, ...]) -> None:
    """Raise StructureError if a collection cannot be split along the stack dim of a lazy stack."""
    members, dim = left._members_and_dim() or ((), 0)
    size = right.batch_size
    if members and size[dim : dim + 1] != (len(members),):
        raise StructureError(
            f"the structures differ at {show_path(path)}: a lazy stack of {len(members)} members along dim {dim} there, "
            f"batch size {list(size)} here"
        )
