"""Find the key paths of leaves, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .._collection import Core, show_path
from .._walks import list_holders, visit
from ..errors import LockedError

#: Errors that torch raises for an unsupported leaf; they are raised again with the key in the message.
LEAF_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)


def describe_leaf(node: Core, leaf: Tensor) -> str:
    """Return the key path of a leaf as text for messages."""
    path = find_path(node, leaf)
    return show_path(path) if path else "a leaf"


def find_path(node: Any, leaf: Tensor) -> tuple[str, ...]:
    """Return the first key path of a leaf, or () if it is not in the tree."""
    return next(iter(_find_paths(node, leaf)), ())


def show_keys(node: Core, leaves: list[Tensor]) -> str:
    return " and ".join(dict.fromkeys(show_path(path) for leaf in leaves for path in _find_paths(node, leaf)))


def _find_paths(node: Core, leaf: Tensor) -> list[tuple[str, ...]]:
    """Return the key paths of a leaf. In a lazy stack, search the members, which hold the leaves."""
    paths: list[tuple[str, ...]] = []

    def collect(level: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        for holder in list_holders(level):
            children = dict(holder._children())
            if not children and any(own is leaf for own in holder._leaves()):
                paths.append(path)
            for key, child in children.items():
                if child is leaf:
                    paths.append((*path, key))
                elif isinstance(child, Core):
                    yield child, (*path, key)

    visit(collect, node, ())
    return paths


def rephrase_error(error: Exception, message: str) -> Exception:
    """Return an error of the same type with a new message, or the error itself if its type may need other arguments."""
    return type(error)(message) if type(error) in (*LEAF_ERRORS, LockedError) else error
