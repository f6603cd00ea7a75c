"""What a leaf is to a module: a parameter or a buffer.

A buffer is an ordinary tensor that carries a mark, the one of ``torch.nn.Buffer``: every operation takes it as it is, and
what is computed from it has no mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._public_names import set_module
from .errors import StructureError


class _BufferMeta(type(Tensor)):  # type: ignore[misc]  # the metaclass of tensors has no name in public
    """Take for a buffer what is marked as one, as the metaclass of ``torch.nn.Buffer`` does."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and is_buffer(instance)


@set_module("td_core")
class Buffer(Tensor, metaclass=_BufferMeta):
    """A tensor that a module keeps as a buffer, where a plain one would become a parameter.

    It is an ordinary tensor with a mark, which those of :class:`torch.nn.Buffer` have too, and those that
    :func:`from_module` takes out of a module.

    Args:
        data: the tensor; its storage is shared. An empty one if not given.
        persistent: whether it is part of the module's state dict.

    >>> isinstance(Buffer(torch.zeros(2)), Tensor)
    True
    """

    persistent: bool

    def __new__(cls, data: Tensor | None = None, *, persistent: bool = True) -> Any:
        source = torch.empty(0) if data is None else data
        return mark_buffer(source.detach().requires_grad_(source.requires_grad), persistent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Older pickles have instances of this class.
        self.__class__ = Tensor  # type: ignore[assignment]
        mark_buffer(self, state["persistent"])


def is_parameter(leaf: Any) -> bool:
    """Tell whether a leaf is a parameter.

    >>> is_parameter(nn.Parameter(torch.zeros(2)))
    True
    """
    # To look at the class of parameters takes longer than all else here.
    return type(leaf) is nn.Parameter or isinstance(leaf, nn.Parameter)


def is_buffer(leaf: Any) -> bool:
    """Tell whether a leaf is marked as a buffer.

    >>> is_buffer(Buffer(torch.zeros(2))), is_buffer(torch.zeros(2))
    (True, False)
    """
    return getattr(leaf, "_is_buffer", False)


def is_differentiable(leaf: Tensor) -> bool:
    """Tell whether a leaf can require grad.

    >>> is_differentiable(torch.tensor(1.0)), is_differentiable(torch.tensor(1))
    (True, False)
    """
    return leaf.is_floating_point() or leaf.is_complex()


def is_persistent(leaf: Any) -> bool:
    """Tell whether a leaf is part of the state dict of its module.

    >>> is_persistent(Buffer(torch.zeros(2), persistent=False))
    False
    """
    return is_parameter(leaf) or getattr(leaf, "persistent", True)


def mark_buffer(leaf: Any, persistent: bool = True) -> Any:
    """Mark a tensor as a buffer, in place; return it.

    >>> isinstance(mark_buffer(torch.zeros(2)), Buffer)
    True
    """
    leaf.persistent, leaf._is_buffer = persistent, True
    return leaf


def as_buffer(leaf: Tensor, persistent: bool = True) -> Tensor:
    """Return a leaf as a buffer of the same memory, which passes its gradients on.

    >>> tensor = torch.zeros(2)
    >>> is_buffer(as_buffer(tensor)), is_buffer(tensor)
    (True, False)
    """
    if torch.compiler.is_compiling():
        return leaf  # a graph takes no marks
    if is_parameter(leaf):
        leaf = unwrap_parameter(leaf)
    elif type(leaf) is Tensor and not leaf.requires_grad:
        leaf = leaf.detach()  # the tensor of the caller stays what it is
    marked: Tensor = mark_buffer(leaf, persistent)
    return marked


def unwrap_parameter(leaf: Tensor) -> Tensor:
    """Return a parameter as a plain tensor of the same memory, through which gradients reach it.

    >>> unwrap_parameter(nn.Parameter(torch.zeros(2))).requires_grad
    True
    """
    if not leaf.requires_grad:
        return leaf.detach()
    with torch.enable_grad():
        return leaf.view_as(leaf)


def is_settled(leaf: Tensor) -> bool:
    """Tell whether a leaf is a parameter or a buffer already.

    >>> is_settled(Buffer(torch.zeros(2))), is_settled(torch.zeros(2))
    (True, False)
    """
    # What a lazy module has yet to make is kept as it is, so that the module can.
    return is_parameter(leaf) or is_buffer(leaf) or is_lazy(leaf)


def is_registered(leaf: Any) -> bool:
    """Tell whether a leaf is one of the parameters: one, or a tensor that requires grad, which stands in the place of one.

    >>> is_registered(torch.zeros(2, requires_grad=True)), is_registered(Buffer(torch.zeros(2)))
    (True, False)
    """
    return is_parameter(leaf) or (isinstance(leaf, Tensor) and leaf.requires_grad and not is_buffer(leaf))


def adopt(leaf: Tensor, held: Any = None, converts: bool = True) -> Tensor:
    """Return what a collection of parameters keeps for a leaf.

    Args:
        leaf: parameters and buffers are kept as they are.
        held: what stood there: in the place of a parameter, or of a buffer that could be one, a plain tensor becomes one.
        converts: whether a new leaf becomes a parameter where it can require grad; the others become buffers.

    Raises:
        StructureError: a tensor with a ``grad_fn`` would become a parameter.

    >>> role(adopt(torch.zeros(2))), role(adopt(torch.zeros(2), Buffer())), role(adopt(torch.zeros(2), None, False))
    ('p', 'b', 'b')
    """
    if is_settled(leaf):
        return leaf
    if is_buffer(held) and (is_differentiable(held) or not converts):
        return as_buffer(leaf, held.persistent)
    if not is_differentiable(leaf) or not (converts or is_parameter(held)):
        return as_buffer(leaf)
    if not converts and leaf.requires_grad:
        return leaf  # in the place of a parameter, with what it was computed from
    if leaf.grad_fn is not None:
        raise StructureError("a tensor with a grad_fn cannot become a parameter; detach() it first")
    trained = leaf.requires_grad or not is_parameter(held) or held.requires_grad
    return nn.Parameter(leaf.detach(), requires_grad=trained)


def role(leaf: Tensor) -> str:
    """Return the letter for what a leaf is to a module, which stands for it where a storage holds the leaves.

    >>> role(nn.Parameter(torch.zeros(2))), role(Buffer(torch.zeros(2))), role(torch.zeros(2))
    ('p', 'b', '-')
    """
    if is_parameter(leaf):
        return "p" if leaf.requires_grad else "f"
    if is_buffer(leaf):
        return "b" if leaf.persistent else "n"  # type: ignore[attr-defined]
    return "-"


def in_role(leaf: Tensor, letter: str) -> Tensor:
    """Return a leaf in the role of a letter that :func:`role` gave.

    >>> type(in_role(torch.zeros(2), "p")).__name__
    'Parameter'
    """
    if letter in "bn" and not is_buffer(leaf):
        return as_buffer(leaf, letter == "b")
    if letter in "pf" and not is_parameter(leaf):
        return nn.Parameter(leaf.detach(), requires_grad=letter == "p" and is_differentiable(leaf))
    return leaf
