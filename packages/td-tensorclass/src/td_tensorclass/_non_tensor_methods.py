"""What td-tensorclass adds to every collection: coercers of values, and methods for non-tensor data and dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from td_core import LinkedList, TensorCollection
from td_core.errors import BatchSizeError
from td_core.spi import RULES, Coercer, unravel_key_to_tuple
from td_core.typing import NO_DEFAULT, BatchSize, DeviceType, NestedKey

from ._attrs import make_attrs
from ._non_tensor import NonTensorData
from ._non_tensor_stack import NonTensorStack
from ._plain_classes import convert_dataclass
from ._unbatched import UnbatchedTensor, to_unbatched
from ._value_nodes import NonTensorNode
from ._value_settings import list_to_stack

if TYPE_CHECKING:
    import numpy.typing as npt

CollectionT = TypeVar("CollectionT", bound=TensorCollection)


def get_non_tensor(self: TensorCollection, key: NestedKey, default: object = NO_DEFAULT) -> Any:
    """Return the value of a non-tensor entry: one value, or a list with one value per batch element.

    An entry that is a tensor or a collection is returned unchanged.

    Raises:
        KeyPathError: the key does not exist, and no default was given.

    >>> TensorDict({"a": "x"}, batch_size=[2]).get_non_tensor("a")
    'x'
    """
    entry = self.get(key, default)
    return entry._unwrap() if entry is not default and hasattr(entry, "_unwrap") else entry


def set_non_tensor(self: CollectionT, key: NestedKey, value: object) -> CollectionT:
    """Store one Python value for the whole batch under ``key``, whatever its type.

    Raises:
        LockedError: the collection is locked.

    >>> TensorDict({}, batch_size=[2]).set_non_tensor("a", [1, 2])["a"]
    [1, 2]
    """
    return self.set(key, NonTensorData(value))


def is_non_tensor(self: TensorCollection, key: NestedKey) -> bool:
    """Return True if the entry ``key`` is non-tensor data.

    Raises:
        KeyPathError: the key does not exist.

    >>> TensorDict({"a": "x"}).is_non_tensor("a")
    True
    """
    return issubclass(self.entry_class(key), NonTensorNode)


def non_tensor_items(self: TensorCollection, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
    """Return the ``(key, node)`` pairs of the non-tensor entries.

    Args:
        include_nested: also return entries of nested collections, with tuples as keys.

    >>> TensorDict({"a": "x", "b": 1}).non_tensor_items()
    (('a', NonTensorData(data=x, batch_size=torch.Size([]), device=None)),)
    """
    return tuple((key, _entry(self, key)) for key in self.keys(include_nested) if self.is_non_tensor(key))


def filter_non_tensor_data(self: CollectionT) -> CollectionT:
    """Return the collection without the non-tensor entries of all its nodes.

    >>> TensorDict({"a": "x", "n": {"b": 1, "c": "y"}}).filter_non_tensor_data()
    TensorDict(batch_size=[], fields={n: {b: i64[]}})
    """
    # The members of a lazy stack may have different entries.
    kept: CollectionT = self._map_members(
        lambda node: node.exclude(*filter(node.is_non_tensor, node.keys(True)))
    )
    return kept


def attrs(
    self: CollectionT, *, fields: Sequence[str] = ("device", "dtype", "shape"), num_threads: int | None = None
) -> CollectionT:
    """Copy the structure, without batch dims, with a :class:`TensorAttrs` in place of each leaf.

    Args:
        fields: the attributes to record per leaf, out of ``"device"``, ``"dtype"`` and ``"shape"``.
        num_threads: number of threads that read the leaves; by default only the calling thread.

    Raises:
        ValueError: ``fields`` contains another name.

    >>> TensorDict({"a": torch.zeros(3)}).attrs()["a"].tgt_shape
    torch.Size([3])
    """
    return make_attrs(self, fields, num_threads)


def from_dataclass(
    dataclass: object,
    *,
    dest_cls: type | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    as_tensorclass: bool = False,
    device: DeviceType | None = None,
    batch_size: BatchSize | None = None,
) -> TensorCollection:
    """Convert a dataclass instance to a collection; dataclass instances in its fields become nested collections.

    Called on a tensorclass, it returns an instance of that class.

    Args:
        dataclass: the instance.
        dest_cls: tensorclass of the result.
        auto_batch_size: use the longest batch size that all leaves share.
        batch_dims: maximum number of dims of that batch size.
        as_tensorclass: convert the dataclass to a tensorclass, and return an instance of that.
        device: device of the result.
        batch_size: batch size of the result.

    Raises:
        TypeError: ``dataclass`` is not an instance of a dataclass.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     xy: torch.Tensor
    >>> TensorDict.from_dataclass(Point(torch.zeros(3, 2)), auto_batch_size=True)
    TensorDict(batch_size=[3,2], fields={xy: f32[]})
    """
    if not is_dataclass(dataclass) or isinstance(dataclass, type):
        raise TypeError(f"from_dataclass takes an instance of a dataclass; got {dataclass!r}")
    options: dict[str, bool] | None = {} if as_tensorclass or dest_cls is not None else None
    return convert_dataclass(dataclass, dest_cls, options, auto_batch_size, batch_dims, batch_size, device)


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
    """Convert a list, or an array of text or dates, to a NonTensorStack with one value per batch element.

    Any other value becomes one NonTensorData.
    """
    if isinstance(value, LinkedList):
        # Convert to plain lists: nested LinkedLists would write back to the collection that they were read from.
        value = value.tolist()
    elif isinstance(value, np.ndarray) and not RULES.follows_tensordict and list_to_stack():
        value = _list_rows(value, batch_size)
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


def _list_rows(array: npt.NDArray[np.generic], batch_size: torch.Size) -> object:
    """Return the values of an array of text or dates that has one for each batch element; another array unchanged."""
    kind = array.dtype.kind
    if not batch_size or kind not in "USTMmO" or array.shape[: len(batch_size)] != batch_size:
        return array
    if kind == "O" and not all(item is None or isinstance(item, (str, bytes)) for item in array.flat):
        return array
    return _list_dates(array) if kind in "Mm" else array.tolist()


def _list_dates(array: npt.NDArray[Any]) -> object:
    """Return the dates of an array as dates of Python; as those of numpy if Python lacks one, such as a nanosecond."""
    values = array
    if np.datetime_data(array.dtype)[0] in ("ns", "ps", "fs", "as"):
        values = array.astype(f"{array.dtype.kind}8[us]")
    is_same = np.array_equal(values.astype(array.dtype), array, equal_nan=True)
    if is_same and not any(isinstance(item, int) for item in values.ravel().tolist()):
        return values.tolist()
    dates = np.empty(array.size, dtype=object)
    dates[:] = [*array.ravel()]
    return dates.reshape(array.shape).tolist()


#: Coercers for text, bytes and None; for UnbatchedTensor; and for all objects that no other coercer accepts.
COERCERS = (
    Coercer((str, bytes, bytearray, type(None)), to_data),
    Coercer((UnbatchedTensor,), to_unbatched),
    Coercer((object,), to_node),
)
