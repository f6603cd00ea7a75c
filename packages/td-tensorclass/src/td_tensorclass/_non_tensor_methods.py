"""Methods that td-tensorclass adds to every collection: non-tensor data, ``attrs`` and ``from_dataclass``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from td_core._keys import unravel_key_to_tuple
from td_core.typing import NO_DEFAULT, BatchSize, DeviceType, NestedKey

from ._attrs import make_attrs
from ._non_tensor import NonTensorData
from ._plain_classes import convert_dataclass
from ._value_nodes import NonTensorNode


class NonTensorMethods:
    """Namespace whose members td-core adds as methods to every collection."""

    def get_non_tensor(self: Any, key: NestedKey, default: Any = NO_DEFAULT) -> Any:
        """Return the value of a non-tensor entry: one value, or a list with one value per batch element.

        An entry that is a tensor or a collection is returned unchanged.

        Raises:
            KeyPathError: the key does not exist, and no default was given.

        >>> TensorDict({"a": "x"}, batch_size=[2]).get_non_tensor("a")
        'x'
        """
        entry = self.get(key, NO_DEFAULT)
        if entry is NO_DEFAULT:
            return self[key] if default is NO_DEFAULT else default
        return entry._unwrap() if hasattr(entry, "_unwrap") else entry

    def set_non_tensor(self: Any, key: NestedKey, value: Any) -> Any:
        """Store one Python value for the whole batch under ``key``, whatever its type.

        Raises:
            LockedError: the collection is locked.

        >>> TensorDict({}, batch_size=[2]).set_non_tensor("a", [1, 2])["a"]
        [1, 2]
        """
        return self.set(key, NonTensorData(value))

    def is_non_tensor(self: Any, key: NestedKey) -> bool:
        """Return True if the entry ``key`` is non-tensor data.

        Raises:
            KeyPathError: the key does not exist.

        >>> TensorDict({"a": "x"}).is_non_tensor("a")
        True
        """
        return issubclass(self.entry_class(key), NonTensorNode)

    def non_tensor_items(self: Any, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
        """Return the ``(key, node)`` pairs of the non-tensor entries.

        Args:
            include_nested: also return entries of nested collections, with tuples as keys.

        >>> TensorDict({"a": "x", "b": 1}).non_tensor_items()
        (('a', NonTensorData(data=x, batch_size=torch.Size([]), device=None)),)
        """
        return tuple((key, _entry(self, key)) for key in self.keys(include_nested) if self.is_non_tensor(key))

    def filter_non_tensor_data(self: Any) -> Any:
        """Return the collection without the non-tensor entries of all its nodes.

        >>> TensorDict({"a": "x", "n": {"b": 1, "c": "y"}}).filter_non_tensor_data()
        TensorDict(batch_size=[], fields={n: {b: i64[]}})
        """
        stacked = self._members_and_dim()
        if stacked is not None:  # the members of a lazy stack may have different entries
            return self._with_members([member.filter_non_tensor_data() for member in stacked[0]])
        return self.exclude(*filter(self.is_non_tensor, self.keys(True)))

    def attrs(
        self: Any, *, fields: Sequence[str] = ("device", "dtype", "shape"), num_threads: int | None = None
    ) -> Any:
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

    @classmethod
    def from_dataclass(
        cls: Any,
        dataclass: Any,
        *,
        dest_cls: type | None = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        as_tensorclass: bool = False,
        device: DeviceType | None = None,
        batch_size: BatchSize | None = None,
    ) -> Any:
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
        return cls._wrap_dense(
            convert_dataclass(dataclass, dest_cls, options, auto_batch_size, batch_dims, batch_size, device)
        )


def _entry(node: Any, key: NestedKey) -> Any:
    for part in unravel_key_to_tuple(key):
        node = node._get_child(part)
    return node
