"""Coerce values that are not tensors to nodes when they are set into a collection."""

from __future__ import annotations

import torch

from td_core import Coercer, LinkedList
from td_core.errors import BatchSizeError

from ._non_tensor import NonTensorData
from ._non_tensor_stack import NonTensorStack
from ._unbatched import UnbatchedTensor, to_unbatched
from ._value_settings import list_to_stack


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
