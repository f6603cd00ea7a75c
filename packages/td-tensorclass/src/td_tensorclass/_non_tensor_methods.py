"""What td-tensorclass adds to every collection: coercers of values, and methods for non-tensor data and dataclasses."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch

from td_core import Coercer, LinkedList, unravel_key_to_tuple
from td_core.errors import BatchSizeError
from td_core.plugins.declarations import implements
from td_core.plugins.value_methods import ValueMethods
from td_core.typing import NestedKey

from ._attrs import make_attrs
from ._non_tensor import NonTensorData
from ._non_tensor_stack import NonTensorStack
from ._plain_classes import convert_dataclass
from ._unbatched import UnbatchedTensor, to_unbatched
from ._value_nodes import NonTensorNode
from ._value_settings import list_to_stack


@implements(ValueMethods.get_non_tensor)
def get_non_tensor(self, key, default):
    entry = self.get(key, default)
    return entry._unwrap() if entry is not default and hasattr(entry, "_unwrap") else entry


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


def to_data(value: object, batch_size: torch.Size, device: torch.device | None) -> NonTensorData:
    """Wrap a value as one :class:`NonTensorData` for the whole batch."""
    data = NonTensorData(value, device=device)
    # Skip the check of as_batch_size(): the batch size of an uneven lazy stack contains -1.
    data._set_batch_size(batch_size)
    return data


def to_node(
    value: object, batch_size: torch.Size, device: torch.device | None
) -> NonTensorData | NonTensorStack:
    """Convert a list to a NonTensorStack with one value per batch element, and any other value to one NonTensorData."""
    if isinstance(value, LinkedList):
        # Convert to plain lists: nested LinkedLists would write back to the collection that they were read from.
        value = value.tolist()
    if not isinstance(value, list) or not list_to_stack():
        return to_data(value, batch_size, device)
    uneven = None
    try:
        stack = NonTensorStack.from_list(value, max(len(batch_size), 1))
    except BatchSizeError as error:
        uneven = error
    if uneven is not None or stack.batch_size[: len(batch_size)] != batch_size:
        raise BatchSizeError(
            f"a list of {len(value)} values gives one for each element of a batch, whose size is {list(batch_size)}; "
            "wrap the list in NonTensorData() to keep it as one value"
        ) from uneven
    stack._device = device
    return stack


#: Coercers for text, bytes and None; for UnbatchedTensor; and for all objects that no other coercer accepts.
COERCERS = (
    Coercer((str, bytes, bytearray, type(None)), to_data),
    Coercer((UnbatchedTensor,), to_unbatched),
    Coercer((object,), to_node),
)
