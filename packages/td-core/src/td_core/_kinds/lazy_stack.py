"""LazyStackedTensorDict: a node that keeps its members and stacks an entry when it is read.

Members may differ in shapes and keys. A key that not all members have is hidden. An entry with different shapes
raises when it is read as one tensor, and can be read as a nested or padded one. Pointwise operations run per
member. A shape plan that keeps the stack dim runs on the members, any other plan on the dense stack.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._convert.from_python import from_list
from .._functions.entries import NOT_GIVEN, get_default, parse_get_options
from .._functions.joining import check_member_sizes
from .._methods.collection import TensorDictBase
from .._plans.elements import JoinPlan, Where
from .._plans.index import plan_index
from .._plans.plans import MultiPlan, ShapePlan, as_batch_size
from .._plans.shapes import Join, stack_plan
from .._plans.steps import Along, remove_size
from .._torch.dtypes import ScalarBeside, as_scalar
from .._tree.defaults import add_nested, check_keys, show_path, unwrap_entry
from .._tree.devices import as_device
from .._tree.dim_names import check_tails, name_stack_dim, names_of_stack, refuse_repeated, set_batch_size
from .._tree.locks import check_no_entry, check_unlocked
from .._tree.node import FACTORIES, Child, Core, make_dense
from .._tree.ragged import convert_form, find_holders, has_no_form, list_member_entries, make_ragged_error
from .._tree.stored_leaves import index_leaves
from .._tree.views import StackedEntries
from .._tree.walks import visit
from .._writes.run import Transaction
from ..errors import BatchSizeError, CollectionIndexError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType, Names, NestedKey, NoDefault
from .lazy_stack_members import LazyStackOps
from .lazy_stack_writes import Part, check_new_members, split_for_members, unbind_members
from .uneven import make_empty_like, transform_uneven, uneven_index

if TYPE_CHECKING:
    from typing_extensions import Self


class LazyStackedTensorDict(LazyStackOps, metaclass=ABCMeta):
    """A stack of collections that keeps its members, and stacks an entry when it is read.

    Args:
        *tensordicts: the members, with the same number of batch dims.
        stack_dim: position of the new dim in the batch size.
        hook_out: function applied to each stacked entry that is read. Copies, pickles and results of operations keep it.
        hook_in: function applied to each written value, kept like ``hook_out``; ``memmap`` drops hooks, other formats raise.
        batch_size: expected batch size; without members, that of the stack (0 at ``stack_dim``) or of future members.
        device: device that all members are moved to; without members, the device label of the stack.
        names: a name or None for each batch dim.
        stack_dim_name: name of the stack dim only.
        strict_shape: raise if the batch sizes of members differ (by default such dims have size -1).

    Raises:
        BatchSizeError: members have different numbers of batch dims, or another size than ``batch_size``.
        DimNamesError: two dims would have the same name, or ``names`` and ``stack_dim_name`` differ.

    >>> members = [TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.ones(2)})]
    >>> stack = LazyStackedTensorDict(*members)
    >>> stack["a"]
    tensor([[0., 0.],
            [1., 1.]])
    """

    __slots__ = ()

    def __init__(
        self,
        *tensordicts: Any,
        stack_dim: int = 0,
        hook_out: Callable[[Any], Any] | None = None,
        hook_in: Callable[[Any], Any] | None = None,
        batch_size: Sequence[int] | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        members = _as_members(tensordicts, device)
        dim, provided = _parse_stack_dim(stack_dim, members, tuple(batch_size or ()))
        self._init(members, dim, stack_dim_name, hook_in, hook_out)
        self._empty_size = torch.Size(provided or (0,))
        self._empty_device = None if device is None else as_device(device)
        check_member_sizes([member.batch_size for member in members], strict_shape)
        if members and batch_size is not None and self.batch_size != provided:
            raise BatchSizeError(
                f"batch_size {list(provided)} was given, the members make {list(self.batch_size)}"
            )
        if names is not None:
            self._set_names(names_of_stack(names, len(self.batch_size), dim, stack_dim_name))
        elif stack_dim_name is not None:
            refuse_repeated(stack_dim_name, members)

    @classmethod
    def from_list(cls, input: Sequence[Any], *, lazy: bool | None = True, **kwargs: Any) -> Any:
        """Stack a list of mappings or collections; see :func:`td_core.from_list`.

        >>> type(LazyStackedTensorDict.from_list([{"a": 1}, {"a": 2}])).__name__
        'LazyStackedTensorDict'
        """
        return from_list(input, lazy=lazy, **kwargs)

    @classmethod
    def _of(cls, members: Sequence[Core], stack_dim: int) -> Self:
        """Build a stack of members that are already checked."""
        stack = object.__new__(cls)
        stack._init(list(members), stack_dim)
        return stack

    def __contains__(self, key: object) -> bool:
        """Return True if an entry has this key, or if this very collection is a member.

        >>> stack = TensorDict.lazy_stack([TensorDict({"a": 1}), TensorDict({"a": 2})])
        >>> "a" in stack, stack.tensordicts[0] in stack, TensorDict({"a": 1}) in stack
        (True, True, False)
        """
        if isinstance(key, Core):
            return any(member is key for member in self._members)
        return super().__contains__(key)

    def _members_and_dim(self) -> tuple[Sequence[Core], int] | None:
        # Copy the list: another thread may add members while the caller iterates.
        return (self._members.copy(), self._stack_dim) if self._members else None

    @property
    def is_locked(self) -> bool:
        """Whether structural changes are refused by the stack or by every member; settable."""
        # Do not copy the members here: a loop that appends one by one would become quadratic.
        members = self._members
        return bool(self._locked) or (bool(members) and all(member.is_locked for member in members))

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        _ = self.lock_() if value else self.unlock_()

    @property
    def tensordicts(self) -> list[Any]:
        """The members, in order."""
        return self._members

    @property
    def stack_dim(self) -> int:
        """Position of the stack dim in the batch size."""
        return self._stack_dim

    @property
    def stack_dim_name(self) -> str | None:
        """Name of the stack dim."""
        return self._stack_dim_name

    @property
    def hook_in(self) -> Callable[[Any], Any] | None:
        """Function applied to each value that is written."""
        return self._hook_in

    @property
    def hook_out(self) -> Callable[[Any], Any] | None:
        """Function applied to each stacked entry that is read."""
        return self._hook_out

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the members with the stack dim inserted; -1 for dims in which members differ."""
        members, dim = self._members, self._stack_dim
        if not members:
            return self._empty_size
        size = members[0].batch_size
        for member in members:
            other = member.batch_size
            if other != size:
                size = torch.Size([a if a == b else -1 for a, b in zip(size, other)])
        return torch.Size((*size[:dim], len(members), *size[dim:]))

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        size = as_batch_size(batch_size)

        def check(members: Sequence[Core], dim: int, wanted: Sequence[int]) -> Iterator[tuple[object, ...]]:
            if len(wanted) <= dim or wanted[dim] != len(members):
                raise BatchSizeError(
                    f"the batch size {list(size)} does not fit a stack of {len(members)} along dim {dim}: the stack "
                    "dim stays; densify() first to drop it"
                )
            inner = remove_size(wanted, dim)
            stacks = filter(None, [member._members_and_dim() for member in members])
            yield from ((*stacked, inner) for stacked in stacks)

        check_no_entry(self, "change the batch size of")
        visit(check, self._members, self._stack_dim, size)
        self._change_batch_size(size)

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        dim = self._stack_dim
        if len(batch_size) > dim and batch_size[dim] != len(self._members):
            raise BatchSizeError(
                f"the batch size {list(batch_size)} does not fit {show_path(path)}, a lazy stack of "
                f"{len(self._members)} along dim {dim}"
            )
        inner = torch.Size(remove_size(batch_size, dim))
        for member in self._members:
            if member.batch_size[: len(inner)] != inner:
                member._check_batch_size(inner, path)

    def _max_batch_size(self) -> torch.Size | None:
        return self.batch_size

    def _change_batch_size(self, batch_size: torch.Size) -> None:
        self._check_batch_size(batch_size)
        self._empty_size = batch_size
        inner = torch.Size(remove_size(batch_size, self._stack_dim))
        for member in self._members:
            member._change_batch_size(inner)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._empty_size = batch_size
        for member in self._members:
            set_batch_size(member, torch.Size(remove_size(batch_size, self._stack_dim)))

    @property
    def device(self) -> torch.device | None:
        """Device of the members; None if they differ or have none."""
        devices = {member.device for member in self._members} or {self._empty_device}
        return devices.pop() if len(devices) == 1 else None

    def numel(self) -> int:
        """Return the number of batch elements, summed over the members; 1 without batch dims.

        >>> LazyStackedTensorDict(*[TensorDict(batch_size=[n]) for n in (2, 3)]).numel()
        5
        """
        size = self.batch_size
        return sum(member.numel() for member in self._members) if -1 in size else size.numel()

    def _set_device(self, device: torch.device | None) -> None:
        self._empty_device = device
        for member in self._members:
            member._set_device(device)

    @property
    def _names(self) -> Names | None:
        inner = self._members[0]._names if self._members else None
        if inner is None and self._stack_dim_name is None:
            return None
        inner = inner or (None,) * (len(self.batch_size) - 1)
        return (*inner[: self._stack_dim], self._stack_dim_name, *inner[self._stack_dim :])

    @_names.setter
    def _names(self, names: Names | None) -> None:
        self._set_stack_names(names)

    def _set_stack_names(self, names: Names | None) -> None:
        # Callers use this method, not the setter: before torch 2.13, torch.compile runs setters too late.
        self._stack_dim_name = None if names is None else names[self._stack_dim]
        inner = self._get_member_names(names)
        for member in self._members:
            member._set_names(inner)

    def _get_member_names(self, names: Names | None) -> Names | None:
        """Return the dim names of the members: ``names`` without the stack dim; None if all are None."""
        dim = self._stack_dim
        inner = () if names is None else names[:dim] + names[dim + 1 :]
        return inner if any(name is not None for name in inner) else None

    def _set_names(self, names: Names | None) -> None:
        ndim = len(self.batch_size)
        left = self._names or (None,) * ndim
        if names is not None:
            check_tails(self, names)
        self._set_stack_names(names + left[len(names) :] if names else None)

    def _common_keys(self) -> list[str]:
        members = self._members
        if not members:
            return []
        keys = list(members[0]._children())
        for member in members[1:]:
            keys = list(filter(member._children().__contains__, keys))
        return keys

    def _children(self) -> Mapping[str, Child]:
        return StackedEntries(self)

    def _get_child(self, key: str) -> Child:
        members = self._members
        if not members:
            raise KeyError(key)
        entries: list[Any] = [member._get_child(key) for member in members]
        first, dim = entries[0], self._stack_dim
        if isinstance(first, Tensor):
            try:
                # Hot path: torch parses the call faster without a dim argument.
                value = torch.stack(entries, dim) if dim else torch.stack(entries)
            except (RuntimeError, TypeError) as error:
                raise make_ragged_error(key, entries, error) from error
        elif any(isinstance(entry, Tensor) for entry in entries):
            raise StructureError(
                f"{show_path((key,))} is a tensor in some members and a collection in others"
            )
        else:
            value = first._stack_lazily(entries, dim, (self, key))
            if self._stack_dim_name is not None:
                name_stack_dim(value, dim, self._stack_dim_name, key)
        return value if self._hook_out is None else self._hook_out(value)

    def get(self, key: NestedKey, *args: object, **kwargs: Any) -> Any:
        """Return the entry ``key``, stacked or in the given form; see :meth:`TensorCollection.get`.

        >>> stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        >>> stack.get("a", as_padded_tensor=True, padding_value=-1.0)
        tensor([[ 0., -1.],
                [ 0.,  0.]])
        """
        if kwargs:
            default, form = parse_get_options(args, kwargs)
            if form:
                results = list_member_entries(self._members.copy(), key, form)
                default = None if default is NOT_GIVEN else default
                if results is None and default is NO_DEFAULT:
                    return get_default(self, key, default)
                if not has_no_form(results):
                    return convert_form(key, results, self._stack_dim, default, **form)
            args = () if default is NOT_GIVEN else (default,)
        elif type(key) is str and len(args) < 2:
            try:
                return unwrap_entry(self._get_child(key))
            except KeyError:
                return args[0] if args and args[0] is not NO_DEFAULT else get_default(self, key, *args)
        return super().get(key, *args)

    def get_nestedtensor(
        self, key: NestedKey, default: object = NO_DEFAULT, *, layout: torch.layout | None = None
    ) -> Any:
        """Return an entry as one nested tensor, whose components are the members' leaves.

        Args:
            key: a string or nested tuple of strings.
            default: returned if a member lacks the key.
            layout: ``torch.strided`` (default) or ``torch.jagged`` (the layout of ``get(key, as_nested_tensor=True)``).

        Raises:
            KeyPathError: a member lacks the key and no default is passed.

        >>> items = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        >>> [part.shape for part in items.get_nestedtensor("a", layout=torch.jagged).unbind()]
        [torch.Size([1]), torch.Size([2])]
        """
        return self.get(key, default, as_nested_tensor=True, layout=layout or torch.strided)

    def _set_child(self, key: str, value: Child) -> None:
        for member, part in self._split_for_members(key, value):
            member._set_child(key, part)

    def _add_child(self, key: str, value: Core) -> Child:
        for member, part in self._split_for_members(key, value):
            add_nested(member, key, part)
        return value

    def _split_for_members(self, key: str, value: Child) -> list[tuple[Core, Child]]:
        """Pair each member with its part of a value that will be stored."""
        check_unlocked(self, f"set {show_path((key,))}")
        check_keys(self, {key: None})
        shares = self._split_value(value)
        for member, part in () if isinstance(value, Tensor) else shares:
            if isinstance(part, Core) and -1 in part.batch_size:
                # The value has the stack's batch size, with -1 for uneven dims; each part needs the size of its member.
                part._change_batch_size(member.batch_size)
        return shares

    def _split_value(self, value: Any) -> list[tuple[Core, Any]]:
        """Pair each member with its part of a value, as ``hook_in`` converts it; a value without dims is each one's part."""
        if not isinstance(value, (Tensor, Core)):
            return [(member, value) for member in self._members]
        if self._hook_in is not None:
            value = self._hook_in(value)
        return list(zip(self._members, unbind_members(value, self._stack_dim)))

    def _split_write(self, value: object, *index: object) -> list[Part]:
        if index:
            return list(split_for_members(self, index[0], value))
        return [(member, (), part) for member, part in self._split_value(value)]

    def _del_child(self, key: str) -> None:
        holders = find_holders(self, (key,))
        if not holders:
            raise KeyError(key)
        for holder in holders:
            check_unlocked(holder, f"remove {show_path((key,))}")
        for holder in holders:
            holder._del_child(key)

    def _with_children(
        self,
        children: Mapping[str, Child],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> Any:
        """Build a stack whose members hold parts of ``children``, or a dense node if the batch size does not fit them."""
        size = self.batch_size if batch_size is None else batch_size
        dim, count = self._stack_dim, len(self._members)
        label = self.device if device is NO_DEFAULT else device
        full_names = self._names if names is NO_DEFAULT else names
        if len(size) <= dim or size[dim] != count or (-1 in size and batch_size is not None):
            return make_dense(dict(children), size, label, full_names)
        parts: list[dict[str, Child]] = [{} for _ in range(count)]
        for key, child in children.items():
            for part, piece in zip(parts, unbind_members(child, dim)):
                part[key] = piece
        inner = torch.Size(remove_size(size, dim))
        inner_names = self._get_member_names(full_names)
        stack = self._with_members(
            [
                member._with_children(
                    part,
                    batch_size=member.batch_size if -1 in inner else inner,
                    device=label,
                    names=inner_names,
                )
                for member, part in zip(self._members, parts)
            ]
        )
        stack._stack_dim_name = None if full_names is None else full_names[dim]
        return stack

    def _flatten_leaves(self, out: list[Tensor]) -> None:
        for member in self._members:
            member._flatten_leaves(out)

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
    ) -> None:
        parts = [value] * len(self._members)
        behind = len(self.batch_size) - self._stack_dim
        if value.ndim >= behind:
            position = value.ndim - behind
            parts = [value.select(position, i if value.shape[position] > 1 else 0) for i in range(len(parts))]
        for member, part in zip(self._members, parts, strict=True):
            member._broadcast_to_leaves(part, out, scalar and as_scalar)

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        parts = unbind_members(other, self._stack_dim)
        if len(parts) != len(self._members):
            raise StructureError(
                f"the structures differ at {show_path(path)}: {len(self._members)} members there, {len(parts)} here"
            )
        for member, part in zip(self._members, parts):
            member._flatten_other(part, out, path)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return self._with_members([member._map(fn) for member in self._members])

    def _shallow_copy(self) -> Self:
        return self._with_members([member._shallow_copy() for member in self._members])

    def _transform(self, plan: ShapePlan) -> Any:
        if plan.empties_stacks and self._members and (size := plan.resize_batch(self.batch_size)):
            return self._make_empty_stack(plan, size)
        along = plan.along(self._stack_dim) if self._members else None
        return self._transform_whole(plan) if along is None else self._transform_members(plan, along)

    def _transform_whole(self, plan: ShapePlan) -> Any:
        """Apply a plan to the dense stack, or rearrange the elements of members that cannot be stacked."""
        try:
            return self._stack_members()._transform(plan)
        except StructureError:
            is_ragged = -1 in self.batch_size
            if is_ragged and not self._stack_dim and plan.is_reshape() and len(plan.lead) == 1:
                # Flattening is defined for a ragged batch too: it keeps the order of the elements.
                rows = [row for member in self._members for row in member.reshape(-1).unbind(0)]
                return self._of(rows, 0)
            # Uneven elements can be rearranged only if the plan moves the stack dim and adds no elements.
            if is_ragged or not self._members or plan.n <= self._stack_dim or plan.creates_values:
                raise
            return transform_uneven(self, plan)

    def _transform_members(self, plan: ShapePlan, along: Along) -> object:
        """Apply a plan to each member; ``along`` is what it does to the stack dim."""
        picks, inner, stack_dim = along
        if inner is not None:
            self._check_even(plan)
        if isinstance(picks, int):
            return self._members[picks]._transform(inner) if inner is not None else self._members[picks]
        members = self._members if picks is None else [self._members[i] for i in picks]
        if not members:
            return make_empty_like(self, plan.resize_batch(self.batch_size))
        result = self._with_members(
            [member._shallow_copy() if inner is None else member._transform(inner) for member in members],
            stack_dim,
        )
        position, name = self._stack_dim, self._stack_dim_name
        if name is not None and position < plan.n and position not in plan.sources:
            result._stack_dim_name = None
        return result

    def _stack_members(self) -> Any:
        """Build the dense stack; StructureError if the members differ."""
        if not self._members:
            return make_dense({}, self.batch_size, self.device, None)
        plan = stack_plan(self._members[0].batch_size, self._stack_dim, len(self._members))
        result = self._members[0]._join(self._members, plan)
        if self._stack_dim_name is not None:
            result._set_names(self._names)
        return result

    def _transform_multi(self, plan: MultiPlan) -> tuple[Any, ...]:
        along = plan.along(self._stack_dim) if self._members else None
        if along is None:
            parts: tuple[object, ...] = self._stack_members()._transform_multi(plan)
            return parts
        picks, inner, stack_dim = along
        if picks is not None:
            # An empty part is built by an empty slice, which keeps the entries.
            nothing = (slice(None),) * self._stack_dim + (slice(0, 0),)
            return tuple(
                self._members[pick]
                if isinstance(pick, int)
                else self._with_members([self._members[i] for i in pick], stack_dim)
                if pick
                else self._index(nothing)
                for pick in picks
            )
        self._check_even(plan)
        columns = [member._transform_multi(inner) for member in self._members]
        return tuple(self._with_members(part, stack_dim) for part in zip(*columns))

    def _check_even(self, plan: ShapePlan) -> None:
        """Raise StructureError if a plan for the whole stack does not apply to each member."""
        if -1 in self.batch_size[: plan.n]:
            raise StructureError(
                f"the members have different batch sizes, {[list(member.batch_size) for member in self._members]}: "
                "apply this operation to each of them"
            )

    def _join(self, items: Sequence[Core], plan: JoinPlan, path: tuple[str, ...] = ()) -> Any:
        stacks = [item for item in items if isinstance(item, LazyStackedTensorDict)]
        together = len(stacks) == len(items) and all(item._stack_dim == self._stack_dim for item in stacks)
        if isinstance(plan, Where):
            joined = self._select_members(items[1], plan, path)
        elif together and not plan.stacks and plan.dim == self._stack_dim:
            joined = self._with_members([member for item in stacks for member in item._members])
        else:
            along = plan.along(self._stack_dim) if together else None
            if along is None or any(len(item._members) != len(self._members) for item in stacks):
                dense: list[Core] = [
                    item._stack_members() if isinstance(item, LazyStackedTensorDict) else item
                    for item in items
                ]
                return dense[0]._join(dense, plan, path)
            joined = self._join_members(stacks, plan, along, path)
        joined._empty_size = plan.resize_batch(self.batch_size)
        return joined

    def _select_members(self, other: object, plan: Where, path: tuple[str, ...]) -> Self:
        """Select between each member and its part of another collection."""
        plans = plan.split(self._stack_dim, len(self._members))
        rows = zip(self._zip_parts([other]), plans, strict=True)
        return self._with_members([row[0]._join(row, part, path) for row, part in rows])

    def _join_members(
        self, stacks: Sequence[LazyStackedTensorDict], plan: Join, along: Along, path: tuple[str, ...]
    ) -> Self:
        """Join the members at each position of several lazy stacks; ``along`` is what the plan does to the stack dim."""
        _, inner, stack_dim = along
        columns = [list(column) for column in zip(*[item._members for item in stacks])]
        # If member sizes differ, each position needs a separate plan.
        plans = [inner] * len(columns)
        if any(-1 in item.batch_size[: plan.n] for item in stacks):
            plans = [inner.of([member.batch_size[: inner.n] for member in column]) for column in columns]
        joined = [column[0]._join(column, item, path) for column, item in zip(columns, plans)]
        return self._with_members(joined, stack_dim)

    def __getitem__(self, index: Any) -> Any:
        """Return an entry by key, or the collection at an index of the batch dims; an int returns the member itself."""
        if self._is_member_index(index):
            return self._members[index]
        return super().__getitem__(index)

    def _is_member_index(self, index: object) -> bool:
        """Return True if an index is an int in range and the stack dim is 0: then one member is the result."""
        count = len(self._members)
        return type(index) is int and self._stack_dim == 0 and -count <= index < count

    def __len__(self) -> int:
        """Return the size of the first batch dim. Raise StructureError if the members differ in it."""
        length = super().__len__() if self._stack_dim else len(self._members)
        if length < 0:
            raise StructureError(
                f"a lazy stack of batch size {list(self.batch_size)} has no length: its members differ in the first dim"
            )
        return length

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._stack_dim else iter(list(self._members))

    def _index(self, index: Any) -> Any:
        if self._is_member_index(index):
            return self._members[index]
        size = self.batch_size
        return uneven_index(self, index) if -1 in size else index_leaves(self, plan_index(index, size))

    def _assign(self, index: Any, value: object, *, non_blocking: bool = False) -> None:
        if self._is_member_index(index):
            self._members[index]._assign((), value, non_blocking=non_blocking)
            return
        # Every member checks its part before the first one is written.
        parts = list(split_for_members(self, index, value))
        if len(parts) == 1:
            ((member, member_index, part),) = parts
            member._assign(member_index, part, non_blocking=non_blocking)
            return
        writes = Transaction(non_blocking)
        self._plan_parts(writes, parts)
        writes.commit()

    def append(self, tensordict: object) -> None:
        """Append a member.

        Raises:
            BatchSizeError: the batch size of the member does not fit the stack.
            LockedError: the stack is locked.

        >>> stack = LazyStackedTensorDict(TensorDict({"a": 0}))
        >>> stack.append(TensorDict({"a": 1}))
        >>> stack["a"]
        tensor([0, 1])
        """
        self.insert(len(self._members), tensordict)

    def extend(self, tensordict: Core | Iterable[Core]) -> None:
        """Append the members of a list, or the parts of a collection along the stack dim.

        >>> stack = LazyStackedTensorDict(TensorDict({"a": 0}))
        >>> stack.extend([TensorDict({"a": 1}), TensorDict({"a": 2})])
        >>> stack["a"]
        tensor([0, 1, 2])
        """
        new = (
            unbind_members(tensordict, self._stack_dim) if isinstance(tensordict, Core) else list(tensordict)
        )
        check_new_members(self, new)
        self._members.extend(new)

    def insert(self, index: int, tensordict: object) -> None:
        """Insert a member before position ``index``.

        >>> stack = LazyStackedTensorDict(TensorDict({"a": 0}))
        >>> stack.insert(0, TensorDict({"a": 1}))
        >>> stack["a"]
        tensor([1, 0])
        """
        check_new_members(self, [tensordict])
        self._members.insert(index, tensordict)

    valid_keys = TensorDictBase.keys
    """Return the keys that all members have; the same as :meth:`keys`."""


def _as_members(items: Sequence[Any], device: DeviceType | None) -> list[Core]:
    for item in items:
        if not isinstance(item, Core):
            raise TypeError(f"the members of a lazy stack are collections; got {type(item).__name__}")
    return list(items) if device is None else [item.to(device) for item in items]


def _parse_stack_dim(
    stack_dim: int, members: Sequence[Core], size: Sequence[int]
) -> tuple[int, Sequence[int]]:
    """Return the stack dim counted from the front, and the expected batch size of the stack (empty if it is not given)."""
    # Without members, the size is that of the stack if it has a 0 at the stack dim, and else that of future members.
    is_of_members = bool(size) and not members and 0 not in size[stack_dim : stack_dim + 1 or None]
    ndim = len(members[0].batch_size) if members else len(size or (0,)) - (not is_of_members)
    dim = stack_dim + ndim + 1 if stack_dim < 0 else stack_dim
    if not 0 <= dim <= ndim:
        raise CollectionIndexError(f"stack_dim {stack_dim} is out of range for members of {ndim} batch dims")
    return dim, (*size[:dim], 0, *size[dim:]) if is_of_members else size


FACTORIES.lazy_stack = LazyStackedTensorDict._of
