"""Wrapper: a collection that holds another collection and delegates every primitive to it.

The public methods are inherited and use only the primitives of ``Core``. Each primitive calls that of the wrapped
collection, and a subclass defines in ``_wrap`` how results are wrapped. So every operation keeps the subclass, without
a list of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

from .._functions.shape import Replacement
from .._methods.collection import TensorCollection
from .._plans.plans import MultiPlan, ShapePlan
from .._python.public_names import name_method
from .._tree.node import Child, Core
from ..typing import BatchSize, Names

MethodT = TypeVar("MethodT", bound=Callable[..., object])


def _hand_on(method: MethodT) -> MethodT:
    """Return the method of Wrapper that calls the method of the same name of the wrapped collection."""
    name = method.__name__

    def call(self: Wrapper, *args: object, **kwargs: object) -> object:
        return getattr(self._tensordict, name)(*args, **kwargs)

    call.__qualname__ = f"Wrapper.{name}"  # pickles of the method find it by this name
    return cast("MethodT", name_method(call, name, ""))


class Wrapper(TensorCollection):
    """Base of the classes that wrap one collection.

    >>> issubclass(Wrapper, TensorCollection)
    True
    """

    _tensordict: TensorCollection

    @classmethod
    def _wrap(cls, td: object) -> Any:
        """Wrap a result of the wrapped collection in this class. The default returns it unchanged."""
        return td

    @classmethod
    def _wrap_stack(cls, td: object) -> object:
        """Wrap a lazy stack of wrapped collections in this class."""
        return cls._wrap(td)

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all entries share; settable if the shape of every entry starts with the new value."""
        return self._tensordict.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        inner: Any = self._tensordict  # each kind has its own setter
        inner.batch_size = batch_size

    @property
    def device(self) -> torch.device | None:
        """Device of every entry, or None if entries may be on different devices."""
        return self._tensordict.device

    @property
    def _locked(self) -> bool | str:  # type: ignore[override]  # read-only: lock() sets it on _inner()
        return self._tensordict._locked

    @property
    def _names(self) -> Names | None:
        return self._tensordict._names

    @_names.setter
    def _names(self, names: Names | None) -> None:
        inner = self._tensordict  # a slot of the kind
        inner._names = names

    def _inner(self) -> Core:
        return self._tensordict

    _with_children = _hand_on(TensorCollection._with_children)
    _set_batch_size = _hand_on(TensorCollection._set_batch_size)
    _max_batch_size = _hand_on(TensorCollection._max_batch_size)
    _check_batch_size = _hand_on(TensorCollection._check_batch_size)
    _change_batch_size = _hand_on(TensorCollection._change_batch_size)
    _set_device = _hand_on(TensorCollection._set_device)
    _get_writable = _hand_on(TensorCollection._get_writable)
    _print_node = _hand_on(TensorCollection._print_node)
    _peek_child = _hand_on(TensorCollection._peek_child)
    _add_child = _hand_on(TensorCollection._add_child)
    _del_child = _hand_on(TensorCollection._del_child)
    _members_and_dim = _hand_on(TensorCollection._members_and_dim)
    _tree_children = _hand_on(TensorCollection._tree_children)
    _plan_writes = _hand_on(TensorCollection._plan_writes)
    _set_names = _hand_on(TensorCollection._set_names)
    _edit_together = _hand_on(TensorCollection._edit_together)
    _check_child = _hand_on(TensorCollection._check_child)

    def _children(self) -> Mapping[str, Child]:
        return self._tensordict._children()

    def _get_child(self, key: str) -> Child:
        return self._tensordict._get_child(key)

    def _with_batch_size(self, batch_size: torch.Size) -> Self:
        fitted = self._tensordict._with_batch_size(batch_size)
        return self if fitted is self._tensordict else self._wrap(fitted)

    def _zip_members(self, *others: object) -> list[tuple[Any, ...]]:
        return [(self._wrap_holder(node), *parts) for node, *parts in self._tensordict._zip_members(*others)]

    def _map_members(self, fn: Callable[..., Any], *others: object) -> Any:
        results: list[TensorCollection] = []

        def map_holder(node: TensorCollection, *parts: TensorCollection) -> object:
            result = fn(self._wrap_holder(node), *parts)
            results.append(result)
            return None if result is None else result._inner()

        made = self._tensordict._map_members(map_holder, *others)
        if made is None or (results and results[0] is not None and made is results[0]._inner()):
            return results[0]
        # A function may return unwrapped nodes, whose keys are not fields of the class: keep the stack unwrapped.
        fits = all(node is None or isinstance(node, type(self)) for node in results)
        return self._wrap_stack(made) if fits else made

    def _wrap_holder(self, node: object) -> Core:
        """Wrap a member of the wrapped lazy stack like this node; the wrapped collection itself becomes this node."""
        return self if node is self._tensordict else self._wrap(node)

    def _take_over(self, result: Core) -> list[Replacement] | None:
        return [(self._tensordict, result._inner(), partial(setattr, self, "_tensordict"))]

    def _flatten_leaves(self, out: list[Tensor]) -> object:
        return self._tensordict._flatten_leaves(out)

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        self._tensordict._flatten_other(other._inner(), out, path)

    def _zip_leaves(
        self, other: Core, left: list[Tensor], right: list[Tensor], values: list[Core] | None = None
    ) -> object:
        return self._tensordict._zip_leaves(other._inner(), left, right, values)

    def _unflatten(self, leaves: Sequence[Tensor], treedef: object = None) -> Any:
        return self._wrap(self._tensordict._unflatten(leaves, treedef))

    def _shallow_copy(self) -> Any:
        return self._wrap(self._tensordict._shallow_copy())

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        return self._wrap(self._tensordict._map(fn))

    def _transform(self, plan: ShapePlan) -> Any:
        return self._wrap(self._tensordict._transform(plan))

    def _split_write(self, value: object, *index: object) -> Sequence[tuple[Core, object, object]]:
        parts = self._tensordict._split_write(value, *index)
        return [(self._wrap_holder(member), place, part) for member, place, part in parts]

    def _split_update(
        self, plan: Any, source: Core, wanted: object, path: tuple[str, ...]
    ) -> Sequence[tuple[Core, object]] | None:
        parts = self._tensordict._split_update(plan, source, wanted, path)
        return parts and [(self._wrap_holder(member), part) for member, part in parts]

    def _transform_multi(self, plan: MultiPlan) -> tuple[Self, ...]:
        wrap = self._wrap
        return tuple([wrap(part) for part in self._tensordict._transform_multi(plan)])

    def _index(self, index: object) -> Any:
        return self._wrap(self._tensordict._index(index))

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the slices along the first batch dim."""
        return map(self._wrap, iter(self._tensordict)) if self.batch_size else super().__iter__()

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
        self._tensordict._assign(
            index, value._inner() if isinstance(value, Core) else value, non_blocking=non_blocking
        )
