"""The formats and methods of tables. What does their work, and pyarrow, are imported at first use."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from td_core import TensorCollection, load, save
from td_core.errors import FormatError
from td_core.spi import Coercer, LazyFunction, Serializer, as_named, check_regular, hookimpl, make_classmethod
from td_core.typing import DeviceType, NestedKey, ObjectLocation

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
    reads_objects = True
    locations = _OBJECTS
    reads_stored_tensors = True
    head: bytes

    def detect(self, location: object, head: bytes) -> bool:
        """Return True for a file with the first bytes of the format, or a directory whose first file has them."""
        if isinstance(location, str):
            return location.endswith(self.suffixes)
        if isinstance(location, ObjectLocation):
            if head:
                return head.startswith(self.head)
            is_named = location.where.lower().rstrip("/").endswith(self.suffixes)
            return f"part-00000.{self.name}" in location.marks or (is_named and not location.marks)
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
    td: TensorCollection,
    *,
    separator: str | None = None,
    row_dims: int = 1,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> Any:
    """Return the collection as a ``pyarrow.Table``. Columns are views of the leaves where Arrow can have their memory.

    Each element of the first batch dim is a row; a collection without batch dims is one row.

    Args:
        td: the collection.
        separator: joins the keys of a nested entry to the name of a column; None makes a column of structs for each level.
        row_dims: 2 makes a row for each element of the first two batch dims.
        tensors: how cells with dims are stored: ``"list"``, as nested lists of a fixed size, which every program reads;
            ``"extension"``, as ``arrow.fixed_shape_tensor``; ``"binary"``, as bytes, the smallest and fastest; ``"auto"``, as
            bytes if a cell has more than 1,024 elements. A mapping has a choice for each key, the default under None.
        mask_key: key of a level with masks, as ``nulls="mask"`` makes them, which become nulls.
        copy: copy all elements, so that later writes into leaves do not reach the table.

    Raises:
        CodecError: a value or leaf cannot be stored; the message has its key path.

    >>> table = to_arrow(TensorDict({"x": torch.zeros(2, 3), "info": {"age": [31, 47]}}, batch_size=[2]))
    >>> table.schema.names, str(table.schema.field("info").type)
    (['x', 'info'], 'struct<age: int64 not null>')
    """
    from ._write_columns import make_table

    return make_table(td, separator, row_dims, tensors, mask_key, copy)


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
    """Return the collection of a table. A class with declared entries returns an instance.

    Args:
        table: a ``pyarrow.Table``, ``RecordBatch`` or ``StructArray``, a data set of Hugging Face, or any object with
            ``__arrow_c_stream__`` or ``__arrow_c_array__``, such as a data frame of polars.
        copy: None views what Arrow may write, and copies the rest; True copies; False copies nothing: leaves whose memory
            cannot be written are :class:`td_store.StoredTensor`, which refuse writes.
        nulls: ``"raise"``; ``"auto"``, NaN in floats, an error otherwise; ``"fill"``, NaN, 0 or False; ``"mask"``, as fill,
            with a bool entry below ``mask_key``; a number. A mapping has a choice for each key, the default under None.
            In columns of values, a null is None.
        mask_key: key of the level with the masks; by default ``"_mask"``.
        device: where the leaves go.
        keys: keys or key paths to read.
        separator: splits the names of columns into key paths.
        lists: lists of numbers become ``"jagged"`` leaves; ``"dense"`` ones, which need one length; ``"padded"`` ones, with
            their lengths under ``key + "_lengths"``; ``"values"``; ``"auto"``, dense if all rows have one length.
        times: ``"values"``, or ``"numbers"``: int64 in the unit of the column.
        categories: dictionary columns become ``"values"``, ``"codes"``, or ``"labels"``: a level with codes and labels.
        strict: what happens if a column of the header is gone: None warns, True raises FormatError, False does nothing.

    Raises:
        FormatError: the table cannot be read; the message has the column.
        ValueError: a column has nulls, and ``nulls`` refuses them.

    >>> import pyarrow
    >>> table = pyarrow.table({"x": [1, 2, None], "name": ["a", None, "c"]})
    >>> from_arrow(table, nulls={"x": -1, None: "fill"})["x"]
    tensor([ 1,  2, -1])
    """
    from ._from_arrow import as_table, read_in_memory

    return read_in_memory(
        as_table(table),
        "the table",
        default="raise",
        nulls=nulls,
        mask_key=mask_key,
        device=device,
        keys=keys,
        separator=separator,
        lists=lists,
        times=times,
        categories=categories,
        strict=strict,
        copy=copy,
    )


def to_parquet(td: TensorCollection, path: Any, *, separator: str | None = None, **options: object) -> None:
    """Save the collection as a Parquet file; ``options`` are those of :func:`td_arrow.save`.

    >>> to_parquet(TensorDict({"x": torch.arange(3)}, batch_size=[3]), "data.parquet")
    """
    save(td, path, format="parquet", separator=separator, **options)


def from_parquet(
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
) -> Any:
    """Load a Parquet file. A class with declared entries returns an instance.

    Args:
        path: a path, a URL, or a binary file object.
        auto_batch_size: find the batch dims that all leaves share.
        batch_dims: the most batch dims that are found.
        device: where the leaves go.
        batch_size: the batch size, instead of ``[rows]``.
        separator: splits the names of columns into key paths.
        dtype: dtype of all leaves of numbers and bools.
        columns: keys, key paths or names of columns to read.
        **options: those of :func:`td_arrow.load`.

    Raises:
        FormatError: the file is damaged, or cannot be read.
        ValueError: a column has nulls that the option ``nulls`` refuses, or two arguments name the batch size.

    >>> TensorDict({"x": torch.zeros(3, 2)}, [3]).to_parquet("data.parquet")
    >>> from_parquet("data.parquet", auto_batch_size=True).batch_size
    torch.Size([3, 2])
    """
    from ._from_arrow import set_sizes

    if columns is not None:
        names = [columns] if isinstance(columns, (str, tuple)) else columns
        options["keys"] = [
            tuple(name.split(separator)) if separator and isinstance(name, str) else name for name in names
        ]
    loaded = load(path, format="parquet", separator=separator, device=device, **options)
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def to_csv(
    td: TensorCollection,
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
    """Write the collection as a csv file: a line for each row.

    Args:
        td: the collection.
        path: a path, a URL, or a binary file object.
        separator: joins the keys of nested entries to the name of a column.
        schema: write ``<name>.td.json`` beside the file, with which :func:`from_csv` gives the same collection.
        delimiter: the character between fields; ``,`` by default.
        sep: another name of ``delimiter``.
        quoting: ``"needed"``, ``"all_valid"``, ``"none"``, or a constant of the module csv.
        header: whether the first line has the names of columns.
        encoding: encoding of the text.
        durable: return after the file has reached the disk.

    Raises:
        ValueError: the collection is nested and ``separator`` is missing, or an option is invalid.
        CodecError: a column has bytes, or what no format can store.

    >>> to_csv(TensorDict({"x": torch.tensor([1.0, 2.5]), "ok": torch.tensor([True, False])}, [2]), "data.csv")
    >>> print(Path("data.csv").read_text())
    "x","ok"
    1,true
    2.5,false
    <BLANKLINE>
    """
    from ._write_csv import write_csv

    write_csv(td, path, separator, schema, delimiter, sep, quoting, header, encoding, durable)


def from_csv(
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
) -> Any:
    r"""Read a csv file, by one rule for all files. A class with declared entries returns an instance.

    A column is bool if all fields are ``true`` or ``false``; int64 if all are integers, uint64 if these need it; float64 if all
    are numbers, ``nan`` or ``inf``; else text as it is written, also digits that begin with a zero. An empty field is missing, of
    text only without quotes. Columns ``x[0]``, ``x[1]`` and so on are one leaf.

    ``dtypes`` has the dtype of columns by key, or ``str`` for text. ``schema`` says whether the schema beside the file is used,
    from which an equal collection is made: by default if it fits. The other arguments are those of :func:`from_parquet`, with the
    options ``keys``, ``rows``, ``nulls``, ``mask_key`` and ``lists`` of :func:`td_arrow.load`; ``delimiter`` or ``sep``,
    ``quoting``, ``header`` (False if the first line is a row), ``encoding``, ``usecols``, ``nrows``, ``skiprows``, ``na_values``
    and ``storage_options``.

    Raises:
        FormatError: the file is malformed; the message has the line.
        ValueError: a column has nulls that the option ``nulls`` refuses.
        TypeError: an option is unknown.

    >>> _ = Path("data.csv").write_text("id,x,ok\n007,1.5,true\n008,,false\n")
    >>> td = from_csv("data.csv")
    >>> list(td["id"]), td["x"].tolist(), td["ok"].tolist()
    (['007', '008'], [1.5, nan], [True, False])
    """
    from ._from_arrow import set_sizes
    from ._read_csv import read_csv
    from ._table_options import check_text_options

    check_text_options(options, read_csv, "from_csv()")
    loaded = read_csv(path, separator=separator, device=device, dtypes=dtypes, schema=schema, **options)
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def to_json(
    td: TensorCollection,
    path: Any,
    *,
    separator: str | None = None,
    lines: bool = False,
    schema: bool = False,
    nonfinite: str = "raise",
    durable: bool = False,
) -> None:
    """Write the collection as JSON in UTF-8: a record for each row, with nested records for nested collections.

    Args:
        td: the collection.
        path: a path, a URL, or a binary file object.
        separator: joins the keys of nested entries to one name.
        lines: write one record a line, instead of an array of records.
        schema: write ``<name>.td.json`` beside the file, with which :func:`from_json` gives the same collection.
        nonfinite: what an infinite number is: ``"raise"``, ``"literal"`` for ``Infinity`` and ``NaN``, which Python and few
            other programs read, or ``"null"``. Otherwise NaN is null.
        durable: return after the file has reached the disk.

    Raises:
        CodecError: a column has bytes, or what no format can store.
        ValueError: a number is infinite, or an option is invalid.

    >>> td = TensorDict({"x": torch.tensor([1.0, 2.5]), "n": {"y": torch.arange(2)}}, [2])
    >>> to_json(td, "data.jsonl", lines=True)
    >>> print(Path("data.jsonl").read_text())
    {"x": 1.0, "n": {"y": 0}}
    {"x": 2.5, "n": {"y": 1}}
    <BLANKLINE>
    """
    from ._json import write_json

    write_json(td, path, separator, lines, schema, nonfinite, durable)


def from_json(
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
) -> Any:
    r"""Read a JSON file of records. A class with declared entries returns an instance.

    Integers are int64 or uint64, numbers with a point or exponent float64, and text is text, whatever it looks like. Records in
    records are nested collections; arrays of numbers are leaves, jagged if their lengths differ. What a record lacks is null.

    ``lines`` says whether each line is a record; None decides by the first character. ``dtypes`` has the dtype of leaves by key,
    and ``schema`` says whether the schema beside the file is used, from which an equal collection is made: by default if it fits.
    The other arguments are those of :func:`from_parquet`, with the options ``keys``, ``rows``, ``nulls``, ``mask_key``, ``lists``
    (``"auto"`` by default) and ``storage_options`` of :func:`td_arrow.load`.

    Raises:
        FormatError: the file is malformed; the message has the line.
        ValueError: a column has nulls that the option ``nulls`` refuses.
        TypeError: an option is unknown.

    >>> _ = Path("data.jsonl").write_text('{"x": 1, "at": "2020-01-01"}\n{"x": 2.5, "at": null}\n')
    >>> td = from_json("data.jsonl")
    >>> td["x"].tolist(), list(td["at"])
    ([1.0, 2.5], ['2020-01-01', None])
    """
    from ._from_arrow import set_sizes
    from ._json import read_json
    from ._table_options import check_text_options

    check_text_options(options, read_json, "from_json()")
    loaded = read_json(
        path, separator=separator, device=device, lines=lines, dtypes=dtypes, schema=schema, **options
    )
    return set_sizes(loaded, auto_batch_size, batch_dims, batch_size, dtype)


def to_mds(
    td: TensorCollection,
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
    """Write the collection as a data set of mosaicml-streaming: a sample for each row.

    Numbers have their dtypes, bools are uint8, and leaves with dims are arrays of a fixed shape. Text and bytes are that, other
    values JSON. Keys of nested entries are joined by a dot. The index has a header that the library ignores, with which
    :func:`from_mds` gives the same collection. The directory appears whole.

    Args:
        td: the collection.
        columns: the encoding of each column, instead of those that are found. All must be there.
        out: a directory that is new or empty; or a remote location, or a pair of both, to which the library writes.
        keep_local: with a remote location, keep the local directory.
        compression: ``"zstd"``, ``"gz"``, ``"bz2"``, ``"br"`` or ``"snappy"``, also with a level, as ``"zstd:7"``.
        hashes: names of hashes of each shard, sorted; ``from_mds`` checks them.
        size_limit: the most bytes of a shard, also as text, such as ``"100kb"``; None for one shard.
        writer: an ``MDSWriter`` of the library to write to, instead of ``out``.
        finish_writer: whether the writer is finished; by default if the collection has batch dims.
        **kwargs: settings of the library for uploads: ``progress_bar``, ``max_workers``, ``retry``.

    Raises:
        FileExistsError: the directory has files.
        CodecError: a value or leaf cannot be stored.
        ValueError: an option is invalid, or ``columns`` lacks an entry.
        ImportError: a remote location needs the library.

    >>> to_mds(TensorDict({"x": torch.arange(6).view(3, 2), "name": ["a", "b", "c"]}, [3]), out="samples")
    >>> from_mds("samples", rows=[2, 0])["x"]
    tensor([[4, 5],
            [0, 1]])
    """
    from ._write_mds import write_mds

    if (out is None) == (writer is None):
        raise TypeError("to_mds() takes out= or writer=")
    options = {"compression": compression, "hashes": hashes, "size_limit": size_limit}
    write_mds(td, columns, out, writer, finish_writer, options, {"keep_local": keep_local, **kwargs})


def from_mds(
    path: str | os.PathLike[str],
    *,
    split: str = "",
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a data set of mosaicml-streaming. A class with declared entries returns an instance.

    Columns of arrays of one shape are dense leaves, others jagged ones, or a lazy stack if their numbers of dims differ. Images
    are bytes.

    Args:
        path: a directory, or the URL of one.
        split: a directory below it.
        device: where the leaves go.
        keys: keys or key paths to load.
        rows: index of the samples: an int, a slice or positions. Only their shards are read.
        storage_options: arguments of the file system of fsspec, for a URL.

    Raises:
        FileNotFoundError: there is no index.
        FormatError: the data set is damaged, or a column is a pickle, which can run any code.

    >>> TensorDict({"x": torch.arange(3), "name": ["a", "b", "c"]}, [3]).to_mds(out="samples")
    >>> list(from_mds("samples", rows=slice(1, None))["name"])
    ['b', 'c']
    """
    from ._read_mds import read_mds

    return read_mds(path, split, device, keys, rows, storage_options)


