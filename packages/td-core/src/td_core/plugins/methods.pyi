"""The methods that packages of the project provide; tools/generate_stub.py writes this file."""

import os
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from ..typing import BatchSize, DeviceType, NestedKey

class DeclaredMethods:
    def attrs(self, *, fields: Sequence[str] = ..., num_threads: int | None = None) -> Self:
        """Copy the structure, without batch dims, with a :class:`TensorAttrs` in place of each leaf."""
    def get_non_tensor(self, key: NestedKey, default: object = ...) -> Any:
        """Return the value of a non-tensor entry: one value, or a list with one value per batch element."""
    def set_non_tensor(self, key: NestedKey, value: object) -> Self:
        """Store one Python value for the whole batch under ``key``, whatever its type."""
    def is_non_tensor(self, key: NestedKey) -> bool:
        """Return True if the entry ``key`` is non-tensor data."""
    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Any, Any], ...]:
        """Return the ``(key, node)`` pairs of the non-tensor entries."""
    def filter_non_tensor_data(self) -> Self:
        """Return the collection without the non-tensor entries of all its nodes."""
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
        """Convert a dataclass instance to a collection; dataclass instances in its fields become nested collections."""
    def to_safetensors(self, path: str | os.PathLike[str], **options: object) -> Self:
        """Save the collection as a safetensors file; see :func:`td_safetensors.save`."""
    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str], **options: object) -> Self:
        """Load a safetensors file; see :func:`td_safetensors.load`."""
    def to_h5(self, filename: str | os.PathLike[str], **options: object) -> Any:
        """Save the collection as an HDF5 file, and return it opened for writing; see :func:`td_hdf5.to_h5`."""
    @classmethod
    def from_h5(
        cls,
        filename: str | os.PathLike[str],
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: Any = None,
        non_tensor_as_stack: bool = False,
    ) -> Self:
        """Open an HDF5 file; see :func:`td_hdf5.from_h5`."""
    def to_zarr(self, filename: Any, **options: Any) -> Any:
        """Save the collection as a Zarr group, and open that for writing; see :func:`td_zarr.to_zarr`."""
    @classmethod
    def from_zarr(cls, filename: Any, **options: Any) -> Self:
        """Open a Zarr group; see :func:`td_zarr.from_zarr`."""
