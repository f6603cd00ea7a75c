"""One function that applies an operation to a list of leaves, fused by torch where that gives the same result.

torch's foreach kernels take a list of tensors in one call. They know neither tensor subclasses (one among the leaves
would turn every result into that subclass) nor the transforms of ``torch.func``, so a gate decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ._torch_private import foreach_kernel, functorch_level

__all__ = [
    "PLAIN",
    "Op",
    "expand_operands",
    "foreach",
    "is_grad_needed",
    "order_subclasses_first",
    "make_op",
    "is_grad_shared",
]

_REQUIRES_GRAD = attrgetter("requires_grad")

#: The leaf types that torch's fused kernels handle as a loop would.
PLAIN = frozenset({Tensor, Parameter})


#: What the autograd of fused kernels says of integers; the second up to torch 2.4.
_NO_AUTOGRAD = ("Autograd not support dtype", "isDifferentiableType")


class Op(NamedTuple):
    """An operation on leaves.

    Attributes:
        fused: takes a list of leaves, then a list of operands or one number; None if torch has no such kernel.
        single: takes one leaf, then one operand.
        alike: takes the leaves and operands, and tells whether the fused form does what the single one does; None: always.
    """

    fused: Callable[..., Any] | None
    single: Callable[..., Any]
    alike: Callable[..., bool] | None = None


def is_grad_needed(*tensors: Any) -> bool:
    """Tell whether autograd records what is done to any of the tensors in some lists.

    >>> is_grad_needed([torch.zeros(1), torch.zeros(1, requires_grad=True)])
    True
    """
    return torch.is_grad_enabled() and any(
        any(map(_REQUIRES_GRAD, tensor)) for tensor in tensors if type(tensor) is list
    )


def _pause_recording(*tensors: Any) -> bool:
    return not is_grad_needed(*tensors)


def _disable_autocast(*tensors: Any) -> bool:
    return not torch.is_autocast_enabled()


#: Fused kernels that are not always like the single ones. Of the first two torch has no derivative (of addcdiv, one that
#: fails where there are more leaves than elements); the others are those that autocast computes in float32, leaf by leaf
#: only (docs.pytorch.org, "CUDA Ops that can autocast to float32").
_ALIKE: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(["copy_", "addcdiv"], _pause_recording),
    **dict.fromkeys(
        [
            "acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log1p", "log2", "norm", "pow", "reciprocal",
            "rsqrt", "sinh", "tan",
        ],
        _disable_autocast,
    ),
}  # fmt: skip


def make_op(name: str, single: Callable[..., Any]) -> Op:
    """Return the operation whose fused form is the kernel ``name`` of torch, if it has that.

    >>> make_op("exp", torch.exp).single(torch.zeros(()))
    tensor(1.)
    """
    return Op(foreach_kernel(name), single, _ALIKE.get(name))


def foreach(op: Op, leaves: list[Tensor], *operands: Any, plain: bool = False) -> Sequence[Tensor]:
    """Return ``make_op(leaf, ...)`` for every leaf; an operand is a list with one tensor per leaf, or a value that all share.

    ``plain`` says that all of them are known to be of the types that fused kernels handle.

    >>> foreach(make_op("add", torch.add), [torch.tensor(1), torch.tensor(2)], 10)
    (tensor(11), tensor(12))
    """
    fused = op.fused
    if (
        fused is not None
        and leaves
        and functorch_level() is None
        and (plain or _is_all_plain(leaves, *operands))
        and (op.alike is None or op.alike(leaves, *operands))
    ):
        try:
            results: Sequence[Tensor] = fused(leaves, *operands)
        except NotImplementedError:
            pass  # no kernel for this dtype or device: the loop has more of them, or says why not
        except RuntimeError as error:
            # Fused kernels do not write to conjugate and negative views. Their autograd takes no integers beside leaves
            # that require grad; in place it finds out after it wrote.
            if "mutable TensorLists" not in str(error) and (
                not any(words in str(error) for words in _NO_AUTOGRAD) or _make_inplace(fused)
            ):
                raise
        else:
            if not results or not results[0].requires_grad or all(leaf.requires_grad for leaf in leaves):
                return results
            # Where one leaf requires grad, autograd takes all the results of one call for its own.
            rows = zip(leaves, *expand_operands(leaves, operands))
            return [
                result
                if any(isinstance(item, Tensor) and item.requires_grad for item in row)
                else result.detach()
                for result, row in zip(results, rows)
            ]
    single = op.single
    return list(map(single, leaves, *expand_operands(leaves, operands)))


def _is_all_plain(*operands: Any) -> bool:
    """Tell whether fused kernels handle the tensors in some lists as a loop would."""
    for operand in operands:  # noqa: SIM110 -- a generator takes longer
        if type(operand) is list and not PLAIN.issuperset(map(type, operand)):
            return False
    return True


def expand_operands(leaves: list[Tensor], operands: tuple[Any, ...]) -> list[list[Any]]:
    """Return the operands with one value for each leaf.

    >>> expand_operands([torch.zeros(1)] * 2, (7, [1, 2]))
    [[7, 7], [1, 2]]
    """
    return [operand if type(operand) is list else [operand] * len(leaves) for operand in operands]


def order_subclasses_first(leaves: list[Tensor]) -> Sequence[int]:
    """Return the order in which to write leaves: those of another class first, which may refuse before anything is written.

    >>> Other = type("Other", (torch.Tensor,), {})
    >>> order_subclasses_first([torch.zeros(1), torch.zeros(1).as_subclass(Other)])
    [1, 0]
    """
    positions = range(len(leaves))
    if PLAIN.issuperset(map(type, leaves)):
        return positions
    return sorted(positions, key=lambda i: type(leaves[i]) in PLAIN)


def _make_inplace(fused: Callable[..., Any]) -> bool:
    return str(getattr(fused, "func", fused).__name__).endswith("_")


def is_grad_shared(*tensors: Any) -> bool:
    """Tell whether a fused call would make tensors require grad that alone would not: some do, and others do not."""
    needs = {tensor.requires_grad for item in tensors if type(item) is list for tensor in item}
    return len(needs) > 1 and torch.is_grad_enabled()
