"""Combine the leaves of a collection with operands, and name the key of a leaf on which an operation fails.

An operand is a number, a tensor that broadcasts against the *batch dims* (not the trailing dims of each leaf), or a
collection of the same structure whose batch size broadcasts. If a leaf of the operand has as many dims as the matching
leaf and broadcasts to it, its leading dims count as batch dims, whatever the operand's batch size is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._plans.elements import align_dims
from .._plans.plans import ShapePlan, broadcast_shape
from .._torch.arrays import as_tensor
from .._torch.dtypes import keep_scalar
from .._torch.kernels import Op, foreach
from .._tree.coerce import COERCERS
from .._tree.defaults import check_keys, check_same_form, check_same_keys, leaf_node_mismatch_error, show_path
from .._tree.node import LEAF_KINDS, Child, Core, Walked, concurrent_change_error
from .._tree.ragged import get_display_shape
from .._tree.views import list_foreign
from .._tree.walks import has_entries, map_levels, zip_walk
from .._writes.check import LEAF_ERRORS, describe_leaf, rephrase_error
from .._writes.inplace import write_leaves
from .._writes.packed import try_write_packed
from .._writes.run import clone_overlapping
from ..errors import BatchSizeError, StructureError
from .broadcasting import align_pairs, expand_to_match, extend_batch, find_longer_size, stack_like

CoreT = TypeVar("CoreT", bound=Core)
Operand = Any  # a collection, tensor, NumPy array or number

NUMBERS = (int, float, complex, np.generic, torch.SymInt, torch.SymFloat, torch.SymBool)


def combine(
    node: CoreT,
    name: str,
    this: Op,
    other: Operand,
    default: object = None,
    foreign: list[Core] | None = None,
) -> CoreT:
    """Apply a binary operation to ``node`` and an operand. Return NotImplemented if ``other`` cannot be an operand.

    ``foreign`` is passed to :meth:`Core._zip_leaves`, which appends the nodes that may hold values.
    """
    leaves: list[Tensor] = []
    levels: Walked = None
    operand, plain, is_single = other, True, True
    try:
        # Hot path: most collections have the class of the node, and isinstance tries seven classes.
        if type(other) is not type(node) and isinstance(other, NUMBERS):
            operand = other.item() if isinstance(other, np.generic) else other
        elif isinstance(other, Core):
            size, is_single = None, False
            if default is not None or other.batch_size != node.batch_size:
                node, other, size = _align(node, name, other, default)
            operand = []
            try:
                levels = node._zip_leaves(other, leaves, operand, foreign)
            except StructureError:
                stacked: CoreT = stack_like(node, other)
                if stacked is node:
                    raise
                if foreign is not None:
                    foreign.clear()
                return combine(stacked, name, this, other, None, foreign)
            if size is not None:
                leaves, operand = align_pairs(node, other, leaves, operand, len(size))
        elif isinstance(other, (Tensor, np.ndarray)):
            node, operand, levels = _pair_with_tensor(node, name, other, leaves)
            plain = False  # views of the operand can be of a subclass, so fused kernels need a type check
        else:
            return NotImplemented  # type: ignore[no-any-return]
        if not leaves:
            levels = node._flatten_leaves(leaves)
        if foreign is not None and is_single and type(levels) is not dict and _may_hold_values(levels):
            foreign.append(node)
    except AttributeError as error:
        raise_foreign(error, name, node, other)
    try:
        plain = plain and type(levels) is dict
        return node._unflatten(foreach(this, leaves, operand, plain=plain), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, operand)


def _may_hold_values(levels: Walked) -> bool:
    """Return True unless the treedef shows that a tree has no value nodes."""
    if type(levels) is not list:
        return True
    return any(
        not isinstance(child, Tensor) and child._is_value for level in levels for child in level.values()
    )


def _pair_with_tensor(
    node: CoreT, name: str, other: object, leaves: list[Tensor]
) -> tuple[CoreT, list[Tensor], Walked]:
    """Append the leaves to ``leaves``. Return the node, expanded to the result, one operand per leaf, and the treedef."""
    tensor = other if isinstance(other, Tensor) else _move_beside(node, other)
    node = _expand_for_tensor(node, name, tensor)
    operand: list[Tensor] = []
    if tensor.ndim:
        node._broadcast_to_leaves(tensor, operand)
    levels = node._flatten_leaves(leaves)
    return node, operand if operand or not leaves else _beside_each(node, tensor, leaves, levels), levels


def _align(
    node: CoreT, name: str, other: Core, default: object
) -> tuple[CoreT, Core, tuple[int, ...] | None]:
    """Give two collections the same keys, and the same batch size, which is returned; None if it was the same already."""
    if default is not None:
        fill = _make_filler(default)
        node, other = reorder_like(node, other, fill, True), reorder_like(other, node, fill, True)
    if other.batch_size == node.batch_size:
        return node, other, None
    size = find_longer_size(node, other) or _broadcast(name, other.batch_size, node.batch_size)
    return expand_to_match(node, other, size), expand_to_match(other, node, size), size


def _expand_for_tensor(node: CoreT, name: str, tensor: Tensor) -> CoreT:
    """Expand a collection to the batch size of the result of an operation with a tensor."""
    if not tensor.ndim or tensor.shape == node.batch_size:
        return node
    size = _broadcast(name, tensor.shape, node.batch_size)
    return node if size == node.batch_size else node.expand(size)


def combine_inplace(node: CoreT, name: str, this: Op, other: Operand) -> CoreT:
    """Apply a binary operation in place. Return NotImplemented if ``other`` cannot be an operand."""
    if node._inner()._backends is not None and try_write_packed(node, this, other):
        return node
    leaves: list[Tensor] = []
    try:
        if type(other) is type(node) and other.batch_size == node.batch_size:
            operand: object = operand_leaves(node, other, leaves)
        else:
            operand = operand_inplace(node, name, other)
            if operand is NotImplemented:
                return operand  # type: ignore[no-any-return]
            node._flatten_leaves(leaves)
    except AttributeError as error:
        raise_foreign(error, name, node, other)
    write_leaves(name, node, this, leaves, operand)
    return node


def operand_inplace(node: Core, name: str, other: Operand) -> Any:
    """Convert an operand to a number or to one tensor per leaf. Raise if it does not broadcast to the batch size."""
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, NUMBERS):
        return other
    leaves: list[Tensor]
    operand: list[Tensor] = []
    if isinstance(other, np.ndarray):
        other = _move_beside(node, other)
    is_tensor = isinstance(other, Tensor)
    if not is_tensor and not isinstance(other, Core):
        return NotImplemented
    size, shape = node.batch_size, other.shape if is_tensor else other.batch_size
    if shape != size and len(shape) + (not is_tensor):
        if not is_tensor and (longer := find_longer_size(node, other)) is not None:
            # The leaves have all dims of the longer batch size, so they are combined as they are.
            return operand_leaves(node, other if shape == longer else extend_batch(other, longer), [])
        if _broadcast(name, shape, size) != size:
            raise BatchSizeError(
                f"cannot compute {name} in place: an operand of batch size {list(shape)} does not fit into {list(size)}"
            )
        if not is_tensor:
            leaves = []
            other = expand_to_match(other, node, size)
            operand = operand_leaves(node, other, leaves)
            return align_pairs(node, other, leaves, operand, len(size))[1]
    if is_tensor and not shape:
        leaves = []
        levels = node._flatten_leaves(leaves)
        operand = _beside_each(node, other, leaves, levels)
    elif is_tensor:
        node._broadcast_to_leaves(other, operand)
    else:
        operand = operand_leaves(node, other, [])
    return operand


def _beside_each(node: Core, scalar: Tensor, leaves: list[Tensor], levels: Walked) -> list[Tensor]:
    """Convert a 0-d tensor to one operand per leaf."""
    if type(levels) is dict or type(levels) is list:
        return [scalar] * len(leaves)
    operand: list[Tensor] = []  # 0-d leaves of a lazy stack's members need a cast scalar, see as_scalar()
    node._broadcast_to_leaves(scalar, operand, keep_scalar)
    return operand


def operand_leaves(node: Core, other: Core, leaves: list[Tensor]) -> list[Tensor]:
    """Append the leaves of ``node`` to ``leaves``, and return the matching leaves of ``other``, cloned on overlap."""
    operand: list[Tensor] = []
    foreign: list[Core] = []
    node._zip_leaves(other, leaves, operand, foreign)
    # Other kinds, such as lazy stacks, may be combined with their own members in another order, so clone operands.
    return clone_overlapping(leaves, operand) if foreign else operand


def write_result(out: object, batch_size: torch.Size, result: object, *, inplace: bool = True) -> Any:
    """Write a result into ``out`` and return ``out``: into its entries if ``inplace`` or if it is locked, else replace them."""
    if not isinstance(out, Core):
        raise TypeError(f"out= of collections is a collection; got a {type(out).__name__}")
    if out.batch_size != batch_size:
        raise BatchSizeError(f"out= has batch size {list(out.batch_size)}, the result has {list(batch_size)}")
    return out.update(result, inplace=inplace or out.is_locked)


def check_operand(result: CoreT, name: str, other: object) -> CoreT:
    """Return ``result``, or raise TypeError if it is NotImplemented."""
    if result is NotImplemented:
        raise TypeError(
            f"{name}() takes a number, a tensor or a collection; got {type(other).__name__}: {other!r}"
        )
    return result


def _move_beside(node: Core, array: object) -> Tensor:
    """Convert an array to a tensor on the device of a collection, not on torch's default device."""
    device = node.device
    if device is None:
        device = next((leaf.device for leaf in node._leaves()), None)
    return as_tensor(array, device=device)


