"""Register the methods of tables with td-core. The rest of the package, and pyarrow, are imported at first use."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core import TensorCollection, save
from td_core.errors import FormatError
from td_core.spi import Coercer, LazyFunction, Serializer, as_named, check_regular, hookimpl, make_classmethod
from td_core.typing import DeviceType, NestedKey

if TYPE_CHECKING:
    import torch

#: Schemes of URLs: those that pyarrow reads by itself, and those of fsspec.
_SCHEMES = (
    "abfs", "abfss", "adl", "az", "ftp", "gcs", "github", "gs", "hdfs", "hf", "http", "https", "memory", "s3", "s3a", "sftp",
    "smb", "ssh", "webdav", "webhdfs", "zip",
)  # fmt: skip
_OBJECTS = (io.BufferedIOBase, io.RawIOBase, "pyarrow.lib.NativeFile")


class _TableFormat(Serializer):
    """What the two formats share."""

    stores_kinds = True
    schemes = _SCHEMES
    locations = _OBJECTS
    reads_stored_tensors = True
    head: bytes

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a file with the first bytes of the format, or a directory whose first file has them."""
        if isinstance(location, str):
            return location.endswith(self.suffixes)
        if not isinstance(location, Path):
            return _read_head(location, len(self.head)) == self.head
        if head or not location.is_dir():
            return head.startswith(self.head)
        return not (location / "meta.json").exists() and _read_first(location, len(self.head)) == self.head


def _read_head(file: Any, size: int) -> bytes:
    """Return the first bytes of a file object, which is then at its beginning."""
    file.seek(0)
    found = bytes(file.read(size))
    file.seek(0)
    return found


def _read_first(folder: Path, size: int) -> bytes:
    """Return the first bytes of the first file of a directory, also below folders such as ``a=1``; none if it is no file."""
    with suppress(OSError, FormatError):
        return _read_first_file(folder, size)
    return b""


def _read_first_file(folder: Path, size: int) -> bytes:
    while True:
        with os.scandir(folder) as entries:
            names = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name[0] not in "._")
        if not names:
            return b""
        name, is_folder = names[0]
        if not is_folder:
            check_regular(folder / name)
            with (folder / name).open("rb") as file:
                return file.read(size)
        if "=" not in name:
            return b""
        folder = folder / name


class ParquetFormat(_TableFormat):
    """Parquet files, and directories of them.

    >>> ParquetFormat().detect(Path("x.parquet"), b"PAR1")
    True
    """

    name = "parquet"
    suffixes = (".parquet", ".pq")
    head = b"PAR1"

    save = LazyFunction(__package__, "._save_tables", "save_parquet")
    load = LazyFunction(__package__, "._load_tables", "load_parquet")
    open = LazyFunction(__package__, "._open_tables", "open_parquet")
    append = LazyFunction(__package__, "._save_tables", "append_parquet")
    inspect = LazyFunction(__package__, "._check_tables", "inspect_parquet")
    verify = LazyFunction(__package__, "._check_tables", "verify_parquet")


class ArrowFormat(_TableFormat):
    """Files of Arrow (feather), and directories of them.

    >>> ArrowFormat().detect(Path("x.arrow"), b"ARROW1")
    True
    """

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")
    head = b"ARROW1"

    save = LazyFunction(__package__, "._save_tables", "save_arrow")
    load = LazyFunction(__package__, "._load_tables", "load_arrow")
    open = LazyFunction(__package__, "._open_tables", "open_arrow")
    create = LazyFunction(__package__, "._open_tables", "create_arrow")
    append = LazyFunction(__package__, "._save_tables", "append_arrow")
    inspect = LazyFunction(__package__, "._check_tables", "inspect_arrow")
    verify = LazyFunction(__package__, "._check_tables", "verify_arrow")


_PARQUET, _ARROW = ParquetFormat(), ArrowFormat()