def to_pandas(
    td: TensorCollection,
    *,
    separator: str | None = None,
    tensors: str = "arrow",
    mask_key: NestedKey | None = None,
) -> Any:
    """Return the collection as a ``pandas.DataFrame``, whose ``attrs`` have what :func:`from_pandas` needs to restore it.

    Args:
        td: the collection.
        separator: joins the keys of a nested entry to the name of a column.
        tensors: cells with dims are columns of ``"arrow"``, without a copy; ``"object"``, an array for each row; or
            ``"columns"``, a column for each element, called ``x[0]`` or ``x[1,2]``.
        mask_key: key of a level with masks, which become missing values.

    Raises:
        ValueError: the collection is nested, and ``separator`` is None.
        ImportError: pandas is not installed.

    >>> to_pandas(TensorDict({"x": torch.zeros(2), "name": ["a", "b"]}, [2]))  # doctest: +SKIP
         x name
    0  0.0    a
    1  0.0    b
    """
    from ._data_frames import make_frame

    return make_frame(td, separator, tensors, mask_key)


def from_pandas(
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
) -> Any:
    """Return the collection of a data frame of pandas. A class with declared entries returns an instance.

    A column index of several levels makes nested entries. ``times`` are ``"numbers"``, int64 nanoseconds, or ``"values"``;
    ``categories`` are ``"codes"``, ``"values"`` or ``"labels"``. ``index=True`` makes an entry of the index, False leaves it out,
    None warns if it is not the default one. The other arguments are those of :func:`from_parquet` and :func:`from_arrow`.

    Raises:
        FormatError: two columns have the same name.
        ValueError: a column has missing values that ``nulls`` refuses.
        TypeError: ``dataframe`` is not a data frame of pandas.

    >>> frame = pandas.DataFrame({"x": [1, 2], "name": ["a", None]})  # doctest: +SKIP
    >>> from_pandas(frame)["name"]  # doctest: +SKIP
    ['a', None]
    """
    from ._data_frames import read_frame
    from ._from_arrow import set_sizes

    found = read_frame(
        dataframe,
        index,
        nulls=nulls,
        mask_key=mask_key,
        device=device,
        separator=separator,
        lists=lists,
        times=times,
        categories=categories,
    )
    return set_sizes(found, auto_batch_size, batch_dims, batch_size, dtype)


