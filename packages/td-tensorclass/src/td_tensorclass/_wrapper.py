"""Wrapper: a collection that holds another one, of any kind, and hands every primitive to it.

What a collection can do is inherited, and rests on the primitives; each is given to the collection inside, and its
result is put into the class again. So every operation keeps the class, and no list of operations exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core._collection import Child, Core, same, show_path
from td_core._names import Names
from td_core._traced import new_object
from td_core.errors import StructureError
from td_core.typing import BatchSize, NestedKey

SelfT = TypeVar("SelfT", bound="Wrapper")

_set = object.__setattr__


class Wrapper(TensorCollection):
    """Base of classes around one collection."""

    #: Whether a result of an operation needs :meth:`_finish`.
    _finishes: ClassVar[bool] = False

    _tensordict: Any
    _undo: Callable[[Any], Any] | None = None

    @classmethod
    def _bare(cls: type[SelfT], td: Any) -> SelfT:
        """Return an instance around anything, as it was: nothing is checked, locked or run."""
        node = new_object(cls)
        _set(node, "_tensordict", td)
        return node

    @classmethod
    def _wrap(cls: type[SelfT], td: Any) -> SelfT:
        """Return an instance around a collection whose keys are fields, unchecked."""
        node = new_object(cls)
        _set(node, "_tensordict", td)
        if cls._finishes:
            node._finish()
        return node

    def _finish(self) -> None:
        """Complete the result of an operation."""

    @property
    def batch_size(self) -> torch.Size:
        """Leading dims that all fields share; settable where every field agrees."""
        return self._tensordict.batch_size  # type: ignore[no-any-return]

    @batch_size.setter
    def batch_size(self, batch_size: BatchSize) -> None:
        self._tensordict.batch_size = batch_size

    @property
    def device(self) -> torch.device | None:
        """Device of every field, or None where fields keep their own."""
        return self._tensordict.device  # type: ignore[no-any-return]

    @property
    def _locked(self) -> bool:  # type: ignore[override]
        return self._tensordict._locked  # type: ignore[no-any-return]

    @property
    def _names(self) -> Names | None:
        return self._tensordict._names  # type: ignore[no-any-return]

    @_names.setter
    def _names(self, names: Names | None) -> None:
        self._tensordict._names = names

    def _inner(self) -> Core:
        return self._tensordict  # type: ignore[no-any-return]

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._tensordict._set_batch_size(batch_size)

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        self._tensordict._check_batch_size(batch_size, path)

    def _grow(self, batch_size: torch.Size) -> None:
        self._tensordict._grow(batch_size)

    def _set_device(self, device: torch.device | None) -> None:
        self._tensordict._set_device(device)

    def _children(self) -> Mapping[str, Child]:
        return self._tensordict._children()  # type: ignore[no-any-return]

    def _get_child(self, key: str) -> Child:
        return self._tensordict._get_child(key)

    def _stand_in(self, key: str) -> Child:
        return self._tensordict._stand_in(key)

    def _nested(self) -> Iterator[Core]:
        return self._tensordict._nested()  # type: ignore[no-any-return]

    def _del_child(self, key: str) -> None:
        self._tensordict._del_child(key)

    def _write_child(self, key: str, value: Child, *, non_blocking: bool = False) -> None:
        self._tensordict._write_child(key, value, non_blocking=non_blocking)

    def _fit(self: SelfT, batch_size: torch.Size) -> SelfT:
        fitted = self._tensordict._fit(batch_size)
        return self if fitted is self._tensordict else self._wrap(fitted)

    def _stacked(self) -> tuple[Sequence[Any], int] | None:
        stacked = self._tensordict._stacked()
        return None if stacked is None else ([self._wrap(member) for member in stacked[0]], stacked[1])

    def _like(self: SelfT, members: Sequence[Core], *args: Any) -> SelfT:
        inner = self._tensordict._like([member._inner() for member in members], *args)
        # Members that an operation took out of the class, for their keys are no fields, stay out of it.
        return self._wrap(inner) if all(isinstance(member, type(self)) for member in members) else inner

    def _keep_together(self, items: Sequence[Core], dim: int) -> Core:
        self._check_joinable(items, ())
        inner = self._tensordict
        return self._wrap(inner._keep_together([item._inner() for item in items], dim))

    def _check_joinable(self, items: Sequence[Core], path: tuple[str, ...]) -> None:
        for item in items:
            if type(item) is not type(self):
                where = f" at {show_path(path)}" if path else ""
                raise StructureError(
                    f"cannot join a {type(self).__name__} and a {type(item).__name__}{where}: convert one of them, with "
                    "from_tensordict() or to_tensordict()"
                )

    def _collect(self, out: list[Tensor]) -> Any:
        return self._tensordict._collect(out)

    def _collect_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        self._tensordict._collect_other(other._inner(), out, path)

    def _collect_both(
        self, other: Core, mine: list[Tensor], theirs: list[Tensor], foreign: list[Core] | None = None
    ) -> Any:
        return self._tensordict._collect_both(other._inner(), mine, theirs, foreign)

    def _rebuild(self: SelfT, leaves: Iterator[Tensor]) -> SelfT:
        return self._wrap(self._tensordict._rebuild(leaves))

    def _with_leaves(self: SelfT, leaves: Sequence[Tensor], levels: Any = None) -> SelfT:
        return self._wrap(self._tensordict._with_leaves(leaves, levels))

    def _shallow(self: SelfT) -> SelfT:
        return self._wrap(self._tensordict._shallow())

    def _map(self: SelfT, fn: Callable[[Tensor], Tensor]) -> SelfT:
        mapped = self._tensordict._map(fn)
        # Around the very leaves that it had, it is what it was, and no result.
        return self._bare(mapped) if fn is same else self._wrap(mapped)

    def _transform(self: SelfT, plan: Any) -> SelfT:
        return self._wrap(self._tensordict._transform(plan))

    def _explode(self: SelfT, plan: Any) -> tuple[SelfT, ...]:
        wrap = self._wrap
        return tuple([wrap(part) for part in self._tensordict._explode(plan)])

    def _join(self: SelfT, items: Sequence[Core], plan: Any, path: tuple[str, ...] = ()) -> SelfT:
        self._check_joinable(items, path)
        return self._wrap(self._tensordict._join([item._inner() for item in items], plan, path))

    def _index(self, index: Any) -> Any:
        return self._wrap(self._tensordict._index(index))

    def _rows(self: SelfT, count: int) -> Iterator[SelfT]:
        return map(self._wrap, self._tensordict._rows(count))

    def _assign(self, index: Any, value: Any, *, non_blocking: bool = False) -> None:
        self._tensordict._assign(
            index, value._inner() if isinstance(value, Core) else value, non_blocking=non_blocking
        )

    def _set_names(self, names: Names | None) -> None:
        self._tensordict._set_names(names)

    def _densify(self: SelfT, layout: torch.layout) -> SelfT:
        return self._wrap(self._tensordict._densify(layout))

    def _get_as(self, key: NestedKey, default: Any, **kwargs: Any) -> Any:
        return self._tensordict._get_as(key, default, **kwargs)
