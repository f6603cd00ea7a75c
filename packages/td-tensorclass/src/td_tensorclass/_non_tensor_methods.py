"""Methods that td-tensorclass adds to every collection: non-tensor data, ``attrs`` and ``from_dataclass``."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from td_core import unravel_key_to_tuple
from td_core.plugins.declarations import implements
from td_core.plugins.value_methods import ValueMethods
from td_core.typing import NO_DEFAULT, NestedKey

from ._attrs import make_attrs
from ._non_tensor import NonTensorData
from ._plain_classes import convert_dataclass
from ._value_nodes import NonTensorNode


@implements(ValueMethods.get_non_tensor)
def get_non_tensor(self, key, default):
    entry = self.get(key, NO_DEFAULT)
    if entry is NO_DEFAULT:
        return self[key] if default is NO_DEFAULT else default
    return entry._unwrap() if hasattr(entry, "_unwrap") else entry


@implements(ValueMethods.set_non_tensor)
def set_non_tensor(self, key, value):
    return self.set(key, NonTensorData(value))


@implements(ValueMethods.is_non_tensor)
def is_non_tensor(self, key):
    return issubclass(self.entry_class(key), NonTensorNode)


@implements(ValueMethods.non_tensor_items)
def non_tensor_items(self, include_nested):
    return tuple((key, _entry(self, key)) for key in self.keys(include_nested) if self.is_non_tensor(key))


@implements(ValueMethods.filter_non_tensor_data)
def filter_non_tensor_data(self):
    # The members of a lazy stack may have different entries.
    return self._map_members(lambda node: node.exclude(*filter(node.is_non_tensor, node.keys(True))))


@implements(ValueMethods.attrs)
def attrs(self, *, fields, num_threads):
    return make_attrs(self, fields, num_threads)


@implements(ValueMethods.from_dataclass)
def from_dataclass(
    cls, dataclass, *, dest_cls, auto_batch_size, batch_dims, as_tensorclass, device, batch_size
):
    if not is_dataclass(dataclass) or isinstance(dataclass, type):
        raise TypeError(f"from_dataclass takes an instance of a dataclass; got {dataclass!r}")
    options: dict[str, bool] | None = {} if as_tensorclass or dest_cls is not None else None
    return cls._wrap_dense(
        convert_dataclass(dataclass, dest_cls, options, auto_batch_size, batch_dims, batch_size, device)
    )


def _entry(node: Any, key: NestedKey) -> object:
    for part in unravel_key_to_tuple(key):
        node = node._get_child(part)
    return node
