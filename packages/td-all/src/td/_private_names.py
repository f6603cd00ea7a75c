"""Private names of tensordict that public programs import, and private methods that they call on collections.

They exist only in a process that has called :func:`td.install_as_tensordict`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import td
import td_core
import td_distributed
import td_tensorclass
from td_core import TensorCollection, TensorDictParams
from td_core.errors import UnsupportedOperationError
from td_core.spi import pytree
from td_core.typing import NestedKey
from td_distributed.spi import describe_storage

__all__ = ["add_private_members"]

#: Classes of entries, for ``isinstance``.
ACCEPTED_CLASSES = (Tensor, td.TensorCollection)

logger = logging.getLogger("tensordict")


class _MembersAsNodes:
    """Value of ``is_leaf``: views of entries list the members of a lazy stack under their positions."""

    def __call__(self, cls: type) -> bool:
        return td.default_is_leaf(cls)

    def __repr__(self) -> str:
        return "_NESTED_TENSORS_AS_LISTS"


MEMBERS_AS_NODES = _MembersAsNodes()


class exclude_from_pytree:  # noqa: N801  named like the context managers of td_core
    """Context manager that makes torch treat collections as leaves of pytrees, in all threads."""

    def __init__(self) -> None:
        self._removed: list[dict[type, Any]] = []

    def set(self) -> None:
        """Start, until :meth:`unset`."""
        nodes = pytree.SUPPORTED_NODES
        found = [cls for cls in nodes if isinstance(cls, type) and issubclass(cls, td.TensorCollection)]
        self._removed.append({cls: nodes.pop(cls) for cls in found})

    def unset(self) -> None:
        """End what the last call of :meth:`set` started."""
        if self._removed:
            pytree.SUPPORTED_NODES.update(self._removed.pop())

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *error: object) -> None:
        self.unset()


def _is_key(key: object) -> bool:
    return isinstance(key, td.NestedKey)  # type: ignore[arg-type]  # a class at run time


def is_seq_of_nested_key(seq: Iterable[object]) -> bool:
    """Return True if every item is a string or a tuple of strings."""
    return all(map(_is_key, seq))


def zip_strict(*iterables: Iterable[object]) -> Iterator[tuple[object, ...]]:
    """Zip iterables of one length."""
    return zip(*iterables, strict=True)


def unravel_key(key: NestedKey) -> object:
    """Unravel a key. Return ``()`` for a tuple that is not a key, since callers test for that."""
    try:
        return td_core.unravel_key(key)
    except td.KeyPathError:
        if isinstance(key, tuple):
            return ()
        raise


def unravel_key_to_tuple(key: NestedKey) -> tuple[str, ...]:
    """Convert a key to a tuple of strings; return ``()`` for any other object."""
    return td_core.unravel_key_to_tuple(key) if _is_key(key) else ()


def is_non_tensor(cls: type) -> bool:
    """Return True if a class is one of values that are not tensors."""
    return not td.default_is_leaf(cls) and td_tensorclass.is_leaf_nontensor(cls)


def index_batch_size(batch_size: Sequence[int], index: object) -> torch.Size:
    """Return the batch size of a collection at an index."""
    result: torch.Size = td.TensorDict(batch_size=batch_size)[index].batch_size
    return result


def wrap_dim(dim: int, shape: Sequence[int] | None, ndim: int | None = None) -> int:
    """Count a dim from the front; raise IndexError if it is out of range."""
    dims = len(shape or ()) if ndim is None else ndim
    if not -dims <= dim < dims:
        raise IndexError(f"the dim {dim} is out of range: there are {dims} batch dims")
    return dim % dims


def get_shape(tensor: Tensor | td.TensorCollection, nested_shape: bool = False) -> torch.Size | Tensor:
    """Return the shape of a tensor or collection, with -1 for uneven sizes; or as rows those of a nested tensor's components."""
    if not (isinstance(tensor, Tensor) and tensor.is_nested):
        return tensor.shape
    rows = [part.shape for part in tensor.unbind()] if nested_shape or tensor.layout is torch.strided else []
    if nested_shape:
        return torch.tensor(rows)
    if tensor.layout is not torch.strided:
        return tensor.shape
    return torch.Size([len(rows), *[sizes[0] if len({*sizes}) == 1 else -1 for sizes in zip(*rows)]])