def _broadcast(name: str, shape: torch.Size, size: torch.Size) -> tuple[int, ...]:
    """Return the shape of a tensor operand broadcast against the batch size; BatchSizeError if it does not."""
    result = broadcast_shape(shape, size)
    if result is None:
        raise BatchSizeError(
            f"cannot compute {name}: an operand of shape {list(shape)} does not broadcast against the batch "
            f"size {list(size)}"
        )
    return result


def raise_at_leaf(
    error: Exception,
    name: str,
    node: Core,
    single: Callable[..., object],
    leaves: list[Tensor],
    *operands: object,
) -> NoReturn:
    """Run an operation leaf by leaf, and raise its error with the key of the leaf that fails."""
    try:
        if any(type(operand) is list and len(operand) != len(leaves) for operand in operands):
            raise concurrent_change_error(node) from error
        for i, leaf in enumerate(leaves):
            others = [item[i] if type(item) is list else item for item in operands]
            try:
                single(leaf, *others)
            except LEAF_ERRORS as again:
                shapes = [
                    list(get_display_shape(item)) for item in (leaf, *others) if isinstance(item, Tensor)
                ]
                message = f"cannot compute {name}: {describe_leaf(node, leaf)}: {again} (shapes {shapes})"
                raise rephrase_error(again, message) from error
        raise error
    finally:
        # The traceback of the raised error refers to this frame: break the reference cycle.
        del error


