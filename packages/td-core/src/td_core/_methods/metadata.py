"""Properties and methods for shape, device, dim names, and summaries of the leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._functions.metadata import (
    change_batch_sizes,
    clear_device_labels,
    count_bytes,
    drop_duplicates,
    find_entry_class,
    get_entry_shape,
    infer_device_labels,
    is_contiguous,
    is_shared,
    list_addresses,
    measure_depth,
    refine_left_names,
    replace_names,
)
from .._plans.plans import wrap_dim
from .._tree.defaults import get_tree_children
from .._tree.dim_names import check_names, find_dims, store_names
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_no_entry
from .._tree.node import Child, Core
from .._tree.packed import is_packed
from .._tree.walks import expand, has_entries
from ..typing import Names, NestedKey

if TYPE_CHECKING:
    from typing_extensions import Self


class MetadataMixin(Core):
    """Properties and methods for shape, device, dim names, and summaries of the leaves."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        """The batch size.

        >>> TensorDict(batch_size=[3]).shape
        torch.Size([3])
        """
        return self.batch_size

    def size(self, dim: int | str | None = None) -> torch.Size | int:
        """Return the batch size, or one of its dims.

        >>> TensorDict(batch_size=[3, 4]).size(-1)
        4
        """
        place = dim if type(dim) is int else find_dims(self, "size", dim)
        size = self.batch_size
        return size if place is None else size[wrap_dim(place, len(size), "size: a dim")]

    @property
    def batch_dims(self) -> int:
        """Number of batch dims.

        >>> TensorDict(batch_size=[3, 4]).batch_dims
        2
        """
        return len(self.batch_size)

    def dim(self) -> int:
        """Return the number of batch dims.

        >>> TensorDict(batch_size=[3, 4]).dim()
        2
        """
        return len(self.batch_size)

    ndim = batch_dims
    ndimension = dim

    def numel(self) -> int:
        """Return the number of elements of the batch; 1 without batch dims.

        >>> TensorDict(batch_size=[3, 4]).numel()
        12
        """
        return self.batch_size.numel()

    @property
    def names(self) -> list[str | None]:
        """Name of each batch dim, or None for an unnamed dim; settable.

        >>> TensorDict(batch_size=[3, 4], names=["time", None]).names
        ['time', None]
        """
        return [None] * len(self.batch_size) if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        check_no_entry(self, "name the dims of")
        self._set_names(check_names(names, len(self.batch_size)))

    def _set_names(self, names: Names | None) -> None:
        """Store checked names on this node, and on the leading dims of every node below."""
        store_names(self._inner(), len(self.batch_size), names)

    def refine_names(self, *names: object) -> Self:
        """Name dims that have no name yet, in place.

        Args:
            *names: a name or None per dim; one ``...`` represents the dims that keep their names.

        Raises:
            DimNamesError: the number of names differs from the number of batch dims.
            StructureError: a dim already has another name.

        >>> TensorDict(batch_size=[2, 3, 4]).refine_names(..., "time").names
        [None, None, 'time']
        """
        check_no_entry(self, "name the dims of")
        self._set_names(refine_left_names(self.names, names))
        return self

    def rename(self, *names: object, **rename_map: str) -> Self:
        """Return a collection with other dim names; leaves are shared.

        Args:
            *names: the new names, or a single None to remove all; one ``...`` represents the dims that keep their names.
            **rename_map: old name -> new name.

        Raises:
            DimNamesError: both names and a map are passed, or neither; or a name is unknown or not unique.

        >>> TensorDict(batch_size=[2, 3], names=["a", "b"]).rename(a="time").names
        ['time', 'b']
        """
        return self._shallow_copy().rename_(*names, **rename_map)

    def rename_(self, *names: object, **rename_map: str) -> Self:
        """Rename the dims in place; the arguments are those of :meth:`rename`.

        >>> TensorDict(batch_size=[2]).rename_("time").names
        ['time']
        """
        replace_names(self, names, rename_map)
        return self

    @property
    def depth(self) -> int:
        """Number of nested nodes between this collection and its deepest leaf; 0 if no leaf is nested.

        >>> TensorDict({"a": 1, "b": {"c": 2}}).depth
        1
        """
        return measure_depth(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that all leaves share, or None if they differ or the collection has no leaves.

        >>> TensorDict({"a": 1, "b": 2}).dtype
        torch.int64
        """
        dtypes = {leaf.dtype for leaf in self._leaves()}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU; False without a device.

        >>> TensorDict(device="cpu").is_cpu, TensorDict().is_cpu
        (True, False)
        """
        return self.device is not None and self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA GPU; False without a device.

        >>> TensorDict(device="cpu").is_cuda
        False
        """
        return self.device is not None and self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        """Whether the device is the meta device; False without a device.

        >>> TensorDict(device="meta").is_meta
        True
        """
        return self.device is not None and self.device.type == "meta"

    def is_floating_point(self) -> bool:
        """Return True if every leaf has a floating point dtype.

        >>> TensorDict({"a": 1.0}).is_floating_point(), TensorDict({"a": 1}).is_floating_point()
        (True, False)
        """
        return all(leaf.is_floating_point() for leaf in self._leaves())

    def is_contiguous(self) -> bool:
        """Return True if every leaf is contiguous; a lazy stack never is.

        >>> TensorDict({"a": torch.zeros(2, 3).T}).is_contiguous()
        False
        """
        return is_contiguous(self)

    @property
    def is_packed(self) -> bool:
        """Whether all leaves are still views of one storage, so that one kernel can write all of them.

        The collections that td-distributed consolidates, receives or loads are packed, and their clones.

        >>> TensorDict({"a": 1}).is_packed
        False
        """
        return is_packed(self)

    def is_shared(self) -> bool:
        """Return True if every leaf is in shared memory or a mapped file, as CUDA leaves always are; False without leaves.

        >>> TensorDict({"a": 1}).is_shared()
        False
        """
        return is_shared(self)

    def is_empty(self) -> bool:
        """Return True if the collection has no leaf at any depth.

        >>> TensorDict({"a": {}}).is_empty()
        True
        """
        root: Child = self
        return all(map(has_entries, expand([root], get_tree_children)))

    def data_ptr(self, *, storage: bool = False) -> Any:
        """Return a collection of the leaves' memory addresses, as int64 tensors of shape ().

        The addresses of a lazy stack's members are under the keys ``"0"``, ``"1"``, ...

        Args:
            storage: return the addresses of the leaves' storages instead.

        >>> td = TensorDict({"a": torch.zeros(3)})
        >>> td.data_ptr()["a"].item() == td["a"].data_ptr()
        True
        """
        return list_addresses(self, storage)

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Return the size of the leaves and their gradients in bytes, with the offsets of jagged leaves.

        Args:
            count_duplicates: count a tensor under several keys once per key.

        >>> TensorDict({"a": torch.zeros(3)}).bytes()
        12
        """
        return count_bytes(self, count_duplicates)

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Return the number of elements of all leaves.

        Args:
            count_duplicates: count a tensor under several keys once per key.

        >>> TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, 2)}).param_count()
        7
        """
        leaves = self._leaves() if count_duplicates else drop_duplicates(self._leaves())
        return sum(leaf.numel() for leaf in leaves)

    @classmethod
    def declared_fields(cls) -> dict[str, Any] | None:
        """Return the declared fields of the class with their types, or None if it declares no fields.

        A class with declared fields has a classmethod ``from_tensordict`` that converts a collection.

        >>> TensorDict.declared_fields() is None
        True
        """
        return None

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of an entry, without building it.

        Raises:
            KeyPathError: the collection has no such entry.

        >>> TensorDict({"a": 1}).entry_class("a")
        <class 'torch.Tensor'>
        """
        return find_entry_class(self, key)

    def get_item_shape(self, key: NestedKey) -> torch.Size:
        """Return the shape of an entry, with -1 for a dim that differs between the members of a lazy stack.

        Raises:
            KeyPathError: the collection has no such entry.

        >>> TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3]).get_item_shape("a")
        torch.Size([3, 2])
        """
        return get_entry_shape(self, unravel_key_to_tuple(key))

    def auto_batch_size_(self, batch_dims: int | None = None, keep_compliant_size: bool = False) -> Self:
        """Set the batch size of every node to the leading dims that all its leaves share, in place.

        Args:
            batch_dims: the maximum number of batch dims.
            keep_compliant_size: keep the batch size of a nested node that has ``batch_dims`` or more dims.

        Raises:
            BatchSizeError: the root is a lazy stack of another batch size. A nested lazy stack keeps its batch size.

        >>> TensorDict({"a": torch.zeros(3, 4, 5), "b": torch.zeros(3, 4)}).auto_batch_size_().batch_size
        torch.Size([3, 4])
        """
        check_no_entry(self, "change the batch size of")
        change_batch_sizes(self, batch_dims, keep_compliant_size)
        return self

    def auto_device_(self) -> Self:
        """Set the device label of every node to the device of its leaves, in place; None if they differ.

        >>> TensorDict({"a": 1}).auto_device_().device
        device(type='cpu')
        """
        check_no_entry(self, "change the device of")
        infer_device_labels(self)
        return self

    def clear_device_(self) -> Self:
        """Set the device label of every node to None, in place; leaves are not moved.

        >>> TensorDict({"a": 1}, device="cpu").clear_device_().device is None
        True
        """
        check_no_entry(self, "change the device of")
        clear_device_labels(self)
        return self

    @property
    def sorted_keys(self) -> list[str]:
        """The keys of this node, without nested keys, in alphabetical order.

        >>> TensorDict({"b": 1, "a": 2}).sorted_keys
        ['a', 'b']
        """
        return sorted(self._children())
