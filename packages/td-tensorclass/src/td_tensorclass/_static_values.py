"""Register non-tensor data as torch pytree nodes without children, whose values are in the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from td_core.spi import is_same_value, register_pytree
from td_core.typing import DeviceType

_CONSTANTS = (str, int, bool, type(None))


class StaticValue:
    """Wrapper of a value in a pytree context: torch compares contexts with ``==``, whose result here is always a bool."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        # There is no hash: equal values may have different ones, or be unhashable.
        return isinstance(other, StaticValue) and is_same_value(self.value, other.value)


def make_static(value: object) -> tuple[str, object] | StaticValue:
    """Wrap a value for a context. ``torch.export(strict=True)`` needs constants such as str and int to stay bare."""
    return (type(value).__name__, value) if type(value) in _CONSTANTS else StaticValue(value)


def get_static(holder: Any) -> object:
    """Unwrap a value that :func:`make_static` wrapped."""
    return holder[1] if type(holder) is tuple else holder.value


def register_static(cls: type, names: Sequence[str], made_of: Callable[..., object]) -> None:
    """Register a class as a pytree node without children; ``made_of`` rebuilds a node from its attributes ``names``."""

    def flatten(node: object) -> tuple[list[Any], tuple[object, ...]]:
        return [], load(tuple([getattr(node, name) for name in names]))

    def unflatten(children: Iterable[object], context: tuple[object, ...]) -> Any:
        return made_of(*dump(context))

    def dump(context: tuple[object, ...]) -> tuple[object, ...]:
        holder, *rest = context
        return (get_static(holder), *rest)

    def load(dumped: tuple[object, ...]) -> tuple[Any, ...]:
        # The first attribute is the value, which torch compares when it compares contexts.
        value, *rest = dumped
        return (make_static(value), *rest)

    register_pytree(cls, flatten, unflatten, lambda context: (), dump, load)


def _fit_names(names: Any, batch_size: Any) -> object:
    """Return the dim names of a context, or None if vmap has added or removed a dim."""
    return names if names is not None and len(names) == len(batch_size) else None


def register_data(cls: type) -> None:
    """Register a subclass of NonTensorDataBase as a pytree node."""

    def made_of(
        value: object, metadata: object, batch_size: object, device: DeviceType | None, names: object
    ) -> object:
        node = cls(value, metadata, batch_size=batch_size, device=device)
        node._names = _fit_names(names, batch_size)
        return node

    register_static(cls, ("_value", "_metadata", "batch_size", "device", "_names"), made_of)


def register_stack(cls: Any) -> None:
    """Register NonTensorStack or a subclass as a pytree node."""

    def made_of(
        values: object,
        values_size: object,
        batch_size: object,
        device: DeviceType | None,
        joints: object,
        hidden: tuple[int, ...],
        emerges: tuple[int, int | None],
        names: object,
        repeated: int | None = None,
    ) -> object:
        node = cls._of(values, values_size, device, _fit_names(names, batch_size))
        node._batch_size, node._joints, node._hidden, node._emerges = batch_size, joints, hidden, emerges
        node._repeated = repeated
        return node

    register_static(
        cls,
        (
            "_snapshot",
            "_values_size",
            "batch_size",
            "device",
            "_joints",
            "_hidden",
            "_emerges",
            "_names",
            "_repeated",
        ),
        made_of,
    )