def raise_foreign(error: Exception, name: str, *operands: object) -> NoReturn:
    """Raise StructureError if an operand has an object in place of a leaf, or else the error."""
    try:
        for path, item in (
            pair for node in operands if isinstance(node, Core) for pair in list_foreign(node)
        ):
            raise StructureError(
                f"cannot compute {name}: {show_path(path)} holds a {type(item).__name__}, which a pytree function put in "
                "place of a leaf; set a tensor there, or use functions of pytrees"
            ) from error
        raise error
    finally:
        del error  # its traceback refers to this frame


def run_each_leaf(name: str, node: CoreT, single: Callable[[Tensor], Tensor]) -> CoreT:
    """Apply ``single`` to each leaf. An error names the key of the leaf that fails."""
    try:
        return node._map(single)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, single, node._leaves())
    except AttributeError as error:
        raise_foreign(error, name, node)


def raise_at_entry(error: Exception, name: str, node: Core, leaf: Callable[[Tensor], object]) -> NoReturn:
    """Run a function entry by entry, and raise its error with the key of the entry that fails."""
    try:
        if type(error) in LEAF_ERRORS:
            for key, entry in node.items(True, True):
                try:
                    if isinstance(entry, Tensor):
                        leaf(entry)
                except LEAF_ERRORS as again:
                    message = f"cannot compute {name}: key {key!r}: {again} (shape {list(get_display_shape(entry))})"
                    raise rephrase_error(again, message) from error
        raise error
    finally:
        del error


