"""The abstract base class of every node: what a kind implements, and the defaults that need nothing but a node.

A *kind* (dense, lazy stack, parameters, a tensorclass, a kind of a plugin) implements the abstract members of
:class:`Core`. The other members have default implementations, which a kind overrides only to be faster or lazier. The
public methods are in mixins that use only these members.

``_flatten_leaves``, ``_flatten_other`` and ``_map`` of a kind visit the leaves in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, overload

import torch
from torch import Tensor

from .._plans.elements import JoinPlan
from .._plans.plans import MultiPlan, ShapePlan
from .._torch.dtypes import ScalarBeside
from ..errors import KeyMismatchError, StructureError
from ..typing import NO_DEFAULT, Names, NoDefault

if TYPE_CHECKING:
    from typing_extensions import Self


Child = Union[Tensor, "Core"]


CoreT = TypeVar("CoreT", bound="Core")


Undo = Callable[[Any], object]


#: The treedef that ``_flatten_leaves`` returns for ``_unflatten``: a list with a copy of the entries of each visited node;
#: a tuple of them if the tree has nodes of other kinds with entries; one dict if the root holds only plain tensors; None if
#: ``_unflatten`` has to walk the tree again.
Walked = Any  # Any avoids casts: most callers handle only one of the four forms of a treedef


#: Classes of nodes that represent one leaf, which ``_unwrap`` returns, and have an instance; mostly empty.
LEAF_KINDS: set[type] = set()


_NOTHING: AbstractContextManager[object] = nullcontext()


class EntrySchema:
    """The entries that a class declares. This one declares none: every key and value is accepted unchanged.

    Attributes:
        converts_tensors: ``convert`` also converts tensors.
        can_grow: loading a state dict may add entries.
        is_in_memory: values can be stored one by one, and leaves replaced.
        clears_none: None, as a value that is set, removes the entry (``_clear_field`` of the node).
        cast_filter: the ``cast_filter`` of casts without this argument, or None.
    """

    __slots__ = ()

    converts_tensors: bool = False
    can_grow: bool = True
    is_in_memory: bool = True
    clears_none: bool = False
    cast_filter: Any = None

    def check_keys(self, keys: Mapping[Any, object]) -> None:
        """Raise an error if a node of the class cannot have an entry under one of the keys."""

    def find_class(self, key: str) -> type | None:
        """Return the class of nodes that is declared for an entry, or None."""
        return None

    def convert(self, key: str, value: object) -> Any:
        """Convert a value that is set to the declared type, before it is coerced."""
        return value

    def convert_plain(self, key: str, value: object) -> object:
        """Convert a value of a mapping that is neither a tensor nor a mapping."""
        return value

    def adopt(self, key: str, node: object) -> Any:
        """Convert a new TensorDict to the class that is declared for its key."""
        return node

    def add_defaults(self, node: object) -> Any:
        """Return a new node with the defaults of the declared entries that it lacks."""
        return node

    def list_entries(self, node: Core) -> Mapping[str, Child | None]:
        """Return the direct entries of a node, with None for each declared entry that is missing."""
        children = node._children()
        return children if type(children) is dict else get_all_entries(node)


#: The members that a kind must define; `td_core.spi.REQUIRED` says what each of them does.
REQUIRED = (
    "batch_size", "device", "_children", "_with_children", "_set_child", "_del_child", "_set_batch_size", "_set_device",
)  # fmt: skip


class Core:
    """Base of every node: the members that a kind must define, and the defaults that use them."""

    __slots__ = ()

    #: True for value nodes, which hold a value and no entries: key iteration never descends into them.
    _is_value: ClassVar[bool] = False

    #: The entries that the class declares.
    _schema: ClassVar[EntrySchema] = EntrySchema()

    # Defaults for kinds without slots; a kind with slots sets them in its constructor.
    _locked: bool | str = False
    _lock_parents: list[weakref.ref[Core]] | None = None
    _backends: dict[str, Any] | None = None
    #: How ``with`` undoes the last operation, and those of its open blocks, innermost first.
    _undo: tuple[Undo | None, tuple[Undo | None, ...]] | None = None
    _names: Names | None = None

    if TYPE_CHECKING:
        # Methods that functions on nodes call; the mixins implement them, with their signatures.
        def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None: ...
        def _broadcast_to_leaves(
            self, value: Tensor, out: list[Tensor], scalar: ScalarBeside | None = None
        ) -> None: ...
        def __getitem__(self, index: object) -> Any: ...
        def _index(self, index: object) -> Any: ...

        _make: Callable[[dict[str, Child], torch.Size, torch.device | None, Names | None], Core]
        _plan_writes: Callable[..., None]
        _print_node: Callable[..., Any]
        _set_path: Callable[..., None]
        _set_names: Callable[[Names | None], None]
        apply: Callable[..., Any]
        all: Callable[..., Any]
        auto_batch_size_: Callable[..., Self]
        clone: Callable[..., Self]
        contiguous: Callable[[], Self]
        copy_: Callable[..., Self]
        del_: Callable[..., Self]
        exclude: Callable[..., Self]
        expand: Callable[..., Self]
        flatten_keys: Callable[..., Self]
        get: Callable[..., Any]
        is_empty: Callable[[], bool]
        items: Callable[..., Any]
        keys: Callable[..., Any]
        pad: Callable[..., Self]
        permute: Callable[..., Self]
        pop: Callable[..., Any]
        reshape: Callable[..., Self]
        set: Callable[..., Self]

        @property
        def batch_dims(self) -> int: ...
        @property
        def is_locked(self) -> bool: ...
        @property
        def names(self) -> list[str | None]: ...
        def lock_(self) -> Self: ...

        is_shared: Callable[[], bool]
        named_apply: Callable[..., Any]
        rename_keys: Callable[..., Self]
        requires_grad_: Callable[..., Self]
        select: Callable[..., Self]
        share_memory_: Callable[[], Self]
        state_dict: Callable[..., Mapping[str, object]]
        to: Callable[..., Self]
        to_dict: Callable[..., object]
        to_lazystack: Callable[..., Core]
        tolist: Callable[..., Any]
        unflatten_keys: Callable[..., Self]

        def unbind(self, dim: int) -> tuple[Self, ...]: ...
        def unlock_(self) -> Self: ...

        update: Callable[..., Self]
        update_: Callable[..., Self]
        update_at_: Callable[..., Self]
        values: Callable[..., Any]
        where: Callable[..., Self]

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share."""
        raise missing_member_error(self, "batch_size")

    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None if entries may be on different devices."""
        raise missing_member_error(self, "device")

    def _children(self) -> Mapping[str, Child]:
        """Return the direct entries in insertion order. The mapping may be the kind's own dict, not a copy."""
        raise missing_member_error(self, "_children")

    def _with_children(
        self,
        children: Mapping[str, Child],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        """Return a new, unlocked node of this kind with unchecked ``children``. Omitted metadata is copied from this node."""
        raise missing_member_error(self, "_with_children")

    def _set_child(self, key: str, value: Child) -> None:
        """Store a checked value under ``key``."""
        raise missing_member_error(self, "_set_child")

    def _add_child(self, key: str, value: Core) -> Child:
        """Store a checked node under a free key. Return the stored entry: another thread may have set the key first."""
        held = self._children().get(key)
        if held is not None:
            return held
        self._set_child(key, value)
        return value

    def _set_children(self, values: Mapping[str, Child]) -> None:
        """Store checked values under their keys."""
        for key, value in values.items():
            self._set_child(key, value)

    def _del_child(self, key: str) -> None:
        """Remove the entry ``key``. Raise KeyError if it is missing."""
        raise missing_member_error(self, "_del_child")

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        """Store a checked batch size; :func:`set_batch_size` then adjusts the dim names."""
        raise missing_member_error(self, "_set_batch_size")

    def _set_device(self, device: torch.device | None) -> None:
        """Store the device label without moving the leaves."""
        raise missing_member_error(self, "_set_device")

    @classmethod
    def _wrap_dense(cls, result: object) -> Any:
        """Convert a dense collection to this class, for classmethods such as ``from_dict``. The default returns it unchanged."""
        return result

    def _as_value(self, value: object) -> object:
        """Wrap a value in a node of this kind, if this is a value node. The default returns the value unchanged."""
        return value

    @classmethod
    def _of_saved(cls, saved: Core) -> Core:
        """Convert a loaded node, maybe of another class, to this class. Raise TypeError if that is not possible."""
        made: Core = cls._wrap_dense(saved)
        return made

    def _get_child(self, key: str) -> Child:
        """Return one direct entry. Raise KeyError if it is missing."""
        return self._children()[key]

    def _get_join_entries(self, first: Core, plan: JoinPlan, path: tuple[str, ...]) -> dict[str, Child]:
        """Return the direct entries for a join with nodes of other kinds. Raise StructureError if the kinds cannot be joined."""
        return dict(get_all_entries(self))

    def _unwrap(self) -> object:
        """Return the result of ``parent[key]`` for this entry: the value of a value node, otherwise the node itself."""
        return self

    def _get_writable(self, key: str) -> Child:
        """Return ``_get_child(key)``, wrapped so that entries set in it are converted as in this node."""
        return self._get_child(key)

    def _inner(self) -> Core:
        """Return the node that holds the state: the wrapped node of a wrapper, otherwise the node itself."""
        return self

    def _edit_together(self) -> AbstractContextManager[object]:
        """Return a context in which changes of the structure reach a store together; in memory there is nothing to do."""
        return _NOTHING

    def _check_child(self, key: str, value: Child) -> None:
        """Raise an error if ``_set_child`` would refuse a checked value."""

    def _index_put(self, index: object, value: object, *, non_blocking: bool = False) -> Core:
        """Write ``value`` at an index. Return the node for the parent to store: this one or its replacement."""
        if type(index) is tuple and not index:
            self.copy_(value, non_blocking=non_blocking)
        else:
            self._assign(index, value, non_blocking=non_blocking)
        return self

    def _check_index_put(self, index: object, value: object) -> None:
        """Raise an error if this kind cannot be written at an index."""

    def _move_mapped_dim(self, dim: int, left: torch.Size | None, level: int) -> None:
        """Hide the batch dim that the vmap of a level maps over, which leaves the size ``left``; None: it returns at ``dim``."""

    @property
    def _keeper(self) -> Any:
        """The :class:`Keeper` that stores the values of this node outside memory, or None; ignored by nodes without values."""
        return None

    @_keeper.setter
    def _keeper(self, keeper: Any) -> None:
        pass

    def _compare(self, other: object, single: Callable[..., object]) -> Child | None:
        """Compare values elementwise with ``torch.eq`` or ``torch.ne``. Return None if only the entries can be compared."""
        return None

    def _peek_child(self, key: str) -> Child:
        """Return an entry of the same class as ``_get_child(key)``, for reading keys only. Raise KeyError if missing."""
        return self._get_child(key)

    def _members_and_dim(self) -> tuple[Sequence[Core], int] | None:
        """Return the members and the stack dim of a lazy stack, or None for other kinds."""
        return None

    def _zip_members(self, *others: object) -> list[tuple[Any, ...]]:
        """Pair each holder with its part of other nodes or tensors, which have the same batch size."""
        return [(self, *others)]

    def _map_members(self, fn: Callable[..., object], *others: object) -> Any:
        """Return ``fn(self, *others)``; for a lazy stack, a stack of the results, empty members for None; None if all are."""
        return fn(self, *others)

    def _tree_children(self) -> list[Child]:
        """Return the direct children: the members of a lazy stack, the entries of any other node."""
        return list(self._children().values())

    def _split_write(self, value: object, *index: object) -> Sequence[tuple[Core, object, object]]:
        """List, for a write to all or an index of a lazy stack, each member with the index in it and the value; else nothing."""
        return ()

    def _split_update(
        self, plan: Any, source: Core, wanted: object, path: tuple[str, ...]
    ) -> Sequence[tuple[Core, object]] | None:
        """Pair each member of a lazy stack with its part of the source of an update; None if the entries are updated."""
        return None

    def _stack_lazily(self, items: Sequence[Core], dim: int, source: tuple[Core, str] | None = None) -> Core:
        """Build a lazy stack of nodes, this one first: those of the lazy stack and key ``source``, which writes must reach."""
        return FACTORIES.lazy_stack(items, dim)

    def _with_batch_size(self, batch_size: torch.Size) -> Self:
        """Return this node if its batch size starts with ``batch_size``, else a shallow copy with that batch size."""
        if self.batch_size[: len(batch_size)] == batch_size:
            return self
        fitted = self._shallow_copy()
        fitted._change_batch_size(batch_size)
        return fitted

    def _max_batch_size(self) -> torch.Size | None:
        """Return the longest batch size that ``_with_batch_size`` accepts; None means any that the leaves allow."""
        return None

    def _change_batch_size(self, batch_size: torch.Size) -> None:
        """Check that all leaves start with ``batch_size``, then store it here and in nested nodes with a shorter one."""
        raise missing_member_error(self, "_change_batch_size")

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        """Raise BatchSizeError unless the shape of every leaf starts with ``batch_size``."""
        raise missing_member_error(self, "_check_batch_size")

    def _flatten_leaves(self, out: list[Tensor]) -> Walked:
        """Append every tensor leaf to ``out``. Return the treedef for ``_unflatten``."""
        _as_dense(self)._flatten_leaves(out)

    def _leaves(self) -> list[Tensor]:
        """Return every tensor leaf, in the order of ``_flatten_leaves``."""
        out: list[Tensor] = []
        self._flatten_leaves(out)
        return out

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        """Append the leaves of ``other`` to ``out``, in the order of this node. Raise StructureError for another structure."""
        _as_dense(self)._flatten_other(other, out, path)

    def _zip_leaves(
        self, other: Core, left: list[Tensor], right: list[Tensor], values: list[Core] | None = None
    ) -> Walked:
        """Append this node's leaves to ``left``, those of ``other`` to ``right``, nodes that may hold values to ``values``."""
        if values is not None:
            values.append(self)
        treedef = self._flatten_leaves(left)
        self._flatten_other(other, right)
        return treedef

    def _unflatten(self, leaves: Sequence[Tensor], treedef: Walked = None) -> Self:
        """Return the same structure with new leaves. ``treedef``, from ``_flatten_leaves`` of this node, is consumed."""
        provided = iter(leaves)
        try:
            result = replace_leaves(self, provided)
        except StopIteration:
            raise concurrent_change_error(self) from None
        if next(provided, None) is not None:
            raise concurrent_change_error(self)
        return result

    def _shallow_copy(self) -> Self:
        """Return a new tree of the same structure that shares the leaves."""
        return self._map(identity)

    @property
    def _copy_stored(self) -> Callable[[Tensor], Tensor]:
        """The function that copies a leaf which ``update(clone=True)`` stores in this node."""
        return copy_leaf

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the same structure with ``fn(leaf)`` in place of each leaf."""
        return self._with_children(_as_dense(self)._map(fn)._children())

    def _transform(self, plan: ShapePlan) -> Self:
        """Apply a shape plan to every leaf and return the result."""
        return convert_level(self, _as_dense(self)._transform(plan))

    def _transform_multi(self, plan: MultiPlan) -> tuple[Self, ...]:
        """Apply a plan that splits every leaf into parts, and return one node per part, with leading dims ``plan.leads``."""
        return tuple([convert_level(self, part) for part in _as_dense(self)._transform_multi(plan)])

    def _join(self, items: Sequence[Core], plan: JoinPlan, path: tuple[str, ...] = ()) -> Self:
        """Join ``items``, this node first, with ``plan.leaf`` per key. Raise StructureError if their keys differ."""
        return convert_level(self, _as_dense(self)._join(items, plan, path))


def list_missing(cls: type[Core]) -> list[str]:
    """Return the members of :data:`REQUIRED` that a class does not define."""
    return [name for name in REQUIRED if getattr(cls, name) is getattr(Core, name)]


def missing_member_error(node: Core, name: str) -> NotImplementedError:
    """Return the error for a member that the kind of a node does not define."""
    return NotImplementedError(
        f"{type(node).__name__} does not define {name}, as every kind must: td_core.spi.REQUIRED lists what is needed"
    )


def _as_dense(node: Core) -> Core:
    """Return the entries as a plain TensorDict, whose tree walks the default implementations use."""
    return make_dense(dict(node._children()), node.batch_size, node.device, node._names)


def convert_level(kind: CoreT, level: Core) -> CoreT:
    """Convert a node, maybe of another kind, to the kind of ``kind``."""
    return kind._with_children(
        level._children(), batch_size=level.batch_size, device=level.device, names=level._names
    )


def replace_leaves(node: CoreT, leaves: Iterator[Tensor]) -> CoreT:
    """Return the same structure with new leaves, taken from an iterator in the order of ``_flatten_leaves``."""
    return node._map(lambda _: next(leaves))


def get_all_entries(node: Core) -> Mapping[str, Child]:
    """Return the direct entries. Raise KeyMismatchError if a lazy stack has entries that only some members have."""
    children = node._children()
    if type(children) is not dict:
        check_no_hidden_keys([holder._children().keys() for (holder,) in node._zip_members()])
    return children


def check_no_hidden_keys(keys: Sequence[Collection[str]]) -> None:
    """Raise KeyMismatchError if the given key sets of the members differ."""
    hidden = [key for key in dict.fromkeys(chain(*keys)) if not all(key in left for left in keys)]
    if hidden:
        raise KeyMismatchError(
            f"the members of a lazy stack have different keys, and {hidden}, which some lack, would be lost; select() the "
            "common keys first, or go through the members"
        )


def concurrent_change_error(node: Core) -> StructureError:
    """Return the error for a structure that another thread changed between two walks."""
    return StructureError(
        f"the {type(node).__name__} was changed by another thread while it was read; lock_() it while threads share it"
    )


def identity(leaf: Tensor) -> Tensor:
    """Return the leaf unchanged."""
    return leaf


def copy_leaf(leaf: Tensor, **kwargs: Any) -> Tensor:
    """Clone a leaf."""
    # Do not use torch.clone: some subclasses keep their class only in the method clone, or override it.
    return leaf.clone(**kwargs)


class Factories:
    """The constructors of the kinds that code below the kinds needs; the module of each kind sets one."""

    __slots__ = ("dense", "lazy_stack", "parameters")

    dense: Callable[[dict[str, Child], torch.Size, torch.device | None, Names | None], Core]
    lazy_stack: Callable[[Sequence[Core], int], Core]
    parameters: Callable[[Core], Core]


FACTORIES = Factories()


@overload
def make_dense(
    children: dict[str, Child],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: Names | None = None,
) -> Core: ...
@overload
def make_dense(
    children: dict[str, Child],
    batch_size: torch.Size,
    device: torch.device | None,
    names: Names | None,
    cls: type[CoreT],
) -> CoreT: ...
def make_dense(
    children: dict[str, Child],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: Names | None = None,
    cls: type[Core] | None = None,
) -> Core:
    """Build a TensorDict, or a node of a subclass, that holds the dict ``children`` itself, without checks."""
    make = FACTORIES.dense if cls is None else cls._make
    return make(children, batch_size, device, names)
