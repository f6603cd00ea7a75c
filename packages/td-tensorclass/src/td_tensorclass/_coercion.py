"""What a value that is no tensor becomes when it is set into a collection."""

from __future__ import annotations

from typing import Any

import torch

from td_core import Coercer, LinkedList
from td_core.errors import BatchSizeError

from ._non_tensor import NonTensorData
from ._non_tensor_stack import NonTensorStack
from ._unbatched import UnbatchedTensor, to_unbatched
from ._value_settings import list_to_stack


def to_data(value: Any, batch_size: torch.Size, device: torch.device | None) -> NonTensorData:
    """Return a value as one for the whole batch.

    >>> to_data("a", torch.Size([2]), None)
    NonTensorData(data=a, batch_size=torch.Size([2]), device=None)
    """
    data = NonTensorData(value, device=device)
    # No check: that of a lazy stack shows -1 where its members differ, and each of them gets its own.
    data._set_batch_size(batch_size)
    return data


def to_node(value: Any, batch_size: torch.Size, device: torch.device | None) -> Any:
    """Return a list as one value for each element of the batch, and any other value as one for the whole batch.

    Raises:
        BatchSizeError: the list does not have the shape of the batch.

    >>> to_node(["a", "b"], torch.Size([2]), None).tolist()
    ['a', 'b']
    """
    if isinstance(value, LinkedList):
        value = value.tolist()  # its rows would be values that write to where they were read
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


#: One for the types that must never be looked into, one for tensors that enter as nodes, and one for everything that
#: nothing else takes.
COERCERS = (
    Coercer((str, bytes, bytearray, type(None)), to_data),
    Coercer((UnbatchedTensor,), to_unbatched),
    Coercer((object,), to_node),
)
