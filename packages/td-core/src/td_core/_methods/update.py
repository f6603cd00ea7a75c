"""Methods that write entries, such as ``update``, ``update_``, ``update_at_``, ``set_at_`` and ``fill_``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .._functions.entries import NOT_GIVEN
from .._functions.update import (
    Path,
    copy_updated,
    fill_leaves,
    get_entry_at,
    set_entry_at,
    try_update_whole,
    update_at_index,
    update_in_place,
    zero_leaves,
)
from .._plans.index import plan_index
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import Core
from .._tree.views import IsLeaf
from .._writes.index import IndexedWrite, check_broadcast
from .._writes.pair import is_basic, try_copy_whole
from .._writes.run import Transaction
from .._writes.update import Update
from ..typing import NO_DEFAULT, NestedKey, NoDefault

if TYPE_CHECKING:
    from typing_extensions import Self


class UpdateMixin(Core):
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
            and try_update_whole(self, input_dict_or_td, clone, inplace, non_blocking)
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
        if (keys_to_update is not None or kwargs) or not (
            input_dict_or_td is self or try_copy_whole(self, input_dict_or_td, non_blocking)
        ):
            update_in_place(self, input_dict_or_td, kwargs, keys_to_update, non_blocking)
        return self

    def copy_(self, tensordict: Any, non_blocking: bool = False) -> Self:
        """Copy the entries of another collection into the existing ones; see :meth:`update_`.

        >>> TensorDict({"a": torch.zeros(2)}).copy_(TensorDict({"a": torch.ones(2)}))["a"]
        tensor([1., 1.])
        """
        return self.update_(tensordict, non_blocking=non_blocking)

    def update_at_(
        self,
        input_dict_or_td: Mapping[Any, object] | Core,
        idx: object,
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
        update_at_index(self, input_dict_or_td, idx, non_blocking, keys_to_update)
        return self

    def copy_at_(
        self, tensordict: Any, idx: object, non_blocking: bool = False, *, fast: bool = True
    ) -> Self:
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

    def set_at_(self, key: NestedKey, value: object, index: object, *, non_blocking: bool = False) -> Self:
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
        set_entry_at(self, unravel_key_to_tuple(key), value, index, non_blocking)
        return self

    def get_at(self, key: NestedKey, index: object, default: object = NOT_GIVEN) -> Any:
        """Return an entry at an index of that entry, or a default if the key is missing.

        Args:
            key: the key of the entry.
            index: an index of the entry, as for a tensor.
            default: returned if the key is missing; None if omitted (see ``set_get_defaults_to_none``). NO_DEFAULT raises.

        >>> TensorDict({"a": torch.arange(3)}).get_at("a", 1)
        tensor(1)
        """
        return get_entry_at(self, key, index, default)

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Return a shallow copy with updated entries; this collection is unchanged.

        Args:
            *args: at most one mapping or collection, as for :meth:`update`.
            **kwargs: entries by keyword.

        >>> td = TensorDict({"a": 1})
        >>> td.replace(a=2)["a"], td["a"]
        (tensor(2), tensor(1))
        """
        return copy_updated(self, args, kwargs)

    def fill_(self, key: NestedKey | float, value: float | NoDefault = NO_DEFAULT) -> Self:
        """Fill an entry, or all leaves of a nested collection, with one number in place.

        Args:
            key: the entry; or the number, to fill all leaves.
            value: the number.

        Raises:
            KeyPathError: the entry does not exist.
            StructureError: a leaf cannot be written in place; nothing was written.
            TypeError: there is no number.

        >>> TensorDict({"a": torch.zeros(2)}).fill_("a", 3)["a"], TensorDict({"a": torch.zeros(2)}).fill_(0.5)["a"]
        (tensor([3., 3.]), tensor([0.5000, 0.5000]))
        """
        fill_leaves(self, key, value)
        return self

    def zero_(self) -> Self:
        """Set every leaf to zero, in place.

        Raises:
            StructureError: a leaf cannot be written in place; nothing was written.

        >>> TensorDict({"a": torch.ones(2)}).zero_()["a"]
        tensor([0., 0.])
        """
        zero_leaves(self)
        return self

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
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
        self, writes: Transaction, index: object, value: object, path: Path = (), dims: int | None = None
    ) -> None:
        """Check ``self[index] = value`` for the node at ``path``, and add its writes; ``dims``: see :class:`IndexedWrite`."""
        size = self.batch_size
        IndexedWrite(writes, plan_index(index, size), size).read(self, value, path, dims)
