"""The role of a leaf in a module: parameter, buffer or plain tensor.

A buffer is an ordinary tensor with the mark of ``torch.nn.Buffer`` (an attribute). Every operation accepts it, and
results of operations have no mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._python.public_names import set_module
from ..errors import StructureError


class _BufferMeta(type(Tensor)):  # type: ignore[misc]  # torch does not export the metaclass of Tensor
    """Metaclass that makes ``isinstance`` test the buffer mark, as the metaclass of ``torch.nn.Buffer`` does."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and is_buffer(instance)


@set_module("td_core")
class Buffer(Tensor, metaclass=_BufferMeta):
    """A tensor that a module registers as a buffer, where a plain one would become a parameter.

    It is an ordinary tensor with a mark, as are :class:`torch.nn.Buffer` and the buffers that :func:`from_module` returns.

    Args:
        data: the tensor, whose storage is shared; an empty one by default.
        persistent: True to include it in the module's state dict.

    >>> isinstance(Buffer(torch.zeros(2)), Tensor)
    True
    """

    persistent: bool

    def __new__(cls, data: Tensor | None = None, *, persistent: bool = True) -> Any:
        source = torch.empty(0) if data is None else data
        if not isinstance(source, Tensor):
            raise TypeError(f"Buffer() takes a tensor; got {type(data).__name__}")
        return mark_buffer(source.detach().requires_grad_(source.requires_grad), persistent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Older pickles hold instances of this class; convert them to marked tensors.
        self.__class__ = Tensor  # type: ignore[assignment]
        mark_buffer(self, state["persistent"])


def is_parameter(leaf: object) -> bool:
    """Return True if a leaf is a parameter."""
    # Hot path: the exact type test is much faster than isinstance with the metaclass of Parameter.
    return type(leaf) is nn.Parameter or isinstance(leaf, nn.Parameter)


def is_buffer(leaf: object) -> bool:
    """Return True if a leaf has the buffer mark."""
    return getattr(leaf, "_is_buffer", False)


def is_differentiable(leaf: Tensor) -> bool:
    """Return True if the dtype of a leaf supports autograd (floating point or complex)."""
    return leaf.is_floating_point() or leaf.is_complex()


def is_persistent(leaf: object) -> bool:
    """Return True if the state dict of the module contains the leaf."""
    return is_parameter(leaf) or getattr(leaf, "persistent", True)


def mark_buffer(leaf: Any, persistent: bool = True) -> Any:
    """Mark a tensor as a buffer, in place, and return it."""
    leaf.persistent, leaf._is_buffer = persistent, True
    return leaf


def as_buffer(leaf: Tensor, persistent: bool = True) -> Tensor:
    """Return a buffer that shares the memory of a leaf and passes gradients to it."""
    if torch.compiler.is_compiling():
        return leaf  # torch.compile cannot trace setting attributes of tensors
    if is_parameter(leaf):
        leaf = unwrap_parameter(leaf)
    elif type(leaf) is Tensor and not leaf.requires_grad:
        leaf = leaf.detach()  # mark an alias, not the tensor of the caller
    marked: Tensor = mark_buffer(leaf, persistent)
    return marked


def unwrap_parameter(leaf: Tensor) -> Tensor:
    """Return a plain tensor that shares the memory of a parameter and passes gradients to it."""
    if not leaf.requires_grad:
        return leaf.detach()
    with torch.enable_grad():
        return leaf.view_as(leaf)


def is_settled(leaf: Tensor) -> bool:
    """Return True if a leaf is already a parameter or a buffer."""
    # An uninitialized leaf of a lazy module must stay the same object, so that the module can materialize it.
    return is_parameter(leaf) or is_buffer(leaf) or is_lazy(leaf)


def is_registered(leaf: object) -> bool:
    """Return True for a parameter, or a tensor that requires grad and replaces a parameter."""
    return is_parameter(leaf) or (isinstance(leaf, Tensor) and leaf.requires_grad and not is_buffer(leaf))


def adopt(leaf: Tensor, held: Any = None, converts: bool = True) -> Tensor:
    """Convert a leaf to the parameter or buffer that a collection of parameters stores in place of ``held``."""
    # With ``converts``, a plain tensor takes the role of ``held``, and a new differentiable leaf becomes a parameter.
    if is_settled(leaf):
        return leaf
    if is_buffer(held) and (is_differentiable(held) or not converts):
        return as_buffer(leaf, held.persistent)
    if not converts and leaf.requires_grad and is_registered(held):
        return leaf  # the leaf replaces a parameter and keeps its autograd graph
    if not converts or not is_differentiable(leaf):
        return as_buffer(leaf)
    if leaf.grad_fn is not None:
        raise StructureError("a tensor with a grad_fn cannot become a parameter; detach() it first")
    trained = leaf.requires_grad or not is_parameter(held) or held.requires_grad
    return nn.Parameter(leaf.detach(), requires_grad=trained)


def role(leaf: Tensor) -> str:
    """Return the role of a leaf as a letter: p(arameter), f(rozen), b(uffer), n(on-persistent buffer) or -."""
    if is_parameter(leaf):
        return "p" if leaf.requires_grad else "f"
    if is_buffer(leaf):
        return "b" if leaf.persistent else "n"  # type: ignore[attr-defined]
    return "-"


def in_role(leaf: Tensor, letter: str) -> Tensor:
    """Convert a leaf to the role of a letter that :func:`role` returned."""
    if letter in "bn" and not is_buffer(leaf):
        return as_buffer(leaf, letter == "b")
    if letter in "pf" and not is_parameter(leaf):
        return nn.Parameter(leaf.detach(), requires_grad=letter == "p" and is_differentiable(leaf))
    return leaf
