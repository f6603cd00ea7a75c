"""Dimension names: None or str for each batch dim, kept only when one is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import DimNamesError, StructureError

Names = tuple["str | None", ...]


def check_names(names: Sequence[str | None] | str | None, ndim: int) -> Names | None:
    """Return names as a tuple, or None where no dim is named.

    Raises:
        DimNamesError: their number is not ``ndim``, one is not a string, or two are equal.

    >>> check_names(["time", None], 2)
    ('time', None)
    """
    if names is None:
        return None
    if isinstance(names, str):
        names = (names,)
    result = tuple(names)
    if len(result) != ndim:
        raise DimNamesError(
            f"there must be one name for each batch dim: got {len(result)} names {list(result)} for {ndim} batch dims"
        )
    given = [name for name in result if name is not None]
    for name in given:
        if not isinstance(name, str):
            raise DimNamesError(f"a dim name is a string or None; got {name!r} in {list(result)}")
    if len(set(given)) != len(given):
        raise DimNamesError(f"dim names must be unique; got {list(result)}")
    return result if given else None


def fit_names(names: Names | None, ndim: int) -> Names | None:
    """Return the names of as many dims: those of the first ones stay, new ones have none."""
    return None if names is None else check_names(names[:ndim] + (None,) * (ndim - len(names)), ndim)


def take_names(entry: Any, names: Names, path: str) -> Any:
    """Return a collection whose leading dims have the names of the parent it is set into.

    Raises:
        StructureError: a dim has another name already.
    """
    ndim = len(names)
    mine = entry._names
    if mine is not None:
        if mine[:ndim] == names:
            return entry
        for theirs, own in zip(names, mine):
            if own is not None and theirs is not None and own != theirs:
                raise StructureError(
                    f"cannot set {path}: its dim names {list(mine)} contradict those of its parent, {list(names)}; "
                    "rename() it first"
                )
    rest = (None,) * (len(entry.batch_size) - ndim) if mine is None else mine[ndim:]
    named = entry._shallow()
    named._set_names(names + rest)
    return named
