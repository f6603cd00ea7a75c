"""The methods ``clone``, ``detach`` and ``new_*``, those for gradients, and the casts to one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.casting import (
    NewOptions,
    backpropagate,
    clear_gradients,
    clone_leaves,
    copy_data_like,
    detach_leaves,
    get_gradients,
    keep_ties,
    make_new_like,
    pair_with_given,
    set_gradients,
    set_requires_grad,
    view_as_plain,
)
from .._functions.dtypes import CASTS, CastFilter, cast_leaves, make_cast
from .._tree.defaults import get_data
from .._tree.node import Core
from .._tree.packed import keep_packed
from ..typing import NO_DEFAULT, DeviceType, DtypeLike, NoDefault


class CastingMixin(Core):
    """The methods ``clone``, ``detach`` and ``new_*``, and those for gradients."""

    __slots__ = ()

    def clone(self, recurse: bool = True, **kwargs: object) -> Self:
        """Return an unlocked copy.

        Args:
            recurse: also copy the leaves; False makes new nodes that hold the same leaves. In both cases, Python objects in
                non-tensor data are not copied; ``copy.deepcopy(td)`` copies them too.
            **kwargs: ``memory_format`` as in :meth:`torch.Tensor.clone`.

        >>> td = TensorDict({"a": torch.zeros(2)})
        >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
        (False, True)
        """
        if not recurse and not kwargs:
            return self._shallow_copy()
        return clone_leaves(self, recurse, kwargs)

    def copy(self) -> Self:
        """Return a new collection that holds the same leaves: ``clone(recurse=False)``.

        >>> td = TensorDict({"a": torch.zeros(2)})
        >>> td.copy()["a"] is td["a"]
        True
        """
        return self.clone(recurse=False)

    def detach(self) -> Self:
        """Return a collection of the leaves detached from the autograd graph; it shares their memory.

        >>> TensorDict({"a": torch.zeros(2, requires_grad=True)}).detach()["a"].requires_grad
        False
        """
        return keep_packed(self, self._map(keep_ties(self, Tensor.detach)), Tensor.detach)

    def detach_(self) -> Self:
        """Detach the leaves from the autograd graph, in place; return self.

        Raises:
            RuntimeError: a leaf is a view of another tensor; no leaf is detached.

        >>> TensorDict({"a": torch.zeros(2, requires_grad=True)}).detach_()["a"].requires_grad
        False
        """
        detach_leaves(self)
        return self

    @property
    def data(self) -> Self:
        """Collection of ``leaf.data``: the same memory, without gradients.

        Assigning a collection of the same structure and shapes sets ``leaf.data`` of every leaf.

        >>> td = TensorDict({"a": torch.zeros(2, requires_grad=True)})
        >>> td.data["a"].requires_grad
        False
        >>> td.data = TensorDict({"a": torch.ones(2)})
        >>> td["a"]
        tensor([1., 1.], requires_grad=True)
        """
        return keep_packed(self, self._map(keep_ties(self, get_data)), get_data)

    @data.setter
    def data(self, value: Core) -> None:
        for leaf, memory in pair_with_given(self, value, "data"):
            leaf.data = memory.data

    @property
    def requires_grad(self) -> bool:
        """True if any leaf requires gradients.

        >>> TensorDict({"a": torch.zeros(2, requires_grad=True)}).requires_grad
        True
        """
        return any(leaf.requires_grad for leaf in self._leaves())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of every leaf, in place; return self. As in a module, a :class:`Buffer` gets no gradients.

        Raises:
            RuntimeError: a leaf cannot require gradients (integer dtype), or cannot stop requiring them (it is not a leaf of
                the autograd graph); no leaf is changed.

        >>> TensorDict({"a": torch.zeros(2)}).requires_grad_().requires_grad
        True
        """
        set_requires_grad(self, requires_grad)
        return self

    @property
    def grad(self) -> Self | None:
        """Collection of the gradients of the leaves that have one, or None if no leaf has one.

        Assigning a collection copies its leaves into existing gradients and sets the missing ones; None removes all.

        >>> td = TensorDict({"a": torch.ones(2, requires_grad=True)})
        >>> td["a"].sum().backward()
        >>> td.grad["a"]
        tensor([1., 1.])
        >>> td.grad = td.grad * 2
        >>> td["a"].grad
        tensor([2., 2.])
        """
        return get_gradients(self)

    @grad.setter
    def grad(self, value: Core | None) -> None:
        if value is None:
            self.zero_grad()
        else:
            set_gradients(self, value)

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Set the gradients of the leaves to None, or fill them with zeros; return self.

        >>> td = TensorDict({"a": torch.ones(2, requires_grad=True)})
        >>> td["a"].sum().backward()
        >>> td.zero_grad().grad is None
        True
        """
        clear_gradients(self, set_to_none)
        return self

    def backward(
        self,
        gradient: Core | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Core | Sequence[Tensor] | None = None,
    ) -> None:
        """Backpropagate from all leaves that require gradients, in one pass.

        Args:
            gradient: gradients of the leaves that require gradients, a collection of the same structure; other leaves need
                none. It may be None only if the leaves are scalars.
            retain_graph: keep the graph for another pass.
            create_graph: make the gradients differentiable.
            inputs: a collection or sequence of tensors that accumulate gradients; None: all leaves of the autograd graph.

        Raises:
            RuntimeError: no leaf requires gradients, or one is not a scalar and ``gradient`` is None.
            TypeError: ``gradient`` is not a collection.
            KeyMismatchError: ``gradient`` has no entry for a leaf that requires gradients.

        >>> x = torch.ones((), requires_grad=True)
        >>> TensorDict({"a": x * 2, "b": x * 3}).backward()
        >>> x.grad
        tensor(5.)
        """
        backpropagate(self, gradient, retain_graph, create_graph, inputs)

    def as_tensor(self) -> Self:
        """Convert leaves of tensor subclasses, such as memory-mapped ones, to plain tensors on the same memory.

        Parameters and nested tensors are returned unchanged.

        >>> TensorDict({"a": torch.nn.Parameter(torch.zeros(2))}).as_tensor()["a"]
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
        """
        return self._map(view_as_plain)

    def new_zeros(
        self,
        *size: object,
        dtype: DtypeLike | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a collection of the same structure with another batch size, filled with zeros.

        Non-tensor data with one value for the whole batch keeps it. One value per element becomes None, unless the batch size
        is the old one. The tensor of an ``UnbatchedTensor`` keeps its shape.

        Args:
            *size: the batch size.
            dtype: dtype of every leaf; by default that of the old leaf.
            device: device of every leaf; by default that of the old leaf.
            requires_grad: True if the new leaves require gradients.
            layout: memory layout of the new leaves.
            pin_memory: True to allocate the new leaves in pinned memory.
            empty_lazy: replace each lazy stack, the root or below it, by a lazy stack of members without leaves.

        >>> TensorDict({"a": torch.ones(2, 3)}, batch_size=[2]).new_zeros(4)["a"].shape
        torch.Size([4, 3])
        """
        options = NewOptions(dtype, device, requires_grad, layout, pin_memory, empty_lazy)
        return make_new_like(self, size, "new_zeros", options)

    def new_ones(
        self,
        *size: object,
        dtype: DtypeLike | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a collection of the same structure with another batch size, filled with ones; see :meth:`new_zeros`.

        >>> TensorDict({"a": torch.zeros(2)}, batch_size=[2]).new_ones(3)["a"]
        tensor([1., 1., 1.])
        """
        options = NewOptions(dtype, device, requires_grad, layout, pin_memory, empty_lazy)
        return make_new_like(self, size, "new_ones", options)

    def new_empty(
        self,
        *size: object,
        dtype: DtypeLike | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a collection of the same structure with another batch size, uninitialised; see :meth:`new_zeros`.

        >>> TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2]).new_empty(0)["a"]
        tensor([], size=(0, 3))
        """
        options = NewOptions(dtype, device, requires_grad, layout, pin_memory, empty_lazy)
        return make_new_like(self, size, "new_empty", options)

    def new_full(
        self,
        size: object,
        fill_value: object,
        *,
        dtype: DtypeLike | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        layout: torch.layout = torch.strided,
        pin_memory: bool | None = None,
        empty_lazy: bool = False,
    ) -> Self:
        """Create a collection of the same structure with another batch size, filled with ``fill_value``.

        The other arguments are those of :meth:`new_zeros`.

        >>> TensorDict({"a": torch.zeros(2)}, batch_size=[2]).new_full((3,), 7)["a"]
        tensor([7., 7., 7.])
        """
        options = NewOptions(dtype, device, requires_grad, layout, pin_memory, empty_lazy)
        return make_new_like(self, (size,), "new_full", options, fill_value)

    def new_tensor(
        self,
        data: object,
        *,
        dtype: DtypeLike | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool | None = None,
    ) -> Self:
        """Create a collection of the same structure from copies of ``data``, cast to the dtypes of the leaves.

        Args:
            data: a tensor, array or sequence, copied to every leaf; its shape becomes the batch size. Or a collection of
                the same structure, each leaf of which is copied.
            dtype: dtype of every leaf; by default that of the old leaf.
            device: device of every leaf; by default that of the old leaf.
            requires_grad: True if the new leaves require gradients.
            pin_memory: True to allocate the new leaves in pinned memory.

        >>> TensorDict({"a": torch.zeros(2, dtype=torch.int64)}).new_tensor([1.0, 2.0])["a"]
        tensor([1, 2])
        """
        result: Self = copy_data_like(self, data, dtype, device, requires_grad, pin_memory)
        return result


class DtypeMixin(Core):
    """The method ``type`` and the casts to one dtype, such as ``float()`` and ``int64()``."""

    __slots__ = ()

    # Begin of casts: written by tools/generate_methods.py from the table in td_core/_torch/dtypes.py.
    bfloat16 = make_cast("bfloat16")
    bool = make_cast("bool")
    complex128 = make_cast("complex128")
    complex32 = make_cast("complex32")
    complex64 = make_cast("complex64")
    double = make_cast("double")
    float = make_cast("float")
    float16 = make_cast("float16")
    float32 = make_cast("float32")
    float64 = make_cast("float64")
    half = make_cast("half")
    int = make_cast("int")
    int16 = make_cast("int16")
    int32 = make_cast("int32")
    int64 = make_cast("int64")
    int8 = make_cast("int8")
    qint32 = make_cast("qint32")
    qint8 = make_cast("qint8")
    quint4x2 = make_cast("quint4x2")
    quint8 = make_cast("quint8")
    uint16 = make_cast("uint16")
    uint32 = make_cast("uint32")
    uint64 = make_cast("uint64")
    uint8 = make_cast("uint8")
    # End of casts.

    def type(self, dst_type: Any, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast the leaves to a dtype.

        Args:
            dst_type: a dtype, or another argument that :meth:`torch.Tensor.type` accepts.
            cast_filter: takes the key path (a tuple) and the leaf; if it returns False, the leaf is not cast.

        >>> TensorDict({"a": torch.zeros(2)}).type(torch.int8)["a"].dtype
        torch.int8
        """
        leaf = CASTS.get(dst_type) or methodcaller("type", dst_type)
        return cast_leaves(self, "type", leaf, cast_filter)
