"""Append rows to a group: their chunks first, then the root, which makes them a part of the group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from td_core import TensorCollection
from td_core.errors import StructureError, UnsupportedOperationError
from td_core.spi import decode, encode, show_path
from td_store.arrays import (
    ArrayPlan,
    PlannedArray,
    build_collection,
    check_growing,
    join_rows,
    make_array_plan,
)

from ._array_documents import (
    NATIVE,
    STACK,
    ArrayInfo,
    ChunkOptions,
    Document,
    join_names,
    make_text_document,
    read_array_document,
)
from ._array_engines import open_array, write_text_rows
from ._dim_labels import name_dims
from ._group_header import GroupContent
from ._read_collections import open_group
from ._write_groups import PlannedGroup, dump_json, put_documents, read_planned
from ._zarr_objects import Objects


def append(
    rows: TensorCollection, location: Any, *, storage_options: Mapping[str, object] | None = None
) -> None:
    """Add rows to a group, along the first batch dim. A process that is killed leaves the group as it was, or complete.

    Only the new rows are written, and the last chunk if it is not full. Choose ``chunks`` when the group is saved: an array of
    one chunk gets chunks of its present size.

    Raises:
        StructureError: the rows have other keys, shapes or dtypes than the group; nothing is written.
        UnsupportedOperationError: the group cannot be written in place, or has leaves that cannot grow.

    >>> from td_zarr import save
    >>> _ = save(TensorDict({"a": torch.arange(3)}, [3]), "data.zarr", chunks=100)
    >>> append(TensorDict({"a": torch.arange(2)}, [2]), "data.zarr")
    >>> TensorDict.load("data.zarr")["a"]
    tensor([0, 1, 2, 0, 1])
    """
    with open_group(location, storage_options, write=True) as group:
        if group.objects.is_read_only or not group.is_ours:
            why = "it is a zip file" if group.objects.is_read_only else "td has not written it"
            raise UnsupportedOperationError(f"cannot append rows to {group.where}: {why}")
        if any(isinstance(place, dict) and "packed" in place for place in group.table.leaves):
            raise UnsupportedOperationError(
                f"cannot append rows to {group.where}: leaves share arrays; save it without pack="
            )
        check_growing(group.table, group.where)
        before = build_collection(group.read_texts(group.table), group.where, group.make_blank)
        whole = make_array_plan(
            join_rows(before, _without_elements(rows)),
            NATIVE,
            join_names,
            blank=True,
            separator="/",
            texts=True,
        )
        added = make_array_plan(rows, NATIVE, join_names, separator="/").arrays
        if whole.arrays.keys() != group.arrays.keys():
            missing, extra = (
                group.arrays.keys() - whole.arrays.keys(),
                whole.arrays.keys() - group.arrays.keys(),
            )
            raise StructureError(
                f"cannot append to {group.where}: with the rows it would need other arrays; missing: "
                f"{sorted(missing)!r:.300}, new: {sorted(extra)!r:.300}"
            )
        grown = [
            _Growth(group.arrays[name], item, added[name], group.where) for name, item in whole.arrays.items()
        ]
        for item in grown:
            item.write(group.objects)
        documents = {item.info.name: item.info.document for item in grown}
        documents |= _grow_texts(group, whole)
        planned = PlannedGroup(whole, documents, sparse=not group.is_strict)
        group.objects.replace("zarr.json", dump_json(planned.root))
        put_documents(group.objects, planned)


def _grow_texts(group: GroupContent, whole: ArrayPlan) -> dict[str, Document]:
    """Write the new rows of text columns, and return the metadata of their arrays."""
    result: dict[str, Document] = {}
    dims = name_dims({**whole.arrays, **whole.texts})
    for name, column in whole.texts.items():
        old = group.texts.get(name)
        if old is None:  # strings that were a value in the header
            document = make_text_document(column, dims[name], ChunkOptions())
        else:
            attributes = {**old.document["attributes"], STACK: list(column.shape)}
            document = {**old.document, "shape": list(column.shape), "attributes": attributes}
        result[name] = document
        info = read_array_document(name, document, group.where)
        write_text_rows(group.objects, info, column, 0 if old is None else old.shape[0], column.shape[0])
    return result


def _without_elements(rows: TensorCollection) -> object:
    """Return a collection of meta tensors of the same structure and with the same values."""
    encoded = encode(rows)
    for path, leaf in zip(encoded.leaf_paths(members=False), encoded.leaves, strict=True):
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise UnsupportedOperationError(
                f"cannot append {show_path(path)}: it is a nested or sparse tensor"
            )
    blank = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in encoded.leaves]
    return decode(replace(encoded, leaves=blank, objects=[]))


class _Growth:
    """An array before and after rows are appended.

    Attributes:
        info: the array after that.
    """

    def __init__(self, old: ArrayInfo, whole: PlannedArray, rows: PlannedArray, where: str) -> None:
        dims = [d for d in range(len(whole.shape)) if old.shape[d : d + 1] != whole.shape[d : d + 1]]
        self.rows = rows
        logical = None if whole.logical is None else str(whole.logical).removeprefix("torch.")
        fits = len(old.shape) == len(whole.shape) and len(dims) <= 1
        if not fits or (old.dtype, old.logical) != (rows.dtype, logical) or whole.dtype != rows.dtype:
            raise StructureError(
                f"cannot append to the array {old.name!r} of {where}: it has the shape {list(old.shape)} and the dtype "
                f"{old.logical or old.dtype}, the rows {list(rows.shape)} and {rows.logical or rows.dtype}"
            )
        document: Document = {**old.document, "shape": list(whole.shape)}
        if not old.nbytes:  # it has no chunks, so they can get another size
            chunks = document["chunk_grid"]["configuration"]["chunk_shape"]
            sizes = [max(size, chunk) for size, chunk in zip(whole.shape, chunks, strict=True)]
            document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": sizes}}
        self.info = read_array_document(old.name, document, where)
        self.index: tuple[slice, ...] | None = None
        if dims:
            self.index = tuple(
                slice(old.shape[dim] if dim in dims else 0, size) for dim, size in enumerate(whole.shape)
            )

    def write(self, objects: Objects) -> None:
        """Write the chunks of the new rows."""
        if self.index is not None and self.rows.nbytes:
            open_array(objects, self.info, strict=False).write(self.index, read_planned(self.rows).numpy())
