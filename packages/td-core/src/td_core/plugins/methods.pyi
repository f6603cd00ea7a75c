"""The methods that packages of the project provide; tools/generate_stub.py writes this file."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from typing_extensions import Self

from ..typing import BatchSize, DeviceType, DtypeLike, NestedKey, Progress

class DeclaredMethods:
    def memmap(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: Progress = False,
        allow_pickle: bool = False,
        compatible: bool = False,
    ) -> Self:
        """Write every leaf to a file under ``prefix`` and return a locked collection that maps those files."""
    def memmap_(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: Progress = False,
        allow_pickle: bool = False,
        compatible: bool = False,
    ) -> Self:
        """Write every leaf to a file under ``prefix``, map it in place, and lock the collection."""
    def memmap_like(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        durable: bool = False,
        progress: Progress = False,
        allow_pickle: bool = False,
        compatible: bool = False,
    ) -> Self:
        """Return a mapped, locked collection of the same structure whose files are sparse zeros, to be filled."""
    @classmethod
    def load_memmap(
        cls,
        prefix: str | Path,
        device: DeviceType | None = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        keys: Iterable[NestedKey] | NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: Progress = False,
    ) -> Self:
        """Return the collection saved at ``prefix``, mapped from its files."""
    def load_memmap_(
        self,
        prefix: str | Path,
        robust_key: bool | None = True,
        *,
        mode: str | None = None,
        allow_pickle: bool | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: Progress = False,
    ) -> Self:
        """Copy the content of the save at ``prefix`` into this collection, in place; add entries that it lacks."""
    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Reload this collection from its save, with the changes of other processes."""
    def make_memmap(
        self,
        key: NestedKey,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry of zeros to the save that this collection maps, and return its mapped tensor."""
    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``storage`` to the save that this collection maps; return its tensor."""
    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``tensor`` to the save that this collection maps; return its tensor."""
    def is_memmap(self) -> bool:
        """Return True if the collection was mapped to files, and has been locked since: then it has a ``saved_path``."""
    @property
    def saved_path(self) -> Path | None:
        """Directory that this collection maps, or None if it is mapped to anonymous files."""
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
    def consolidate(
        self,
        filename: Path | str | None = None,
        *,
        num_threads: int = 0,
        device: DeviceType | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: bool = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
        durable: bool = False,
        checksums: bool = False,
    ) -> Self:
        """Copy the collection into one storage: return a locked collection whose leaves are views of that storage."""
    def is_consolidated(self) -> bool:
        """Return True if all leaves are still views of the storage that consolidation made."""
    @classmethod
    def from_consolidated(cls, filename: str | Path, *, verify: bool = False) -> Self:
        """Load a collection from a consolidated file, written by td or by any release of tensordict."""
    def send(
        self,
        dst: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> None:
        """Send this collection to a process that calls :meth:`recv`."""
    def recv(
        self,
        src: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> int:
        """Receive a collection that a process sent with :meth:`send`, into this collection in place."""
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> int | list[Work] | None:
        """Start to send this collection; arguments as for :meth:`send`."""
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> tuple[int, list[Any]] | list[Any] | None:
        """Start to receive into this collection; arguments as for :meth:`recv`."""
    def init_remote(
        self,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
    ) -> None:
        """Send structure and content to a process that calls :func:`from_remote_init`."""
    @classmethod
    def from_remote_init(
        cls,
        src: int,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
        limit: int = ...,
        *,
        root: str | Path | None = None,
    ) -> Self:
        """Receive the collection that the rank ``src`` sends with :func:`init_remote`, and return it."""
    def broadcast(
        self, src: int, *, group: ProcessGroup | None = None, device: DeviceType | None = None
    ) -> Self:
        """Broadcast the collection of the rank ``src`` and return it on every rank."""
    def scatter(
        self,
        src: int,
        tensordicts: list[Any] | None = None,
        *,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
    ) -> Self:
        """Scatter the list of collections of the rank ``src``: return the item of this rank."""
    def gather_and_stack(self, dst: int, group: ProcessGroup | None = None) -> Self | None:
        """Stack the collections of all other ranks into the collection of the rank ``dst``, in place."""
    def all_gather(self, *, group: ProcessGroup | None = None) -> list[Any]:
        """Gather the collections of all ranks."""
    def all_reduce(
        self,
        op: object = None,
        *,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> list[Any] | None:
        """Reduce every leaf over all ranks, in place; non-tensor data is not changed."""
    def reduce(
        self,
        dst: int,
        op: object = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> list[Any] | None:
        """Reduce every leaf over all ranks into the collection of the rank ``dst``, in place; other ranks keep theirs."""
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
        batch_size: object = None,
        non_tensor_as_stack: bool = True,
    ) -> Self:
        """Open an HDF5 file; see :func:`td_hdf5.from_h5`."""
    def to_zarr(self, filename: object, **options: Any) -> Any:
        """Save the collection as a Zarr group, and open that for writing; see :func:`td_zarr.to_zarr`."""
    @classmethod
    def from_zarr(cls, filename: Any, **options: Any) -> Self:
        """Open a Zarr group; see :func:`td_zarr.from_zarr`."""
    def to_arrow(
        self,
        *,
        separator: str | None = None,
        row_dims: int = 1,
        tensors: str | Mapping[NestedKey | None, str] = "list",
        mask_key: NestedKey | None = None,
        copy: bool = False,
    ) -> Any:
        """Return the collection as a ``pyarrow.Table``."""
    @classmethod
    def from_arrow(
        cls,
        table: object,
        *,
        copy: bool | None = None,
        nulls: Any = "raise",
        mask_key: NestedKey | None = None,
        device: DeviceType | None = None,
        keys: Iterable[NestedKey] | NestedKey | None = None,
        separator: str | None = None,
        lists: str = "jagged",
        times: str = "values",
        categories: str = "values",
        strict: bool | None = None,
    ) -> Self:
        """Return the collection of a table."""
    def to_parquet(self, path: Any, *, separator: str | None = None, **options: object) -> None:
        """Save the collection as a Parquet file; ``options`` are those of :func:`td_arrow.save`."""
    @classmethod
    def from_parquet(
        cls,
        path: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceType | None = None,
        batch_size: Sequence[int] | None = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        columns: Iterable[NestedKey] | NestedKey | None = None,
        **options: Any,
    ) -> Self:
        """Load a Parquet file."""
    def to_pandas(
        self, *, separator: str | None = None, tensors: str = "arrow", mask_key: NestedKey | None = None
    ) -> Any:
        """Return the collection as a ``pandas.DataFrame``, whose ``attrs`` have what :func:`from_pandas` needs to restore it."""
    @classmethod
    def from_pandas(
        cls,
        dataframe: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceType | None = None,
        batch_size: Sequence[int] | None = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        nulls: Any = "auto",
        mask_key: NestedKey | None = None,
        lists: str = "jagged",
        times: str = "numbers",
        categories: str = "codes",
        index: bool | None = None,
    ) -> Self:
        """Return the collection of a data frame of pandas."""
    def to_csv(
        self,
        path: Any,
        *,
        separator: str | None = None,
        schema: bool = False,
        delimiter: str | None = None,
        sep: str | None = None,
        quoting: str | int = "needed",
        header: bool = True,
        encoding: str = "utf-8",
        durable: bool = False,
    ) -> None:
        """Write the collection as a csv file: a line for each row."""
    @classmethod
    def from_csv(
        cls,
        path: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceType | None = None,
        batch_size: Sequence[int] | None = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        dtypes: Mapping[NestedKey, Any] | None = None,
        schema: bool | None = None,
        **options: Any,
    ) -> Self:
        """Read a csv file, by one rule for all files."""
    def to_json(
        self,
        path: Any,
        *,
        separator: str | None = None,
        lines: bool = False,
        schema: bool = False,
        nonfinite: str = "raise",
        durable: bool = False,
    ) -> None:
        """Write the collection as JSON in UTF-8: a record for each row, with nested records for nested collections."""
    @classmethod
    def from_json(
        cls,
        path: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceType | None = None,
        batch_size: Sequence[int] | None = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        lines: bool | None = None,
        dtypes: Mapping[NestedKey, Any] | None = None,
        schema: bool | None = None,
        **options: Any,
    ) -> Self:
        """Read a JSON file of records."""
    def to_mds(
        self,
        *,
        columns: Mapping[str, str] | None = None,
        out: Any = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = ...,
        writer: Any = None,
        finish_writer: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the collection as a data set of mosaicml-streaming: a sample for each row."""
    @classmethod
    def from_mds(
        cls,
        path: str | os.PathLike[str],
        *,
        split: str = "",
        device: DeviceType | None = None,
        keys: Iterable[NestedKey] | NestedKey | None = None,
        rows: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a data set of mosaicml-streaming."""
    def to_store(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        device: DeviceType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Store the collection on a Redis server, and return it opened."""
