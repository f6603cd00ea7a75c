"""What the formats of named arrays share: the names and dtypes of the arrays, and the way back to a collection.

:func:`make_array_plan` splits a collection into dense arrays with names, and a header. A format stores both, where the
programs of its users expect them. It reads the header as a table, and builds the collection with :func:`build_collection`,
which calls the format for each array that it needs.

>>> import torch
>>> from td_core import TensorDict
>>> from td_core.spi import load_table, select_keys
>>> plan = make_array_plan(TensorDict({"a": torch.ones(2), "z": torch.ones(1).bfloat16()}), {torch.float32}, ".".join)
>>> {name: (array.dtype, array.logical) for name, array in plan.arrays.items()}
{'a': (torch.float32, None), 'z': (torch.uint16, torch.bfloat16)}
>>> stored = {name: array.read()[0] for name, array in plan.arrays.items()}
>>> table = select_keys(load_table(plan.header, "data.bin"), "z", "data.bin")
>>> build_collection(table, "data.bin", stored.get)["z"]
tensor([1.], dtype=torch.bfloat16)
"""

from __future__ import annotations

from td_core.spi import get_most_nodes, make_table_header, prune_table

from ..files import map_file
from .array_plan import ArrayPlan, FreeNames, PlannedArray, compute_check, make_array_plan
from .array_rows import Rows, Stack, TableBuilder, find_stacks
from .build_collection import (
    RefusedValues,
    build_collection,
    build_leaves,
    find_batch_sizes,
    join_rows,
    refuse_values,
)
from .byte_ranges import plan_ranges, read_objects
from .check_arrays import (
    check_arrays,
    check_growing,
    check_in_place,
    describe_arrays,
    read_hashes,
    report_damage,
)
from .live_collections import LiveCollection
from .live_edits import Change, LiveStore
from .mapped_leaves import (
    KeptSource,
    MappedSource,
    MappedTensor,
    as_mapped,
    read_into,
    sync_file,
    view_mapped,
)
from .object_files import NewTree, ObjectFile, read_stored, refuse_objects, upload
from .places import Place, as_storable, get_stored, is_nested, list_names, read_shape, restore, split_leaf
from .range_source import ObjectReader, RangeSource, open_place
from .table_edits import TableEdit, find_row
from .text_columns import (
    StoredText,
    TextColumn,
    add_texts,
    check_text,
    find_old_names,
    list_array_names,
    list_texts,
    load_array_table,
    read_texts,
    take_texts,
)

__all__ = [
    "ArrayPlan", "Change", "FreeNames", "KeptSource", "LiveCollection", "LiveStore", "MappedSource", "MappedTensor",
    "NewTree", "ObjectFile", "ObjectReader", "Place", "PlannedArray", "RangeSource", "RefusedValues", "Rows", "Stack",
    "StoredText", "TableBuilder", "TableEdit", "TextColumn", "add_texts", "as_mapped", "as_storable", "build_collection",
    "build_leaves", "check_arrays", "check_growing", "check_in_place", "check_text", "compute_check", "describe_arrays",
    "find_batch_sizes", "find_old_names", "find_row", "find_stacks", "get_most_nodes", "get_stored", "is_nested",
    "join_rows", "list_array_names", "list_names", "list_texts", "load_array_table", "make_array_plan", "make_table_header",
    "map_file", "open_place", "plan_ranges", "prune_table", "read_hashes", "read_into", "read_objects", "read_shape",
    "read_stored", "read_texts", "refuse_objects", "refuse_values", "report_damage", "restore", "split_leaf", "sync_file",
    "take_texts", "upload", "view_mapped",
]  # fmt: skip
