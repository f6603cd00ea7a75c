"""NonTensorData: one Python value for a whole batch, as a node without tensors.

It has no leaves, so pointwise operations leave it unchanged, and shape operations change only its batch size. Joining
different values gives a :mod:`._non_tensor_stack`, with one value per batch element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from td_core import LinkedList, TensorCollection, default_is_leaf
from td_core.errors import KeyPathError, StructureError
from td_core.spi import (
    RULES,
    MultiPlan,
    Node,
    PrintedNode,
    ShapePlan,
    as_batch_size,
    as_device,
    check_unlocked,
    is_same_value,
    new_object,
)
from td_core.typing import BatchSize, DeviceType, Names

from ._static_values import register_data
from ._value_nodes import NonTensorNode, ValueNode, nest_values, take_values
from ._value_settings import capture_non_tensor_stack

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass
class _Fields:
    data: Any
    _metadata: dict[str, Any] | None = None
    _is_non_tensor: bool = True


class NonTensorDataBase(NonTensorNode, TensorCollection):
    """Base of the nodes that hold one Python value for a whole batch.

    Args:
        data: the value; if it is a node of this kind, the value of that node.
        batch_size: batch size that the value applies to.
        device: a label only, a value has no device.
        names: a name or None per batch dim.

    >>> issubclass(NonTensorData, NonTensorDataBase)
    True
    """

    __slots__ = ("_metadata",)

    _joints = None
    _hidden = ()
    _is_non_tensor: ClassVar[bool] = True

    _metadata: dict[str, Any] | None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_data(cls)

    def __init__(
        self,
        data: object,
        _metadata: dict[str, Any] | None = None,
        _is_non_tensor: bool = True,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        if not _is_non_tensor:
            raise ValueError("non-tensor data is always non-tensor: _is_non_tensor=False has no meaning")
        if isinstance(data, NonTensorDataBase):
            data = data._value
        elif isinstance(data, ValueNode):
            raise TypeError(
                f"{type(self).__name__} holds one value for the whole batch, and a {type(data).__name__} has "
                "one for each element already; set it as it is"
            )
        self._store_new([data])
        self._metadata = _metadata
        self._start(as_batch_size(batch_size), None if device is None else as_device(device))
        if names is not None:
            self.names = names

    @classmethod
    def from_tensordict(
        cls,
        tensordict: TensorCollection,
        non_tensordict: Mapping[str, Any] | None = None,
        safe: bool | None = None,
    ) -> Self:
        """Build a node with the batch size, device and names of a collection.

        Args:
            tensordict: collection without entries.
            non_tensordict: mapping with the value under ``"data"``.
            safe: False skips the check that ``tensordict`` has no entries.

        Raises:
            StructureError: the collection has entries.

        >>> NonTensorData.from_tensordict(TensorDict({}, batch_size=[2]), {"data": "a"}).tolist()
        ['a', 'a']
        """
        if safe is not False and tensordict._children():
            raise StructureError(f"a {cls.__name__} has no entries; got {list(tensordict._children())}")
        provided = dict(non_tensordict or {})
        node = cls(
            provided.pop("data", None), **provided, batch_size=tensordict.batch_size, device=tensordict.device
        )
        node._names = tensordict._names
        return node

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields of the class, as :func:`dataclasses.fields` does.

        >>> [field.name for field in NonTensorData.fields()]
        ['data', '_metadata', '_is_non_tensor']
        """
        return dataclasses.fields(_Fields)

    def extend(self, tensordict: object) -> None:
        """Raise StructureError: one value for the whole batch has no elements to extend.

        >>> NonTensorData("a").extend(["b"])
        Traceback (most recent call last):
        td_core.errors.StructureError: a NonTensorData holds one value for the whole batch, to which ['b'] cannot
        be added; call maybe_to_stack() first
        """
        raise StructureError(
            f"a {type(self).__name__} holds one value for the whole batch, to which {tensordict!r} cannot be added; "
            "call maybe_to_stack() first"
        )

    def _copy_with(self, batch_size: torch.Size, device: torch.device | None, names: Names | None) -> Self:
        """Build a node with the same value and another batch size, device and names."""
        node = new_object(type(self))
        node._store_new([self._value])
        node._metadata = self._metadata
        node._start(batch_size, device, names)
        return node

    @classmethod
    def _of_stack(cls, stack: NonTensorNode, places: Sequence[int]) -> list[Self]:
        """Build one node per position in ``places``, each a view of the value of a stack at that position."""
        size, device, cells = torch.Size(), stack._device, stack._cells
        root = stack if stack._root is None else stack._root
        if stack._places is not None:
            places = take_values(stack._places, places)
        nodes: list[Self] = []
        for place in places:
            # Hot path: set the slots as _show() and _start() do, without a call per element.
            node = new_object(cls)
            node._cells, node._places, node._root = cells, (place,), root
            node._batch_size, node._device, node._locked = size, device, False
            node._metadata = node._names = node._lock_parents = node._backends = node._undo = None
            nodes.append(node)
        return nodes

    @property
    def data(self) -> Any:
        """The value for the whole batch; settable.

        >>> NonTensorData("a", batch_size=[3]).data
        'a'
        """
        return self._value

    @data.setter
    def data(self, value: object) -> None:
        check_unlocked(self, "replace the value")
        self._replace_value(value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the value, so that ``td.apply(lambda leaf, fn: fn(leaf), functions)`` works on a collection of functions.

        >>> NonTensorData(str.upper)("a")
        'A'
        """
        return self.data(*args, **kwargs)

    def _unwrap(self) -> Any:
        return self._value

    def _as_value(self, value: object) -> object:
        return type(self)(value) if type(value) is type(self._value) else value

    def _copy_node(self) -> Self:
        return self._copy_with(self._batch_size, self._device, self._names)

    def _get_varying_dims(self) -> tuple[int, ...]:
        return ()

    def _shallow_copy(self) -> Self:
        node = self._copy_with(self._batch_size, self._device, self._names)
        node._show(self, range(len(self._places or (0,))))
        return node

    def _shown_stack(self) -> Any:
        """Return a NonTensorStack, a view of the elements that this node shows as one value; None if it shows fewer than two."""
        if self._places is None or len(self._places) < 2:
            return None
        stack = self._stack._of([], self._batch_size, self._device, self._names)
        stack._show(self, range(len(self._places)))
        stack._joints = (), None
        return stack

    def _transform(self, plan: ShapePlan) -> Self:
        stack = self._shown_stack()
        if stack is not None and plan.is_view and plan.resize_batch(self._batch_size).numel():
            return stack._transform(plan)  # type: ignore[no-any-return]
        node = self._copy_with(
            plan.resize_batch(self._batch_size), self._device, plan.rename_dims(self._names)
        )
        root = self if self._root is None else self._root
        # A view shares the stored value of a stack or of a node without batch dims. A part of a batch gets a separate
        # copy, because a write to it must not change the whole batch.
        if plan.is_view:
            if not root._batch_size or type(root) is not type(self):
                node._show(self, (0,))
            else:
                node._stay_part_of(self)
        # Programs of tensordict read a list where unsqueeze() or expand() gives the first dims to one value.
        if plan.repeats and RULES.follows_tensordict and not self._batch_size and node._batch_size:
            return node.maybe_to_stack()  # type: ignore[no-any-return]
        return node

    def _transform_multi(self, plan: MultiPlan) -> tuple[Self, ...]:
        stack = self._shown_stack()
        if stack is not None and plan.is_view:
            return tuple(stack._transform_multi(plan))
        tail = self._batch_size[plan.n :]
        names = plan.rename_dims(self._names)
        parts = tuple(self._copy_with(torch.Size(lead + tail), self._device, names) for lead in plan.leads)
        if self._cells[2] is not None and plan.is_view:
            for part in parts:
                part._stay_part_of(self)
        return parts

    def _stay_part_of(self, other: NonTensorDataBase) -> None:
        """Mark this node as a part of ``other``, whose value a sibling package may store for the whole batch."""
        keeper = other._cells[2]
        if keeper is not None:
            self._cells[2] = keeper.of_part()

    def _expand_values(self, size: torch.Size) -> list[object]:
        return [self._value] * size.numel()

    def maybe_to_stack(self) -> Any:
        """Convert to a :class:`NonTensorStack` with one value per batch element; without batch dims, return the node.

        >>> NonTensorData("a", batch_size=[2]).maybe_to_stack().tolist()
        ['a', 'a']
        """
        return self._expand_value() if self._batch_size else self

    def _expand_value(self) -> Any:
        return self._stack.from_nontensordata(self)

    def _check_index_put(self, index: object, value: object) -> None:
        keeper = self._cells[2]
        if keeper is None or (
            isinstance(value, NonTensorDataBase) and is_same_value(value._value, self._value)
        ):
            return
        super()._check_index_put(index, value)
        whole = type(index) is tuple and not index and isinstance(value, NonTensorDataBase)
        if isinstance(self._root, NonTensorDataBase) and not whole and self._batch_size.numel() != 1:
            keeper.of_part().check(self, ())

    def _index_put(self, index: object, value: object, *, non_blocking: bool = False) -> Any:
        if isinstance(value, NonTensorDataBase) and is_same_value(value._value, self._value):
            return self
        if type(index) is tuple and not index:
            if isinstance(value, NonTensorDataBase):
                return self._replace_value(value._value)
            # Writing a stack whose elements all equal this value is a no-op.
            if self._is_value_of_all(value):
                return self
        self._check_index_put(index, value)
        keeper, shown = self._cells[2], self._shown_stack()
        stack = self._expand_value() if shown is None else shown
        if shown is None and self._root is not None and self._batch_size.numel() == 1:
            # This view shows one element: write that element, and keep a node with one value.
            stack._assign(index, value)
            return self._replace_value(stack._values[0])
        # The stack replaces this node in its collection, so it takes over the lock and the storage backends.
        stack._locked, stack._lock_parents = self._locked, self._lock_parents
        stack._backends = self._backends
        if keeper is not None and shown is None:
            stack._keeper = keeper.of_each()
        stack._assign(index, value)
        return stack

    def _is_value_of_all(self, stack: object) -> bool:
        """Return True if each element of a stack of the same batch size has the value of this node."""
        size = self._batch_size
        if not isinstance(stack, self._stack) or stack.batch_size != size:
            return False
        return all(is_same_value(item, self._value) for item in stack._expand_values(size))

    def _replace_value(self, value: object) -> Self:
        """Write another value to this node, to its views, and to the storage of the package that saved it."""
        places = self._places or (0,)
        self._owner()._store(self._cells, places, [value] * len(places))
        return self

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
        raise StructureError(
            f"a {type(self).__name__} holds one value for the whole batch, so {index!r} alone cannot be set; call "
            "maybe_to_stack() for one value each"
        )

    def _take(self, source: object) -> None:
        if isinstance(source, Mapping) and set(source.keys()) == {"data"}:
            source = NonTensorData(source["data"])
        if not isinstance(source, NonTensorDataBase):
            raise StructureError(
                f"a {type(self).__name__} takes the value of another one, not of a {type(source).__name__}"
            )
        self._replace_value(source._value)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value if the key is ``"data"``, else the default: the node has no entries.

        >>> NonTensorData("a").get("data")
        'a'
        """
        return self._value if key == "data" else super().get(key, *args, **kwargs)

    def _set_path(
        self, key: object, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        if key != "data":
            raise KeyPathError(f"a {type(self).__name__} has no entries but its value, 'data'; got {key!r}")
        self.data = value

    def _to_nested_lists(self, linked: bool) -> object:
        size = self._batch_size
        return nest_values(self._expand_values(size), size, partial(LinkedList, td=self) if linked else list)

    def _print_node(self) -> PrintedNode:
        return super()._print_node()._replace(text=type(self._value).__name__)

    def __repr__(self) -> str:
        value = str(self._value)
        if len(value) > 200:
            value = f"{value[:20]}  ...  {value[-20:]}"
        return (
            f"{type(self).__name__}(data={value}, batch_size=torch.Size({list(self._batch_size)}), "
            f"device={self._device})"
        )


register_data(NonTensorDataBase)


class NonTensorData(NonTensorDataBase):
    """One Python value for a whole batch; stacking several gives one value per element.

    Args:
        data: the value, of any type; if it is a node of this kind, the value of that node.
        batch_size: batch size that the value applies to.
        device: a label only, a value has no device.
        names: a name or None per batch dim.

    >>> td = TensorDict({"name": "run 1"}, batch_size=[3])
    >>> td[0]["name"], td.get("name")
    ('run 1', NonTensorData(data=run 1, batch_size=torch.Size([3]), device=None))
    >>> torch.stack([td[0], td[1]])["name"]
    LinkedList(['run 1', 'run 1'])
    """

    __slots__ = ()

    def _is_single_after_join(self, items: Sequence[Node], stacks: bool) -> bool:
        # Concatenating equal values keeps one value; stacking them does so only if set_capture_non_tensor_stack(True).
        if stacks and not capture_non_tensor_stack():
            return False
        return all(type(item) is type(self) and is_same_value(item._value, self._value) for item in items)


def is_non_tensor(data: object) -> bool:
    """Return True if ``data`` is a node of non-tensor data: NonTensorData, NonTensorStack or MetaData.

    >>> from td_tensorclass import NonTensorData
    >>> is_non_tensor(NonTensorData("a")), is_non_tensor("a")
    (True, False)
    """
    return isinstance(data, NonTensorNode)


def is_leaf_nontensor(cls: type) -> bool:
    """Return True if ``cls`` is a class of leaves or of non-tensor data; pass this function as ``is_leaf=`` to ``keys``.

    >>> td = TensorDict({"a": "x", "b": {"c": 1}})
    >>> list(td.keys(True, True, is_leaf=is_leaf_nontensor))
    ['a', ('b', 'c')]
    """
    # A mapping is stored as a node, not as a leaf.
    return getattr(cls, "_is_value", False) or (default_is_leaf(cls) and not issubclass(cls, Mapping))
