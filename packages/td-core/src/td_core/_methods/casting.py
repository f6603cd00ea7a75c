"""The methods ``clone``, ``detach`` and ``new_*``, and those for gradients."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.casting import NewBatch, as_plain, iter_pairs, keep_ties, make_new
from .._functions.operands import raise_at_leaf
from .._torch.arrays import as_tensor
from .._torch.dtypes import as_dtype
from .._torch.private import get_base
from .._tree.backends import get_backends
from .._tree.defaults import get_data
from .._tree.devices import as_device, set_device_labels
from .._tree.gradients import pair_leaves
from .._tree.node import Core, copy_leaf
from .._tree.walks import has_entries, list_nested, walk
from .._writes.check import LEAF_ERRORS, describe_leaf, is_sealed
from ..typing import NO_DEFAULT, DeviceType, DtypeLike, NoDefault

_REQUIRES_GRAD = attrgetter("requires_grad")


class CastingMixin(Core):
    """The methods ``clone``, ``detach`` and ``new_*``, and those for gradients."""

    __slots__ = ()

    def clone(self, recurse: bool = True, **kwargs: Any) -> Self:
        """Return an unlocked copy.

        Args:
            recurse: also copy the leaves; False makes new nodes that hold the same leaves. In both cases, Python objects in
                non-tensor data are not copied; ``copy.deepcopy(td)`` copies them too.
            **kwargs: ``memory_format`` as in :meth:`torch.Tensor.clone`.

        >>> td = TensorDict({"a": torch.zeros(2)})
        >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
        (False, True)
        """
        if kwargs and recurse:
            return self._map(partial(copy_leaf, **kwargs))
        if kwargs:
            raise TypeError(f"clone(recurse=False) copies no leaf, so it takes no {', '.join(kwargs)}")
        if not recurse:
            return self._shallow_copy()
        for attachment in get_backends(self):
            copied = attachment.clone(self)
            if copied is not None:
                return copied
        try:
            return self._map(copy_leaf)
        except LEAF_ERRORS as error:
            raise_at_leaf(error, "clone", self, copy_leaf, self._leaves())

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
        return self._map(keep_ties(self, Tensor.detach))

    def detach_(self) -> Self:
        """Detach the leaves from the autograd graph, in place; return self.

        Raises:
            RuntimeError: a leaf is a view of another tensor; no leaf is detached.

        >>> TensorDict({"a": torch.zeros(2, requires_grad=True)}).detach_()["a"].requires_grad
        False
        """
        leaves = self._leaves()
        for leaf in leaves:
            if get_base(leaf) is not None:
                raise RuntimeError(
                    f"cannot detach {describe_leaf(self, leaf)} in place: it is a view; use detach()"
                )
        for leaf in leaves:
            leaf.detach_()
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
        return self._map(keep_ties(self, get_data))

    @data.setter
    def data(self, value: Core) -> None:
        for leaf, memory in iter_pairs(self, value, "data"):
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
        """Set ``requires_grad`` of every leaf, in place; return self.

        Raises:
            RuntimeError: a leaf cannot require gradients (integer dtype), or cannot stop requiring them (it is not a leaf of
                the autograd graph); no leaf is changed.

        >>> TensorDict({"a": torch.zeros(2)}).requires_grad_().requires_grad
        True
        """
        leaves = self._leaves()
        for leaf in leaves:
            if leaf.requires_grad == requires_grad:
                continue
            if not requires_grad:
                if not leaf.is_leaf:
                    raise RuntimeError(
                        f"cannot stop to record gradients: {describe_leaf(self, leaf)} was computed from what requires them; "
                        "detach() the collection"
                    )
            elif not (leaf.is_floating_point() or leaf.is_complex()):
                raise RuntimeError(
                    f"cannot require gradients: {describe_leaf(self, leaf)} has dtype {leaf.dtype}; only floating point "
                    "and complex leaves have gradients"
                )
            elif is_sealed(leaf):
                raise RuntimeError(
                    f"cannot require gradients: {describe_leaf(self, leaf)} was made under torch.inference_mode(); clone() the "
                    "collection first"
                )
        for node in walk(*list_nested(self)):
            if not has_entries(node):
                node.requires_grad_(requires_grad)
        for leaf in leaves:
            leaf.requires_grad_(requires_grad)
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
        if all(leaf.grad is None for leaf in self._leaves()):
            return None
        gradients: Self | None = self.apply(attrgetter("grad"), filter_empty=True)
        return gradients

    @grad.setter
    def grad(self, value: Core | None) -> None:
        if value is None:
            self.zero_grad()
            return
        for leaf, gradient in iter_pairs(self, value, "grad"):
            if leaf.grad is None:
                leaf.grad = gradient
            else:
                leaf.grad.detach_().copy_(gradient)

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Set the gradients of the leaves to None, or fill them with zeros; return self.

        >>> td = TensorDict({"a": torch.ones(2, requires_grad=True)})
        >>> td["a"].sum().backward()
        >>> td.zero_grad().grad is None
        True
        """
        for leaf in self._leaves():
            if leaf.grad is not None:
                if set_to_none:
                    leaf.grad = None
                else:
                    leaf.grad.detach_().zero_()
        return self

    def backward(
        self,
        gradient: Core | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
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
        if gradient is not None and not isinstance(gradient, Core):
            raise TypeError(f"backward: gradient is a collection; got {type(gradient).__name__}")
        leaves = list(filter(_REQUIRES_GRAD, self._leaves()))
        gradients: list[Any] = [None] * len(leaves)
        if not leaves:
            raise RuntimeError(f"backward: no leaf of this {type(self).__name__} requires gradients")
        if gradient is not None:
            pairs = pair_leaves(self, gradient, _REQUIRES_GRAD)
            leaves, gradients = [leaf for leaf, _ in pairs], [given for _, given in pairs]
        for leaf, given_gradient in zip(leaves, gradients, strict=True):
            if given_gradient is None and leaf.numel() != 1:
                raise RuntimeError(
                    f"backward: {describe_leaf(self, leaf)} has shape {list(leaf.shape)}, and only scalars have an implicit "
                    "gradient; give gradient=, a collection of the same structure"
                )
        if isinstance(inputs, Core):
            inputs = inputs._leaves()
        torch.autograd.backward(
            leaves, gradients, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )

    def as_tensor(self) -> Self:
        """Convert leaves of tensor subclasses, such as memory-mapped ones, to plain tensors on the same memory.

        Parameters and nested tensors are returned unchanged.

        >>> TensorDict({"a": torch.nn.Parameter(torch.zeros(2))}).as_tensor()["a"]
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
        """
        return self._map(as_plain)

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
        return make_new(self, size, "new_zeros", dtype, device, requires_grad, layout, pin_memory, empty_lazy)

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
        return make_new(self, size, "new_ones", dtype, device, requires_grad, layout, pin_memory, empty_lazy)

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
        return make_new(self, size, "new_empty", dtype, device, requires_grad, layout, pin_memory, empty_lazy)

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
        return make_new(
            self,
            (size,),
            "new_full",
            dtype,
            device,
            requires_grad,
            layout,
            pin_memory,
            empty_lazy,
            fill_value,
        )

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
        shape: Any
        references: list[Tensor] = []
        if isinstance(data, Core):
            shape = data
            data._flatten_other(self, references)
            values = data._leaves()
        else:
            source = as_tensor(data)
            shape = self._transform(NewBatch(self.batch_size, tuple(source.shape), lambda leaf, size: leaf))
            shape._flatten_leaves(references)
            values = [source] * len(references)
        if isinstance(device, NoDefault) or device is None:
            goal = self.device or (None if isinstance(data, Core) else source.device)
        else:
            goal = as_device(device)
        made = []
        for reference, value in zip(references, values, strict=True):
            leaf = value.detach().to(goal or reference.device, as_dtype(dtype) or reference.dtype, copy=True)
            leaf = leaf.pin_memory() if pin_memory else leaf
            # A detached leaf does not require gradients, and vmap forbids requires_grad_(False).
            made.append(leaf.requires_grad_() if requires_grad else leaf)
        result: Self = shape._unflatten(made)
        set_device_labels(result, goal)
        return result
