"""The small required core of every collection, and the primitives derived from it.

A *kind* (dense, lazy stack, parameters, a tensorclass, one of a plugin) provides the abstract members of :class:`Core`;
the primitives below are written once on top of them, and a kind overrides one only to be faster or lazier. The public
behaviour lives in mixins that see only these members.

Leaves are visited in one order, the same for ``_flatten_leaves``, ``_flatten_like`` and ``_map`` of a kind.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ._dim_names import Names
from ._keys import suggest_keys
from ._plans import ShapePlan
from .errors import BatchSizeError, KeyMismatchError, KeyPathError, StructureError
from .typing import NO_DEFAULT, NoDefault

Child = Any  # Tensor | Core: spelled Any because most callers know which of the two they hold
SelfT = TypeVar("SelfT", bound="Core")

#: What ``_flatten_leaves`` tells ``_unflatten``: the entries of each level as they were read, in the order of the walk, as a
#: tuple where nodes of other kinds that have entries are among them; of the only level where all are plain tensors; None
#: where the levels have to be walked again.
Walked = Any  # list[dict[str, Child]] | tuple[dict[str, Child], ...] | dict[str, Child] | None


#: What ``_locked`` is where what is attached to a node has locked it, and not its owner.
ATTACHED = "attached"


class Core(ABC):
    """What a kind of collection must provide, and what it gets for it."""

    __slots__ = ()

    #: True for kinds that hold a value and no entries: key iteration never descends into them.
    _is_value: ClassVar[bool] = False

    #: True for opaque kinds that stand for one tensor: readers get it, from ``_unwrap``, and count it as a leaf.
    _is_tensor_proxy: ClassVar[bool] = False

    #: False where a state dict adds no entries: a module keeps those that it was made with.
    _grows: bool = True

    #: True for kinds whose declarations convert tensors too, see ``_coerce_to_schema``.
    _has_schema: ClassVar[bool] = False

    #: True for stacks that change each value before it is written, see ``_split_value``.
    _changes_values: bool = False

    #: The dict that holds the entries, for kinds that keep them in one.
    _dict: Any = None

    # A kind has nothing to do for these, unless it has slots.
    _locked: bool | str = False
    _lock_parents: list[weakref.ref[Core]] | None = None
    _backends: dict[str, Any] | None = None
    _undo: Callable[[Any], Any] | None = None
    _names: Names | None = None

    @property
    @abstractmethod
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share."""

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """Device of every entry, or None where entries keep their own."""

    @abstractmethod
    def _children(self) -> Mapping[str, Child]:
        """Return the direct entries, in insertion order (a live mapping where the kind stores one)."""

    @abstractmethod
    def _with_children(
        self: SelfT,
        children: Mapping[str, Child],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> SelfT:
        """Return a new, unlocked node of this kind around ``children``, unchecked; what is omitted stays."""

    @abstractmethod
    def _set_child(self, key: str, value: Child) -> None:
        """Store a checked value under ``key``."""

    def _add_child(self, key: str, value: Core) -> Child:
        """Store a checked collection where nothing is; return what is there: another thread may have been first."""
        self._set_child(key, value)
        return value

    def _set_children(self, values: Mapping[str, Child]) -> None:
        """Store checked values under their keys."""
        for key, value in values.items():
            self._set_child(key, value)

    @abstractmethod
    def _del_child(self, key: str) -> None:
        """Remove the entry ``key``; KeyError where it is missing."""

    @abstractmethod
    def _set_batch_size(self, batch_size: torch.Size) -> None:
        """Store a checked batch size; names stay with the first dims, and new dims have none."""

    @abstractmethod
    def _set_device(self, device: torch.device | None) -> None:
        """Store the device label, without moving anything."""

    @classmethod
    def _wrap_dense(cls, result: Any) -> Any:
        """Return what a function made as what the classmethod of its name returns; kinds with dense entries override it."""
        return result

    def _as_value(self, value: Any) -> Any:
        """Return what another collection holds where this node stands in its own; for kinds that hold values, a node of them."""
        return value

    def _as_entry(self, key: str, value: Any) -> Any:
        """Return a value as this node would hold it under a key."""
        own = self._children().get(key)
        return own._as_value(value) if isinstance(own, Core) and own._is_value else value

    def _of_level(self, level: Core) -> Core:
        """Return a level as one of the kind of this collection, with what that declares and the level lacks."""
        return self._with_children(
            level._children(), batch_size=level.batch_size, device=level.device, names=level._names
        )

    @classmethod
    def _of_saved(cls, saved: Core) -> Core:
        """Return what was saved, maybe in another class, as one of this class; TypeError where that cannot be."""
        made: Core = cls._wrap_dense(saved)
        return made

    @classmethod
    def _class_at(cls, key: str) -> type | None:  # noqa: ARG003  for classes that declare entries
        """Return the class of collections that is declared for an entry, if one is."""
        return None

    def _get_child(self, key: str) -> Child:
        """Return one direct entry; KeyError where it is missing."""
        return self._children()[key]

    def _all_children(self) -> Mapping[str, Child]:
        """Return the direct entries, for one who would lose those that a lazy stack hides: KeyMismatchError there."""
        return self._children()

    def _get_join_entries(self, first: Core, plan: ShapePlan, path: tuple[str, ...]) -> dict[str, Child]:
        """Return the direct entries, for a node of another kind to join its own with; StructureError if it cannot."""
        return dict(self._all_children())

    def _write_child(self, key: str, value: Child, *, non_blocking: bool = False) -> None:
        """Copy a checked value into the existing entry ``key``, in place."""
        entry = self._children()[key]
        if isinstance(entry, Tensor):
            entry.copy_(align_dims(value, entry.ndim, len(self.batch_size)), non_blocking=non_blocking)
        elif not entry._is_value:
            entry.copy_(value, non_blocking=non_blocking)
        else:
            written = entry._index_put((), value)
            if written is not entry:
                self._set_child(key, written)

    def _move(self, device: torch.device, non_blocking: bool) -> Any:
        """Return this node with everything in it on a device; the casting mixin provides it."""
        raise NotImplementedError

    def _get_leaf_spec(self) -> tuple[torch.device | None, torch.dtype | None]:
        """Return the device and dtype of the leaf that this node describes; most kinds describe none."""
        return None, None

    def _index(self, index: Any) -> Any:
        """Return all entries at an index; the shape mixin provides it."""
        raise NotImplementedError

    def _unwrap(self) -> Any:
        """Return what ``parent[key]`` shows for this entry: the node itself, or the value that it stands for."""
        return self

    def _get_writable(self, key: str) -> Child:
        """Return ``_get_child(key)``, through which what is set below is stored as this collection stores it."""
        return self._get_child(key)

    def _keep_shown(self) -> None:  # noqa: B027  # most kinds have nothing else
        """Make what ``_unwrap`` gives the leaf that operations take; for changes of the leaves themselves."""

    def _inner(self) -> Core:
        """Return the node that holds the state: itself, or the one it wraps."""
        return self

    def _index_put(self, index: Any, value: Any) -> Core:
        """Write ``value`` at an index and return what the parent holds from now on: this node, or one in its place."""
        self._assign(index, value)  # type: ignore[attr-defined]
        return self

    def _check_index_put(self, index: Any, value: Any) -> None:  # noqa: B027 -- most kinds are written at any index
        """Raise where this kind cannot be written at an index."""

    def _hide_dim(self, dim: int, batch_size: torch.Size) -> None:  # noqa: B027 -- most kinds hold nothing by position
        """Take note that vmap takes a batch dim away, which leaves ``batch_size``, for kinds that hold values."""

    def _reveal_dim(self, dim: int) -> None:  # noqa: B027
        """Take note of the place where the batch dim comes back that vmap took last."""

    def _keeper(self) -> Any:
        """Return what keeps the values of this node beside its memory; None where nothing does."""
        return None

    def _keep(self, keeper: Any) -> None:  # noqa: B027 -- most kinds have no values
        """Let a :class:`Keeper` keep the values of this node."""

    def _has_equal_values(self, other: Any) -> bool:
        """Tell whether another node surely holds the same values, for kinds that hold values."""
        return False

    def _wrap_child(self, key: str, value: Child) -> Child:
        """Return a new TensorDict as what this kind holds under a key, where that is a class of its own."""
        return value

    def _check_keys(self, keys: Mapping[Any, Any]) -> None:  # noqa: B027 -- most kinds take any key
        """Raise where one of some keys is that of no entry which this node can have."""

    def _coerce_to_schema(self, key: str, value: Any) -> Any:
        """Return a value as the declaration of ``key`` wants it, before it is coerced; here nothing is declared."""
        return value

    def _peek_child(self, key: str) -> Child:
        """Return an entry of the class of ``self._get_child(key)``, for looking at keys only; KeyError if missing."""
        return self._get_child(key)

    def _iter_nested(self) -> Iterator[Core]:
        """Iterate over the collections directly below, without building entries."""
        return (child for child in list(self._children().values()) if not isinstance(child, Tensor))

    def _members_and_dim(self) -> tuple[Sequence[Any], int] | None:
        """Return the members and the dim they are stacked along, for kinds made of members; None for all others."""
        return None

    def _is_fully_locked(self) -> bool:
        """Tell whether structural changes are refused, by a lazy stack where every member does."""
        return bool(self._locked)

    def _tree_children(self) -> list[Child]:
        """Return what is directly below: the members of a lazy stack, the entries of any other node."""
        stacked = self._members_and_dim()
        return list(self._children().values() if stacked is None else stacked[0])

    def _split_value(self, value: Child) -> Sequence[Any]:
        """Return what each member gets of a value that is written; only where ``_changes_values`` is true."""
        raise NotImplementedError

    def _rows_for_members(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return each member with its row of a list of tensors that do not stack; None where there are no such."""
        return None

    def _with_members(self: SelfT, members: Sequence[Core]) -> SelfT:
        """Return a node of this kind around new members; only where ``_members_and_dim`` gives some."""
        raise NotImplementedError

    def _stack_lazily(self, items: Sequence[Core], dim: int) -> Core:
        """Return nodes, this one first, as one lazy stack of the right kind."""
        return make_lazy_stack(items, dim)

    def _bind_to_stack(self, stack: Core, key: str) -> None:  # noqa: B027 -- most kinds share what they were made of
        """Take notice that a lazy stack made this node to show ``key``, so that what is written here can go there."""

    def _with_batch_size(self: SelfT, batch_size: torch.Size) -> SelfT:
        """Return this node, or a copy that shares its leaves, whose batch size starts with ``batch_size``.

        Raises:
            BatchSizeError: an entry cannot have this batch size.
        """
        if self.batch_size[: len(batch_size)] == batch_size:
            return self
        fitted = self._shallow_copy()
        fitted._change_batch_size(batch_size)
        return fitted

    def _max_batch_size(self) -> torch.Size | None:
        """Return the longest batch size that ``_with_batch_size`` can give this opaque node; None: any."""
        return None

    def _change_batch_size(self, batch_size: torch.Size) -> None:
        """Check that every entry starts with ``batch_size``, then store it; nested levels that are too short grow.

        Raises:
            BatchSizeError: an entry does not start with ``batch_size``; nothing was changed.
        """
        self._check_batch_size(batch_size)
        self._expand_batch_size(batch_size)

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        """Raise BatchSizeError unless every entry can start with ``batch_size``."""
        ndim = len(batch_size)
        todo: list[tuple[Core, tuple[str, ...]]] = [(self, path)]
        while todo:
            node, prefix = todo.pop()
            for key, child in dict(node._children()).items():
                if isinstance(child, Tensor):
                    if get_lead(child, ndim) != batch_size:
                        raise BatchSizeError(
                            f"the batch size {list(batch_size)} does not fit: {show_path((*prefix, key))} has shape "
                            f"{list(child.shape)}"
                        )
                elif child.batch_size[:ndim] != batch_size:
                    if type(child)._check_batch_size is Core._check_batch_size:
                        todo.append((child, (*prefix, key)))
                    else:
                        child._check_batch_size(batch_size, (*prefix, key))

    def _expand_batch_size(self, batch_size: torch.Size) -> None:
        """Store a checked batch size here, and below wherever a level does not start with it."""
        ndim = len(batch_size)
        todo: list[Core] = [self]
        while todo:
            node = todo.pop()
            todo.extend(child for child in node._iter_nested() if child.batch_size[:ndim] != batch_size)
            node._set_batch_size(batch_size)

    def _as_dense(self) -> Any:
        """Return the entries as the canonical kind, whose walks serve every kind that has none of its own."""
        return make_dense(dict(self._children()), self.batch_size, self.device, self._names)

    def _from_dense(self: SelfT, made: Core) -> SelfT:
        """Return a result of the canonical kind as one of this kind."""
        return self._with_children(made._children(), batch_size=made.batch_size, names=made._names)

    def _flatten_leaves(self, out: list[Tensor]) -> Walked:
        """Append every tensor leaf to ``out``; what is returned is for ``_unflatten``."""
        self._as_dense()._flatten_leaves(out)

    def _leaves(self) -> list[Tensor]:
        """Return every tensor leaf, in the order of ``_flatten_leaves``."""
        out: list[Tensor] = []
        self._flatten_leaves(out)
        return out

    def _flatten_like(self, ref: Core, out: list[Tensor]) -> None:
        """Append the leaves of this node in the order in which ``ref`` collects its own.

        Raises:
            StructureError: the keys differ; the message names the first differing one.
        """
        ref._flatten_other(self, out)

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        """Append the leaves of ``other`` in the order in which this node collects its own; see ``_flatten_like``."""
        self._as_dense()._flatten_other(other, out, path)

    def _zip_leaves(
        self, other: Core, left: list[Tensor], right: list[Tensor], values: list[Core] | None = None
    ) -> Walked:
        """Append the leaves of this node to ``left`` and those of ``other``, in the same order, to ``right``.

        What is returned is for ``_unflatten``. Nodes met that are no plain mappings, which may hold values beside
        leaves, are appended to ``values``.

        Raises:
            StructureError: the keys differ; the message names the first differing one.
        """
        if values is not None:
            values.append(self)
        treedef = self._flatten_leaves(left)
        other._flatten_like(self, right)
        return treedef

    def _unflatten_iter(self: SelfT, leaves: Iterator[Tensor]) -> SelfT:
        """Return the same structure around new leaves, taken in the order of ``_flatten_leaves``, which is that of ``_map``."""
        return self._map(lambda _: next(leaves))

    def _unflatten(self: SelfT, leaves: Sequence[Tensor], treedef: Walked = None) -> SelfT:
        """Return the same structure around new leaves, one for each that ``_flatten_leaves`` gave.

        ``treedef`` is what ``_flatten_leaves`` told, if that was of this node. It is used up.

        Raises:
            StructureError: their number differs, since another thread changed the structure in between.
        """
        provided = iter(leaves)
        try:
            result = self._unflatten_iter(provided)
        except StopIteration:
            raise concurrent_change_error(self) from None
        if next(provided, None) is not None:
            raise concurrent_change_error(self)
        return result

    def _shallow_copy(self: SelfT) -> SelfT:
        """Return the same structure around the same leaves."""
        return self._map(identity)

    def _map(self: SelfT, fn: Callable[[Tensor], Tensor]) -> SelfT:
        """Return the same structure around ``fn(leaf)``."""
        return self._with_children(self._as_dense()._map(fn)._children())

    def _clone_leaves(self: SelfT) -> SelfT:
        """Return a copy, with leaves of its own."""
        return self._map(copy_leaf)

    def _transform(self: SelfT, plan: ShapePlan) -> SelfT:
        """Return the result of a shape plan."""
        return self._from_dense(self._as_dense()._transform(plan))

    def _transform_multi(self: SelfT, plan: Any) -> tuple[SelfT, ...]:
        """Return the parts of a plan whose ``leaf`` gives one leaf for each part, of leading dims ``plan.leads``."""
        return tuple(map(self._from_dense, self._as_dense()._transform_multi(plan)))

    def _join(self: SelfT, items: Sequence[Core], plan: ShapePlan, path: tuple[str, ...] = ()) -> SelfT:
        """Return ``items`` (this node first) joined leaf by leaf: ``plan.leaf`` takes the list of leaves.

        Raises:
            StructureError: keys differ between items; the message names the first.
        """
        return self._from_dense(self._as_dense()._join(items, plan, path))


def iter_nodes(root: Core) -> Iterator[Core]:
    """Iterate over a collection and all below it, parents first."""
    todo = [root]
    while todo:
        level = todo.pop()
        yield level
        todo.extend(level._iter_nested())


def has_lazy_stack(root: Core) -> bool:
    """Tell whether a collection is a lazy stack, or holds one."""
    return any(level._members_and_dim() is not None for level in iter_nodes(root))


def concurrent_change_error(node: Core) -> StructureError:
    """Return the error for a structure that another thread changed while it was walked twice."""
    return StructureError(
        f"the {type(node).__name__} was changed by another thread while it was read; lock_() it while threads share it"
    )


def add_nested(node: Core, key: str, level: Any) -> None:
    """Store a new level, or what is in it where another thread has made one meanwhile: neither loses entries."""
    result = node._add_child(key, level)
    if result is level:
        return
    if isinstance(result, Tensor) or result._is_value:
        node._set_child(key, level)
    else:
        result.update(level)


def get_lead(leaf: Tensor, ndim: int) -> torch.Size:
    """Return the leading dims of a leaf; a nested tensor of strided layout has no shape, but sizes one by one.

    >>> get_lead(torch.zeros(2, 3, 4), 2)
    torch.Size([2, 3])
    """
    if leaf.is_nested and leaf.layout is torch.strided:
        return torch.Size([leaf.size(dim) for dim in range(min(ndim, leaf.ndim))])
    return leaf.shape[:ndim]


def align_dims(value: Tensor, ndim: int, batch_dims: int) -> Tensor:
    """Return a value as it broadcasts to an entry of ``ndim`` dims: both start with the batch dims; torch lines up the last.

    >>> align_dims(torch.zeros(3), 2, 1).shape
    torch.Size([3, 1])
    """
    if not 0 < batch_dims <= value.ndim < ndim:
        return value
    return value[(slice(None),) * batch_dims + (None,) * (ndim - value.ndim)]


def identity(leaf: Tensor) -> Tensor:
    """Return a leaf as it is."""
    return leaf


def get_data(leaf: Tensor) -> Tensor:
    """Return a leaf without its gradient."""
    return leaf.data


def copy_leaf(leaf: Tensor, **kwargs: Any) -> Tensor:
    """Return a copy of a leaf."""
    # Not torch.clone: some subclasses keep their class in the method only, or have one of their own.
    return leaf.clone(**kwargs)


def is_copying(fn: Callable[..., Any]) -> bool:
    """Tell whether a function makes copies of leaves, so that what they are mapped to is a copy of a node.

    >>> is_copying(copy_leaf), is_copying(torch.exp)
    (True, False)
    """
    return getattr(fn, "func", fn) is copy_leaf


def clone_detached(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf that has no past."""
    return leaf.detach().clone()


def is_aliasing(fn: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether a function gives leaves around the same memory, so that what is no leaf has to be shared too.

    >>> is_aliasing(identity), is_aliasing(torch.exp)
    (True, False)
    """
    fn = fn.args[0] if isinstance(fn, partial) and fn.func is _call_once else fn
    return fn is identity or fn is Tensor.detach or fn is get_data


def call_once_per_leaf(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that calls ``fn`` once for each tensor, so that one under several keys stays one.

    >>> leaf = torch.zeros(2)
    >>> data = call_once_per_leaf(get_data)
    >>> data(leaf) is data(leaf)
    True
    """
    return partial(_call_once, fn, {})


def _call_once(fn: Callable[[Tensor], Tensor], made: dict[Tensor, Tensor], leaf: Tensor) -> Tensor:
    if leaf not in made:
        made[leaf] = fn(leaf)
    return made[leaf]


_dense: Callable[..., Any]
_lazy_stack: Callable[[Sequence[Core], int], Core]


def register_dense(factory: Callable[..., Any]) -> None:
    """Store how the canonical mapping kind is made; called once, by the module that defines it."""
    global _dense
    _dense = factory


def make_dense(
    children: dict[str, Child],
    batch_size: torch.Size,
    device: torch.device | None = None,
    names: Names | None = None,
) -> Any:
    """Return the canonical mapping kind around checked ``children``, without copying them."""
    return _dense(children, batch_size, device, names)


def register_lazy_stack(factory: Callable[[Sequence[Core], int], Core]) -> None:
    """Store how a lazy stack is made; called once, by the module that defines it."""
    global _lazy_stack
    _lazy_stack = factory


def make_lazy_stack(items: Sequence[Core], dim: int) -> Core:
    """Return a lazy stack around checked items."""
    return _lazy_stack(items, dim)


def check_same_keys(wanted: Mapping[str, Child], actual: Mapping[str, Child], path: tuple[str, ...]) -> None:
    """Raise KeyMismatchError unless two mappings have the same keys, in any order."""
    if wanted.keys() != actual.keys():
        missing = [key for key in wanted if key not in actual]
        extra = [key for key in actual if key not in wanted]
        raise KeyMismatchError(
            f"the structures differ at {show_path(path)}: missing keys {missing}, extra keys {extra}; "
            "select() the common keys first, or give default= where the operation has it"
        )


def check_same_leaves(
    wanted: Mapping[str, Child], actual: Mapping[str, Child], path: tuple[str, ...]
) -> None:
    """Raise KeyMismatchError unless two mappings have the same keys, but for values without tensors."""
    for left, right in ((wanted, actual), (actual, wanted)):
        for key, child in dict(left).items():
            if key not in right and (
                isinstance(child, Tensor) or not child._is_value or child._is_tensor_proxy
            ):
                check_same_keys(wanted, actual, path)


def leaf_node_mismatch_error(wanted: Child, actual: Child, path: tuple[str, ...]) -> StructureError:
    """Return the error for a tensor that faces a collection."""
    there, here = (
        "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}" for value in (wanted, actual)
    )
    return StructureError(f"the structures differ at {show_path(path)}: {there} there, {here} here")


def show_path(path: tuple[str, ...]) -> str:
    """Return a key path as it stands in messages."""
    if not path:
        return "the root"
    return f"key {path[0]!r}" if len(path) == 1 else f"key {path!r}"


def add_key_note(error: Exception, path: tuple[str, ...]) -> None:
    """Say beside an error that is not ours at which key it was raised; Python shows such notes from 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(f"at {show_path(path)}")


def missing_key_error(node: Core, key: Any, path: tuple[str, ...] = ()) -> KeyPathError:
    """Return the error for a key that ``node``, found at ``path``, does not have."""
    from_here = f" in {show_path(path)}" if path else ""
    return KeyPathError(
        f"key {key!r} not found{from_here} in {type(node).__name__}: {suggest_keys(str(key), list(node._children()))}"
    )
