"""Collections of tables: of objects in memory, and of the columns that a file gives one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from td_core import NestedKey, is_tensor_collection
from td_core.spi import as_device, as_dtype
from td_core.typing import DeviceType

from ._arrow_types import without_views
from ._build_rows import RowBuilder
from ._dialects import find_features
from ._nulls import Nulls, Path
from ._read_columns import ColumnReader, Item, One, RowValues, find_form, join_chunks
from ._table_columns import TableColumns, plan_columns
from ._table_header import read_facts

#: What is read of columns: an array of Arrow, or what the column becomes.
Columns = Iterator[tuple[Path, Any]]
#: Gives the arrays of columns, in the order that suits a file.
Fetch = Callable[[Iterable[Path]], Columns]


def read_in_memory(content: pa.Table, where: str, **options: Any) -> Any:
    """Return the collection of a table in memory; the options are those of :func:`read_collection`."""
    return read_collection(
        content.schema, content.num_rows, lambda paths: get_columns(content, paths), where, **options
    )


def read_collection(
    schema: pa.Schema,
    rows: int,
    fetch: Fetch,
    where: str,
    *,
    nulls: Any = "auto",
    default: str = "auto",
    mask_key: NestedKey | None = None,
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    separator: str | None = None,
    lists: str = "jagged",
    times: str = "values",
    categories: str = "values",
    strict: bool | None = None,
    copy: bool | None = None,
    mapped: torch.UntypedStorage | None = None,
) -> Any:
    """Return the collection of the columns that ``fetch`` gives; ``default`` is the policy of keys that ``nulls`` lacks."""
    shapes = find_features(schema.metadata)
    reader = ColumnReader(Nulls.of(nulls, default), lists, times, categories, copy, shapes, mapped)
    target = None if device is None else as_device(device)
    plan = plan_columns(schema, rows, where, separator=separator, keys=keys, strict=strict)
    if keys is None:
        reader.nulls.check_keys(plan.keys.values(), where)
    if target is not None and target.type == "meta":
        fetch = _describe_first(fetch, plan, rows, shapes)
    items: dict[Path, Item] = {}
    present: dict[Path, list[bool]] = {}
    for path, array in fetch(plan.fields):
        field, key = plan.fields[path], plan.keys[path]
        if isinstance(array, (torch.Tensor, RowValues, One, dict)):  # it is read when it is used, or was read
            items[path] = array
        elif read_facts(field).get("absent"):
            present[path] = join_chunks(array).is_valid().to_pylist()
            items[path] = ColumnReader(Nulls.of("fill"), copy=True).read(array, field, key)
        else:
            items[path] = reader.read(array, field, key)
    path = ("_mask",) if mask_key is None else (mask_key,) if isinstance(mask_key, str) else mask_key
    result = RowBuilder(plan, items, present, rows, where).build(reader.nulls.masks, path)
    return result if target is None else result.to(target)


def _describe_first(fetch: Fetch, plan: TableColumns, rows: int, shapes: Mapping[Path, Any]) -> Fetch:
    """Return a function that gives leaves without elements for columns of cells of one shape, and reads the others."""

    def describe(paths: Iterable[Path]) -> Columns:
        others = []
        for path in paths:
            dense = find_form(plan.fields[path], plan.keys[path], shapes)
            if dense is None:
                others.append(path)
            else:
                yield path, torch.empty(rows, *dense.shape, dtype=dense.dtype, device="meta")
        yield from fetch(others)

    return describe


def set_sizes(
    loaded: Any,
    auto_batch_size: bool,
    batch_dims: int | None,
    batch_size: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> Any:
    """Return what was loaded with another batch size and dtype; raise ValueError if two arguments say the batch size."""
    if batch_size is not None and (auto_batch_size or batch_dims is not None):
        raise ValueError("pass batch_size, or auto_batch_size with batch_dims, not both")
    if dtype is not None:
        kind = as_dtype(dtype)
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"dtype is a dtype of torch; got {dtype!r:.100}")
        loaded = loaded.apply(lambda leaf: leaf if leaf.is_complex() else leaf.to(kind))
    if batch_size is not None:
        loaded.batch_size = torch.Size(batch_size)
    elif auto_batch_size or batch_dims is not None:
        loaded.auto_batch_size_(batch_dims)
    return loaded


#: What to do with objects whose rows are not in memory, by the end of their class's name.
_HINTS = {
    ".LazyFrame": ": collect() it",
    ".DatasetDict": ': take one of its data sets, as in data["train"]',
    ".IterableDataset": ": it is not in memory",
    "Dataset": ": it is not in memory: call to_table(), or use iter_batches",
    ".str": ": load() reads files",
}


def as_table(data: object) -> pa.Table:
    """Return an object that Arrow can take over as a table; raise TypeError for others."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.StructArray):
        data = pa.RecordBatch.from_struct_array(data)
    if is_dataset(data):
        return get_dataset_table(data)
    if is_tensor_collection(data):
        raise TypeError("from_arrow() makes collections of tables, and it is a collection already")
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "__arrow_c_stream__"):
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


def get_dataset_table(data: Any) -> pa.Table:
    """Return the rows of a data set of Hugging Face, in its order: ``select`` and ``shuffle`` give it an index of rows."""
    table = data.data.table if data._indices is None else data.with_format("arrow")[:]
    return table.select(data.column_names).replace_schema_metadata(data.data.table.schema.metadata)


def get_columns(table: pa.Table, paths: Iterable[Path]) -> Columns:
    """Yield the array of each column path of a table; a null of a struct is one of what is in it."""
    schema = table.schema
    for path in paths:
        array = table.column(schema.get_field_index(path[0]))
        for name in path[1:]:
            number = array.type.get_field_index(name)
            chunks = [chunk.flatten()[number] for chunk in array.chunks]
            array = pa.chunked_array(chunks, array.type.field(number).type)
        yield path, without_views(array)
