"""Make a table of a collection: a column for each leaf and for values of rows, and a header for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from td_core import KeyPathError, NestedKey, TensorCollection, is_tensor_collection, kinds
from td_core.errors import CodecError, UnsupportedOperationError
from td_core.spi import Encoded, encode, show_path, split_value
from td_store.arrays import find_stacks

from ._arrow_types import Cells, check_storable, make_cells, make_lists
from ._nulls import Path
from ._row_members import merge_members
from ._row_values import find_type, make_values
from ._table_plan import Row, TablePlan, Tensors


def make_table(
    td: TensorCollection,
    separator: str | None = None,
    row_dims: int = 1,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> pa.Table:
    """Return the table of a collection; see :func:`td_arrow.to_arrow`."""
    if row_dims not in (1, 2) or isinstance(row_dims, bool):
        raise ValueError(f"row_dims is 1 or 2; got {row_dims!r:.100}")
    check_collection("to_arrow", td)
    check_separator(separator)
    choices = Tensors(tensors)
    masks: dict[Path, Tensor] = {}
    if mask_key is not None and mask_key in td.keys(True):
        found = td.get(mask_key).items(True, True)
        masks = {(key,) if isinstance(key, str) else key: mask for key, mask in found}
        td = td.exclude(mask_key)
    encoded = encode(td.clone() if copy else td, in_memory=True)
    plan = _Writer(encoded, separator, row_dims, choices, masks)
    plan.walk()
    if plan.masks:
        raise KeyPathError(
            f"the mask of {', '.join(map(show_path, plan.masks))} is of no entry that can have nulls"
        )
    return plan.make_table()


def check_collection(operation: str, data: object) -> None:
    """Raise TypeError for data that is not a collection."""
    if not is_tensor_collection(data):
        raise TypeError(
            f"{operation}() takes a collection, such as a TensorDict; got {type(data).__qualname__}"
        )


def check_separator(separator: object) -> None:
    """Raise ValueError for a separator that is neither text nor None."""
    if separator is not None and not (isinstance(separator, str) and separator):
        raise ValueError(f"separator is a string that is not empty, or None; got {separator!r:.100}")


def export(data: TensorCollection, requested_schema: object, method: str) -> object:
    """Return the capsules of a collection that a method of Arrow makes, in the requested schema if pyarrow can cast to it."""
    table = make_table(data).combine_chunks()
    arrays = [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in table.columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=table.schema)

    def open_source() -> Any:
        is_stream = method == "__arrow_c_stream__"
        return pa.RecordBatchReader.from_batches(batch.schema, [batch]) if is_stream else batch

    if requested_schema is not None:
        with contextlib.suppress(pa.ArrowException, NotImplementedError, ValueError):
            return getattr(open_source(), method)(requested_schema)
    return getattr(open_source(), method)()


class _Visit(NamedTuple):
    """A node to add: its row, its new row, its column path and key path, whether it has the rows, and its place."""

    old: int
    new: int
    path: Path
    keys: Path
    in_rows: bool
    place: tuple[int, ...]


class _Writer(TablePlan):
    """Plans the table of a collection, node by node."""

    def __init__(self, encoded: Encoded, *options: Any) -> None:
        super().__init__(encoded, *options)
        free = [leaf.layout is torch.strided and not leaf.is_quantized for leaf in encoded.leaves]
        stacks, self._homes = find_stacks(encoded.nodes, encoded.leaves, free)
        self._stacks = {leaf: stack for stack in stacks.values() for leaf in stack.leaves}
        self._shared: dict[int, Any] = {}

    def walk(self) -> None:
        """Add all nodes, parents before children."""
        todo = [_Visit(0, self.add_node(self.encoded.nodes[0]), (), (), True, ())]
        while todo:
            visit = todo.pop()
            row, node = self.encoded.nodes[visit.old], self.encoded.objects[visit.old]
            kind = kinds.find(row["kind"])
            hidden = kind is not None and kind.is_leaf
            in_rows = visit.in_rows and not hidden and tuple(node.batch_size[: len(self.lead)]) == self.lead
            self.place = visit.place
            self._add_values(row, visit.new, visit.path, visit.keys, in_rows)
            if in_rows and self._is_stack_of_rows(row):
                members = [ref for _, ref in row["members"]]
                if merge_members(self, members, visit.new, visit.path, visit.keys):
                    continue
                in_rows = False
            self._add_children(visit._replace(in_rows=in_rows), row, hidden, todo)

    def _add_children(self, visit: _Visit, row: Row, hidden: bool, todo: list[_Visit]) -> None:
        """Add the leaves of a node, and its nodes to those that are added later."""
        plain = hidden or (not row["entries"] and len(row["members"]) == 1) or visit.old in self._homes
        for group in ("entries", "members"):
            named = group == "entries" and not hidden
            for number, (key, ref) in enumerate(row[group]):
                path = visit.path if plain and not named else (*visit.path, key)
                keys = (*visit.keys, key) if named else visit.keys
                self.place = (*visit.place, number)
                if isinstance(ref, list):
                    child: Any = self._add_leaf(ref[0], path, keys, visit.in_rows)
                else:
                    child = self.add_node(self.encoded.nodes[ref])
                    todo.append(_Visit(ref, child, path, keys, visit.in_rows, self.place))
                self.nodes[visit.new][group].append([key, child])

    def _is_stack_of_rows(self, row: Row) -> bool:
        if row["kind"] != "LazyStackedTensorDict" or row["meta"]["stack_dim"] >= len(self.lead):
            return False
        if len(self.lead) > 1:
            raise UnsupportedOperationError(
                "row_dims=2 needs dense rows, and the collection is a lazy stack along one of them: pass its contiguous()"
            )
        return True

    def _add_values(self, row: Row, new: int, path: Path, keys: Path, in_rows: bool) -> None:
        for name, ref in row["values"]:
            value = self.encoded.values[ref]
            if in_rows and row["kind"] == "NonTensorStack":
                self.add_value(new, name, self._add_rows(value, path, keys))
                continue
            try:
                pair: Any = split_value(value)
            except CodecError as error:
                raise CodecError(f"cannot save {show_path(keys)}: {error}") from error
            kind = None
            if in_rows and self.rows and row["kind"] == "NonTensorData" and value is not None:
                kind = find_type([value])
            if kind is not None and not pa.types.is_large_list(kind):
                cells = Cells(pa.repeat(pa.scalar(value, kind), self.rows), {"kind": "one"})
                pair = {"column": self.add_column(path, cells, True), "one": list(pair)}
            self.add_value(new, name, pair)

    def _add_rows(self, values: Sequence[Any], path: Path, keys: Path) -> Any:
        """Add a column with the values of each row; several of one row are a list."""
        each = len(values) // self.rows if self.rows else 1
        cells = values if each == 1 else [values[i : i + each] for i in range(0, len(values), each)]
        mask = self.masks.pop(keys, None)
        if mask is not None:
            cells = [value if present else None for value, present in zip(cells, mask.tolist(), strict=True)]
        column = make_values(cells, partial(self.show, keys))
        return {"column": self.add_column(path, column, True)}

    def _add_leaf(self, position: int, path: Path, keys: Path, in_rows: bool) -> list[int]:
        leaf = self.encoded.leaves[position]
        try:
            check_storable(leaf)
        except CodecError as error:
            raise CodecError(f"cannot save {show_path(keys)}: {error}") from None
        stack = self._stacks.get(position)
        place = None
        if in_rows and stack is not None and stack.dim >= len(self.lead):
            if stack.leaves[0] not in self._shared:
                whole = torch.stack([self.encoded.leaves[i] for i in stack.leaves], stack.dim)
                self._shared[stack.leaves[0]] = self._place_rows(whole, path, keys)
            place = self._shared[stack.leaves[0]]
            if place is not None:
                place = {**place, "select": [stack.dim - len(self.lead), stack.leaves.index(position)]}
        elif in_rows:
            place = self._place_rows(leaf, path, keys)
        if place is None:
            reason = "its cells cannot be a column" if in_rows else "it has no rows"
            place = self.inline.add(leaf, show_path(keys), reason)
        return self.add_place(place)

    def _place_rows(self, leaf: Tensor, path: Path, keys: Path) -> Any:
        """Add a leaf as a column, and return its place; None if its elements are not those of rows."""
        if leaf.is_nested:
            jagged = self._make_jagged(leaf, keys) if len(self.lead) == 1 else None
            return None if jagged is None else {"column": self.add_column(path, jagged)}
        shape, dims = tuple(leaf.shape), len(self.lead)
        lead, cell = shape[:dims], shape[dims:]
        if lead != self.lead:
            return None
        if 0 in cell:
            return {"empty": list(cell), "dtype": str(leaf.dtype)}
        valid, elements = self._take_mask(keys, leaf) if self.masks else (None, None)
        flat = leaf if dims == 1 else leaf.reshape(self.rows, *cell)
        cells = make_cells(flat, self.tensors.get(keys), valid=valid, elements=elements)
        nullable = valid is not None or elements is not None
        return {"column": self.add_column(path, cells, nullable)}

    def _take_mask(self, keys: Path, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask of rows and that of elements of an entry, or None."""
        mask = self.masks.pop(keys, None)
        if mask is None:
            return None, None
        if mask.dtype != torch.bool or mask.shape not in (leaf.shape, leaf.shape[: len(self.lead)]):
            raise ValueError(
                f"the mask of {show_path(keys)} has the dtype {mask.dtype} and the shape {list(mask.shape)}; expected "
                f"torch.bool and that of its rows or elements, {list(leaf.shape)}"
            )
        flat = mask.cpu().reshape(-1)
        return (flat, None) if mask.ndim == len(self.lead) else (None, flat)

    def _make_jagged(self, leaf: Tensor, keys: Path) -> Cells | None:
        """Return the rows of a nested tensor as lists; None if these cannot hold it."""
        mask = self.masks.pop(keys, None)
        if leaf.layout is not torch.jagged or leaf.size(0) != self.rows:
            return None
        dim = next(i for i, size in enumerate(leaf.shape) if i and not isinstance(size, int))
        values, offsets = _compact(leaf, dim)
        if 0 in values.shape[1:]:
            return None
        valid = elements = None
        if mask is not None and mask.is_nested:
            elements = mask.values().reshape(-1).cpu()
        elif mask is not None:
            valid = mask.cpu()
        choice = self.tensors.get(keys)
        inner = make_cells(values, choice if choice == "extension" else "list", elements=elements)
        facts = {**inner.facts, **({"jagged": dim} if dim != 1 else {})}
        return Cells(make_lists(offsets.to(torch.int64).numpy(), inner.array, valid), facts)


def _compact(leaf: Any, dim: int) -> tuple[Tensor, Tensor]:
    """Return the values of a jagged tensor along their first dim, without elements of no row, and their offsets from 0."""
    values, offsets, lengths = leaf.values().detach().cpu(), leaf.offsets().cpu(), leaf.lengths()
    values = values.movedim(dim - 1, 0)
    if lengths is not None or int(offsets[0]):
        starts = offsets[:-1]
        sizes = offsets.diff() if lengths is None else lengths.cpu()
        pieces = [
            values[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        values = torch.cat(pieces) if pieces else values[:0]
        offsets = torch.cat([offsets.new_zeros(1), sizes.cumsum(0)])
    return values[: int(offsets[-1])], offsets
