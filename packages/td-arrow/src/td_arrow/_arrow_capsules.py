"""The PyCapsule interface of Arrow: collections as streams and arrays that other libraries take over without a copy."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ._write_columns import to_arrow


def _make_batch(data: Any) -> Any:
    table = to_arrow(data)
    arrays = [column.combine_chunks() for column in table.columns]
    arrays = [array.chunk(0) if isinstance(array, pa.ChunkedArray) else array for array in arrays]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def export_stream(data: Any, requested_schema: object = None) -> object:
    """Return the capsule of a stream of one batch; in the requested schema if pyarrow can cast to it."""
    batch = _make_batch(data)
    if requested_schema is not None:
        try:
            reader = pa.RecordBatchReader.from_batches(batch.schema, [batch])
            return reader.__arrow_c_stream__(requested_schema)
        except (pa.ArrowException, NotImplementedError, ValueError):
            pass
    return pa.RecordBatchReader.from_batches(batch.schema, [batch]).__arrow_c_stream__()


def export_array(data: Any, requested_schema: object = None) -> object:
    """Return the capsules of the schema and of one array of structs."""
    batch = _make_batch(data)
    if requested_schema is not None:
        try:
            return batch.__arrow_c_array__(requested_schema)
        except (pa.ArrowException, NotImplementedError, ValueError):
            pass
    return batch.__arrow_c_array__()
