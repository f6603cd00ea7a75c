"""Compare collections in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .._torch.private import without_torch_function
from .._tree.buffers import has_memory
from .._tree.components import has_same_components
from .._tree.defaults import check_same_form, show_path, unwrap_entry
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core
from .._tree.stored_leaves import as_memory
from .._tree.walks import visit
from ..errors import KeyPathError, StructureError
from ..typing import NestedKey
from .operands import pair_unset


def assert_close(
    actual: object,
    expected: object,
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
        rtol: relative tolerance; pass both or neither of ``rtol`` and ``atol``.
        atol: absolute tolerance.
        equal_nan: treat nan as equal to nan.
        intersection: compare only the keys that both have.
        msg: prefix of the message of a failure.
        prefix: key path of both collections, for messages.

    Returns:
        True.

    Raises:
        AssertionError: two leaves differ; the message names the key.
        KeyPathError: the keys differ.

    >>> assert_close(TensorDict(a=1.0), TensorDict(a=1.0 + 1e-9))
    True
    """
    start = unravel_key_to_tuple(prefix) if prefix != () else ()
    for value in (actual, expected):
        if not isinstance(value, Core):
            raise TypeError(f"assert_close compares collections; got {type(value).__name__}")
    check = partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=equal_nan)

    def compare(first: Core, second: Core, parent_path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        same_size = first.batch_size == second.batch_size
        for actual_node, expected_node in first._zip_members(second) if same_size else [(first, second)]:
            left, right = actual_node._children(), expected_node._children()
            try:
                unset = [] if intersection else pair_unset(actual_node, expected_node, parent_path)
            except StructureError as error:
                raise KeyPathError(f"{msg}{error}") from None
            for key, held, none in unset:
                _check_value(held, none, (*parent_path, key), msg)
            for key, value in dict(left).items():
                if key not in right:
                    continue
                reference, path = right[key], (*parent_path, key)
                leaf, wanted = unwrap_entry(value), unwrap_entry(reference)
                if isinstance(leaf, Tensor) and isinstance(wanted, Tensor):
                    # A node that represents a leaf is compared with a leaf of the same shape.
                    both = isinstance(value, Tensor) == isinstance(reference, Tensor)
                    if both or leaf.shape == wanted.shape:
                        _check_leaf(leaf, wanted, path, check, msg)
                        continue
                try:
                    check_same_form(reference, value, path)
                    check_same_form(wanted, leaf, path)
                except StructureError as error:
                    raise AssertionError(f"{msg}{error}") from None
                if not _check_value(value, reference, path, msg):
                    yield value, reference, path

    visit(compare, actual, expected, start)
    return True


assert_allclose_td = assert_close


def _check_value(value: Core, reference: Core, path: tuple[str, ...], msg: str) -> bool:
    """Compare two value nodes. Return False for nodes of entries."""
    same = value._compare(reference, torch.eq)
    if same is not None and not same.all():
        raise AssertionError(
            f"{msg}{show_path(path)} differs: {value._unwrap()!r}, expected {reference._unwrap()!r}"
        )
    return same is not None


def _check_leaf(
    value: Tensor, reference: Tensor, path: tuple[str, ...], check: Callable[..., None], msg: str
) -> None:
    if not isinstance(value, type(reference)) and not isinstance(reference, type(value)):
        # torch compares no tensors of two classes of which neither is derived from the other.
        value, reference = map(_as_plain, as_memory([value, reference]))
    try:
        # Nested tensors with equal components have different symbolic shapes if they do not share their offsets.
        if has_same_components(value, reference):
            check(list(value.unbind()), list(reference.unbind()))
        else:
            check(value, reference)
    except AssertionError as error:
        raise AssertionError(f"{msg}{show_path(path)} differs: {error}") from None


def _as_plain(leaf: Tensor) -> Tensor:
    """Return a view of a leaf in memory as a plain tensor; a tensor that only wraps others is returned unchanged."""
    with without_torch_function():
        return leaf.as_subclass(Tensor) if has_memory(leaf) else leaf