def transform(name: str, node: CoreT, plan: ShapePlan) -> CoreT:
    """Apply a shape plan to a collection. An error names the key of the entry that fails."""
    try:
        return node._transform(plan)
    except LEAF_ERRORS as error:
        raise_at_entry(error, name, node, plan.leaf)


def _make_filler(default: object) -> Callable[[Tensor], Tensor] | None:
    """Return a function that builds the value of a missing entry, or None if such entries are dropped."""
    if not isinstance(default, str):
        filler = default if isinstance(default, Tensor) else torch.as_tensor(default, device="cpu")
        return lambda leaf: filler
    if default != "intersection":
        raise TypeError(f"default= is a number, a tensor, 'intersection' or None; got {default!r}")
    return None


def reorder_like(
    node: Core, ref: Core, fill: Callable[[Tensor], Tensor] | None, keeps_kinds: bool = False
) -> Any:
    """Copy ``node``, with ``fill(entry)`` for each entry that only ``ref`` has; without ``fill``, keep the common entries.

    ``keeps_kinds``: raise if a node's kind does not accept a new key; if False, such a node becomes a plain one.
    """
    if node.batch_size != ref.batch_size:
        return _reorder_level(node, ref, fill, keeps_kinds)
    # Go through the members of either tree: a lazy stack does not list entries that some members lack.
    return node._map_members(
        lambda own, given: given._map_members(
            lambda part, holder: _reorder_level(holder, part, fill, keeps_kinds), own
        ),
        ref,
    )


def _reorder_level(
    node: Core, ref: Core, fill: Callable[[Tensor], Tensor] | None, keeps_kinds: bool
) -> object:
    """Return a node with the entries of ``node`` in the order of ``ref``, and ``fill(leaf)`` where ``node`` lacks one."""

    def fill_level(own: Core, out: dict[str, Child], given_node: Core) -> Iterator[tuple[str, Core, Core]]:
        a, b = own._children(), given_node._children()
        for key in list(a):
            child, other = a[key], b.get(key)
            if other is None:
                if fill is not None:
                    out[key] = child
            elif isinstance(other, Tensor) or not has_entries(child):
                out[key] = child
            elif any(node._members_and_dim() for node in (child, other)):
                out[key] = reorder_like(child, other, fill, keeps_kinds)
            else:
                yield key, child, other
        if fill is not None:
            more = {key: b[key] for key in list(b) if key not in a}
            if keeps_kinds:
                check_keys(own, more)
            for key, child in more.items():
                out[key] = fill(child) if isinstance(child, Tensor) else child._map(fill)

    return map_levels(node, fill_level, ref)


def convert_values(node: Core, ref: Core, *, strict: bool = False) -> Any:
    """Copy ``node`` with a tensor in place of each value beside which ``ref`` has a tensor: NaN for one that is not a number.

    ``strict``: raise StructureError for values that are not bools.
    """
    if node.batch_size != ref.batch_size:
        return _convert_level(node, ref, strict)
    return node._map_members(
        lambda own, given: given._map_members(lambda part, holder: _convert_level(holder, part, strict), own),
        ref,
    )


