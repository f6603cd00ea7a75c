"""Apply an operation to a list of leaves, with torch's fused kernels where they give the same result.

The ``torch._foreach_*`` kernels take a list of tensors in one call. They do not support tensor subclasses (one
subclass leaf would turn every result into that subclass) or the transforms of ``torch.func``, so ``foreach``
checks for both and otherwise loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .private import foreach_kernel, functorch_level

_REQUIRES_GRAD = attrgetter("requires_grad")

#: The leaf types for which torch's fused kernels give the same results as a loop.
PLAIN = frozenset({Tensor, Parameter})


#: Texts in the errors that fused kernels raise for integer leaves under autograd; torch <= 2.4 raises the second.
_NO_AUTOGRAD = ("Autograd not support dtype", "isDifferentiableType")


class Op(NamedTuple):
    """An operation on leaves in two forms: one call for a list of leaves (fused), and one call per leaf (single).

    Attributes:
        fused: takes a list of leaves, then lists of operands or numbers; None if torch has no such kernel.
        single: takes one leaf, then one operand each.
        alike: predicate on leaves and operands, True if both forms give the same results; None if they always do.
    """

    fused: Callable[..., Any] | None
    single: Callable[..., Any]
    alike: Callable[..., bool] | None = None


def is_grad_needed(*tensors: object) -> bool:
    """Return True if autograd records operations on any tensor of the given lists."""
    return torch.is_grad_enabled() and any(
        any(map(_REQUIRES_GRAD, tensor)) for tensor in tensors if type(tensor) is list
    )


#: Where the results of some fused kernels differ from those of the single form, with a predicate that is True elsewhere.
#: Autograd does not support all kernels (the backward of addcdiv fails with more leaves than elements). Autocast computes
#: some operations in float32, but only in the single form (docs.pytorch.org, "CUDA Ops that can autocast to float32").
_IS_OUTSIDE: dict[str, Callable[..., bool] | None] = {
    "": None,
    "autograd": lambda *tensors: not is_grad_needed(*tensors),
    "autocast": lambda *tensors: not torch.is_autocast_enabled(),
}


def make_op(name: str, single: Callable[..., object], loop_in: str = "") -> Op:
    """Build the operation with torch's fused kernel ``name``, if torch has one; loop in "autograd" or "autocast"."""
    return Op(foreach_kernel(name), single, _IS_OUTSIDE[loop_in])


def foreach(op: Op, leaves: list[Tensor], *operands: object, plain: bool = False) -> Sequence[Tensor]:
    """Apply ``op`` to every leaf; an operand is a list with one tensor per leaf, or one value for all leaves."""
    # ``plain=True`` skips the type check: the caller guarantees that all types are in PLAIN.
    fused = op.fused
    if (
        fused is not None
        and leaves
        and functorch_level() is None
        and (plain or is_all_plain(leaves, *operands))
        and (op.alike is None or op.alike(leaves, *operands))
    ):
        results = _call_fused(fused, leaves, operands)
        if results is not None:
            return results
    single = op.single
    return list(map(single, leaves, *expand_operands(leaves, operands)))


def _call_fused(
    fused: Callable[..., Any], leaves: list[Tensor], operands: tuple[object, ...]
) -> Sequence[Tensor] | None:
    """Call a fused kernel; return None if the loop must be used, because it works or raises a clear error."""
    try:
        results: Sequence[Tensor] = fused(leaves, *operands)
    except NotImplementedError:
        return None  # torch has no fused kernel for this dtype or device
    except RuntimeError as error:
        # Fused kernels cannot write to conjugate or negative views, and autograd rejects integers next to leaves that
        # require grad: use the loop. In-place kernels raise the second error after writing: do not write twice.
        text = str(error)
        is_inplace = getattr(fused, "func", fused).__name__.endswith("_")
        is_refused = any(words in text for words in _NO_AUTOGRAD) and not is_inplace
        if "mutable TensorLists" not in text and not is_refused:
            raise
        return None
    if not results or not results[0].requires_grad or all(leaf.requires_grad for leaf in leaves):
        return results
    # If one leaf requires grad, all results of a fused call do; detach those whose operands do not require it.
    rows = zip(leaves, *expand_operands(leaves, operands))
    return [
        result if any(isinstance(item, Tensor) and item.requires_grad for item in row) else result.detach()
        for result, row in zip(results, rows)
    ]


def is_all_plain(*operands: object) -> bool:
    """Return True if all tensors in the given lists have types that fused kernels support."""
    for operand in operands:  # noqa: SIM110 -- all() with a generator is slower
        if type(operand) is list and not PLAIN.issuperset(map(type, operand)):
            return False
    return True


def expand_operands(leaves: list[Tensor], operands: tuple[object, ...]) -> list[list[object]]:
    """Expand each operand to a list with one value per leaf."""
    return [operand if type(operand) is list else [operand] * len(leaves) for operand in operands]


def order_subclasses_first(*columns: Any) -> Sequence[int]:
    """Return the order in which to write leaves, the first column: rows with subclasses first, since these may raise."""
    positions = range(len(columns[0]))
    if is_all_plain(*columns):
        return positions
    rows = [column for column in columns if type(column) is list]
    return sorted(positions, key=lambda i: all(type(row[i]) in PLAIN for row in rows))


def is_grad_shared(*tensors: object) -> bool:
    """Return True if some tensors require grad and others do not: then all results of a fused call would require grad."""
    needs = {tensor.requires_grad for item in tensors if type(item) is list for tensor in item}
    return len(needs) > 1 and torch.is_grad_enabled()
