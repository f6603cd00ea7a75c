"""NonTensorStack: one Python value per element of a batch.

The values are in one flat list, in C order of the batch. A shape plan acts on tensors, so it is applied to the positions
of the values, which are then gathered: values are rearranged exactly like the elements of a leaf. An operation that
returns a view of a leaf returns a view of the stack, too: a node with the same cells (the list of values) and with the
positions of its values in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from td_core import LinkedList, TensorCollection, TensorDictBase
from td_core.errors import BatchSizeError, KeyPathError, StructureError
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
    plan_index,
    show_path,
    stack_plan,
)
from td_core.typing import NO_DEFAULT, BatchSize, DeviceType, Names, NestedKey

from ._non_tensor import NonTensorData, NonTensorDataBase
from ._static_values import register_stack
from ._value_nodes import (
    Joints,
    NonTensorNode,
    concat_values,
    find_joints,
    nest_values,
    pad_to_even,
    take_values,
)
from ._value_settings import list_to_stack

if TYPE_CHECKING:
    from typing_extensions import Self


class NonTensorStack(NonTensorNode, TensorDictBase):
    """One Python value per element of a batch.

    As for tensors, ``stack[1:]`` and other views share the values of the stack: a write to a view changes both. A stack
    that is read from a lazy stack of collections writes to the members.

    Args:
        *args: the items along the new dim. A node of non-tensor data contributes the values of its batch; anything
            else, lists included, is one value. If the batch sizes of nodes differ from some dim on, that dim and
            those after it become lists.
        stack_dim: position of the new dim in the batch size.
        batch_size: the expected batch size, checked against the values; for a stack without values, its batch size.
        device: the device to report; None: that of the nodes.
        names: a name or None per batch dim.

    Raises:
        BatchSizeError: the batch sizes of the nodes differ before ``stack_dim``, or do not match ``batch_size``.

    >>> stack = NonTensorStack("a", "b", "c")
    >>> stack[1:].tolist()
    ['b', 'c']
    >>> NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")).batch_size
    torch.Size([2, 2])
    >>> uneven = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"))
    >>> uneven.batch_size, uneven.tolist()
    (torch.Size([2]), [['a', 'b'], ['c']])
    """

    __slots__ = ("_emerges", "_hidden", "_joints", "_origin", "_repeated", "_values_size")

    #: (lazy stack, key) if the values were read from the members of a lazy stack, so that writes reach the members.
    _origin: tuple[Node, str] | None
    #: The batch size, followed by the sizes of the dims that vmap maps over, whose levels are in ``_hidden``.
    _values_size: torch.Size
    _hidden: tuple[int, ...]
    #: Position at which vmap will insert its dim, and its level; None: that of the most recently hidden dim.
    _emerges: tuple[int, int | None]
    #: The dim along which the values are repeated, because vmap added it, or None.
    _repeated: int | None

    def _store(self, cells: list[object], places: Sequence[int], new: Sequence[object]) -> None:
        if cells is self._cells and self._origin is not None:
            stack, key = self._origin
            for place, value in zip(places, new, strict=True):
                prefix, node = _get_coordinates(place, self._values_size), as_node(value)
                if isinstance(value, list) and (size := stack._index(prefix)._get_child(key).batch_size):
                    # The values of uneven members were read as lists, so convert a list back to one value per element.
                    node = self.from_list(value, len(size))
                stack._assign(prefix, {key: node})
        super()._store(cells, places, new)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_stack(cls)

    def __init__(
        self,
        *args: object,
        stack_dim: int = 0,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        items = _list_nodes(args, stack_dim)
        provided = None if batch_size is None else as_batch_size(batch_size)
        size, values = provided or torch.Size((0,)), list(args)
        if args:
            inner = items[0].batch_size if items else torch.Size()
            plan = stack_plan(inner, stack_dim, len(args))
            size = plan.resize_batch(inner)
        if items:
            values = concat_values(items, plan.dim)
            device = items[0].device if device is None else device
        if size.numel() != len(values) or provided not in (None, size):
            made = list(size) if args else "none"
            raise BatchSizeError(f"batch_size {list(provided or ())} was given, the values make {made}")
        self._fill(values, size, None if device is None else as_device(device), None)
        if names is not None:
            self.names = names
        if items:
            self._joints = find_joints(items, plan)

    def _fill(
        self, values: list[object], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> None:
        self._store_new(values)
        self._origin = self._joints = None
        self._hidden, self._emerges, self._repeated = (), (0, None), None
        self._values_size = batch_size
        self._start(batch_size, device, names)

    @classmethod
    def _of(
        cls,
        values: list[object],
        batch_size: torch.Size,
        device: torch.device | None = None,
        names: Names | None = None,
    ) -> Self:
        """Build a stack from values in C order of the batch, without checks."""
        node = new_object(cls)
        node._fill(values, batch_size, device, names)
        return node

    @classmethod
    def _make_stack_or_value(
        cls,
        values: list[object],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
        joints: Joints | None,
    ) -> object:
        """Build a stack without checks; for a batch without dims, a NonTensorData of the single value."""
        if batch_size:
            node = cls._of(values, batch_size, device, names)
            node._joints = joints
            return node
        return NonTensorData(values[0], device=device)

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorDataBase) -> Self:
        """Convert a :class:`NonTensorData` to a stack that repeats its value per batch element.

        >>> NonTensorStack.from_nontensordata(NonTensorData("a", batch_size=[2])).tolist()
        ['a', 'a']
        """
        size = non_tensor.batch_size
        return cls._of(non_tensor._expand_values(size), size, non_tensor.device, non_tensor._names)

    @classmethod
    def from_list(cls, values: list[Any], ndim: int | None = None) -> Self:  # type: ignore[override]
        """Build a stack from a nested list.

        Args:
            values: nested lists, of equal length at each depth; nodes of non-tensor data in them contribute the
                values of their batch.
            ndim: number of depths that are batch dims; deeper lists are values. None: all depths at which the lists
                have equal lengths.

        Raises:
            BatchSizeError: lists at one of the first ``ndim`` depths differ in length.

        >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]]).batch_size
        torch.Size([2, 2])
        >>> NonTensorStack.from_list([["a", "b"], ["c", "d"]], 1)[0].data
        ['a', 'b']
        """
        flat, sizes, seen = values, [len(values)], {id(values)}
        while ndim is None or len(sizes) < ndim:
            lengths = {len(item) if isinstance(item, list) else -1 for item in flat}
            if ndim is None:
                here = {*map(id, flat)}
                if (
                    len(lengths) != 1 or lengths & {-1, 0} or here & seen
                ):  # a list that contains itself is a value
                    break
                seen |= here
            if len(lengths) > 1 or -1 in lengths:
                raise BatchSizeError(
                    f"a list of {ndim} levels has lists of one length at each; got lengths {sorted(lengths)} at level "
                    f"{len(sizes)} (-1: no list)"
                )
            sizes.append(max(lengths, default=0))
            flat = [value for item in flat for value in item]
        inner = torch.Size()
        if any(isinstance(value, NonTensorNode) for value in flat):
            stack = NonTensorStack(*flat)
            flat, inner = stack._values, stack.batch_size[1:]
        return cls._of(list(flat), torch.Size(sizes) + inner)

    @property
    def stack_dim(self) -> int:
        """The dim along which ``tensordicts``, ``append`` and ``insert`` work: always 0.

        >>> NonTensorStack("a").stack_dim
        0
        """
        return 0

    @property
    def tensordicts(self) -> list[Any]:
        """The nodes along the first dim, as ``unbind(0)`` returns them.

        >>> NonTensorStack("a").tensordicts
        [NonTensorData(data=a, batch_size=torch.Size([]), device=None)]
        """
        return list(self.unbind(0))

    @property  # type: ignore[misc]
    def data(self) -> Any:
        """The value that all elements share.

        Raises:
            AttributeError: the values differ, or the stack is empty.

        >>> NonTensorStack("a", "a").data
        'a'
        """
        first = self._values[:1]
        if not first or not all(is_same_value(value, first[0]) for value in self._values):
            raise AttributeError(f"a {type(self).__name__} has no one value: read them with tolist()")
        return first[0]

    @property
    def hook_in(self) -> None:
        """None: values are not converted when they are stored."""
        return None

    @property
    def hook_out(self) -> None:
        """None: values are not converted when they are read."""
        return None

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        if self._names is not None and len(self._names) != len(batch_size):
            self._names = None
        size, (dim, level), count = self._values_size, self._emerges, len(self._hidden)
        shown, last = size[: len(size) - count], len(size) - 1
        if count and level in (None, self._hidden[-1]):
            if batch_size == (*shown[:dim], size[last], *shown[dim:]):
                self._reorder((*range(dim), last, *range(dim, last)), self._hidden[:-1])
                self._emerges = 0, None
        elif len(batch_size) == len(shown) + 1:
            if batch_size[:dim] + batch_size[dim + 1 :] == shown:
                self._repeat(self._of(self._values, size).unsqueeze(dim), batch_size, dim)
        elif len(batch_size) == len(shown) and self._repeated is not None and batch_size != shown:
            # The chunks of a vmap are joined.
            dim = self._repeated
            self._repeat(self._of(self._values, size).narrow(dim, 0, 1), batch_size, dim)
        self._batch_size = batch_size

    def _repeat(self, once: Self, batch_size: torch.Size, dim: int) -> None:
        """Take the values of a stack with size 1 along ``dim``, repeated for a batch size."""
        size = torch.Size((*batch_size, *once.batch_size[len(batch_size) :]))
        self._store_new(list(once.expand(size)._values))
        self._values_size, self._joints, self._origin = size, None, None
        self._emerges, self._repeated = (0, None), dim

    def _move_mapped_dim(self, dim: int, left: torch.Size | None, level: int) -> None:
        ndim = len(self._values_size) - len(self._hidden)
        if left is None:
            self._emerges = dim, level
        elif dim < ndim and len(left) == ndim - 1:
            order = (*range(dim), *range(dim + 1, ndim + len(self._hidden)), dim)
            self._reorder(order, (*self._hidden, level))

    def _reorder(self, order: Sequence[int], hidden: tuple[int, ...]) -> None:
        """Permute the dims of the values; the last dims of the new order, of the levels ``hidden``, are not part of the batch."""
        size = self._values_size
        self._store_new(list(self._of(self._values, size).permute(*order)._values))
        self._values_size = torch.Size([size[dim] for dim in order])
        self._hidden, self._joints, self._origin, self._repeated = hidden, None, None, None

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        # The files of saved values have one value per element of the batch size with which they were saved.
        longest = self._batch_size if self._keeper is not None else self._max_batch_size()
        if batch_size != longest[: len(batch_size)]:
            raise BatchSizeError(
                f"the batch size {list(batch_size)} does not fit {show_path(path)}, a {type(self).__name__} with one "
                f"value for each element of {list(self._batch_size)}"
            )

    def _change_batch_size(self, batch_size: torch.Size) -> None:
        if batch_size == self._batch_size:
            return
        self._check_batch_size(batch_size)
        if len(batch_size) < len(self._batch_size):
            raise BatchSizeError(
                f"a {type(self).__name__} with one value for each element of {list(self._batch_size)} cannot have the "
                f"batch size {list(batch_size)}"
            )
        self._store_new(self._flatten_lists(batch_size))
        self._values_size, self._joints, self._origin = batch_size, None, None
        self._set_batch_size(batch_size)

    def _with_batch_size(self, batch_size: torch.Size) -> Self:
        if (
            len(batch_size) > len(self._batch_size)
            and batch_size == self._max_batch_size()[: len(batch_size)]
        ):
            return self._of(self._flatten_lists(batch_size), batch_size, self._device)
        self._check_batch_size(batch_size)
        return self

    def _max_batch_size(self) -> torch.Size:
        return self._batch_size + NonTensorStack.from_list(self._values).batch_size[1:]

    def _flatten_lists(self, batch_size: torch.Size) -> list[object]:
        """Return one value per element of a batch size with more dims, of which the lists have the items."""
        values = self._values
        for _ in batch_size[len(self._batch_size) :]:
            values = [item for value in values for item in value]
        return values

    def _view(self, places: Sequence[int], size: tuple[int, ...]) -> Self:
        """Build a view of the values at ``places``, with batch size ``size``: writes change both nodes."""
        node = self._make_sized([], size)
        node._show(self, places)
        return node

    def _take_over(self, result: Any) -> list[Any] | None:
        below = super()._take_over(result)
        if below is not None:
            self._origin = None
            self._values_size, self._joints = result._values_size, result._joints
            self._hidden, self._emerges, self._repeated = result._hidden, result._emerges, result._repeated
        return below

    def _make_sized(self, values: list[object], size: tuple[int, ...]) -> Self:
        """Build a stack of ``size``, whose last dims are hidden from the batch size if this node has hidden dims."""
        node = self._of(values, torch.Size(size), self._device)
        if self._hidden:
            node._hidden, node._batch_size = self._hidden, node._values_size[: -len(self._hidden)]
        return node

    def _get_varying_dims(self) -> tuple[int, ...]:
        return tuple(range(len(self._batch_size))) if self._joints is None else self._joints[0]

    def _unwrap(self) -> object:
        self._check_whole()
        return _LinkedEntry(self).read(self._values, self._batch_size)

    def _check_whole(self) -> None:
        """Raise StructureError if vmap hides a dim of the batch, so that values cannot be read in order."""
        if self._hidden or self._batch_size != self._values_size:
            raise StructureError(
                f"one value for each element of {list(self._values_size)} cannot be shown as {list(self._batch_size)}: "
                "vmap changed the dims; exclude() the key, or densify() a lazy stack, before the call"
            )

    def _gather(self, plan: ShapePlan) -> list[tuple[Sequence[int], tuple[int, ...]]]:
        if not self._hidden:
            self._check_whole()
        return plan.locate(self._values_size, self._device)

    def _gather_parts(self, plan: ShapePlan) -> list[Any]:
        """Apply a plan. Return its results: stacks, or NonTensorData for results without batch dims."""
        names = plan.rename_dims(self._names)
        # As in torch, reshaping makes a copy of an expanded stack, in which positions repeat.
        known = self._places if plan.is_reshape() and self._places is not None else ()
        shares = plan.is_view and len(set(known)) == len(known)
        arranged = self._gather(plan)
        if not shares:
            values = self._values
            parts = [self._make_sized(list(take_values(values, places)), size) for places, size in arranged]
        elif arranged and not arranged[0][1]:  # hot path: unbinding into single elements
            return NonTensorData._of_stack(self, [places[0] for places, _ in arranged])
        else:
            parts = [self._view(places, size) for places, size in arranged]
        if self._joints is not None:
            dims = self._dims_after(plan)
            parts = [self._regroup(part, places, dims) for part, (places, _) in zip(parts, arranged)]
        result: list[object] = []
        for part in parts:
            part._names = names
            result += [part] if part._batch_size or self._hidden else NonTensorData._of_stack(part, [0])
        return result

    def _dims_after(self, plan: ShapePlan) -> tuple[int, ...] | None:
        """Map the dims along which values vary through a plan; None if the plan merges them with other dims."""
        if not (plan.n or plan.lead):
            return self._get_varying_dims()
        dims = []
        for dim in self._get_varying_dims():
            along = plan.along(dim)
            if along is None:
                return None
            if along.stack_dim is not None:
                dims.append(along.stack_dim)
        return tuple(sorted(dims))

    def _regroup(self, part: Any, places: Sequence[int], dims: tuple[int, ...] | None) -> Any:
        """Set the varying dims of a result; convert it to NonTensorData if it has none and all values are equal."""
        if dims is None or len(dims) == len(part._batch_size) or self._joints is None:
            return part
        ones = self._joints[1]
        part._joints = dims, None if ones is None else list(take_values(ones, places))
        values = part._values
        if dims or not values or not all(part._joints[1] or ()):
            return part
        if not all(is_same_value(value, values[0]) for value in values):
            return part  # a write to another view has changed a value since
        node = NonTensorData(values[0], batch_size=part._batch_size, device=self._device)
        if part._root is not None:
            node._show(part, range(len(values)))
        return node

    def _as_value(self, value: object) -> object:
        if not isinstance(value, list):
            return value
        try:
            return self.from_list(value, len(self._values_size))
        except BatchSizeError:
            return value

    def _copy_node(self) -> Self:
        node = self._of(self._snapshot, self._values_size, self._device, self._names)
        node._batch_size, node._joints, node._hidden = self._batch_size, self._joints, self._hidden
        node._emerges, node._repeated = self._emerges, self._repeated
        return node

    def _shallow_copy(self) -> Self:
        node = self._view(range(self._values_size.numel()), self._values_size)
        node._batch_size, node._names, node._joints = self._batch_size, self._names, self._joints
        node._emerges, node._repeated = self._emerges, self._repeated
        return node

    def _transform(self, plan: ShapePlan) -> Any:
        if plan.creates_values:
            maps = plan.locate(self._batch_size)
            return self._pad_values(*maps[0], plan) if maps else self._kept(plan, plan.lead)
        return self._gather_parts(plan)[0]

    def _transform_multi(self, plan: MultiPlan) -> tuple[Any, ...]:
        if plan.creates_values:
            return tuple(self._kept(plan, lead) for lead in plan.leads)
        return tuple(self._gather_parts(plan))

    def _pad_values(self, places: Sequence[int], size: tuple[int, ...], plan: ShapePlan) -> Node:
        """Build a padded stack from the position of each value; padding elements, at position -1, become None."""
        self._check_whole()
        known = self._values
        values = [None if i < 0 else known[i] for i in places]
        stack = self._of(values, torch.Size(size), self._device, plan.rename_dims(self._names))
        return stack if size else NonTensorData._of_stack(stack, [0])[0]

    def _kept(self, plan: ShapePlan, lead: tuple[int, ...]) -> Self:
        """Copy the stack for an operation that computes new numbers, such as a sum. Raise if it changes the batch size."""
        size = torch.Size(lead + self._batch_size[plan.n :])
        if size != self._batch_size:
            raise StructureError(
                f"this operation changes the batch size from {list(self._batch_size)} to {list(size)}, which is "
                f"not defined for the values of a {type(self).__name__}; take them out with "
                "filter_non_tensor_data() first"
            )
        return self._copy_node()

    def _expand_values(self, size: torch.Size) -> list[object]:
        if self._values_size == size:
            return self._values
        self._check_whole()
        try:
            expanded = self.expand(size)
        except BatchSizeError as error:
            raise BatchSizeError(
                f"values of batch size {list(self._batch_size)} do not fill {list(size)}"
            ) from error
        return expanded._expand_values(size)

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
        ((places, size),) = self._gather(plan_index(index, self._batch_size))
        root, left, joints = self._owner(), self._places, self._joints
        position = places if left is None else take_values(left, places)
        new = repeat_value(value, torch.Size(size))
        if joints is not None:  # set first, because a package that saves the values also saves the joints
            self._joints = joints[0], self._ones_with(places, value)
        try:
            root._store(self._cells, position, new)
        except BaseException:
            self._joints = joints
            raise

    def _ones_with(self, places: Sequence[int], value: object) -> list[bool]:
        """Return which elements come from nodes with one value (:data:`Joints`), after writing ``value`` at ``places``."""
        _, known = self._joints or ((), None)
        new = [not isinstance(value, (list, NonTensorStack))] * len(places)
        if (
            isinstance(value, NonTensorStack)
            and value._joints is not None
            and len(value._values) == len(places)
        ):
            new = value._joints[1] or [True] * len(places)
        ones = list(known or [True] * self._values_size.numel())
        for place, item in zip(places, new, strict=True):
            ones[place] = item
        return ones

    def _take(self, source: object) -> None:
        if not isinstance(source, NonTensorNode):
            raise StructureError(f"a {type(self).__name__} takes the values of another one; got {source!r}")
        self._assign((), source)

    def _to_nested_lists(self, linked: bool) -> object:
        self._check_whole()
        return self._unwrap() if linked else nest_values(self._values, self._batch_size)

    def maybe_to_stack(self) -> Self:
        """Return the stack itself; see :meth:`NonTensorData.maybe_to_stack`.

        >>> NonTensorStack("a").maybe_to_stack().tolist()
        ['a']
        """
        return self

    def append(self, tensordict: object) -> None:
        """Append a value along the first dim.

        Raises:
            BatchSizeError: the value is a node whose batch size differs from the dims after the first.
            LockedError: the stack is locked.

        >>> stack = NonTensorStack("a")
        >>> stack.append("b")
        >>> stack.tolist()
        ['a', 'b']
        """
        self.insert(self._batch_size[0], tensordict)

    def insert(self, index: int, tensordict: object) -> None:
        """Insert a value before position ``index`` of the first dim.

        >>> stack = NonTensorStack("b")
        >>> stack.insert(0, "a")
        >>> stack.tolist()
        ['a', 'b']
        """
        self._splice(index, [as_node(tensordict)])

    def extend(self, tensordict: Iterable[object]) -> None:
        """Append the values of a list or of another stack along the first dim.

        >>> stack = NonTensorStack("a")
        >>> stack.extend(["b", "c"])
        >>> stack.tolist()
        ['a', 'b', 'c']
        """
        self._splice(self._batch_size[0], [as_node(item) for item in tensordict])

    def _splice(self, index: int, items: list[Node]) -> None:
        check_unlocked(self, "add a value")
        tail = self._batch_size[1:]
        for item in items:
            if item.batch_size != tail:
                raise BatchSizeError(
                    f"the elements have batch size {list(tail)}, the new one has {list(item.batch_size)}"
                )
        self._check_whole()
        new = [value for item in items for value in repeat_value(item, tail)]
        position = slice(index, None).indices(self._batch_size[0])[0] * tail.numel()
        values = self._values.copy()  # copy the list, because clones may share it
        values[position:position] = new
        self._store_new(values)
        self._origin = None
        self._values_size = self._batch_size = torch.Size((self._batch_size[0] + len(items), *tail))

    def get_nestedtensor(self, key: NestedKey, default: object = NO_DEFAULT, *, layout: object = None) -> Any:
        """Return the default: a stack of values has no entries.

        Raises:
            KeyPathError: no default was given.

        >>> NonTensorStack("a").get_nestedtensor("k", None)
        """
        if default is NO_DEFAULT:
            raise KeyPathError(
                f"a NonTensorStack holds values and no entries; got the key {key!r} (layout {layout})"
            )
        return default

    valid_keys = TensorDictBase.keys
    """Return the keys, of which a stack of values has none."""

    def _print_node(self) -> PrintedNode:
        node = super()._print_node()
        # Reading all values of a stored column would be slow.
        names = {type(value).__name__ for value in self._values[:100]}
        if RULES.follows_tensordict or type(self) is not NonTensorStack or not names:
            return node
        return node._replace(text=f"list[{names.pop()}]" if len(names) == 1 else "list")

    def __repr__(self) -> str:
        values = str(self.tolist())
        if len(values) > 50:
            values = f"{values[:50]}..."
        return (
            f"{type(self).__name__}(\n    {values},\n    batch_size=torch.Size({list(self._batch_size)}),\n"
            f"    device={self._device})"
        )


def _list_nodes(args: Sequence[object], stack_dim: int) -> Sequence[NonTensorNode]:
    """Convert the items of a stack to nodes of one batch size; an empty list if all of them are plain values."""
    if not any(issubclass(kind, TensorCollection) for kind in set(map(type, args))):
        return []
    items: Sequence[NonTensorNode] = pad_to_even([as_node(arg) for arg in args], stack_dim)
    for i, item in enumerate(items):
        if item.batch_size != items[0].batch_size:
            raise BatchSizeError(
                f"cannot stack: item 0 has batch size {list(items[0].batch_size)}, item {i} has {list(item.batch_size)}"
            )
    return items


class _LinkedEntry:
    """Position in a stack that a LinkedList was read from, and to which it writes its changes."""

    __slots__ = ("_at", "_stack")

    def __init__(self, stack: NonTensorStack, position: tuple[int, ...] = ()) -> None:
        self._stack = stack
        self._at = position

    def __setitem__(self, index: object, value: object) -> None:
        self._stack._assign((*self._at, index), value)

    def read(self, values: list[object], size: Sequence[int]) -> Any:
        """Convert values to nested LinkedLists of this size, which write changes back to the stack."""
        if not size:
            return values[0]
        step = torch.Size(size[1:]).numel()
        parts = values
        if len(size) > 1:
            parts = [
                _LinkedEntry(self._stack, (*self._at, i)).read(values[i * step : (i + 1) * step], size[1:])
                for i in range(size[0])
            ]
        return LinkedList(parts, td=self)


def as_node(value: object) -> Node:
    """Wrap a value as NonTensorData without batch dims, unless it is a node of non-tensor data."""
    return value if isinstance(value, NonTensorNode) else NonTensorData(value)


def repeat_value(value: object, size: torch.Size) -> list[Any]:
    """Expand a value, list or node to one value per element of ``size``; a list is one value if list_to_stack() is off."""
    if isinstance(value, list) and size and list_to_stack():
        value = NonTensorStack.from_list(value, len(size))
    return value._expand_values(size) if isinstance(value, NonTensorNode) else [value] * size.numel()


NonTensorNode._stack = NonTensorStack


def _get_coordinates(place: int, size: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a flat position in a batch of ``size``."""
    index = []
    for count in reversed(size):
        place, coordinate = divmod(place, count)
        index.append(coordinate)
    return tuple(reversed(index))


register_stack(NonTensorStack)
