"""Declarations of the methods of packages that save in files and stores of other libraries."""
# The bodies are empty, since the packages implement the methods.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declarations import provided_by

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StoreMethods"]


class StoreMethods:
    """The methods that write a collection to a file or store of another library, or read it.

    Each has the options of its package, so the declarations of packages that are not installed show ``**options``.
    """

    __slots__ = ()

    @provided_by("td-safetensors")
    def to_safetensors(self, path: object, **options: object) -> Self:
        """Save the collection as a safetensors file, and return it."""

    @provided_by("td-safetensors")
    @classmethod
    def from_safetensors(cls, path: object, **options: object) -> Self:
        """Load a safetensors file."""

    @provided_by("td-hdf5")
    def to_h5(self, filename: object, **options: object) -> Any:
        """Save the collection as an HDF5 file, and open that."""

    @provided_by("td-hdf5")
    @classmethod
    def from_h5(
        cls,
        filename: Any,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: Any = None,
        non_tensor_as_stack: bool = False,
    ) -> Self:
        """Open an HDF5 file."""

    @provided_by("td-zarr")
    def to_zarr(self, filename: Any, **options: Any) -> Any:
        """Save the collection as a Zarr group, and open that."""

    @provided_by("td-zarr")
    @classmethod
    def from_zarr(cls, filename: Any, **options: Any) -> Self:
        """Open a Zarr group."""