def _read_as(function: Callable[..., Any], what: str | None = None) -> Callable[..., Any]:
    """Return a function that reads a source, with the class of the result as its first argument."""

    def read(cls: type, source: object, **options: Any) -> Any:
        return as_named(cls, function(source, **options), what or f"what is saved at {source!r}")

    return read


def _export_stream(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsule of a stream of one batch, from which other libraries make their tables."""
    from ._write_columns import export

    return export(self, requested_schema, "__arrow_c_stream__")


def _export_array(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsules of an array of structs."""
    from ._write_columns import export

    return export(self, requested_schema, "__arrow_c_array__")


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
    "read_data_frame": ("pandas.DataFrame",),
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
        "from_arrow": make_classmethod(from_arrow, with_class=_read_as(from_arrow, "the table")),
        "to_parquet": to_parquet,
        "from_parquet": make_classmethod(from_parquet, with_class=_read_as(from_parquet)),
        "to_pandas": to_pandas,
        "from_pandas": make_classmethod(from_pandas, with_class=_read_as(from_pandas, "the data frame")),
        "to_csv": to_csv,
        "from_csv": make_classmethod(from_csv, with_class=_read_as(from_csv)),
        "to_json": to_json,
        "from_json": make_classmethod(from_json, with_class=_read_as(from_json)),
        "to_mds": to_mds,
        "from_mds": make_classmethod(from_mds, with_class=_read_as(from_mds)),
        "__arrow_c_stream__": _export_stream,
        "__arrow_c_array__": _export_array,
    }


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the formats ``"parquet"`` and ``"arrow"``."""
    return [_PARQUET, _ARROW]
