"""Stacks of parameters without a shape, as those of ``nn.LazyLinear``: the module that vmap first calls gives them one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from ..errors import StructureError
from ..typing import DeviceType
from .private import (
    add_batch_dim,
    exit_transforms,
    functorch_level,
    get_mapped_dim,
    pytree,
    unmap,
    without_torch_function,
)

#: All stacks that have no shape yet, so that to_module() under vmap can skip the search for them.
WITHOUT_SHAPE: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class _Stack:
    """Base of a parameter or buffer without a shape for each of several modules."""

    @classmethod
    def of(cls, count: int, like: Tensor) -> Any:
        """Build a stack of ``count`` tensors without a shape."""
        make: Any = cls
        result = make(like.requires_grad, like.device, like.dtype)
        result.data = torch.empty(count, 0, device=like.device, dtype=like.dtype)
        WITHOUT_SHAPE[id(result)] = result
        return result

    #: The dim of the modules.
    shape: Any = property(lambda self: self.size()[:1])

    def materialize(
        self, shape: Sequence[int], device: DeviceType | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Give each member a shape, and become a stack of tensors with this shape."""
        del WITHOUT_SHAPE[id(self)]
        base: Any = super()
        base.materialize((*self.shape, *shape), device, dtype)

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if func is Tensor.dim:  # torch.vmap reads it
            with without_torch_function():
                return func(*args)
        base: Any = super()
        return base.__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self: Any, memo: dict[int, object]) -> Any:
        return memo.setdefault(id(self), self.of(*self.shape, self))

    def __reduce_ex__(self: Any, protocol: object) -> tuple[object, ...]:
        return _make_again, (type(self), *self.shape, self.device, self.dtype, self.requires_grad)


class StackedParameter(_Stack, UninitializedParameter):
    """A parameter without a shape for each of several modules."""


class StackedBuffer(_Stack, UninitializedBuffer):
    """A buffer without a shape for each of several modules."""


def _make_again(
    cls: type[_Stack], count: int, device: torch.device | None, dtype: torch.dtype | None, requires_grad: bool
) -> object:
    return cls.of(count, torch.empty(0, device=device, dtype=dtype, requires_grad=requires_grad))


def stack_without_shapes(row: Sequence[Tensor], name: Callable[[], str]) -> Tensor | None:
    """Stack tensors without a shape. Return None if all have one; raise StructureError if only some do."""
    lazy = list(map(is_lazy, row))
    if not any(lazy):
        return None
    if not all(lazy):
        raise StructureError(
            f"cannot stack the modules: {name()} has no shape yet in some of them; call these once before"
        )
    cls = StackedParameter if isinstance(row[0], nn.Parameter) else StackedBuffer
    stacked: Tensor = cls.of(len(row), row[0])
    return stacked


class _Member:
    """Base of the members of a stack that torch.vmap maps over."""

    source: Any
    level: int

    def materialize(
        self, shape: Sequence[int], device: DeviceType | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Give all members of the stack a shape."""
        with exit_transforms([]):
            self.source.materialize(shape, device, dtype)
        self.__class__ = _MemberParameter if isinstance(self, nn.Parameter) else _MemberBuffer

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Any = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = args[0] if args else kwargs.get("tensor")
        leaves = pytree.tree_leaves((args, kwargs))
        mapped = any(
            isinstance(leaf, Tensor) and not isinstance(leaf, _Member) and get_mapped_dim(leaf) is not None
            for leaf in leaves
        )
        is_inplace = func.__name__.endswith("_") and not func.__name__.startswith("_")
        if not is_inplace or not isinstance(written, _Member) or mapped:
            return _call(func, args, kwargs, lambda member: add_batch_dim(member.source, 0, member.level))
        # Initialise each member by itself: vmap would draw the same numbers for all, or refuse to draw.
        with exit_transforms([]):
            for i in range(len(written.source)):
                _call(func, args, kwargs, partial(_take_row, i))
        return written


def _take_row(i: int, member: _Member) -> Any:
    return member.source.data[i]


def _call(
    func: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    take: Callable[[Any], Tensor],
) -> Any:
    args, kwargs = pytree.tree_map(
        lambda item: take(item) if isinstance(item, _Member) else item, (args, kwargs)
    )
    return func(*args, **kwargs)


class _MemberParameter(_Member, nn.Parameter):
    """A member of a stack that has a shape."""


class _MemberBuffer(_Member, Tensor):
    """A member of a stack of buffers that have a shape."""


class _LazyParameter(_Member, UninitializedParameter):
    """A member of a stack without a shape."""

    __torch_function__ = UninitializedParameter.__torch_function__


class _LazyBuffer(_Member, UninitializedBuffer):
    """A member of a stack of buffers without a shape."""

    __torch_function__ = UninitializedBuffer.__torch_function__


def take_member(leaf: Tensor) -> Any:
    """Return a member in place of a stack without a shape that torch.vmap maps over; any other leaf unchanged."""
    inner = unmap(leaf)
    if not isinstance(inner, _Stack):
        return leaf
    source = inner
    cls: Any = _LazyParameter if isinstance(source, nn.Parameter) else _LazyBuffer
    member = cls(source.requires_grad, source.device, source.dtype)
    member.source, member.level = source, functorch_level().level()
    return member