def to_arrow(
    self: TensorCollection,
    *,
    separator: str | None = None,
    row_dims: int = 1,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> Any:
    """Return the collection as a ``pyarrow.Table``; see :func:`td_arrow.to_arrow`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_arrow().column_names
        ['x']
    """
    from ._write_columns import to_arrow

    return to_arrow(
        self, separator=separator, row_dims=row_dims, tensors=tensors, mask_key=mask_key, copy=copy
    )


def from_arrow(
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
) -> Any:
    """Return the collection of a table; see :func:`td_arrow.from_arrow`. A class with declared entries returns an instance.

    Example:
        >>> table = TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_arrow()
        >>> TensorDict.from_arrow(table.slice(1))["x"]
        tensor([1, 2])
    """
    from ._from_arrow import from_arrow

    return from_arrow(
        table,
        copy=copy,
        nulls=nulls,
        mask_key=mask_key,
        device=device,
        keys=keys,
        separator=separator,
        lists=lists,
        times=times,
        categories=categories,
        strict=strict,
    )


def to_parquet(
    self: TensorCollection, path: str | os.PathLike[str], *, separator: str | None = None, **options: object
) -> None:
    """Save the collection as a Parquet file; ``options`` are those of :func:`td_arrow.save`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_parquet("data.parquet")
    """
    save(self, path, format="parquet", separator=separator, **options)


def from_parquet(
    path: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    columns: Iterable[NestedKey] | NestedKey | None = None,
    **options: Any,
) -> Any:
    """Load a Parquet file; ``options`` are those of :func:`td_arrow.load`. A class with declared entries returns an instance.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_parquet("data.parquet")
        >>> TensorDict.from_parquet("data.parquet", dtype=torch.float32)["x"]
        tensor([0., 1., 2.])
    """
    from ._sized_tables import from_parquet

    return from_parquet(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        columns=columns,
        **options,
    )


def to_csv(
    self: TensorCollection,
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    schema: bool = False,
    **options: Any,
) -> None:
    """Write the collection as a csv file; see :func:`td_arrow.to_csv`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_csv("data.csv")
    """
    from ._write_csv import to_csv

    to_csv(self, path, separator=separator, schema=schema, **options)


def from_csv(
    path: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    **options: Any,
) -> Any:
    """Read a csv file; see :func:`td_arrow.from_csv`. A class with declared entries returns an instance.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_csv("data.csv")
        >>> TensorDict.from_csv("data.csv")["x"]
        tensor([0, 1, 2])
    """
    from ._sized_tables import from_csv

    return from_csv(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        dtypes=dtypes,
        schema=schema,
        **options,
    )


def to_json(
    self: TensorCollection,
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    lines: bool = False,
    schema: bool = False,
    **options: Any,
) -> None:
    """Write the collection as JSON; see :func:`td_arrow.to_json`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_json("data.json")
    """
    from ._json import to_json

    to_json(self, path, separator=separator, lines=lines, schema=schema, **options)


def from_json(
    path: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    lines: bool | None = None,
    dtypes: Mapping[NestedKey, Any] | None = None,
    schema: bool | None = None,
    **options: Any,
) -> Any:
    """Read a JSON file; see :func:`td_arrow.from_json`. A class with declared entries returns an instance.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_json("data.json")
        >>> TensorDict.from_json("data.json")["x"]
        tensor([0, 1, 2])
    """
    from ._sized_tables import from_json

    return from_json(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        lines=lines,
        dtypes=dtypes,
        schema=schema,
        **options,
    )


def to_mds(
    self: TensorCollection,
    *,
    columns: Mapping[str, str] | None = None,
    out: Any = None,
    keep_local: bool = False,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str | None = 1 << 26,
    writer: Any = None,
    finish_writer: bool | None = None,
    **kwargs: Any,
) -> None:
    """Write the collection as a data set of mosaicml-streaming; see :func:`td_arrow.to_mds`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_mds(out="samples")
    """
    from ._write_mds import to_mds

    to_mds(
        self,
        columns=columns,
        out=out,
        keep_local=keep_local,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        writer=writer,
        finish_writer=finish_writer,
        **kwargs,
    )


def from_mds(
    path: str | os.PathLike[str],
    *,
    split: str = "",
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    **options: Any,
) -> Any:
    """Load a data set of mosaicml-streaming; see :func:`td_arrow.from_mds`. A class with declared entries returns an instance.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_mds(out="samples")
        >>> TensorDict.from_mds("samples", rows=[2])["x"]
        tensor([2])
    """
    from ._read_mds import from_mds

    return from_mds(path, split=split, device=device, keys=keys, rows=rows, **options)


def _make_load_as(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of files with the class of the result as its first argument."""

    def load_as(cls: type, path: Any, **options: Any) -> Any:
        return as_named(cls, function(path, **options), f"what is saved at {path!r}")

    return load_as


def to_pandas(
    self: TensorCollection,
    *,
    separator: str | None = None,
    tensors: str = "arrow",
    mask_key: NestedKey | None = None,
) -> Any:
    """Return the collection as a ``pandas.DataFrame``; see :func:`td_arrow.to_pandas`.

    Example:
        >>> frame = TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_pandas()  # doctest: +SKIP
    """
    from ._data_frames import to_pandas

    return to_pandas(self, separator=separator, tensors=tensors, mask_key=mask_key)


def from_pandas(
    dataframe: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    times: str = "numbers",
    categories: str = "codes",
    index: bool | None = None,
) -> Any:
    """Return the collection of a data frame; see :func:`td_arrow.from_pandas`. A class with declared entries returns an instance.

    Example:
        >>> td = TensorDict.from_pandas(pandas.DataFrame({"x": [1, 2]}))  # doctest: +SKIP
    """
    from ._data_frames import from_pandas

    return from_pandas(
        dataframe,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        nulls=nulls,
        mask_key=mask_key,
        lists=lists,
        times=times,
        categories=categories,
        index=index,
    )


def _from_pandas_as(cls: type, dataframe: Any, **options: Any) -> Any:
    return as_named(cls, from_pandas(dataframe, **options), "the data frame")


def _from_arrow_as(cls: type, table: object, **options: Any) -> Any:
    return as_named(cls, from_arrow(table, **options), "the table")


def _export_stream(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsule of a stream of one batch, from which other libraries make their tables."""
    from ._arrow_capsules import export_stream

    return export_stream(self, requested_schema)


def _export_array(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsules of an array of structs."""
    from ._arrow_capsules import export_array

    return export_array(self, requested_schema)


#: The functions of ``_table_entries`` that make entries, and the classes that each of them takes.
_ENTRIES: dict[str, tuple[str, ...]] = {
    "read_column": ("pyarrow.Array", "pyarrow.ChunkedArray", "polars.Series"),
    "read_series": ("pandas.Series", "pandas.Index", "pandas.api.extensions.ExtensionArray"),
    "read_dataset_column": ("datasets.arrow_dataset.Column",),
    "read_table": (
        "pyarrow.Table",
        "pyarrow.RecordBatch",
        "polars.DataFrame",
        "datasets.arrow_dataset.Dataset",
    ),
    "read_frame": ("pandas.DataFrame",),
    "read_tensor": ("pyarrow.Tensor",),
    "read_variable": ("xarray.DataArray", "xarray.Variable"),
    "read_variables": ("xarray.Dataset",),
    "refuse_unread": ("polars.LazyFrame", "pyarrow.RecordBatchReader", "pyarrow.dataset.Dataset"),
}


@hookimpl
def td_coercers() -> Iterable[Coercer]:
    """Return the coercers of columns and tables of other libraries, none of which is imported."""
    return [
        Coercer(classes, LazyFunction(__package__, "._table_entries", name))
        for name, classes in _ENTRIES.items()
    ]


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that convert to tables and back."""
    return {
        "to_arrow": to_arrow,
        "from_arrow": make_classmethod(from_arrow, with_class=_from_arrow_as),
        "to_parquet": to_parquet,
        "from_parquet": make_classmethod(from_parquet, with_class=_make_load_as(from_parquet)),
        "to_pandas": to_pandas,
        "from_pandas": make_classmethod(from_pandas, with_class=_from_pandas_as),
        "to_csv": to_csv,
        "from_csv": make_classmethod(from_csv, with_class=_make_load_as(from_csv)),
        "to_json": to_json,
        "from_json": make_classmethod(from_json, with_class=_make_load_as(from_json)),
        "to_mds": to_mds,
        "from_mds": make_classmethod(from_mds, with_class=_make_load_as(from_mds)),
        "__arrow_c_stream__": _export_stream,
        "__arrow_c_array__": _export_array,
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the formats ``"parquet"`` and ``"arrow"``."""
    return [_PARQUET, _ARROW]
