"""The values of a ring that another process writes: unlike elements, each process has them in its own memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from td_core.spi import expand, lock


def read_values(rows: Any) -> Any:
    """Read again values that another process has written. Return the key of one whose storage cannot do so, or None."""
    for holder in _list_holders(rows):
        for key, child in list(holder._children().items()):
            # A node that holds a tensor shares it.
            if isinstance(child, Tensor) or not child._is_value or child._leaves():
                continue
            keeper = child._keeper
            fresh = None if keeper is None else keeper.read_again(child)
            if fresh is None:
                return key
            if fresh is not child:
                _replace(holder, key, child, fresh)
    return None


def _list_holders(root: Any) -> Iterator[Any]:
    """Iterate over the nodes that hold entries themselves, unlike lazy stacks."""

    def list_below(node: Any) -> list[Any]:
        children = [child for (holder,) in node._zip_members() for child in holder._children().values()]
        return [child for child in children if not isinstance(child, Tensor) and not child._is_value]

    for node in expand([root], list_below):
        for (holder,) in node._zip_members():
            yield holder


def _replace(holder: Any, key: str, old: Any, new: Any) -> None:
    new._set_device(old.device)
    new._set_names(old._names)
    if old.is_locked:
        lock(new)
    holder._set_child(key, new)
