"""Pointwise operations: how each is computed, and the methods, most of which follow from the table of operations.

:mod:`.operands` defines which values are operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .._plans.plans import broadcast_shape
from .._python.public_names import name_method
from .._torch.dtypes import dtype_beside
from .._torch.kernels import Op, foreach, make_op
from .._torch.operators import OPERATIONS, Operation
from .._torch.private import foreach_kernel
from .._tree.coerce import build_nested
from .._tree.node import Core
from .._tree.packed import map_packed
from .._writes.check import LEAF_ERRORS
from .._writes.inplace import write_leaves
from .._writes.packed import Beside, try_write_packed
from ..errors import StructureError
from .broadcasting import align_columns, expand_to_match, find_longer_size
from .flags import combine_flags, combine_logical
from .operands import (
    NUMBERS,
    CoreT,
    Operand,
    check_operand,
    combine,
    combine_inplace,
    compare_values,
    convert_values,
    operand_inplace,
    operand_leaves,
    raise_at_leaf,
    raise_foreign,
    run_each_leaf,
    write_result,
)


def _make_extreme(tensors: str, number: str) -> Op:
    """Build ``maximum`` or ``minimum``. A number clamps instead: forward-mode gradients of torch's maximum would be wrong."""
    of_tensor, of_number = getattr(torch, tensors), getattr(torch, number)
    of_tensors, of_numbers = foreach_kernel(tensors), foreach_kernel(number)

    def call_single(leaf: Tensor, other: object) -> object:
        return (of_tensor if isinstance(other, Tensor) else of_number)(leaf, other)

    def call_fused(leaves: list[Tensor], other: object) -> object:
        return (of_tensors if type(other) is list else of_numbers)(leaves, other)  # type: ignore[misc]

    return Op(call_fused if of_tensors and of_numbers else None, call_single)


def combine_tensors(function: Callable[[Tensor, Tensor], Tensor]) -> Op:
    """Build an operation with a number or tensor, which torch only has for tensors."""

    def call_single(leaf: Tensor, other: object) -> object:
        return function(leaf, other if isinstance(other, Tensor) else _number_beside(leaf, other))

    return Op(None, call_single)


def _swap_operands(function: Callable[[object, object], object]) -> Op:
    """Build the reflected operation of an operator of Python."""

    def call_single(leaf: Tensor, other: object) -> object:
        return function(other, leaf)

    return Op(None, call_single)


def _make_ops(row: Operation) -> dict[str, Op]:
    """Build the operation of a row, and the one in place."""
    name, inplace = row.function or row.name, f"{row.kernel or row.name}_"
    function = getattr(torch, name)
    if row.of_tensors:
        plain = combine_tensors(function)
    else:
        plain = _make_extreme(name, row.kernel) if row.kernel else make_op(name, function, row.loop_in)
    return {
        row.name: plain,
        **({f"{row.name}_": make_op(inplace, getattr(Tensor, inplace))} if row.inplace else {}),
    }


ROWS = {row.name: row for row in OPERATIONS}

#: All operations by name. Methods read them from this global, since torch.compile cannot trace such an object in a
#: closure.
OPS: dict[str, Op] = {
    **{
        row.reflected: _swap_operands(getattr(operator, f"__{row.dunder}__"))
        for row in OPERATIONS
        if row.dunder and row.reflected
    },
    **{name: this for row in OPERATIONS for name, this in _make_ops(row).items()},
}

#: The operations that also combine values that are bools.
LOGICAL = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"})


#: Operations of several kernels whose result for an element is the same in any tensor, and which raise for none.
_OF_SINGLE = frozenset({"isfinite"})


def bind_options(name: str, **options: object) -> Op | None:
    """Bind the options of torch that are not None to an operation; return None if all are."""
    given = {key: option for key, option in options.items() if option is not None}
    return Op(None, partial(OPS[name].single, **given)) if given else None


def apply_unary(node: CoreT, name: str, this: Op | None = None) -> CoreT:
    """Return a collection of the results of an operation on each leaf."""
    this = this or OPS[name]
    leaves: list[Tensor] = []
    try:
        if this.fused is None:
            held = node._inner()._backends if name in _OF_SINGLE else None
            packed = None if held is None else map_packed(node, this.single)
            return node._map(this.single) if packed is None else packed
        levels = node._flatten_leaves(leaves)
        return node._unflatten(foreach(this, leaves, plain=type(levels) is dict), levels)
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, node._leaves())
    except AttributeError as error:
        raise_foreign(error, name, node)


def apply_unary_inplace(node: CoreT, name: str) -> CoreT:
    """Apply an operation to each leaf in place; return the collection."""
    this = OPS[name]
    if node._inner()._backends is not None and try_write_packed(node, this):
        return node
    try:
        leaves = node._leaves()
    except AttributeError as error:
        raise_foreign(error, name, node)
    write_leaves(name, node, this, leaves)
    return node


