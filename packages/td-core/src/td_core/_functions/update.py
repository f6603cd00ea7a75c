"""Write many entries at once: ``update``, ``update_``, writes at an index, and fills.

A write has two phases: the first traverses both trees, checks every value and lists the writes; the second executes
them. So if a check raises, the collection is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._plans.index import plan_index
from .._torch.arrays import tensors_in
from .._torch.kernels import PLAIN, Op, make_op
from .._torch.private import functorch_level
from .._tree.coerce import NUMBERS, coerce
from .._tree.defaults import add_key_note, get_entry, get_parent, missing_key_error
from .._tree.key_trees import filter_entries, parse_requested_keys
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Core
from .._tree.ragged import list_distinct_members
from .._tree.views import IsLeaf
from .._tree.walks import has_entries, visit
from .._writes.check import add_path, find_expansion, find_problem, is_expanded, is_sealed
from .._writes.index import IndexedWrite, check_broadcast
from .._writes.inplace import write_leaves
from .._writes.pair import is_basic, try_copy_whole
from .._writes.parameters import write_unrecorded
from .._writes.run import Transaction, put_value, write_at
from .._writes.update import Update, try_merge, write_entry
from ..errors import LockedError, StructureError
from ..typing import NestedKey
from .entries import NOT_GIVEN, EntryMixin, get_default

if TYPE_CHECKING:
    from typing_extensions import Self

Path = tuple[str, ...]

_SCALARS = (Tensor, *NUMBERS)

FILL = Op(None, Tensor.fill_)
ZERO = make_op("zero_", Tensor.zero_)


class UpdateMixin(EntryMixin):
    """Methods that write entries, such as ``update``, ``update_``, ``update_at_``, ``set_at_`` and ``fill_``."""

    __slots__ = ()

    def update(
        self,
        input_dict_or_td: Mapping[Any, Any] | Core | None = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        is_leaf: IsLeaf | None = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Set the entries of another collection or mapping; nested collections that both have are merged.

        All values are checked before the first is stored. A dense nested collection that is merged with a lazy stack
        becomes a lazy stack, unless it is written in place.

        Args:
            input_dict_or_td: the source of the entries.
            clone: store copies of the entries.
            inplace: copy into existing entries instead of replacing them.
            non_blocking: as in :meth:`torch.Tensor.to`, for entries that change device.
            keys_to_update: update only these keys.
            is_leaf: a predicate of a class; a value for whose class it is True replaces an existing nested collection
                instead of being merged into it.
            update_batch_size: set the batch size to that of the source; the shapes of other entries must start with
                it. A lazy stack whose length differs gets copies of the source's members.
            ignore_lock: unlock a locked collection during the update.
            **kwargs: more entries.

        Raises:
            BatchSizeError: the leading dims of a value are not the batch size.
            LockedError: the collection is locked, and an entry would be added or replaced.
            KeyMismatchError: a dense collection cannot store an entry that only some members of a lazy stack have.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.update({"b": {"d": 3}})
        TensorDict(batch_size=[], fields={a: i64[], b: {c: i64[], d: i64[]}})
        """
        if input_dict_or_td is None:
            input_dict_or_td, kwargs = kwargs, {}
        whole = not (update_batch_size or kwargs) and keys_to_update is None and is_leaf is None
        if (
            whole
            and input_dict_or_td is not self
            and _try_whole(self, input_dict_or_td, clone, inplace, non_blocking)
        ):
            return self
        with self.unlock_() if ignore_lock and self._locked else nullcontext():  # type: ignore[union-attr]
            if self._locked and not inplace:
                check_unlocked(self, "update")
            writes = Transaction(non_blocking)
            plan = Update(writes, clone, inplace, is_leaf, resize=update_batch_size)
            for source in (input_dict_or_td, kwargs) if kwargs else (input_dict_or_td,):
                if source is not self:
                    plan.read(self, source, keys_to_update)
            with self._edit_together():
                writes.commit()
        return self

    def update_(
        self,
        input_dict_or_td: Mapping[Any, Any] | Core | None = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Copy the entries of another collection or mapping into the existing ones, in place.

        All values are checked before the first is written. Works on a locked collection.

        Args:
            input_dict_or_td: the source of the entries; a number fills the entry.
            clone: has no effect, since copying into an entry never shares memory.
            non_blocking: as in :meth:`torch.Tensor.copy_`.
            keys_to_update: update only these keys.
            **kwargs: more entries.

        Raises:
            KeyPathError: the collection lacks an entry of the source.
            BatchSizeError: the leading dims of a value are not the batch size.
            StructureError: a value cannot be copied into its entry.

        >>> td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)})
        >>> td.update_({"a": torch.ones(2)})["a"]
        tensor([1., 1.])
        """
        if keys_to_update is None and not kwargs and try_copy_whole(self, input_dict_or_td, non_blocking):
            return self

        def write(root: Core) -> None:
            writes = Transaction(non_blocking)
            plan = Update(writes, inplace=True, strict=True)
            for source in (input_dict_or_td, kwargs or None):
                if source is not None and source is not self:
                    plan.read(root, source, keys_to_update)
            writes.commit()

        write_unrecorded(self, write)
        return self

    def copy_(self, tensordict: Any, non_blocking: bool = False) -> Self:
        """Copy the entries of another collection into the existing ones; see :meth:`update_`.

        >>> TensorDict({"a": torch.zeros(2)}).copy_(TensorDict({"a": torch.ones(2)}))["a"]
        tensor([1., 1.])
        """
        return self.update_(tensordict, non_blocking=non_blocking)

    def update_at_(
        self,
        input_dict_or_td: Mapping[Any, Any] | Core,
        idx: Any,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
    ) -> Self:
        """Write the entries of another collection or mapping into the existing ones, at an index.

        All values are checked before the first is written. Works on a locked collection.

        Args:
            input_dict_or_td: the source of the entries; its batch size is that of ``self[idx]``.
            idx: an index of the batch dims.
            clone: has no effect, since writing into an entry never shares memory.
            non_blocking: as in :meth:`torch.Tensor.copy_`.
            keys_to_update: update only these keys.

        Raises:
            KeyPathError: the collection lacks an entry of the source.
            StructureError: a value cannot be written into its entry.

        >>> td = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
        >>> td.update_at_({"a": torch.ones(())}, 0)["a"]
        tensor([1., 0.])
        """
        source = input_dict_or_td
        wanted = parse_requested_keys(keys_to_update)
        if wanted is not None:
            source = filter_entries(source, wanted)
        _check_no_new_keys(self, idx, source)
        write_unrecorded(self, lambda root: root._assign(idx, source, non_blocking=non_blocking))
        return self

    def copy_at_(self, tensordict: Any, idx: Any, non_blocking: bool = False, *, fast: bool = True) -> Self:
        """Write the entries of another collection into the existing ones, at an index; see :meth:`update_at_`.

        Args:
            tensordict: the source of the entries.
            idx: an index of the batch dims.
            non_blocking: as in :meth:`torch.Tensor.copy_`.
            fast: has no effect; the fused copy runs whenever its result is the same.

        >>> td = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
        >>> td.copy_at_(TensorDict({"a": 1.0}), 0)["a"]
        tensor([1., 0.])
        """
        return self.update_at_(tensordict, idx, non_blocking=non_blocking)

    def set_at_(self, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False) -> Self:
        """Write a value into an existing entry, at an index of that entry.

        Args:
            key: the key of the entry.
            value: the value to write; broadcast as in ``tensor[index] = value``.
            index: an index of the entry, which may also index feature dims.
            non_blocking: as in :meth:`torch.Tensor.copy_`.

        Raises:
            KeyPathError: the entry does not exist.

        >>> td = TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2])
        >>> td.set_at_("a", 1, (0, 1))["a"]
        tensor([[0., 1.],
                [0., 0.]])
        """
        path = unravel_key_to_tuple(key)
        try:
            _write_at(self, path, value, index, non_blocking)
        except StructureError:
            write_unrecorded(self, lambda root: _write_at(root, path, value, index, non_blocking))
        return self

    def get_at(self, key: NestedKey, index: Any, default: Any = NOT_GIVEN) -> Any:
        """Return an entry at an index of that entry, or a default if the key is missing.

        Args:
            key: the key of the entry.
            index: an index of the entry, as for a tensor.
            default: returned if the key is missing; None if omitted (see ``set_get_defaults_to_none``). NO_DEFAULT raises.

        >>> TensorDict({"a": torch.arange(3)}).get_at("a", 1)
        tensor(1)
        """
        entry = self.get(key, self)
        if entry is not self:
            try:
                return entry[tensors_in(index) if isinstance(entry, Tensor) else index]
            except Exception as error:
                add_key_note(error, unravel_key_to_tuple(key))
                raise
        return get_default(self, key, default)

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Return a shallow copy with updated entries; this collection is unchanged.

        Args:
            *args: at most one mapping or collection, as for :meth:`update`.
            **kwargs: entries by keyword.

        >>> td = TensorDict({"a": 1})
        >>> td.replace(a=2)["a"], td["a"]
        (tensor(2), tensor(1))
        """
        if len(args) > 1:
            raise TypeError(f"replace() takes one mapping or collection, got {len(args)}")
        source = args[0] if args else None
        if not kwargs and (
            source is None or (not isinstance(source, Core) and isinstance(source, Mapping) and not source)
        ):
            return self
        if source is None:
            source, kwargs = kwargs, {}
        return self._shallow_copy().update(source, **kwargs)

    def fill_(self, key: NestedKey, value: float | bool) -> Self:
        """Fill an entry, or all leaves of a nested collection, with one number in place.

        Raises:
            KeyPathError: the entry does not exist.
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.zeros(2)}).fill_("a", 3)["a"]
        tensor([3., 3.])
        """
        path = unravel_key_to_tuple(key)
        write_unrecorded(
            self, lambda root: write_leaves("fill_", root, FILL, _list_leaves(root, path), value)
        )
        return self

    def zero_(self) -> Self:
        """Set every leaf to zero, in place.

        Raises:
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.ones(2)}).zero_()["a"]
        tensor([0., 0.])
        """
        try:
            write_leaves("zero_", self, ZERO, self._leaves())
        except StructureError:
            write_unrecorded(self, lambda root: write_leaves("zero_", root, ZERO, root._leaves()))
        return self

    def _assign(self, index: object, value: Any, *, non_blocking: bool = False) -> None:
        """Write ``value`` into all entries at an index; create missing entries, with zeros at the other positions."""
        size = self.batch_size
        plan = plan_index(index, size)
        if torch.compiler.is_compiling() and isinstance(value, Core) and not is_basic(plan.index):
            check_broadcast((*plan.lead, *size[plan.n :]), value.batch_size)
        if type(value) is dict or (
            (type(value) is type(self) or isinstance(value, Core))
            and value.batch_size == (*plan.lead, *size[plan.n :])
        ):
            if try_copy_whole(self, value, non_blocking, plan):
                return
        writes = Transaction(non_blocking)
        IndexedWrite(writes, plan, size).read(self, value)
        with self._edit_together():
            writes.commit()

    def _plan_writes(
        self, writes: Transaction, index: object, value: Any, path: Path = (), dims: int | None = None
    ) -> None:
        """Check ``self[index] = value`` for the node at ``path``, and add its writes; ``dims``: see :class:`IndexedWrite`."""
        size = self.batch_size
        IndexedWrite(writes, plan_index(index, size), size).read(self, value, path, dims)


