"""Dataclasses as tensorclasses and as collections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from td_core import TensorDict
from td_core.typing import BatchSize, DeviceType

from ._decorator import make_class
from ._schema import OPTIONS
from ._tensorclass import TensorClass

_made: dict[tuple[Any, ...], type] = {}


def from_dataclass(
    obj: Any,
    *,
    dest_cls: type | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: BatchSize | None = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    inplace: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    device: DeviceType | None = None,
) -> Any:
    """Return a dataclass as a tensorclass, or an instance of one as an instance of it.

    Args:
        obj: the dataclass, or an instance; instances in its fields are converted alike.
        dest_cls: the tensorclass of the result, for an instance; by default one is made from its class.
        auto_batch_size: work out the longest batch size that the leaves share.
        batch_dims: how many dims it may have at most.
        batch_size: batch size of the result.
        frozen: an option of the class that is made, as those below; see :func:`tensorclass`.
        autocast: convert what is written to the annotated type.
        nocast: keep numbers and arrays as they are.
        inplace: refused: a class cannot become another one; use the result.
        shadow: allow fields that hide members of a collection.
        tensor_only: accept tensors and collections only.
        device: device of the result.

    Raises:
        TypeError: ``obj`` is neither a dataclass nor an instance of one.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     xy: torch.Tensor
    ...     label: str
    >>> from_dataclass(Point(torch.zeros(3, 2), "a"), batch_size=[3])
    Point_tc(batch_size=[3], fields={label: str, xy: f32[2]})
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    if not dataclasses.is_dataclass(obj):
        raise TypeError(f"from_dataclass takes a dataclass or an instance of one; got {obj!r}")
    if inplace:
        raise ValueError(
            "a dataclass cannot become a tensorclass in place: use the class that from_dataclass returns"
        )
    if isinstance(obj, type):
        return _class_for(obj, options)
    return converted(obj, dest_cls, options, auto_batch_size, batch_dims, batch_size, device)


def converted(
    obj: Any,
    dest_cls: type | None,
    options: dict[str, bool] | None,
    auto_batch_size: bool,
    batch_dims: int | None,
    batch_size: BatchSize | None,
    device: DeviceType | None,
) -> Any:
    """Return an instance of a dataclass as one of a tensorclass; as a TensorDict where there are no options for a class."""
    if auto_batch_size and batch_size is not None:
        raise TypeError(f"give a batch size or auto_batch_size=True, not both; got {batch_size!r}")
    if options is None:
        result: Any = TensorDict(_as_mapping(obj), batch_size=batch_size, device=device)
    else:
        result = _instance_for(obj, dest_cls, options, batch_size=batch_size, device=device)
    return result.auto_batch_size_(batch_dims) if auto_batch_size else result


def _class_for(cls: type, options: dict[str, bool]) -> type:
    """Return the tensorclass of a dataclass; the same one each time."""
    if issubclass(cls, TensorClass):
        return cls
    key = (cls, *options.items())
    if key not in _made:
        _made[key] = make_class(cls, options, f"{cls.__name__}_tc")
    return _made[key]


def _instance_for(obj: Any, cls: Any, options: dict[str, bool], **labels: Any) -> Any:
    values = _values(obj, lambda value: _instance_for(value, None, options, **labels))
    return (cls or _class_for(type(obj), options))(**values, **labels)


def _as_mapping(obj: Any) -> dict[str, Any]:
    return _values(obj, _as_mapping)


def _values(obj: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what the fields of a dataclass hold, with the dataclasses among that converted."""
    values = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorClass)):
            values[name] = convert(value)
    return values