def apply_binary(
    node: CoreT, name: str, other: Operand, default: object = None, this: Op | None = None
) -> CoreT:
    """Combine each leaf with an operand; raise TypeError if it is not one."""
    combined = combine_logical if name in LOGICAL else combine
    return check_operand(combined(node, name, this or OPS[name], other, default), name, other)


def clamp_elements(node: CoreT, min: Operand | None, max: Operand | None, out: object) -> CoreT:
    """Clamp each element to an interval, see ``clamp``."""
    if min is None and max is None:
        raise TypeError("clamp() needs min, max or both; got neither")
    if isinstance(min, NUMBERS) and isinstance(max, NUMBERS):
        result = run_each_leaf("clamp", node, methodcaller("clamp", min, max))
    else:
        result = node if min is None else apply_binary(node, "clamp_min", min)
        result = result if max is None else apply_binary(result, "clamp_max", max)
    if out is None:
        return result
    written: CoreT = write_result(out, result.batch_size, result)
    return written


def compare(node: Core, name: str, symbol: str, other: Operand, close: Op | None = None) -> Any:
    """Compare each leaf with an operand, and the values that are not tensors with those of another collection."""
    if isinstance(other, dict):
        other = build_nested(other, node.batch_size, None)
    this = close or OPS[name]
    foreign: list[Core] = []
    equality = name in ("eq", "ne")
    try:
        result = combine(node, symbol, this, other, None, foreign)
    except StructureError:
        if not isinstance(other, Core):
            raise
        # One may have a tensor where the other has a number that was kept as a value.
        strict = not equality
        try:
            node, other = (
                convert_values(node, other, strict=strict),
                convert_values(other, node, strict=strict),
            )
        except AttributeError as error:
            raise_foreign(error, symbol, node, other)
        foreign.clear()
        result = combine(node, symbol, this, other, None, foreign)
    if not foreign or result is NotImplemented:
        return result
    if not isinstance(other, Core):
        return combine_flags(result, node, symbol, this, other)
    return compare_values(result, node, other, lambda a, b, _: a._compare(b, OPS[name].single), equality)


def is_equal(node: Any, other: object) -> bool:
    """Return True if two collections have the same batch size, keys, shapes, elements and values."""
    if not isinstance(other, Core):
        raise TypeError(f"equal() compares two collections; got a {type(other).__name__}")
    leaves: list[Tensor] = []
    try:
        beside = operand_leaves(node, other, leaves) if node.batch_size == other.batch_size else None
        return (
            beside is not None
            and [leaf.shape for leaf in leaves] == [leaf.shape for leaf in beside]
            and (node == other).all()
        )
    except StructureError:
        return False


def scale_operand(this: Op, alpha: float | None, other: Operand) -> tuple[Op, Operand]:
    """Return an operation and an operand that together apply ``alpha * other``."""
    if alpha is None:
        return this, other
    if type(other) is type(alpha) and type(other) in (int, float):
        return this, other * alpha
    # Fused kernels reject alpha for mixed dtypes, and multiplying first can change the dtype: use the single op.
    return Op(None, partial(this.single, alpha=alpha)), other


T_co = TypeVar("T_co", covariant=True)


class UnaryMethod(Protocol):
    """Type of the methods of unary operations."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> Callable[[], CoreT]:
        """Return the method bound to ``instance``."""


class BoundBinary(Protocol[T_co]):
    """Type of the bound method of a binary operation."""

    def __call__(self, other: Operand, *, default: object = None) -> T_co:
        """Combine the leaves with ``other``."""


class BinaryMethod(Protocol):
    """Type of the methods of binary operations."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> BoundBinary[CoreT]:
        """Return the method bound to ``instance``."""


class BoundOperator(Protocol[T_co]):
    """Type of the bound method of an operator, or of a binary operation in place."""

    def __call__(self, other: Operand) -> T_co:
        """Combine the leaves with ``other``."""


class OperatorMethod(Protocol):
    """Type of the methods of operators, and of binary operations in place."""

    def __get__(self, instance: CoreT, owner: type | None = None) -> BoundOperator[CoreT]:
        """Return the method bound to ``instance``."""


def make_unary(name: str, elements: str, result: str) -> UnaryMethod:
    """Build the method of a unary operation; the example has a leaf of these elements."""

    def method(self: CoreT) -> CoreT:
        return apply_unary(self, name)

    return name_method(
        method,
        name,
        f"""Return {ROWS[name].returns}.

        >>> TensorDict({{"a": torch.tensor({elements})}}).{name}()["a"]
        {result}
        """,
    )


def make_unary_inplace(name: str) -> UnaryMethod:
    """Build the method ``name``, which ends in ``_``, of a unary operation."""

    def method(self: CoreT) -> CoreT:
        return apply_unary_inplace(self, name)

    return name_method(method, name, f"Compute :meth:`{name[:-1]}` in place; return self.")


def make_binary(name: str, result: str, elements: str = "[1, 6]") -> BinaryMethod:
    """Build the method of a binary operation; the example has a leaf of these elements."""

    def method(self: CoreT, other: Operand, *, default: object = None) -> CoreT:
        return apply_binary(self, name, other, default)

    return name_method(
        method,
        name,
        f"""Return {ROWS[name].returns}; arguments are those of :meth:`add`.

        >>> TensorDict({{"a": torch.tensor({elements})}}).{name}(4)["a"]
        {result}
        """,
    )


