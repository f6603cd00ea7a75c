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
    def to_safetensors(self, path: Any, **options: Any) -> Self:
        """Save the collection as a safetensors file, and return it."""

    @provided_by("td-safetensors")
    @classmethod
    def from_safetensors(cls, path: Any, **options: Any) -> Self:
        """Load a safetensors file."""

    @provided_by("td-hdf5")
    def to_h5(self, filename: Any, **options: Any) -> Any:
        """Save the collection as an HDF5 file, and open that."""

    @provided_by("td-hdf5")
    @classmethod
    def from_h5(cls, filename: Any, **options: Any) -> Self:
        """Open an HDF5 file."""

    @provided_by("td-zarr")
    def to_zarr(self, store: Any, **options: Any) -> Self:
        """Save the collection as a Zarr group, and return it."""

    @provided_by("td-zarr")
    @classmethod
    def from_zarr(cls, store: Any, **options: Any) -> Self:
        """Load a Zarr group."""

    @provided_by("td-arrow")
    def to_arrow(self, **options: Any) -> Any:
        """Convert the collection to an Arrow table."""

    @provided_by("td-arrow")
    @classmethod
    def from_arrow(cls, table: Any, **options: Any) -> Self:
        """Convert an Arrow table, or another object with the Arrow C stream, to a collection."""

    @provided_by("td-arrow")
    def to_pandas(self, **options: Any) -> Any:
        """Convert the collection to a DataFrame of pandas."""

    @provided_by("td-arrow")
    @classmethod
    def from_pandas(cls, dataframe: Any, **options: Any) -> Self:
        """Convert a DataFrame of pandas to a collection."""

    @provided_by("td-arrow")
    def to_parquet(self, path: Any, **options: Any) -> Self:
        """Save the collection as a Parquet file, and return it."""

    @provided_by("td-arrow")
    @classmethod
    def from_parquet(cls, path: Any, **options: Any) -> Self:
        """Load a Parquet file."""

    @provided_by("td-arrow")
    def to_csv(self, path: Any, **options: Any) -> Self:
        """Save the collection as a CSV file, and return it."""

    @provided_by("td-arrow")
    @classmethod
    def from_csv(cls, path: Any, **options: Any) -> Self:
        """Load a CSV file."""

    @provided_by("td-arrow")
    def to_json(self, path: Any, **options: Any) -> Self:
        """Save the collection as a JSON file, and return it."""

    @provided_by("td-arrow")
    @classmethod
    def from_json(cls, path: Any, **options: Any) -> Self:
        """Load a JSON file."""

    @provided_by("td-redis")
    def to_store(self, **options: Any) -> Any:
        """Save the collection in Redis or a compatible server, and open that."""
