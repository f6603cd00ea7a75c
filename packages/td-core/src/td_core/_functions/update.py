"""Write many entries at once: ``update``, ``update_``, writes at an index, and fills.

A write has two phases: the first traverses both trees, checks every value and lists the writes; the second executes
them. So if a check raises, the collection is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from .._plans.index import plan_index
from .._python.settings import RULES
from .._torch.arrays import tensors_in
from .._torch.kernels import Op, make_op
from .._tree.coerce import NUMBERS, convert_source
from .._tree.defaults import add_key_note, get_entry, get_parent, missing_key_error, type_error
from .._tree.key_trees import filter_entries, parse_requested_keys
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core, CoreT
from .._tree.ragged import list_distinct_members
from .._tree.walks import has_entries, visit
from .._writes.index import write_leaf_at
from .._writes.inplace import write_leaves, write_unrecorded
from .._writes.packed import try_write_packed
from .._writes.pair import try_copy_whole
from .._writes.run import Transaction, put_value
from .._writes.update import Update, try_merge, write_entry
from ..errors import StructureError
from ..typing import NO_DEFAULT, NestedKey, NoDefault
from .entries import get_default

Path = tuple[str, ...]

_FILL = Op(None, Tensor.fill_)
_ZERO = make_op("zero_", Tensor.zero_)


def try_update_whole(root: Core, source: object, clone: bool, inplace: bool, non_blocking: bool) -> bool:
    """Update all entries at once, if no value needs conversion; else return False, with nothing written."""
    if inplace:
        return try_copy_whole(root, source, non_blocking)
    return not clone and try_merge(root, source)


def update_in_place(
    root: Core,
    source: Mapping[Any, object] | Core | None,
    more: Mapping[str, object],
    keys: Sequence[NestedKey] | None,
    non_blocking: bool,
) -> None:
    """Copy the entries of a source, and ``more`` of them, into the existing ones, see ``update_``."""

    def write(target: Core) -> None:
        writes = Transaction(non_blocking)
        lenient = RULES.follows_tensordict and keys is None
        plan = Update(writes, inplace=True, strict=True, lenient=lenient)
        for entries in (source, more or None):
            if entries is not None and entries is not root:
                plan.read(target, entries, keys)
        writes.commit()

    write_unrecorded(root, write)


def update_at_index(
    root: Core,
    source: Mapping[Any, object] | Core,
    index: object,
    non_blocking: bool,
    keys: Sequence[NestedKey] | None,
) -> None:
    """Write the entries of a source into the existing ones at an index, see ``update_at_``."""
    wanted = parse_requested_keys(keys)
    found: Any = source if isinstance(source, (Core, dict)) else convert_source(source)
    chosen = found if wanted is None else filter_entries(found, wanted)
    _check_no_new_keys(root, index, chosen)
    write_unrecorded(root, lambda target: target._assign(index, chosen, non_blocking=non_blocking))


def set_entry_at(root: Core, path: Path, value: object, index: object, non_blocking: bool) -> None:
    """Write a value into an existing entry at an index of it, see ``set_at_``."""
    try:
        _write_entry_at(root, path, value, index, non_blocking)
    except StructureError:
        write_unrecorded(root, lambda target: _write_entry_at(target, path, value, index, non_blocking))


def get_entry_at(node: Core, key: NestedKey, index: object, default: object) -> object:
    """Return an entry at an index of it, see ``get_at``."""
    entry = node.get(key, node)
    if entry is not node:
        try:
            return entry[tensors_in(index) if isinstance(entry, Tensor) else index]
        except Exception as error:
            add_key_note(error, unravel_key_to_tuple(key))
            raise
    return get_default(node, key, default)


def copy_updated(node: CoreT, args: tuple[object, ...], kwargs: dict[str, object]) -> CoreT:
    """Return a shallow copy with updated entries, see ``replace``."""
    if len(args) > 1:
        raise TypeError(f"replace() takes one mapping or collection, got {len(args)}")
    source = args[0] if args else None
    if not kwargs and (
        source is None or (not isinstance(source, Core) and isinstance(source, Mapping) and not source)
    ):
        return node
    if source is None:
        source, kwargs = kwargs, {}
    return node._shallow_copy().update(source, **kwargs)


def fill_leaves(root: Core, key: NestedKey | float, value: float | NoDefault) -> None:
    """Fill the leaf at a key, or the leaves below the node there, with a number; all leaves if there is only the number."""
    if value is NO_DEFAULT:
        if not isinstance(key, NUMBERS):
            raise TypeError(f"fill_() takes a key and a number, or a number for all leaves; got only {key!r}")
        path: Path = ()
        value = key
    elif isinstance(value, (list, tuple)):  # write_leaves() takes a list as one operand for each leaf
        raise type_error("fill_", value, "a key and a number")
    else:
        path = unravel_key_to_tuple(cast("NestedKey", key))
    if not path and root._inner()._backends is not None and try_write_packed(root, _FILL, value):
        return
    write_unrecorded(
        root, lambda target: write_leaves("fill_", target, _FILL, _list_leaves(target, path), value)
    )


def zero_leaves(root: Core) -> None:
    """Set every leaf to zero."""
    if root._inner()._backends is not None and try_write_packed(root, _ZERO):
        return
    try:
        write_leaves("zero_", root, _ZERO, root._leaves())
    except StructureError:
        write_unrecorded(root, lambda target: write_leaves("zero_", target, _ZERO, target._leaves()))


def _write_entry_at(root: Core, path: Path, value: object, index: object, non_blocking: bool) -> None:
    """Write a value into an existing entry, at an index of that entry."""
    parent, key = get_parent(root, path), path[-1]
    try:
        entry = get_entry(root, path)
    except StructureError:
        # The entries of the members cannot be stacked, so write to each; the index then covers batch dims only.
        writes = Transaction(non_blocking)
        parent._plan_writes(writes, index, {key: value}, path[:-1])
        writes.commit()
        return
    if isinstance(entry, Tensor):
        # An entry that the kind builds when it is read, as a lazy stack does, is copied, and written back.
        target = entry if parent._peek_child(key) is entry else entry.clone()
        write_leaf_at(target, tensors_in(index), value, path, non_blocking)
        if target is not entry:
            write_entry(parent, key, target, path, non_blocking)
        return
    try:
        if has_entries(entry):
            entry._assign(index, value, non_blocking=non_blocking)
        else:
            put_value(parent, key, entry, index, non_blocking, value)
    except Exception as error:
        add_key_note(error, path)
        raise


def _list_leaves(root: Core, path: Path) -> list[Tensor]:
    """Return the leaf at a key path, or the leaves below the node there. In a lazy stack, return those of the members."""
    if not path:
        return list(root._leaves())
    leaves: list[Tensor] = []
    for node in list_distinct_members([get_parent(root, path)]):
        entry = get_entry(node, path[-1:])
        if isinstance(entry, Tensor):
            leaves.append(entry)
        else:
            entry._flatten_leaves(leaves)
    return leaves


def _check_no_new_keys(root: Core, index: object, source: Any) -> None:
    """Raise KeyPathError if ``root``, or an indexed member of it, lacks an entry of ``source``."""

    def check(node: Any, index: object, right: Any, prefix: Path) -> Iterator[tuple[object, ...]]:
        if not isinstance(right, (Core, Mapping)):
            return
        if node._members_and_dim() is not None:
            yield from ((*part, prefix) for part in node._split_write(right, index))
            return
        for key, value in dict(right._children() if isinstance(right, Core) else right).items():
            path = unravel_key_to_tuple(key)
            entry = node
            for depth, part in enumerate(path):
                try:
                    entry = entry._peek_child(part)
                except (KeyError, AttributeError):
                    raise missing_key_error(node, key, prefix + path[:depth]) from None
            if has_entries(entry) and not isinstance(value, Tensor):
                yield entry, index, value, prefix + path

    # Expand ``...`` with the root's batch size: a nested stack may have more batch dims.
    uneven = -1 in root.batch_size
    visit(check, root, index if uneven else plan_index(index, root.batch_size).index, source, ())
