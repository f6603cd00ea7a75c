"""Comparing collections in tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._collection import Core, check_same_keys, leaf_against_node, show_path
from .._components import same_components
from .._keys import unravel_key_to_tuple
from ..errors import KeyPathError, StructureError
from ..typing import NestedKey

__all__ = ["assert_allclose_td", "assert_close"]


def assert_close(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
    prefix: NestedKey = (),
) -> bool:
    """Check that two collections have the same keys and close leaves; see :func:`torch.testing.assert_close`.

    Args:
        actual: a collection.
        expected: a collection.
        rtol: relative tolerance, given with ``atol`` or not at all.
        atol: absolute tolerance.
        equal_nan: whether nan equals nan.
        intersection: compare the keys that both have only.
        msg: put before the message of a failure.
        prefix: where the two stand, for messages.

    Returns:
        True.

    Raises:
        AssertionError: two leaves differ; the message names the key.
        KeyPathError: the keys differ.

    >>> assert_close(TensorDict(a=1.0), TensorDict(a=1.0 + 1e-9))
    True
    """
    start = unravel_key_to_tuple(prefix) if prefix != () else ()
    todo: list[tuple[Any, Any, tuple[str, ...]]] = [(actual, expected, start)]
    for value in (actual, expected):
        if not isinstance(value, Core):
            raise TypeError(f"assert_close compares collections; got {type(value).__name__}")
    check = partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=equal_nan)
    while todo:
        mine, theirs, at = todo.pop()
        stacked, other = mine._stacked(), theirs._stacked()
        if (
            stacked is not None
            and other is not None
            and stacked[1] == other[1]
            and len(stacked[0]) == len(other[0])
        ):
            todo.extend((a, b, at) for a, b in zip(stacked[0], other[0], strict=True))
            continue
        left, right = mine._children(), theirs._children()
        if not intersection:
            try:
                check_same_keys(left, right, at)
            except StructureError as error:
                raise KeyPathError(f"{msg}{error}") from None
        for key, value in dict(left).items():
            if key not in right:
                continue
            reference, path = right[key], (*at, key)
            if isinstance(value, Tensor) and isinstance(reference, Tensor):
                _check_leaf(value, reference, path, check, msg)
            elif (
                isinstance(value, Tensor)
                or isinstance(reference, Tensor)
                or value._opaque != reference._opaque
                or value._shows_tensor != reference._shows_tensor
            ):
                raise AssertionError(f"{msg}{leaf_against_node(reference, value, path)}")
            elif not value._opaque:
                todo.append((value, reference, path))
            elif value._shows_tensor:
                _check_leaf(value._unwrap(), reference._unwrap(), path, check, msg)
            elif not value._compare(reference, torch.eq).all():
                raise AssertionError(
                    f"{msg}{show_path(path)} differs: {value._unwrap()!r}, expected {reference._unwrap()!r}"
                )
    return True


assert_allclose_td = assert_close


def _check_leaf(
    value: Tensor, reference: Tensor, path: tuple[str, ...], check: Callable[..., None], msg: str
) -> None:
    try:
        # Nested tensors of the same components have different shapes where they do not share their offsets.
        if same_components(value, reference):
            check(list(value.unbind()), list(reference.unbind()))
        else:
            check(value, reference)
    except AssertionError as error:
        raise AssertionError(f"{msg}{show_path(path)} differs: {error}") from None