def _try_whole(root: Core, source: Any, clone: bool, inplace: bool, non_blocking: bool) -> bool:
    """Update all entries at once, if no value needs conversion; else return False, with nothing written."""
    if inplace:
        return try_copy_whole(root, source, non_blocking)
    return not clone and try_merge(root, source)


def _write_at(root: Any, path: Path, value: Any, index: object, non_blocking: bool) -> None:
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
        _write_leaf_at(target, tensors_in(index), value, path, non_blocking)
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


def _write_leaf_at(target: Tensor, index: object, value: Any, path: Path, non_blocking: bool) -> None:
    """Check the write of a value at an index of one leaf, and write it."""
    if isinstance(value, np.generic):
        value = value.item()
    elif not isinstance(value, _SCALARS):
        value = coerce(value, torch.Size(), None, path)
        if not isinstance(value, Tensor):
            problem = StructureError(f"it is a tensor, the value a {type(value).__name__}")
            raise add_path(problem, path, f"at the index {index!r}")
    _check_leaf_at(target, index, value, path)
    try:
        write_at(target, index, value, non_blocking)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = LockedError if isinstance(error, LockedError) else StructureError
        found = find_problem(target, value, index) or kind(str(error))
        raise add_path(found, path, f"at the index {index!r}") from error


def _check_leaf_at(target: Tensor, index: Any, value: object, path: Path) -> None:
    """Raise an error if a leaf cannot be written at an index, and torch would not find that before it writes."""
    plain = type(target) in PLAIN and functorch_level() is None
    if plain and not (is_sealed(target) or is_expanded(target)):
        return
    problem = find_problem(target, value, index)
    if problem is None and not (is_basic(index) and not is_expanded(target[index])):
        problem = find_expansion(target)
    if problem is not None:
        raise add_path(problem, path, f"at the index {index!r}")


def _list_leaves(root: Any, path: Path) -> list[Tensor]:
    """Return the leaf at a key path, or the leaves below the node there. In a lazy stack, return those of the members."""
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
            yield from ((*part, prefix) for part in node._split_write(index, right))
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
