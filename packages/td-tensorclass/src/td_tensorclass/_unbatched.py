"""UnbatchedTensor: one tensor for the whole batch, which shape operations do not change.

A collection stores it as a node with one leaf: pointwise operations and moves apply to the leaf, and a shape operation
changes only the batch size of the node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from td_core import TensorCollection
from td_core.errors import StructureError
from td_core.spi import (
    LEAF_KINDS,
    PLAIN,
    LazyFunction,
    MultiPlan,
    Node,
    PrintedNode,
    ShapePlan,
    as_batch_size,
    as_tensor,
    is_same_value,
    is_stored,
    is_traced,
    new_object,
    set_module,
    without_torch_function,
)
from td_core.typing import NO_DEFAULT, BatchSize, Names, NoDefault

from ._static_values import register_static
from ._value_nodes import ValueNode, kind_mismatch_error

if TYPE_CHECKING:
    from typing_extensions import Self

#: Programs without stored tensors do not import their class.
_convert_stored = LazyFunction(__package__, "._stored_unbatched", "convert_stored")


# A state dict contains the tensor itself, so torch.load(weights_only=True) must accept the class.
@set_module("td_tensorclass", in_files=True)
class UnbatchedTensor(Tensor):
    """A tensor that all elements of a batch share.

    Its shape does not start with the batch size of its collection, and indexing, reshaping, stacking and other shape
    operations do not change it. Pointwise operations, casts and moves apply to it as to any leaf. So does autograd: if
    it requires grad, the entry is the tensor that accumulates ``grad``.

    Args:
        data: the tensor, whose memory is shared, or a value that ``torch.as_tensor`` can convert.
        batch_size: batch size that it applies to; a collection sets its own.

    >>> td = TensorDict({"scale": UnbatchedTensor([1.0, 2.0, 3.0]), "x": torch.zeros(4)}, batch_size=[4])
    >>> td[0]["scale"].tolist(), td[0]["scale"].batch_size, td.view(2, 2)["scale"].batch_size
    ([1.0, 2.0, 3.0], torch.Size([]), torch.Size([2, 2]))
    """

    _size: torch.Size

    @staticmethod
    def __new__(cls: Any, data: object, *, batch_size: BatchSize | None = None) -> Any:
        """Convert ``data`` to this class, sharing its memory and its autograd history."""
        source = data if isinstance(data, Tensor) else as_tensor(data)
        if not source.requires_grad and type(source) in PLAIN and not torch.compiler.is_compiling():
            result: Any = source.detach()
            result.__class__ = cls  # change the class instead of taking a view: detach_() fails on views
        else:
            with torch.enable_grad():
                result = source.as_subclass(cls)
            if source.requires_grad and source.is_leaf and not is_traced():
                result.retain_grad()  # keep grad as a leaf does, so that an optimizer accepts the tensor
        result._size = as_batch_size(batch_size)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply a torch function as to any subclass."""
        with (
            without_torch_function()
        ):  # the method of Tensor leaves modes on, with which torch.compile recurs
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    # Tensor.__init__ does not accept batch_size; torch.compile calls this method without arguments.
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    @property
    def batch_size(self) -> torch.Size:
        """The batch size that the tensor applies to; settable.

        >>> UnbatchedTensor(torch.zeros(3)).batch_size
        torch.Size([])
        """
        return getattr(self, "_size", torch.Size())

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        self._size = as_batch_size(batch_size)

    # torch formats the element of a tensor without dims only if its class is exactly Tensor. StoredTensor has this method, too,
    # but to import its module takes time, and makes each index look for stored leaves.
    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.ndim == 0 else object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # torch loads a subclass as a view, which is not a leaf if it requires grad, so set requires_grad afterwards.
        state = {**vars(self), "requires_grad": self.requires_grad}
        return type(self), (_plain(self.detach()),), state

    def __setstate__(self, state: dict[str, object]) -> None:
        requires_grad = state.pop("requires_grad", False)
        vars(self).update(state)
        if requires_grad:
            self.requires_grad_()

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        # Tensor.__deepcopy__ uses new_empty(), which returns a plain tensor for this class.
        plain = copy.deepcopy(_plain(self.detach() if self.is_leaf else self), memo)
        copied = type(self)(plain).requires_grad_(self.requires_grad)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied


