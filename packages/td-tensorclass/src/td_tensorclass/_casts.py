"""The casts of a tensorclass: convert a value that is written to a field, before td-core coerces it.

A cast returns a tensor, a node, or a value for td-core to coerce. It wraps a value that must not become a tensor as
non-tensor data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, get_origin

import numpy as np
import torch
from torch import Tensor

from td_core import LinkedList, TensorCollection, TensorDict
from td_core.spi import as_dtype, as_tensor, is_foreign

from ._non_tensor import NonTensorData, NonTensorDataBase
from ._schema import Schema, collection_class, get_choices, is_tensorclass
from ._value_nodes import ValueNode

_NUMBERS = (bool, int, float, complex, np.number, np.bool_, np.ndarray)


def make_cast(schema: Schema) -> Callable[[str, object], object]:
    """Build the function ``cast(field, value)`` that converts a value, other than None, to the type of a field."""
    options = schema.options
    if options.tensor_only:
        for name in schema.names:
            hint = schema.hint(name)
            if schema.is_resolved(name) and not all(
                _is_tensor_hint(choice) or collection_class(choice) or _is_value_hint(choice)
                for choice in get_choices(hint)
            ):
                raise TypeError(
                    f"{schema.cls.__name__} is tensor_only, so its fields are tensors, collections and NonTensorData; "
                    f"{name!r} is annotated as {hint!r}"
                )

    def plain(name: str, value: object) -> Any:
        if isinstance(value, Mapping) and not isinstance(value, TensorCollection):
            return _from_mapping(schema.hint(name), value)
        if isinstance(value, tuple) and not _is_tensor_hint(schema.hint(name)):
            return NonTensorData(value)
        return value

    def nocast(name: str, value: object) -> object:
        return NonTensorData(value) if isinstance(value, _NUMBERS) else plain(name, value)

    def autocast(name: str, value: object) -> object:
        hint = schema.hint(name)
        # Non-tensor data, or a list read from a collection, already has one value per element, so keep it.
        if isinstance(value, ValueNode) or (isinstance(value, LinkedList) and not _is_tensor_hint(hint)):
            return value
        return _as_type(hint, name, value)

    def tensor_only(name: str, value: object) -> object:
        if isinstance(value, (Tensor, TensorCollection)) and not isinstance(value, ValueNode):
            return value
        if isinstance(value, Mapping):
            wanted = [
                choice for choice in get_choices(schema.hint(name)) if collection_class(choice) is not None
            ]
            if wanted or not schema.is_resolved(name):
                return _from_mapping(wanted[0] if wanted else TensorDict, value)
        for choice in filter(_is_value_hint, get_choices(schema.hint(name))):
            return _as_type(choice, name, value)
        return _as_tensor(name, value, "takes tensors only")

    if options.tensor_only:
        return tensor_only
    if options.autocast:
        return autocast
    return nocast if options.nocast else plain


def is_batch_number(hint: object, value: object) -> bool:
    """Return True if a value and its annotation are numbers: the value is then stored once for the whole batch."""
    return isinstance(value, (bool, int, float, complex)) and hint in (bool, int, float, complex)


def _is_tensor_hint(hint: object) -> bool:
    # torch.LongTensor and similar types are not subclasses of Tensor.
    return isinstance(hint, type) and (issubclass(hint, Tensor) or isinstance(hint, type(torch.LongTensor)))


def _is_value_hint(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, NonTensorDataBase)


def _from_mapping(hint: object, value: Mapping[object, object]) -> object:
    """Convert a mapping to the annotated collection class, or else wrap it as one non-tensor value."""
    if type(value) is not dict and is_foreign(value):
        return value
    cls = collection_class(hint)
    if cls is None:
        return NonTensorData(value)
    if is_tensorclass(cls):
        return cls.from_dict(value, auto_batch_size=False)
    return TensorDict(dict(value))


def _as_any(hint: object, value: object) -> object:
    """Convert a value for a field that is annotated as no class; lists and mappings become one value."""
    if isinstance(value, Mapping) and not isinstance(value, TensorCollection):
        return _from_mapping(hint, value)
    if isinstance(value, (list, tuple)) and not any(map(_is_tensor_hint, get_choices(hint))):
        return NonTensorData(value)
    return value


def _as_collection(hint: object, cls: Any, value: object) -> object:
    if not isinstance(value, TensorCollection):
        return _from_mapping(hint, value) if isinstance(value, Mapping) else value
    fits = is_tensorclass(cls) and value._children().keys() <= cls._schema.names.keys()
    return cls.from_tensordict(value) if fits else value


def _as_type(hint: object, name: str, value: object) -> object:
    cls: object = get_origin(hint) or hint
    # Newer versions of Python implement Any and int | str as classes, too.
    if not isinstance(cls, type) or cls in (Any, object, UnionType):
        return _as_any(hint, value)
    if cls is torch.dtype:
        value = as_dtype(value)
    if isinstance(value, cls):
        return value if isinstance(value, (Tensor, TensorCollection)) else NonTensorData(value)
    if _is_tensor_hint(cls):
        tensor = _as_tensor(name, value, "is declared as a tensor")
        return (
            cls(tensor)
            if isinstance(tensor, Tensor) and issubclass(cls, Tensor) and not isinstance(tensor, cls)
            else tensor
        )
    if issubclass(cls, NonTensorDataBase):
        return cls(value)
    if issubclass(cls, TensorCollection):
        return _as_collection(hint, cls, value)
    try:
        made: Any = (
            np.asarray if cls is np.ndarray else cls
        )  # np.ndarray(value) would use the value as a shape
        return NonTensorData(made(value))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"the field {name!r} is declared as {cls.__name__}; got {value!r}: {error}"
        ) from error


def _as_tensor(name: str, value: object, rule: str) -> object:
    if is_foreign(value):
        return value
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the field {name!r} {rule}; got {value!r}") from error
