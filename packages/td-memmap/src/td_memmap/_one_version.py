"""Reading one version of a directory, while other processes replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td_core.errors import FormatError

from ._fs import Parts, Tree

_ATTEMPTS = 1000


def on_one_version(
    path: str, work: Callable[[Tree], tuple[Any, bool]], place: Callable[[Tree], Parts] | None = None
) -> Any:
    """Do something with a directory, and start over where another one took its place and the files were gone.

    The work returns its result, and whether that is right even if the directory was replaced meanwhile; ``place`` tells
    where the directory to work with is below this one.

    Raises:
        FormatError: it is replaced each time.
    """
    for _ in range(_ATTEMPTS):
        trees = [Tree.at_path(path)]
        try:
            if place is not None:
                trees.append(trees[0].below(place(trees[0])))
            result, right = work(trees[-1])
            if right or not any(tree.replaced() for tree in trees):
                return result
        except (OSError, ValueError):
            if not any(tree.replaced() for tree in trees):
                raise
        finally:
            for tree in trees:
                tree.close()
    raise FormatError(f"cannot load {path}: other processes replace it all the time")
