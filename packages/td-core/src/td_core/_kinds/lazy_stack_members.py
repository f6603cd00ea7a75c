"""Operations that a lazy stack runs on its members: walks over them, printing, indexed writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._convert.printing import PrintedMembers, PrintedNode, merge_fields
from .._functions.shape import Replacement
from .._methods.collection import TensorDictBase
from .._plans.steps import remove_size
from .._tree.coerce import coerce
from .._tree.defaults import show_path
from .._tree.locks import check_unlocked
from .._tree.node import FACTORIES, Child, Core
from .._tree.ragged import list_distinct_members
from .._tree.walks import has_entries, list_holders, map_levels
from .._writes.run import Transaction
from .._writes.update import Update
from ..errors import BatchSizeError, StructureError
from .lazy_stack_writes import Part, split_for_members

if TYPE_CHECKING:
    from typing_extensions import Self


class LazyStackOps(TensorDictBase):
    """Base of LazyStackedTensorDict: operations that do not stack the entries."""

    __slots__ = (
        "__weakref__", "_backends", "_empty_device", "_empty_size", "_hook_in", "_hook_out",
        "_lock_parents", "_locked", "_members", "_passed", "_stack_dim", "_stack_dim_name", "_undo",
    )  # fmt: skip

    _members: list[Any]
    _stack_dim: int
    _stack_dim_name: str | None
    _hook_in: Callable[[Any], object] | None
    _hook_out: Callable[[Child], Child] | None
    _empty_size: torch.Size
    _empty_device: torch.device | None

    def _init(
        self,
        members: list[Core],
        stack_dim: int,
        name: str | None = None,
        hook_in: Callable[[object], object] | None = None,
        hook_out: Callable[[Any], Any] | None = None,
    ) -> None:
        self._members = members
        self._stack_dim = stack_dim
        self._stack_dim_name = name
        self._hook_in = hook_in
        self._hook_out = hook_out
        self._empty_size, self._empty_device = torch.Size((0,)), None
        self._locked = False
        self._lock_parents = self._backends = self._undo = None

    def _with_members(self, members: Sequence[Core], stack_dim: int | None = None) -> Self:
        """Build a stack of other members, with the dim name and hooks of this one."""
        stack = object.__new__(type(self))
        dim = self._stack_dim if stack_dim is None else stack_dim
        stack._init(list(members), dim, self._stack_dim_name, self._hook_in, self._hook_out)
        stack._empty_size, stack._empty_device = self._empty_size, self._empty_device
        return stack

    def _zip_parts(self, others: Sequence[object]) -> Iterable[tuple[Any, ...]]:
        """Pair each member with its part of other nodes or tensors."""
        return zip(self._members, *[_unbind(other, self._stack_dim) for other in others], strict=True)

    def _zip_members(self, *others: object) -> list[tuple[Any, ...]]:
        if not others:
            members = self._members.copy()
            kinds: set[type[Core]] = {*map(type, members)}
            if all(kind._zip_members is _HOLDS_ENTRIES for kind in kinds):
                return list(zip(members))
            return [row for member in members for row in member._zip_members()]
        return [row for member, *parts in self._zip_parts(others) for row in member._zip_members(*parts)]

    def _map_members(self, fn: Callable[..., object], *others: object) -> Any:
        if others:
            made = [member._map_members(fn, *parts) for member, *parts in self._zip_parts(others)]
        else:
            made = [member._map_members(fn) for member in self._members]
        dropped = [node is None for node in made]
        if True in dropped:
            if all(dropped):
                return None
            made = [
                self._members[i]._with_children({}) if node is None else node for i, node in enumerate(made)
            ]
        return self._with_members(made)

    def _tree_children(self) -> list[Child]:
        return list(self._members)

    def _peek_child(self, key: str) -> Child:
        members = self._members.copy()
        levels = [member._children() for member in members]
        if not members or False in [key in level for level in levels]:
            raise KeyError(key)
        first: Child = members[0]._peek_child(key)
        if isinstance(first, Tensor):
            return first
        entries = [
            level[key] if type(level) is dict else member._peek_child(key)
            for level, member in zip(levels, members)
        ]
        if any(issubclass(kind, Tensor) for kind in {*map(type, entries)}):
            return first
        try:
            return first._stack_lazily(entries, self._stack_dim)
        except StructureError:  # entries that cannot be joined have keys, too
            return first if first._is_value else FACTORIES.lazy_stack(entries, self._stack_dim)

    def _print_node(self) -> PrintedNode:
        members, dim = self._members.copy(), self._stack_dim
        # A member may be a lazy stack with ragged leaves. Of a tensorclass, print the entries, not the fields.
        rows = [{field.key: field for field in member._inner()._print_node().fields} for member in members]
        common = [key for key in rows[0] if all(key in row for row in rows)] if rows else []
        exclusive = [[row[key] for key in row if key not in common] for row in rows]
        return PrintedNode(
            [merge_fields([row[key] for row in rows], dim) for key in common],
            PrintedMembers(dim, [row for row in zip(range(len(rows)), members, exclusive) if row[2]]),
        )

    def _take_over(self, result: Core) -> list[Replacement] | None:
        size, stacked = result.batch_size, result._members_and_dim()
        if not size:
            return None
        dim = min(self._stack_dim, len(size) - 1) if stacked is None else stacked[1]
        parts: Sequence[Any] = result.unbind(dim) if stacked is None else stacked[0]
        if not parts:
            return None
        # A member that occurs twice cannot take over two results.
        repeats = len(list_distinct_members(self._members)) < len(list_holders(self))
        kept = [] if repeats else self._members[: len(parts)]
        self._members[:] = [*kept, *parts[len(kept) :]]
        self._stack_dim = dim
        self._stack_dim_name = None if result._names is None else result._names[dim]
        return [
            (member, part, partial(self._members.__setitem__, i))
            for i, (member, part) in enumerate(zip(kept, parts))
        ]

    def _plan_writes(
        self,
        writes: Transaction,
        index: object,
        value: object,
        path: tuple[str, ...] = (),
        dims: int | None = None,
    ) -> None:
        self._plan_parts(writes, split_for_members(self, index, value, path, dims), path, dims)

    def _plan_parts(
        self, writes: Transaction, parts: Iterable[Part], path: tuple[str, ...] = (), dims: int | None = None
    ) -> None:
        writes.split = True
        for member, index, part in parts:
            member._plan_writes(writes, index, part, path, dims)

    def _split_update(
        self, plan: Update, source: Core, wanted: object, path: tuple[str, ...]
    ) -> list[tuple[Core, object]] | None:
        members, dim, size = self._members, self._stack_dim, source.batch_size
        # A source without the stack dim is read as a mapping: its leaves may have that dim.
        if not members or self._hook_in is not None or not (plan.resize or len(size) > dim):
            return None
        if size[dim : dim + 1] == (len(members),):
            return list(zip(members, source.unbind(dim), strict=True))
        if not plan.resize:
            raise BatchSizeError(
                f"cannot update {show_path(path)}: it is a lazy stack of {len(members)} along dim {dim}, the source has "
                f"batch size {list(size)}"
            )
        plan.writes.change(self._replace_members, self._make_new_members(plan, source, wanted, path))
        return []

    def _replace_members(self, members: list[object]) -> None:
        """Replace all members, whose number may change."""
        self._members[:] = members

    def _make_new_members(
        self, plan: Update, source: Core, wanted: object, path: tuple[str, ...]
    ) -> list[Child]:
        """Copy the slices of ``source``, whose number differs from that of the members."""
        members, dim, right = self._members, self._stack_dim, source._children()
        kept = sorted({key for member in members for key in member._children() if key not in right})
        if kept or plan.inplace or wanted is not None or len(source.batch_size) <= dim:
            raise BatchSizeError(
                f"cannot update {show_path(path)}: this lazy stack of {len(members)} along dim {dim} would get new members from "
                f"the source of batch size {list(source.batch_size)}, which needs inplace=False, no keys_to_update, and "
                f"all of its keys; missing there: {kept}"
            )
        check_unlocked(self, f"update {show_path(path)}")
        parts = [part.clone(recurse=plan.clone)._inner() for part in source.unbind(dim)]
        return [
            coerce(part, part.batch_size, self.device, path, non_blocking=plan.writes.non_blocking)
            for part in parts
        ]

    def _make_empty_stack(self, plan: Any, size: torch.Size) -> Core:
        """Build a lazy stack of another batch size, whose members have the nested nodes of the first, but no leaves."""
        dim = min(self._stack_dim, len(size) - 1)
        first = self._members[0].select(*list(self._children()))
        first = map_levels(first, _drop_leaves, by_member=True)
        inner = plan.of_member(first.batch_size, remove_size(size, dim))
        return FACTORIES.lazy_stack([first._transform(inner) for _ in range(size[dim])], dim)


#: The method of a node that holds its own entries.
_HOLDS_ENTRIES = Core._zip_members


def _drop_leaves(node: Core, entries: dict[str, Child], state: None) -> Iterator[tuple[str, Core, None]]:
    return ((key, child, None) for key, child in dict(node._children()).items() if has_entries(child))


def _unbind(other: Any, dim: int) -> Iterable[Child]:
    """Unbind a tensor or node, without the checks of a class for results of an operation."""
    if isinstance(other, Tensor):
        return other.unbind(dim)
    inner = other._inner()
    parts: Iterable[Child] = inner.unbind(dim)
    return parts if inner is other else map(other._wrap_holder, parts)
