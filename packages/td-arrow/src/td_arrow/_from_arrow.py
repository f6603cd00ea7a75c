"""Collections of tables: of Arrow objects in memory, and of the columns that a file gives one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import torch

from td_core import NestedKey, is_tensor_collection
from td_core.spi import as_device, as_dtype
from td_core.typing import DeviceType
from td_store import StoredTensor
from td_store.arrays import KeptSource

from ._arrow_types import Dense, convert, view_numbers, without_views
from ._build_rows import One, RowBuilder
from ._dialects import find_features
from ._nulls import Nulls, Path
from ._read_columns import ColumnReader, RowValues, find_form, join_chunks
from ._row_values import read_values
from ._table_columns import TableColumns, plan_columns
from ._table_header import read_facts

#: Gives the arrays of columns, in the order that suits a file.
Fetch = Callable[[Iterable[Path]], Iterator[tuple[Path, Any]]]


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
    """Return the collection of a table, whose leaves are views of its columns where these can be written.

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
    >>> td = from_arrow(table, nulls={"x": -1, None: "fill"})
    >>> td["x"]
    tensor([ 1,  2, -1])
    """
    content = as_table(table)
    reader = make_reader(nulls, "raise", lists, times, categories, copy, content.schema)
    return read_collection(
        content.schema,
        content.num_rows,
        lambda paths: get_columns(content, paths),
        reader,
        "the table",
        separator=separator,
        keys=keys,
        mask_key=mask_key,
        device=device,
        strict=strict,
    )


def read_in_memory(
    content: Any, where: str, *, nulls: Any = "auto", lists: str = "jagged", **options: Any
) -> Any:
    """Return the collection of a table that a file has become; see :func:`read_collection` for the options."""
    reader = make_reader(nulls, "auto", lists, "values", "values", None, content.schema)
    return read_collection(
        content.schema,
        content.num_rows,
        lambda paths: get_columns(content, paths),
        reader,
        where,
        **options,
    )


def make_reader(
    nulls: Any,
    default: str,
    lists: str,
    times: str,
    categories: str,
    copy: bool | None,
    schema: Any,
) -> ColumnReader:
    """Return the reader of columns that options describe."""
    if copy not in (None, True, False):
        raise TypeError(f"copy is None, True or False; got {copy!r:.100}")
    shapes = find_features(schema.metadata)
    return ColumnReader(Nulls.of(nulls, default), lists, times, categories, copy, _view_read_only, shapes)


def _view_read_only(numbers: Any, dense: Dense) -> Any:
    """Return numbers without a copy; as a stored tensor if they cannot be written, since torch has no such tensors."""
    if not len(numbers) or pa.types.is_boolean(numbers.type) or numbers.buffers()[1].is_mutable:
        return convert(view_numbers(numbers, dense.stored), dense)
    return StoredTensor(KeptSource(convert(torch.utils.dlpack.from_dlpack(numbers), dense)), mode="r")


def read_collection(
    schema: Any,
    rows: int,
    fetch: Fetch,
    reader: ColumnReader,
    where: str,
    *,
    separator: str | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    mask_key: NestedKey | None = None,
    device: DeviceType | None = None,
    strict: bool | None = None,
    dtype: torch.dtype | None = None,
    classes: bool = True,
) -> Any:
    """Return the collection of the columns that ``fetch`` gives; see :func:`from_arrow` for the options."""
    target = None if device is None else as_device(device)
    if dtype is not None:
        dtype = as_dtype(dtype)
    plan = plan_columns(schema, rows, where, separator=separator, keys=keys, strict=strict)
    if keys is None:
        reader.nulls.check_keys(plan.keys.values(), where)
    items: dict[Path, Any] = {}
    present: dict[Path, Any] = {}
    if target is not None and target.type == "meta":
        fetch = _describe_first(fetch, plan, rows, reader)
    for path, array in fetch(plan.fields):
        field = plan.fields[path]
        facts = read_facts(field)
        if isinstance(array, (torch.Tensor, RowValues, One, dict)):  # it is read when it is used, or was read
            items[path] = array
        elif facts.get("absent"):
            array = join_chunks(array)
            present[path] = array.is_valid().to_pylist()
            filling = ColumnReader(Nulls.of("fill"), copy=True)
            items[path] = filling.read(array, field, plan.keys[path])
        elif facts.get("kind") == "one":
            items[path] = _read_one(reader, join_chunks(array), field, plan.keys[path])
        else:
            items[path] = reader.read(array, field, plan.keys[path])
    builder = RowBuilder(plan, items, present, rows, where)
    masks = reader.nulls.masks
    path = ("_mask",) if mask_key is None else (mask_key,) if isinstance(mask_key, str) else mask_key
    result = builder.build(masks, path, classes)
    if dtype is not None:
        result = result.apply(lambda leaf: leaf.to(dtype) if _is_number(leaf) else leaf)
    return result if target is None else result.to(target)


def _describe_first(fetch: Fetch, plan: TableColumns, rows: int, reader: ColumnReader) -> Fetch:
    """Return a function that gives leaves without elements for columns of cells of one shape, and reads the others."""

    def describe(paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
        others = []
        for path in paths:
            dense = find_form(plan.fields[path], plan.keys[path], reader.shapes)
            if dense is None:
                others.append(path)
            else:
                yield path, torch.empty(rows, *dense.shape, dtype=dense.dtype, device="meta")
        yield from fetch(others)

    return describe


def _is_number(leaf: Any) -> bool:
    return not leaf.is_complex()


def _read_one(reader: ColumnReader, array: Any, field: Any, key: Path) -> Any:
    """Read the column of one value for all rows; the values of rows if they differ."""
    found = array.unique() if len(array) else array
    if len(found) > 1 or not len(found) or found.null_count:
        return reader.read(array, field, key)
    return One(read_values(found, read_facts(field))[0])


#: What to do with objects whose rows are not in memory, by the end of their class's name.
_HINTS = {
    ".LazyFrame": ": collect() it",
    ".DatasetDict": ': take one of its data sets, as in data["train"]',
    ".IterableDataset": ": it is not in memory",
    "Dataset": ": it is not in memory: call to_table(), or use iter_batches",
    ".str": ": load() reads files",
}


def as_table(data: Any) -> Any:
    """Return an object of Arrow, or one that Arrow can take over, as a table.

    Raises:
        TypeError: it is something else, or not in memory.
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.StructArray):
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(data)])
    if is_dataset(data):
        return get_dataset_table(data)
    if is_tensor_collection(data):
        raise TypeError("from_arrow() makes collections of tables, and it is a collection already")
    if isinstance(data, pa.RecordBatchReader) or hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    if hasattr(data, "__arrow_c_array__"):
        return pa.Table.from_batches([pa.record_batch(data)])
    name = f"{type(data).__module__}.{type(data).__qualname__}"
    hint = next((hint for end, hint in _HINTS.items() if name.endswith(end)), "")
    raise TypeError(
        "from_arrow() takes a table of Arrow, a data set of Hugging Face, or an object with __arrow_c_stream__; got "
        f"{name}{hint}"
    )


def is_dataset(data: object) -> bool:
    """Return True for a data set of Hugging Face, whose library is not imported."""
    return any(
        cls.__module__ == "datasets.arrow_dataset" and cls.__qualname__ == "Dataset"
        for cls in type(data).__mro__
    )


def get_dataset_table(data: Any) -> Any:
    """Return the rows of a data set of Hugging Face, in its order: ``select`` and ``shuffle`` give it an index of rows."""
    if data._indices is None:
        table = data.data.table
    else:
        table = data.with_format("arrow")[:]
    return table.select(data.column_names).replace_schema_metadata(data.data.table.schema.metadata)


def get_columns(table: Any, paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the array of each column path of a table; a null of a struct is one of what is in it."""
    schema = table.schema
    for path in paths:
        array = table.column(schema.get_field_index(path[0]))
        for name in path[1:]:
            number = array.type.get_field_index(name)
            chunks = [chunk.flatten()[number] for chunk in array.chunks]
            array = pa.chunked_array(chunks, array.type.field(number).type)
        yield path, without_views(array)