def _convert_level(node: Core, ref: Core, strict: bool) -> object:
    """Return a node whose values are tensors where ``ref`` has one; with ``strict``, raise for values that are not bools."""

    def fill_level(own: Core, out: dict[str, Child], given: Core) -> Iterator[tuple[str, Core, Core]]:
        for key, child in dict(own._children()).items():
            other = given._children().get(key)
            if isinstance(other, Tensor) and not isinstance(child, Tensor) and not has_entries(child):
                out[key] = _value_as_tensor(child, other, key if strict else None)
            elif isinstance(child, Tensor) or not has_entries(child) or not isinstance(other, Core):
                out[key] = child
            elif any(level._members_and_dim() for level in (child, other)):
                out[key] = convert_values(child, other, strict=strict)
            else:
                yield key, child, other

    return map_levels(node, fill_level, ref)


def _value_as_tensor(value: Core, beside: Tensor, key: str | None) -> Tensor:
    """Convert values to a tensor that broadcasts against a leaf; with ``key``, raise for those that are not bools."""
    size = value.batch_size
    if key is None and type(value) in LEAF_KINDS and isinstance(leaf := value._unwrap(), Tensor):
        return leaf if leaf.shape == beside.shape else torch.full(size, torch.nan, device=beside.device)
    try:
        made = torch.as_tensor(value.tolist(), device=beside.device)
    except (TypeError, ValueError, RuntimeError):
        made = torch.full(size, torch.nan, device=beside.device)
    if key is not None and made.dtype is not torch.bool:
        raise leaf_node_mismatch_error(beside, value, (key,))
    return align_dims(made, beside.ndim, len(size))


def pair_unset(left: Core, right: Core, path: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """Pair each value that the other node lacks with None, if the class of that node declares the entry.

    Raise KeyMismatchError for any other key that only one of the nodes has.
    """
    wanted, actual = left._children(), right._children()
    coercer = COERCERS.get_fallback()
    pairs: list[tuple[str, Any, Any]] = []
    for key in () if wanted.keys() == actual.keys() else sorted(wanted.keys() ^ actual.keys()):
        held, lacking = (wanted[key], right) if key in wanted else (actual[key], left)
        declared = {**lacking._schema.list_entries(lacking)}
        if isinstance(held, Tensor) or has_entries(held) or key not in declared or coercer is None:
            check_same_keys(wanted, actual, path)
        else:  # a value that only some members of a lazy stack have is None in the others
            filled = declared[key]
            none = coercer.convert(None, held.batch_size, held.device)
            pairs.append((key, held, none if filled is None else filled))
    return pairs


def compare_values(
    result: Core,
    first: Core,
    second: Core,
    compare: Callable[[Any, Any, str], Any],
    same_keys: bool = True,
) -> Any:
    """Combine the value nodes of two collections, and add what is not None to ``result``, which holds that of the leaves.

    ``same_keys``: raise KeyMismatchError if one collection lacks a value, instead of ignoring it.
    """
    size = result.batch_size
    first, second = expand_to_match(first, second, size), expand_to_match(second, first, size)
    if not has_entries(first) and (compared := compare(first, second, "")) is not None:
        return compared
    for left, right, target in zip_walk(first, second, result):
        for key, held, unset in pair_unset(left, right, ()) if same_keys else ():
            target._set_child(key, compare(held, unset, key))
        for key, a in dict(left._children()).items():
            if isinstance(a, Tensor) or key not in right._children():
                continue
            b = right._get_child(key)
            if isinstance(b, Tensor):
                raise concurrent_change_error(right)
            check_same_form(a, b, (key,))
            if not has_entries(a) and (compared := compare(a, b, key)) is not None:
                target._set_child(key, compared)
    return result