def make_binary_inplace(name: str) -> OperatorMethod:
    """Build the method ``name``, which ends in ``_``, of a binary operation."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return check_operand(combine_inplace(self, name, OPS[name], other), name, other)

    doc = f"Compute :meth:`{name[:-1]}` in place; return self. Operands and errors are those of :meth:`add_`."
    return name_method(method, name, doc)


def make_operator(name: str, expression: str, operation: str) -> OperatorMethod:
    """Build the special method ``name`` of an operator, for an expression such as ``td + x``."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return combine(self, expression, OPS[operation], other)

    def logical(self: CoreT, other: Operand) -> CoreT:
        return combine_logical(self, expression, OPS[operation], other)

    made = logical if operation in LOGICAL else method
    return name_method(made, name, f"Return ``{expression}``; ``x`` is an operand of :meth:`add`.")


def make_augmented(name: str, expression: str, operation: str) -> OperatorMethod:
    """Build the special method ``name`` of an augmented assignment, such as ``td += x``."""

    def method(self: CoreT, other: Operand) -> CoreT:
        return combine_inplace(self, expression, OPS[operation], other)

    doc = f"Compute ``{expression}`` in place; ``x`` is an operand of :meth:`add_`."
    return name_method(method, name, doc)


def make_comparison(name: str, expression: str, operation: str) -> Callable[[Any, object], Any]:
    """Build the special method ``name`` of a comparison, such as ``td < x``."""

    def method(self: Core, other: object) -> object:
        return compare(self, operation, expression, other)

    doc = f"Return ``{expression}`` as a collection of bools; ``x`` is an operand of :meth:`add` or a dict."
    return name_method(method, name, doc)


def bind_value(this: Op, value: float | None) -> Op:
    """Bind ``value`` to an operation, unless it is the default 1."""
    if value is None or value == 1:
        return this
    call_fused = partial(this.fused, value=value) if this.fused else None
    return this._replace(fused=call_fused, single=partial(this.single, value=value))


def _number_beside(leaf: Tensor, number: object) -> Tensor:
    """Convert a number to a scalar tensor, in the dtype that torch uses to combine it with ``leaf``."""
    kind = torch.as_tensor(number, device="cpu").dtype
    return torch.as_tensor(number, dtype=dtype_beside(leaf.dtype, kind), device=leaf.device)


def _as_packed_operand(operand: Operand) -> Operand:
    """Return an operand of three for a packed collection: a number becomes a tensor of the dtype of each run."""
    if isinstance(operand, (Tensor, Core)) or not isinstance(operand, NUMBERS):
        return operand
    return Beside(lambda run: _number_beside(run, operand))


def apply_ternary(
    node: CoreT, name: str, this: Op, first: Operand, second: Operand, *, keep_number: bool = False
) -> CoreT:
    """Apply an operation of three tensors, in place if ``name`` ends in ``_``."""
    leaves: list[Tensor] = []
    inplace = name.endswith("_")
    if inplace and node._inner()._backends is not None:
        weight = second if keep_number else _as_packed_operand(second)
        if try_write_packed(node, this, _as_packed_operand(first), weight):
            return node
    try:
        if not inplace:
            node = _broadcast_batch(node, first, second)
        if type(first) is type(node) and first.batch_size == node.batch_size:
            operands: list[object] = [operand_leaves(node, first, leaves)]
        else:
            operands = [check_operand(operand_inplace(node, name, first), name, first)]
            node._flatten_leaves(leaves)
        operands.append(check_operand(operand_inplace(node, name, second), name, second))
    except AttributeError as error:
        raise_foreign(error, name, node, first, second)
    for i, operand in enumerate(operands):
        if type(operand) is not list and not (keep_number and i == 1):
            operands[i] = [_number_beside(leaf, operand) for leaf in leaves]
    if inplace:
        write_leaves(name, node, this, leaves, *operands)
        return node
    if any(isinstance(item, Core) and item.batch_size != node.batch_size for item in (first, second)):
        leaves, *operands = align_columns(node, leaves, *operands)
    try:
        return node._unflatten(foreach(this, leaves, *operands))
    except LEAF_ERRORS as error:
        raise_at_leaf(error, name, node, this.single, leaves, *operands)


def _broadcast_batch(node: CoreT, *others: Operand) -> CoreT:
    """Expand a collection to the batch size that it has together with its operands; unchanged if they do not broadcast."""
    for other in others:
        shape = getattr(other, "shape", ())
        if shape == node.batch_size:
            continue
        longer = find_longer_size(node, other) if isinstance(other, Core) else None
        size = longer or broadcast_shape(shape, node.batch_size)
        if size is not None and size != node.batch_size:
            node = expand_to_match(node, other, size) if isinstance(other, Core) else node.expand(size)
    return node
