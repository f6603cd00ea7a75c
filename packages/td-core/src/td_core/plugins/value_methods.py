"""Declarations of the methods that td-tensorclass provides."""
# The bodies are empty, since td-tensorclass implements the methods.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..typing import NO_DEFAULT, BatchSize, DeviceType, NestedKey
from .declarations import provided_by

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ValueMethods"]


class ValueMethods:
    """The methods for values that are not tensors, ``attrs`` and ``from_dataclass``."""

    __slots__ = ()

    @provided_by("td-tensorclass")
    def attrs(
        self, *, fields: Sequence[str] = ("device", "dtype", "shape"), num_threads: int | None = None
    ) -> Self:
        """Copy the structure, without batch dims, with a :class:`TensorAttrs` in place of each leaf.

        Args:
            fields: the attributes to record per leaf, out of ``"device"``, ``"dtype"`` and ``"shape"``.
            num_threads: number of threads that read the leaves; by default only the calling thread.

        Raises:
            ValueError: ``fields`` contains another name.

        >>> TensorDict({"a": torch.zeros(3)}).attrs()["a"].tgt_shape
        torch.Size([3])
        """

    @provided_by("td-tensorclass")
    def get_non_tensor(self, key: NestedKey, default: object = NO_DEFAULT) -> Any:
        """Return the value of a non-tensor entry: one value, or a list with one value per batch element.

        An entry that is a tensor or a collection is returned unchanged.

        Raises:
            KeyPathError: the key does not exist, and no default was given.

        >>> TensorDict({"a": "x"}, batch_size=[2]).get_non_tensor("a")
        'x'
        """

    @provided_by("td-tensorclass")
    def set_non_tensor(self, key: NestedKey, value: object) -> Self:
        """Store one Python value for the whole batch under ``key``, whatever its type.

        Raises:
            LockedError: the collection is locked.

        >>> TensorDict({}, batch_size=[2]).set_non_tensor("a", [1, 2])["a"]
        [1, 2]
        """

    @provided_by("td-tensorclass")
    def is_non_tensor(self, key: NestedKey) -> bool:
        """Return True if the entry ``key`` is non-tensor data.

        Raises:
            KeyPathError: the key does not exist.

        >>> TensorDict({"a": "x"}).is_non_tensor("a")
        True
        """

    @provided_by("td-tensorclass")
    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
        """Return the ``(key, node)`` pairs of the non-tensor entries.

        Args:
            include_nested: also return entries of nested collections, with tuples as keys.

        >>> TensorDict({"a": "x", "b": 1}).non_tensor_items()
        (('a', NonTensorData(data=x, batch_size=torch.Size([]), device=None)),)
        """

    @provided_by("td-tensorclass")
    def filter_non_tensor_data(self) -> Self:
        """Return the collection without the non-tensor entries of all its nodes.

        >>> TensorDict({"a": "x", "n": {"b": 1, "c": "y"}}).filter_non_tensor_data()
        TensorDict(batch_size=[], fields={n: {b: i64[]}})
        """

    @provided_by("td-tensorclass")
    @classmethod
    def from_dataclass(
        cls,
        dataclass: object,
        *,
        dest_cls: type | None = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        as_tensorclass: bool = False,
        device: DeviceType | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
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
