"""The methods ``apply``, ``apply_`` and ``named_apply``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._functions.apply import Walk, accept_any_leaf, parse_key_options
from .._tree.node import Core
from .._tree.views import IsLeaf
from ..typing import NO_DEFAULT, BatchSize, DeviceType, NoDefault

if TYPE_CHECKING:
    from typing_extensions import Self


class ApplyMixin(Core):
    """The methods ``apply``, ``apply_`` and ``named_apply``."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., object],
        *others: Any,
        batch_size: BatchSize | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        """Call ``fn(leaf, *leaves_of_others)`` on every leaf and return a collection of the results.

        Args:
            fn: called with a leaf and the leaves of ``others`` under the same key; if it returns None, the entry is dropped.
            *others: collections with the same keys.
            batch_size: batch size of all nodes of the result; by default each node keeps its own.
            device: device of the result; by default the device of this collection.
            names: dim names of the result; by default those of this collection, unless the batch size changes.
            inplace: copy the results into the leaves and return this collection, which keeps its batch size and names. For
                a tensor under several keys, such as tied weights, ``fn`` is called once, at the first key.
            default: passed to ``fn`` in place of an entry that one of ``others`` does not have.
            filter_empty: True drops every node without entries, False drops no node, None drops nodes whose entries were
                all dropped. If no entry remains, the result is None.
            propagate_lock: lock the result if this collection is locked.
            call_on_nested: call ``fn`` on nested collections instead of on their leaves.
            is_leaf: takes the class of an entry; if it returns True, ``fn`` is called on the entry as a whole.
            out: collection that stores the results and is returned; if it is locked, they are copied into its entries.
            **constructor_kwargs: ``named=True`` and ``nested_keys`` as in :meth:`named_apply`; others raise TypeError.

        Raises:
            KeyPathError: one of ``others`` does not have an entry, and ``default`` is not given.
            BatchSizeError: the shape of a result does not start with the batch size, or the batch size of ``out`` differs from
                ``batch_size``.
            ValueError: both ``out`` and ``inplace`` are given.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.apply(lambda leaf: leaf + 1)["b", "c"]
        tensor(3)
        """
        named, nested_keys = parse_key_options(constructor_kwargs) if constructor_kwargs else (False, False)
        walk = Walk(
            fn,
            named,
            nested_keys,
            inplace,
            default,
            filter_empty,
            accept_any_leaf if call_on_nested else is_leaf,
        )
        return walk.run(self, others, batch_size, device, names, propagate_lock, out)

    def named_apply(
        self,
        fn: Callable[..., object],
        *others: Any,
        nested_keys: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceType | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: object,
    ) -> Any:
        """Call ``fn(key, leaf, *leaves_of_others)`` on every leaf and return a collection of the results.

        ``key`` is the last key of the leaf's key path. With ``nested_keys`` it is the whole key path: a tuple for nested
        entries. The other arguments are those of :meth:`apply`.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.named_apply(lambda key, leaf: leaf if key == ("b", "c") else None, nested_keys=True)
        TensorDict(batch_size=[], fields={b: {c: i64[]}})
        """
        if constructor_kwargs:
            raise TypeError(f"named_apply() takes no {', '.join(constructor_kwargs)}")
        return Walk(
            fn,
            True,
            nested_keys,
            inplace,
            default,
            filter_empty,
            accept_any_leaf if call_on_nested else is_leaf,
        ).run(self, others, batch_size, device, names, propagate_lock, out)

    def apply_(self, fn: Callable[..., object], *others: object, **kwargs: Any) -> Self:
        """Replace the values of every leaf by ``fn(leaf, *leaves_of_others)``, in place; return this collection.

        If ``fn`` returns None, the leaf is not changed. A tensor under several keys is changed once. The arguments are those
        of :meth:`apply`.

        >>> TensorDict({"a": 1}).apply_(lambda leaf: leaf + 1)["a"]
        tensor(2)
        """
        self.apply(fn, *others, inplace=True, **kwargs)
        return self