def apply(
    self: td.TensorCollection,
    fn: Callable[..., object],
    *others: td.TensorCollection,
    named: bool = False,
    nested_keys: bool = False,
    prefix: tuple[str, ...] = (),
    checked: bool = False,  # results are always checked
    filter_empty: bool | None = None,
    num_threads: int = 0,
    **options: Any,
) -> object:
    """Call a function on each leaf, as ``apply`` and ``named_apply`` do."""
    if not named:
        return self.apply(fn, *others, filter_empty=filter_empty, **options)
    if prefix and nested_keys:
        function = fn

        def fn(key: NestedKey, *leaves: object) -> object:
            return function((*prefix, *td_core.unravel_key_to_tuple(key)), *leaves)

    return self.named_apply(fn, *others, nested_keys=nested_keys, filter_empty=filter_empty, **options)


def fast_apply(
    self: td.TensorCollection,
    fn: Callable[..., object],
    *others: td.TensorCollection,
    filter_empty: bool = False,
    **options: Any,
) -> object:
    """Call a function on each leaf; nodes without entries stay."""
    return apply(self, fn, *others, filter_empty=filter_empty, **options)


def get_entry(self: td.TensorCollection, key: str, default: object, **options: bool) -> object:
    """Return an entry as ``get`` does; without a default, raise KeyError if it is missing."""
    if default is td_core.NO_DEFAULT and key not in self:
        return self[key]
    return self.get(key, default, **options)


def set_entry(
    self: td.TensorCollection,
    key: str,
    value: object,
    *,
    inplace: bool,
    validated: bool,  # values are always checked
    ignore_lock: bool = False,
    non_blocking: bool = False,
) -> td.TensorCollection:
    """Set an entry, or write into it; ``ignore_lock`` also replaces entries of a locked collection."""
    if inplace:
        return self.set_(key, value, non_blocking=non_blocking)
    if ignore_lock:  # a node is replaced as by set(), not merged
        return self.update(
            {key: value}, ignore_lock=True, is_leaf=lambda cls: True, non_blocking=non_blocking
        )
    return self.set(key, value, non_blocking=non_blocking)


def index(self: td.TensorCollection, idx: object) -> object:
    """Return the collection at an index, for reading."""
    return self[idx]


def stack_onto(
    self: td.TensorCollection, items: Iterable[td.TensorCollection], dim: int
) -> td.TensorCollection:
    """Write a stack of collections into this one."""
    return td.stack(items, dim, out=self)


def synchronize(self: td.TensorCollection) -> None:
    """Wait until the accelerator has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def has_names(self: td.TensorCollection) -> bool:
    """Return True if a batch dim has a name."""
    return any(name is not None for name in self.names)


def list_names(self: td.TensorCollection) -> list[str | None] | None:
    """Return the names of the batch dims, or None if no dim has one."""
    return list(self.names) if has_names(self) else None


def has_exclusive_keys(self: td.TensorCollection) -> bool:
    """Return True for a lazy stack of which a member has an entry that another one lacks."""
    return len({frozenset(member.keys(True)) for member in getattr(self, "tensordicts", ())}) > 1


def make(
    cls: Callable[..., object],
    /,
    source: object = None,
    batch_size: Sequence[int] | int | None = None,
    device: torch.device | str | int | None = None,
    names: Sequence[str | None] | None = None,
    non_blocking: bool | None = None,
    lock: bool = False,
    nested: bool = True,  # nested mappings are always converted
    is_shared: bool = False,  # found from the tensors, as the next one
    is_memmap: bool = False,
    **entries: object,
) -> object:
    """Build a collection; unlike that of tensordict, this constructor checks the entries."""
    return cls(
        entries if source is None else source,
        batch_size=() if batch_size is None else batch_size,
        device=device,
        names=names,
        non_blocking=non_blocking,
        lock=lock,
    )


def wrap(
    cls: Any,
    tensordict: td.TensorCollection,
    non_tensordict: Mapping[str, object] | None = None,
    safe: bool | None = True,
) -> object:
    """Wrap a collection as an instance of a tensorclass, without copying it."""
    return cls.from_tensordict(tensordict, non_tensordict, safe)


def get_parameters(self: TensorDictParams) -> object:
    """Return the collection that a TensorDictParams holds."""
    return self._inner()


#: The structures of consolidated collections, and what programs have put in their place, by storage.
_STRUCTURES = WeakTensorKeyDictionary()
_ASSIGNED = WeakTensorKeyDictionary()


def get_consolidated(self: td.TensorCollection) -> object:
    """Return the storage and the structure of a consolidated collection; programs read and change the structure."""
    if not self.is_consolidated():
        raise AttributeError(f"this {type(self).__name__} is not consolidated")
    storage = td_distributed.storage_of(self)
    if storage in _ASSIGNED:
        return _ASSIGNED[storage]
    if storage not in _STRUCTURES:
        _STRUCTURES[storage] = describe_storage(self)
    return {"storage": storage, "metadata": _STRUCTURES[storage]}


def set_consolidated(self: td.TensorCollection, value: object) -> None:
    """Put another value in place of the structure of a consolidated collection."""
    _ASSIGNED[td_distributed.storage_of(self)] = value


def _create_stored(make: Callable[..., object]) -> Any:
    """Make ``from_schema`` create the files of tensordict's storages, and return them opened for writing."""

    def wrapper(
        cls: type[TensorCollection],
        /,
        schema: Mapping[NestedKey, object],
        *,
        storage: str | None = None,
        **options: Any,
    ) -> object:
        if storage not in ("h5", "zarr"):
            return make(schema, storage=storage, **options)
        if "filename" not in options:
            raise TypeError(f"from_schema(storage={storage!r}) needs filename=, the file to create")
        format, open_again = ("hdf5", cls.from_h5) if storage == "h5" else ("zarr", cls.from_zarr)
        make(schema, storage=format, **options)
        return open_again(options["filename"], mode="r+")

    return classmethod(wrapper)