class UnbatchedNode(ValueNode, TensorCollection):
    """Node that a collection stores for an :class:`UnbatchedTensor`."""

    __slots__ = ("_kept", "_shown")

    #: The tensor that operations read: a plain one, so that they can be fused, until it requires grad.
    _kept: Tensor
    #: The UnbatchedTensor that reading the entry returns, with the same memory; None until the first read.
    _shown: Any

    def __init__(self, payload: Tensor, batch_size: torch.Size, device: torch.device | None = None) -> None:
        LEAF_KINDS.add(type(self))
        self._kept = payload
        self._shown = None
        self._start(batch_size, device)

    @property
    def _payload(self) -> Tensor:
        # If a caller called requires_grad_() on the tensor that it read, autograd tracks that object, so use it.
        shown = self._shown
        if shown is not None and shown.requires_grad:
            self._kept = shown
        return self._kept

    def _with(self, payload: Tensor, batch_size: torch.Size | None = None) -> Self:
        """Build a node with another payload, or with the same payload and another batch size."""
        node = new_object(type(self))
        size = self._batch_size if batch_size is None else batch_size
        shown = None
        if payload is self._kept:
            if size == self._batch_size:
                shown = self._shown
            elif payload.requires_grad and not torch.compiler.is_compiling():
                payload = payload.as_subclass(Tensor)  # each node gets a separate view, as for any leaf
        elif isinstance(payload, UnbatchedTensor) and not _is_own(payload):
            payload = _plain(payload)
        UnbatchedNode.__init__(node, payload, size, self._device)
        node._shown = shown
        return node

    def _set_names(self, names: Names | None) -> None:
        """Ignore names: the tensor has no batch dims that they could refer to."""

    def _take_over(self, result: Any) -> list[Any] | None:
        below = super()._take_over(result)
        if below is not None:
            self._kept, self._shown = result._kept, result._shown
        return below

    def _with_children(
        self,
        children: Mapping[str, object],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        node = self._with(self._payload, batch_size)
        if device is not NO_DEFAULT:
            node._device = device
        return node

    def _set_child(self, key: str, value: object) -> None:
        # Formats store the tensor under the key "data", and replace it by a loaded one.
        if key != "data" or not isinstance(value, Tensor):
            super()._set_child(key, value)
        else:
            self._kept, self._shown = value, None

    def _unwrap(self) -> Any:
        payload = self._payload
        shown = self._shown
        if shown is None or (shown is not payload and not _is_alias(shown, payload)):
            self._shown = shown = _show(payload)
        shown._size = self._batch_size
        return shown

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the tensor, as an object that reading the entry returns."""
        if type(self._payload) in PLAIN and not is_traced():
            self._kept = self._unwrap()
        return super().requires_grad_(requires_grad)

    def _flatten_leaves(self, out: list[Tensor]) -> list[object]:
        out.append(self._payload)
        return []

    def _flatten_other(self, other: Node, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        out.append(self._get_counterpart(other, path)._payload)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        mapped = fn(self._payload)
        # A function that writes in place may return None.
        return self._with(self._payload if mapped is None else mapped)

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        if value.numel() != 1:
            raise StructureError(
                f"a value of shape {list(value.shape)} has one number for each element of the batch, and an "
                "UnbatchedTensor is the same for all of them"
            )
        out.append(value.reshape(()))

    def _transform(self, plan: ShapePlan) -> Self:
        payload = self._payload
        return self._with(plan.apply_unbatched(payload), plan.resize_batch(self._batch_size))

    def _transform_multi(self, plan: MultiPlan) -> tuple[Self, ...]:
        tail = self._batch_size[plan.n :]
        return tuple([self._with(self._payload, torch.Size(lead + tail)) for lead in plan.leads])

    def _join(self, items: Sequence[Node], plan: ShapePlan, path: tuple[str, ...] = ()) -> Self:
        for i, item in enumerate(items):
            if not self._get_counterpart(item, path)._is_same(self):
                raise StructureError(
                    f"cannot join: the UnbatchedTensor at key {path or '()'} differs between items 0 and {i}, and one "
                    "tensor stands for the whole batch; set it again as a plain tensor with the dims of the batch"
                )
        return self._with(self._payload, plan.resize_batch(self._batch_size))

    def _check_index_put(self, index: object, value: object) -> None:
        if isinstance(value, UnbatchedNode):
            if value._is_same(self) or (type(index) is tuple and not index):
                return
        raise StructureError(
            "an UnbatchedTensor is the same for the whole batch: it is written whole, with another UnbatchedTensor"
        )

    def _index_put(self, index: object, value: Any, *, non_blocking: bool = False) -> Node:
        if isinstance(value, UnbatchedTensor):
            value = to_unbatched(value, value.batch_size, None)
        self._check_index_put(index, value)
        if not value._is_same(self):
            self._payload.copy_(value._payload)
        return self

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
        self._index_put(index, value)

    def _is_same(self, other: UnbatchedNode) -> bool:
        left, right = self._payload, other._payload
        if left is right:
            return True
        # The elements of a stored tensor are compared in memory.
        left, right = (payload.clone() if is_stored(payload) else payload for payload in (left, right))
        return is_same_value(_plain(left), _plain(right))

    def _compare(self, other: object, single: Callable[..., Any]) -> Self:
        return self._with(single(self._payload, self._get_counterpart(other)._payload))

    def _get_counterpart(self, other: object, path: tuple[str, ...] = ()) -> UnbatchedNode:
        """Return the matching node of another collection; raise StructureError if it is of another kind."""
        if not isinstance(other, UnbatchedNode):
            raise kind_mismatch_error(self, other, path)
        return other

    def _print_node(self) -> PrintedNode:
        return TensorCollection._print_node(self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={self._payload.shape}, dtype={self._payload.dtype}, "
            f"batch_size=torch.Size({list(self._batch_size)}))"
        )


def _is_alias(shown: Tensor, payload: Tensor) -> bool:
    """Return True if a tensor that was read still has the memory of the payload, as it has not after ``payload.data = ...``."""
    if is_stored(payload):
        return is_stored(shown)
    return not is_traced() and shown.data_ptr() == payload.data_ptr() and shown.shape == payload.shape


def _show(payload: Tensor) -> object:
    """Convert a payload to an UnbatchedTensor: the same object if autograd or a module refers to it, else an alias."""
    if type(payload) is UnbatchedTensor:
        return payload
    if is_stored(payload):
        return _convert_stored(payload, unbatched=True)
    if type(payload) not in PLAIN or torch.compiler.is_compiling():
        return payload.as_subclass(UnbatchedTensor)
    known = payload.requires_grad or type(payload) is nn.Parameter or payload.__dict__
    shown = payload if known else payload.detach()
    is_parameter = isinstance(payload, nn.Parameter)
    shown.__class__ = UnbatchedTensor
    if is_parameter:
        shown._is_param = True  # torch recognises Parameters of other classes by this attribute
    return shown


def _is_own(tensor: Tensor) -> bool:
    """Return True if the tensor object must be kept: a leaf that requires grad, or a parameter."""
    return (tensor.requires_grad and tensor.is_leaf) or isinstance(tensor, nn.Parameter)


def _plain(tensor: Tensor) -> Tensor:
    """Convert an UnbatchedTensor to a plain tensor with the same memory, a stored one to a StoredTensor."""
    if is_stored(tensor):
        stored: Tensor = _convert_stored(tensor, unbatched=False)
        return stored
    if not torch.compiler.is_compiling():
        return tensor.as_subclass(Tensor)
    # torch.compile cannot trace as_subclass(Tensor), but an operation without __torch_function__ gives a plain tensor.
    with without_torch_function():
        return tensor.view(tensor.shape)


def to_unbatched(value: Any, batch_size: torch.Size, device: torch.device | None) -> UnbatchedNode:
    """Convert an :class:`UnbatchedTensor` to the node that a collection stores."""
    if torch.compiler.is_compiling():
        payload = _plain(value)
        return UnbatchedNode(payload if device is None else payload.to(device), batch_size, device)
    payload = value if value.requires_grad else _plain(value).detach()
    node = UnbatchedNode(payload if device is None else payload.to(device), batch_size, device)
    if node._kept is payload and value.batch_size in (batch_size, torch.Size()):
        # Readers receive the same object, unless its batch size differs: reading sets that of the shown tensor.
        node._shown = value
    return node


# Register the tensor as static: as a pytree child, vmap would map over one of its dims, none of which is a batch dim.
register_static(UnbatchedNode, ("_payload", "_batch_size", "_device"), UnbatchedNode)
