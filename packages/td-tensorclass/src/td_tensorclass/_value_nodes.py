"""Base classes of the nodes without entries: they hold values, or one tensor for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from td_core import LinkedList, TensorCollection
from td_core.errors import KeyPathError, StructureError
from td_core.spi import (
    RULES,
    Keeper,
    Node,
    PrintedNode,
    ShapePlan,
    as_batch_size,
    check_unlocked,
    is_aliasing,
    show_path,
    stack_plan,
)
from td_core.typing import NO_DEFAULT, BatchSize, Names, NoDefault

from ._value_comparisons import COMPARISONS, make_value_comparison

if TYPE_CHECKING:
    from typing_extensions import Self

NodeT = TypeVar("NodeT", bound="ValueNode")

#: (dims, ones) of a stack made by joining nodes of which some had one value for a whole batch. ``dims`` are the batch dims
#: along which the values vary. ``ones`` is None if all of the nodes had one value, else it has a bool per element.
Joints = tuple[tuple[int, ...], "list[bool] | None"]


class ValueNode(TensorCollection):
    """Base of the nodes without entries."""

    __slots__ = (
        "__weakref__", "_backends", "_batch_size", "_device", "_lock_parents", "_locked", "_names",
        "_undo",
    )  # fmt: skip

    _is_value: ClassVar[bool] = True

    _batch_size: torch.Size
    _device: torch.device | None

    def _start(self, batch_size: torch.Size, device: torch.device | None, names: Names | None = None) -> None:
        """Initialise the attributes that all value nodes have."""
        self._batch_size = batch_size
        self._device = device
        self._names = names
        self._locked = False
        self._lock_parents = self._backends = self._undo = None

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of this node; settable."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        self._change_batch_size(as_batch_size(batch_size))

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size

    @property
    def device(self) -> torch.device | None:
        """The device of the collection that this node belongs to."""
        return self._device

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device

    def _children(self) -> Mapping[str, Tensor | Node]:
        return {}

    def _set_child(self, key: str, value: object) -> None:
        raise KeyPathError(f"a {type(self).__name__} has no entries, so {key!r} cannot be set")

    def _del_child(self, key: str) -> None:
        raise KeyError(key)

    def _with_batch_size(self: NodeT, batch_size: torch.Size) -> NodeT:
        if self._batch_size[: len(batch_size)] == batch_size:
            return self
        return self._with_children({}, batch_size=batch_size, names=None)

    def _take_over(self, result: Node) -> list[Any] | None:
        if type(result) is not type(self):
            return None
        self._batch_size, self._names = result.batch_size, result._names
        return []

    def _print_node(self) -> PrintedNode:
        return super()._print_node()._replace(text=type(self).__name__)

    def _get_join_entries(
        self, first: Node, plan: ShapePlan, path: tuple[str, ...]
    ) -> dict[str, Tensor | Node]:
        raise kind_mismatch_error(first, self, path)

    def _set_path(
        self, key: Any, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        self._set_child(key, value)

    def _stack_lazily(self, items: Sequence[Node], dim: int, source: tuple[Node, str] | None = None) -> Any:
        return self._join(items, stack_plan(self._batch_size, dim, len(items)))


class NonTensorNode(ValueNode):
    """Base of the nodes that hold Python values: one for a whole batch, or one per element."""

    __slots__ = ("_cells", "_places", "_root")

    #: NonTensorStack; its module sets this attribute, because it imports this module.
    _stack: ClassVar[Any]

    #: [list of the values, True if no other cells share that list, td-core's Keeper of the saved values or None].
    #: Views share the cells, copies share the list. The first write replaces a shared list by a copy (copy-on-write);
    #: later writes go to that copy until it is shared, too.
    _cells: list[Any]
    #: Positions of a view's values in the cells, and (``_root``) the node that owns the cells; None if this is not a view.
    _places: Sequence[int] | None
    _joints: Joints | None
    _hidden: tuple[int, ...]
    _root: NonTensorNode | None

    if TYPE_CHECKING:
        _copy_with: Callable[..., Self]  # of the nodes of one value

    @property
    def _values(self) -> list[Any]:
        values, places = self._owner()._read(self._cells), self._places
        return values if places is None else take_values(values, places)  # type: ignore[return-value]

    @property
    def _value(self) -> object:
        cells = self._cells
        if self._root is None and cells[2] is None:
            return cells[0][0]  # hot path: neither a view nor saved by another package
        return self._values[0]

    @property
    def _snapshot(self) -> list[object]:
        """The list of the values, which no later write changes."""
        if self._root is None:
            self._cells[1] = False
        return self._values

    def _owner(self) -> NonTensorNode:
        """Return the node that owns the cells this node shows: itself, unless it is a view."""
        return self if self._root is None else self._root

    def _take_over(self, result: Any) -> list[Any] | None:
        below = super()._take_over(result)
        if below is not None:
            self._store_new(list(result._values))  # not the cells, which may be those of this node
        return below

    def _read(self, cells: list[Any], *, writes: bool = False) -> list[object]:
        """Return the value of each cell, reloaded first if another process wrote it; ``writes``: the caller will write next."""
        if cells[2] is not None:
            result: list[object] = reload_values(self, cells[2], writes=writes)._cells[0]
            if result is not cells[0] and len(result) == len(cells[0]):
                cells[:2] = result, False
        values: list[object] = cells[0]
        return values

    def _store_new(self, values: list[object]) -> None:
        """Store values in new cells, which no other node shares."""
        self._cells = [values, False, None]
        self._places = self._root = None

    @property
    def _keeper(self) -> Keeper | None:
        keeper: Keeper | None = self._cells[2]
        if keeper is None or self._is_whole():
            return keeper
        return keeper.of_part()

    @_keeper.setter
    def _keeper(self, keeper: Keeper | None) -> None:
        if self._root is not None:
            self._store_new(list(self._values))
        self._cells[2] = keeper

    def _is_whole(self) -> bool:
        """Return True if this node shows all values of its cells in order, and has the kind of the owner."""
        root, places = self._root, self._places
        if root is None or places is None:
            return True
        return type(root) is type(self) and list(places) == list(range(len(self._cells[0])))

    def _check_index_put(self, index: object, value: object) -> None:
        keeper = self._cells[2]
        if keeper is not None:
            values = value._expand_values(value.batch_size) if isinstance(value, NonTensorNode) else [value]
            keeper.check(self, values)
            self._owner()._read(self._cells, writes=True)

    def _store(self, cells: list[Any], places: Sequence[int], new: Sequence[object]) -> None:
        """Write values into ``cells`` at ``places``, and into the storage of a sibling package that saved them."""
        keeper = cells[2]
        if keeper is not None:
            with keeper.lock(self):
                self._store_kept(keeper, cells, places, new)
            return
        values = _written(cells[0], places, new, cells[1])
        cells[:2] = values, True

    def _store_kept(
        self, keeper: Keeper, cells: list[Any], places: Sequence[int], new: Sequence[object]
    ) -> None:
        if cells is self._cells and keeper.write_rows(self, places, new, self._list_separate(places)):
            cells[:2] = _written(cells[0], places, new, cells[1]), True
            return
        old = self._read(cells, writes=True)
        cells[:2] = _written(old, places, new, False), False
        try:
            if cells is self._cells:
                keeper.write(self)
        except BaseException:
            cells[0] = old
            raise

    def _list_separate(self, places: Sequence[int]) -> list[bool] | None:
        """Return for each place whether its value was not the one value of a node; None if all were."""
        ones = None if self._joints is None else self._joints[1]
        return None if ones is None else [not ones[place] for place in places]

    def _show(self, source: NonTensorNode, places: Sequence[int]) -> None:
        """Make this node a view of the values of ``source`` at ``places``: they share the cells."""
        self._cells = source._cells
        self._places = places if source._places is None else take_values(source._places, places)
        self._root = source if source._root is None else source._root

    def _copy_node(self) -> Self:
        """Return a node with the same values, which later writes to this one do not change."""
        raise NotImplementedError

    def _expand_values(self, size: torch.Size) -> list[object]:
        """Expand the batch to ``size`` and return one value per element; raise BatchSizeError if that is impossible."""
        raise NotImplementedError

    def _get_varying_dims(self) -> tuple[int, ...]:
        """Return the batch dims along which the values may differ."""
        raise NotImplementedError

    def _is_single_after_join(self, items: Sequence[Node], stacks: bool) -> bool:
        """Return True if stacking (``stacks``) or concatenating ``items`` gives one value for the whole batch."""
        return False

    def _stack_lazily(self, items: Sequence[Node], dim: int, source: tuple[Node, str] | None = None) -> Any:
        stack = self._join_uneven(items, dim)
        if isinstance(stack, self._stack):
            stack._origin = source
        return stack

    def _join_uneven(self, items: Sequence[Node], dim: int) -> object:
        """Stack nodes whose batch sizes may differ."""
        sizes = [item.batch_size for item in items]
        if sizes == [self._batch_size] * len(items):
            return super()._stack_lazily(items, dim)
        if self._is_single_after_join(items, True):
            # One value for all members fits any batch, so their batch sizes may differ.
            size = torch.Size([-1])
            if len({*map(len, sizes)}) == 1:
                size = TensorCollection._stack_lazily(self, items, dim).batch_size
            return self._copy_with(size, self._device, None)
        even = pad_to_even(items, dim)
        return even[0]._join(even, stack_plan(even[0].batch_size, dim, len(even)))

    def _nest_values(self, ndim: int) -> Any:
        """Convert the batch dims after the first ``ndim`` to nested lists, which become the values."""
        size, inner = self._batch_size[:ndim], self._batch_size[ndim:]
        values, step = self._expand_values(self._batch_size), inner.numel()
        lists = [nest_values(values[i * step : (i + 1) * step], inner) for i in range(size.numel())]
        return self._stack._of(lists, size, self._device)

    def _join(self, items: Sequence[Node], plan: Any, path: tuple[str, ...] = ()) -> Any:
        for item in items:
            if not isinstance(item, NonTensorNode):
                raise kind_mismatch_error(self, item, path)
        nodes: Sequence[Any] = items  # all of them are NonTensorNodes
        if plan.alike:
            _check_even(nodes, plan, path)
        size, names = plan.resize_batch(self._batch_size), plan.rename_dims(self._names)
        if self._is_single_after_join(items, plan.stacks):
            return self._copy_with(size, self._device, names)
        tail = find_hidden_size(nodes)
        values = concat_values(nodes, plan.dim, tail) if plan.alike else _select_values(nodes, plan)
        made = type(self) if isinstance(self, self._stack) else self._stack
        if tail:
            stack = made._of(values, torch.Size((*size, *tail)), self._device)
            first = next(node for node in nodes if len(node._hidden) == len(tail))
            stack._hidden, stack._batch_size, stack._names = first._hidden, size, names
            stack._emerges = first._emerges
            return stack
        return made._make_stack_or_value(values, size, self._device, names, find_joints(nodes, plan))

    def _compare(self, other: object, single: Callable[..., object]) -> Tensor:
        """Compare values elementwise with a comparison of torch. Return a bool tensor of the batch size."""
        if not isinstance(other, NonTensorNode):
            raise kind_mismatch_error(self, other, ())
        size, compare = self._batch_size, COMPARISONS[single]
        if _holds_rows_of(other, self):
            result: Tensor = self._nest_values(len(other._batch_size))._compare(other, single)
            return result
        right = other._nest_values(len(size)) if _holds_rows_of(self, other) else other
        results = [compare(a, b) for a, b in zip(self._expand_values(size), right._expand_values(size))]
        return torch.tensor(results, dtype=torch.bool, device=self._device or "cpu").view(size)

    def __contains__(self, value: object) -> bool:
        """Return True if one of the values equals this one; in a program of tensordict, whether it is a key or a member."""
        if isinstance(value, Node) or RULES.follows_tensordict:
            return super().__contains__(value)
        return value in self._expand_values(self._batch_size)

    __eq__ = make_value_comparison("__eq__", "==")
    __ne__ = make_value_comparison("__ne__", "!=")
    __lt__ = make_value_comparison("__lt__", "<")
    __le__ = make_value_comparison("__le__", "<=")
    __gt__ = make_value_comparison("__gt__", ">")
    __ge__ = make_value_comparison("__ge__", ">=")
    __hash__ = ValueNode.__hash__

    def _with_children(
        self,
        children: Mapping[str, object],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        if children:
            raise StructureError(f"a {type(self).__name__} holds values and no entries; got {list(children)}")
        node = self._copy_node()
        if device is not NO_DEFAULT:
            node._device = device
        if batch_size is not None and batch_size != self._batch_size:
            node._change_batch_size(batch_size)
        if names is not NO_DEFAULT:
            node._names = names
        return node

    def _flatten_leaves(self, out: list[Tensor]) -> list[object]:
        return []

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return self._shallow_copy() if is_aliasing(fn) else self._copy_node()

    def _flatten_other(self, other: Node, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        if not isinstance(other, ValueNode):
            raise kind_mismatch_error(self, other, path)

    def update(
        self,
        input_dict_or_td: object = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: object = None,
        is_leaf: object = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Copy the values of other non-tensor data; options that concern entries have no effect.

        Raises:
            LockedError: this node is locked, and neither ``inplace`` nor ``ignore_lock`` is True.
            StructureError: the source is not non-tensor data.
            TypeError: other keyword arguments are passed; this node has no entries to update.

        >>> from td_tensorclass import NonTensorData
        >>> NonTensorData("a").update(NonTensorData("b")).data
        'b'
        """
        if not (inplace or ignore_lock):
            check_unlocked(self, "replace the values")
        return self.update_(input_dict_or_td, **kwargs)

    def update_(
        self,
        input_dict_or_td: object = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: object = None,
        **kwargs: object,
    ) -> Self:
        """Copy the values of other non-tensor data, even if this node is locked.

        Raises:
            StructureError: the source is not non-tensor data.
            TypeError: other keyword arguments are passed; this node has no entries to update.

        >>> from td_tensorclass import NonTensorData
        >>> NonTensorData("a").lock_().update_(NonTensorData("b")).data
        'b'
        """
        if kwargs:
            raise TypeError(
                f"a {type(self).__name__} has no entries, so none can be updated; got {list(kwargs)}"
            )
        self._take(input_dict_or_td)
        return self

    def _take(self, source: object) -> None:
        """Copy the values of ``source``; implements :meth:`update_`."""
        raise NotImplementedError

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: object = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Convert the values to nested lists of the shape of the batch.

        Args:
            convert_nodes: has no effect on values.
            convert_tensors: has no effect on values.
            tolist_first: has no effect on values.
            as_linked_list: return lists that write changes back, as ``td[key]`` does; for one value for the whole
                batch, a write to them raises.

        >>> from td_tensorclass import NonTensorData, NonTensorStack
        >>> NonTensorData("a", batch_size=[2]).tolist(), NonTensorStack("a", "b").unsqueeze(-1).tolist()
        (['a', 'a'], [['a'], ['b']])
        """
        return self._to_nested_lists(as_linked_list)

    def _to_nested_lists(self, linked: bool) -> object:
        """Convert the values to nested lists of the shape of the batch; ``linked`` ones write changes back."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Return False: a node of values always counts as content, even for a batch without elements.

        >>> from td_tensorclass import NonTensorData
        >>> NonTensorData("a").is_empty()
        False
        """
        return False

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: object = False, tolist_first: bool = False
    ) -> Any:
        """Convert to a value or nested lists, as ``to_dict`` of the parent does; options have no effect.

        >>> from td_tensorclass import NonTensorStack
        >>> NonTensorStack("a", "b").to_dict()
        ['a', 'b']
        """
        value = self._unwrap()
        return self.tolist() if isinstance(value, LinkedList) else value

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """Return a copy of this node.

        >>> from td_tensorclass import NonTensorStack
        >>> NonTensorStack("a", "b").to_tensordict().tolist()
        ['a', 'b']
        """
        return self._copy_node()


def _written(values: list[object], places: Sequence[int], new: Sequence[object], own: bool) -> list[object]:
    """Write ``new`` at ``places`` into a copy of ``values``, or into the list itself if ``own``. Return the list."""
    result = values if own else values.copy()
    # If ``new`` is the list that is written, copy it: its elements would be overwritten before they are read.
    for place, value in zip(places, list(new) if new is values else new, strict=True):
        result[place] = value
    return result


def reload_values(node: NonTensorNode, keeper: Keeper, *, writes: bool = False) -> Any:
    """Return a node, reloaded if another process wrote its stored values. Raise StructureError if its kind or size changed."""
    result: Any = keeper.reload(node, writes=writes)
    if result is None:
        return node
    same = type(result) is type(node)
    if not same or (writes and len(result._cells[0]) != len(node._cells[0])):
        raise StructureError(
            f"this {type(node).__name__} was replaced where it is saved, by a {type(result).__name__}"
            f"{' of another size' if same else ''}: call memmap_refresh_() on the collection, or load it again"
        )
    return result


def nest_values(values: list[object], size: Sequence[int], made: Callable[..., object] = list) -> object:
    """Convert a flat list of values to nested lists of shape ``size``; ``made`` is the class of the lists."""
    if len(size) < 2:
        return made(values) if size else values[0]
    step = torch.Size(size[1:]).numel()
    return made(nest_values(values[i * step : (i + 1) * step], size[1:], made) for i in range(size[0]))


def _holds_rows_of(short: NonTensorNode, long: NonTensorNode) -> bool:
    """Return True if a node has fewer batch dims than another one, and lists as values, which are those of the other dims."""
    size = short._batch_size
    if long._batch_size[: len(size)] != size or size == long._batch_size:
        return False
    if isinstance(short, short._stack):
        return all(isinstance(value, list) for value in short._values)
    # One list is compared with each list of a stack, but as a whole with a stack of other values.
    return isinstance(short._value, list) and not any(isinstance(value, list) for value in long._values)


def _check_even(items: Sequence[NonTensorNode], plan: Any, path: tuple[str, ...]) -> None:
    """Raise StructureError if the batch sizes of nodes to join do not match."""
    dim, first = plan.dim, items[0]._batch_size
    for i, item in enumerate(items):
        size = item._batch_size
        fits = size == first
        if not (fits or plan.stacks):
            fits = (
                size[:dim] == first[:dim] and size[dim + 1 :] == first[dim + 1 :] and len(size) == len(first)
            )
        if not fits:
            raise StructureError(
                f"cannot join{f' {show_path(path)}' if path else ''}: item 0 has values for a batch of {list(first)} and item "
                f"{i} for one of {list(size)}; lazy_stack() keeps both, and get(key, as_list=True) reads them from it"
            )


def take_values(values: Sequence[object], places: Sequence[int]) -> Sequence[Any]:
    """Gather the values at ``places``; a range of places is read as a slice, which is faster."""
    if type(places) is range and places.step > 0:
        return values[places.start : places.stop : places.step]
    return [values[i] for i in places]


def pad_to_even(items: Sequence[Any], dim: int) -> Sequence[Any]:
    """Make batch sizes equal for stacking: the first dim that differs between nodes, and all after it, become lists."""
    # Nodes that differ before ``dim``, or in their number of dims, are returned unchanged: joining them raises.
    sizes = [item.batch_size for item in items]
    if not all(isinstance(item, NonTensorNode) for item in items) or len(set(map(len, sizes))) > 1:
        return items
    ndim = next((position for position, column in enumerate(zip(*sizes)) if len(set(column)) > 1), -1)
    return [item._nest_values(ndim) for item in items] if 0 <= dim <= ndim else items


def find_hidden_size(items: Sequence[Any]) -> torch.Size:
    """Return the sizes of the dims that vmap hides from the nodes to join; empty if it hides none."""
    tail = torch.Size()
    for item in items:
        if len(item._hidden) > len(tail):
            tail = item._values_size[-len(item._hidden) :]
    return tail


def expand_to_tail(item: NonTensorNode, tail: torch.Size) -> list[object]:
    """Return the values of a node, expanded to its batch size followed by the dims of ``tail``."""
    size = torch.Size((*item.batch_size, *tail))
    hidden = len(item._hidden)
    if hidden == len(tail):
        return item._expand_values(size)
    count = tail[hidden:].numel()
    own = torch.Size((*item.batch_size, *tail[:hidden]))
    return [value for value in item._expand_values(own) for _ in range(count)]


def concat_values(
    items: Sequence[NonTensorNode],
    dim: int,
    tail: torch.Size = torch.Size(),
    of: Callable[[NonTensorNode], list[Any]] | None = None,
) -> list[Any]:
    """Concatenate the values of nodes along ``dim``, in C order of the result."""
    # ``tail`` are the sizes of the dims that vmap hides; ``of`` returns the items of a node to use in place of its values.
    # Only plain Python here, because torch.compile traces it.
    if tail or of:
        columns = [of(item) if of else expand_to_tail(item, tail) for item in items]
    else:
        columns = [item._expand_values(item.batch_size) for item in items]
    outer = torch.Size(items[0].batch_size[:dim]).numel()
    if outer == 1:
        return [value for column in columns for value in column]
    steps = [torch.Size((*item.batch_size[dim:], *tail)).numel() for item in items]
    return [
        value
        for row in range(outer)
        for column, step in zip(columns, steps, strict=True)
        for value in column[row * step : (row + 1) * step]
    ]


def find_joints(items: Sequence[NonTensorNode], plan: Any) -> Joints | None:
    """Compute the :data:`Joints` of a stack or concatenation; None if the values vary along all of its dims."""
    ndim = len(items[0].batch_size)
    if not plan.alike or (plan.stacks and not ndim):
        return None
    dims = [set(item._get_varying_dims()) for item in items]
    shared = set.intersection(*dims)
    alike = all(dim == shared for dim in dims)
    made = {plan.dim, *(dim + (plan.stacks and dim >= plan.dim) for dim in shared)}
    if len(made) == ndim + plan.stacks:
        return None
    if alike and all(item._joints is None or item._joints[1] is None for item in items):
        return tuple(sorted(made)), None

    def are_one(item: NonTensorNode) -> list[bool]:
        known: list[bool] | None = item._joints[1] if item._joints is not None else None
        if set(item._get_varying_dims()) == shared and known is not None:
            return known
        return [set(item._get_varying_dims()) == shared] * item.batch_size.numel()

    return tuple(sorted(made)), concat_values(items, plan.dim, of=are_one)


def _select_values(items: Sequence[NonTensorNode], plan: Any) -> list[object]:
    """Gather the values that a plan with several inputs, such as ``where``, selects from nodes of one batch size."""
    values: list[object] = []
    places: list[Tensor] = []
    for item in items:
        # Positions on the meta device could not be read.
        device = "cpu" if item.device is None or item.device.type == "meta" else item.device
        size = item.batch_size
        places.append(torch.arange(size.numel(), device=device).view(size) + len(values))
        values += item._expand_values(item.batch_size)
    return [values[i] for i in plan.leaf(places).flatten().tolist()]


def kind_mismatch_error(value: Node, other: object, path: tuple[str, ...]) -> StructureError:
    """Build the error for a value node that is matched with a node of another kind; ``path`` is () if unknown."""
    position = f" at {show_path(path)}" if path else ""
    return StructureError(
        f"the structures differ{position}: a {type(value).__name__} there, a {type(other).__name__} here"
    )