def _iter_entries(
    node: td.TensorCollection, leaves_only: bool, path: tuple[str, ...] = ()
) -> Iterator[tuple[td.NestedKey, object]]:
    """Yield (key, entry) of a tree; the members of a lazy stack have their positions as keys."""
    if isinstance(node, td.LazyStackedTensorDict) and not td.is_non_tensor(node):
        pairs: Any = [(str(place), member) for place, member in enumerate(node.tensordicts)]
    else:
        pairs = node.items()
    for key, entry in pairs:
        nests = isinstance(entry, td.TensorCollection) and not td.is_non_tensor(entry)
        if not leaves_only or isinstance(entry, Tensor):
            yield (*path, key) if path else key, entry
        if nests:
            yield from _iter_entries(entry, leaves_only, (*path, key))


def _list_members(
    view: Callable[..., object], take: Callable[[tuple[td.NestedKey, object]], object]
) -> Callable[..., object]:
    """Make ``values`` or ``items`` accept ``is_leaf=MEMBERS_AS_NODES``."""

    @functools.wraps(view)
    def wrapper(
        self: TensorCollection,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: object = None,
        **options: object,
    ) -> object:
        if is_leaf is MEMBERS_AS_NODES and include_nested:
            return [take(pair) for pair in _iter_entries(self, leaves_only)]
        return view(self, include_nested, leaves_only, is_leaf, **options)

    return wrapper


def _refuse_transport(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedOperationError(
            f"{type(self).__name__}.{name}() needs UCX, which td does not have: {instead} of td-distributed returns handles "
            "that can be awaited, and td_distributed.spi packs a collection for another transport"
        )

    return refuse


#: Members of collections that td has for programs of tensordict alone, by their names there; most are private.
MEMBERS: dict[str, object] = {
    "asend": _refuse_transport("asend", "isend(return_early=True)"),
    "arecv": _refuse_transport("arecv", "irecv(return_premature=True)"),
    "_apply_nest": apply,
    "_consolidated": property(get_consolidated, set_consolidated),
    "_fast_apply": fast_apply,
    "_get_str": get_entry,
    "_set_str": set_entry,
    "_get_sub_tensordict": index,
    "_stack_onto_": stack_onto,
    "_sync_all": synchronize,
    "_has_exclusive_keys": property(has_exclusive_keys),
    "_has_names": has_names,
    "_td_dim_names": property(list_names),
}


def add_private_members() -> None:
    """Add the private members to the classes of collections, and make a NonTensorStack count as a lazy stack."""
    base: Any = td.TensorCollection
    for name, member in MEMBERS.items():
        setattr(base, name, member)
    base.values = _list_members(base.values, lambda pair: pair[1])
    base.items = _list_members(base.items, lambda pair: pair)
    td.TensorDict._new_unsafe = classmethod(make)  # type: ignore[attr-defined]
    params: Any = td.TensorDictParams
    params._param_td = property(get_parameters)
    classes: list[Any] = [td.TensorClass, td.NonTensorDataBase]
    for cls in classes:
        cls._from_tensordict = classmethod(wrap)
    base.from_schema = _create_stored(td.from_schema)
    td.LazyStackedTensorDict.register(td.NonTensorStack)
