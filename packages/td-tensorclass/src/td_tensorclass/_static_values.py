"""Non-tensor data in torch's pytrees: nodes without children, whose values travel in the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from td_core._mapped_names import get_names_after
from td_core._pytree import register
from td_core._value_codec import is_same_value

_CONSTANTS = (str, int, bool, type(None))


class StaticValue:
    """A value in a context: contexts are compared with ``==``, and values may answer with anything.

    >>> StaticValue([1]) == StaticValue([1])
    True
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValue) and is_same_value(self.value, other.value)

    # Equal values may hash differently, or not at all.
    __hash__ = None  # type: ignore[assignment]


def make_static(value: Any) -> Any:
    """Return a value as a context has it; what torch takes for a constant remains one, for ``torch.export(strict=True)``.

    >>> make_static("a") == make_static("a"), make_static(1) == make_static(True)
    (True, False)
    """
    return (type(value).__name__, value) if type(value) in _CONSTANTS else StaticValue(value)


def get_static(holder: Any) -> Any:
    """Return the value that :func:`make_static` was given.

    >>> get_static(make_static("a")), get_static(make_static([1]))
    ('a', [1])
    """
    return holder[1] if type(holder) is tuple else holder.value


def register_static(cls: Any, names: Sequence[str], made_of: Callable[..., Any]) -> None:
    """Register a class of nodes without children.

    Args:
        cls: the class.
        names: the attributes that the context has, of which the first is held.
        made_of: what returns a node of these.
    """

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [], load(tuple([getattr(node, name) for name in names]))

    def unflatten(children: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return made_of(*dump(context))

    def dump(context: tuple[Any, ...]) -> tuple[Any, ...]:
        holder, *rest = context
        return (get_static(holder), *rest)

    def load(dumped: tuple[Any, ...]) -> tuple[Any, ...]:
        value, *rest = dumped
        return (make_static(value), *rest)

    register(cls, flatten, unflatten, lambda context: (), dump, load)


def register_data(cls: Any) -> None:
    """Register a class of nodes that hold one value."""

    def made_of(value: Any, metadata: Any, batch_size: Any, device: Any, names: Any) -> Any:
        node = cls(value, metadata, batch_size=batch_size, device=device)
        node._names = get_names_after(names, batch_size, ())
        return node

    register_static(cls, ("_value", "_metadata", "batch_size", "device", "_names"), made_of)


def register_stack(cls: Any) -> None:
    """Register a class of nodes that hold one value for each element of their batch."""

    def made_of(
        values: Any,
        values_size: Any,
        batch_size: Any,
        device: Any,
        joints: Any,
        hidden: int,
        emerges: int,
        names: Any,
    ) -> Any:
        node = cls._of(values, values_size, device, get_names_after(names, batch_size, ()))
        node._batch_size, node._joints, node._hidden, node._emerges = batch_size, joints, hidden, emerges
        return node

    register_static(
        cls,
        ("_snapshot", "_values_size", "batch_size", "device", "_joints", "_hidden", "_emerges", "_names"),
        made_of,
    )
