"""Make a table of a collection: a column for each leaf and for values of rows, and a header for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

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


def to_arrow(
    td: TensorCollection,
    *,
    separator: str | None = None,
    row_dims: int = 1,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> Any:
    """Return a collection as a ``pyarrow.Table``, whose columns are views of the leaves where Arrow can have their memory.

    Args:
        td: the collection. Each element of its first batch dim is a row; without batch dims, it is one row.
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
    plan = plan_table(td, separator, row_dims, tensors, mask_key, copy)
    return plan.make_table()


def plan_table(
    td: Any,
    separator: str | None,
    row_dims: int,
    tensors: str | Mapping[NestedKey | None, str],
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> TablePlan:
    """Plan a table; see :func:`to_arrow`."""
    if row_dims not in (1, 2) or isinstance(row_dims, bool):
        raise ValueError(f"row_dims is 1 or 2; got {row_dims!r:.100}")
    if not is_tensor_collection(td):
        raise TypeError(f"to_arrow() takes a collection, such as a TensorDict; got {type(td).__qualname__}")
    choices = check_columns(separator, tensors)
    masks: dict[Path, Tensor] = {}
    if mask_key is not None and mask_key in td.keys(True):
        found = td.get(mask_key)
        masks = {_as_path(key): mask for key, mask in found.items(True, True)}
        td = td.exclude(mask_key)
    encoded = encode(td.clone() if copy else td, in_memory=True)
    plan = _Writer(encoded, separator, row_dims, choices, masks)
    plan.walk()
    if masks := plan.masks:
        raise KeyPathError(
            f"the mask of {', '.join(map(show_path, masks))} is of no entry that can have nulls"
        )
    return plan


def check_columns(separator: str | None, tensors: str | Mapping[NestedKey | None, str]) -> Tensors:
    """Return the forms of cells; raise ValueError for an unknown one, or a separator that is none."""
    if separator is not None and not (isinstance(separator, str) and separator):
        raise ValueError(f"separator is a string that is not empty, or None; got {separator!r:.100}")
    return Tensors(tensors)


def _as_path(key: NestedKey) -> Path:
    return (key,) if isinstance(key, str) else key


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
        todo: list[tuple[int, int, Path, Path, bool, tuple[int, ...]]] = [
            (0, self.add_node(self.encoded.nodes[0]), (), (), True, ())
        ]
        while todo:
            old, new, path, keys, in_rows, place = todo.pop()
            row, node = self.encoded.nodes[old], self.encoded.objects[old]
            kind = kinds.find(row["kind"])
            hidden = kind is not None and kind.is_leaf
            in_rows = in_rows and not hidden and tuple(node.batch_size[: len(self.lead)]) == self.lead
            self.place = place
            self._add_values(row, new, path, keys, in_rows)
            if in_rows and self._is_stack_of_rows(row):
                members = [ref for _, ref in row["members"]]
                if merge_members(self, members, new, path, keys):
                    continue
                in_rows = False
            plain = hidden or (not row["entries"] and len(row["members"]) == 1) or old in self._homes
            for group in ("entries", "members"):
                named = group == "entries" and not hidden
                for number, (key, ref) in enumerate(row[group]):
                    below = path if plain and not named else (*path, key)
                    deeper = (*keys, key) if named else keys
                    self.place = (*place, number)
                    if isinstance(ref, list):
                        child: Any = self._add_leaf(ref[0], below, deeper, in_rows)
                    else:
                        child = self.add_node(self.encoded.nodes[ref])
                        todo.append((ref, child, below, deeper, in_rows, self.place))
                    self.nodes[new][group].append([key, child])

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
            pair: Any = self._split(value, keys)
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
        nested = each != 1
        cells = [values[i : i + each] for i in range(0, len(values), each)] if nested else values
        mask = self.masks.pop(keys, None)
        if mask is not None:
            cells = [value if present else None for value, present in zip(cells, mask.tolist(), strict=True)]
        column = make_values(cells, partial(self.show, keys))
        return {"column": self.add_column(path, column, True)}

    def _split(self, value: Any, keys: Path) -> tuple[Any, Any]:
        try:
            return split_value(value)
        except CodecError as error:
            raise CodecError(f"cannot save {show_path(keys)}: {error}") from error

    def _add_leaf(self, position: int, path: Path, keys: Path, in_rows: bool) -> list[int]:
        leaf = self.encoded.leaves[position]
        try:
            check_storable(leaf)
        except CodecError as error:
            raise CodecError(f"cannot save {show_path(keys)}: {error}") from None
        stack = self._stacks.get(position)
        if in_rows and stack is not None and stack.dim >= len(self.lead):
            if stack.leaves[0] not in self._shared:
                whole = torch.stack([self.encoded.leaves[i] for i in stack.leaves], stack.dim)
                self._shared[stack.leaves[0]] = self._place_rows(whole, path, keys)
            place = self._shared[stack.leaves[0]]
            if place is not None:
                number = stack.leaves.index(position)
                return self.add_place({**place, "select": [stack.dim - len(self.lead), number]})
        elif in_rows:
            place = self._place_rows(leaf, path, keys)
            if place is not None:
                return self.add_place(place)
        reason = "it has no rows" if not in_rows else "its cells cannot be a column"
        return self.add_place(self.inline.add(leaf, show_path(keys), reason))

    def _place_rows(self, leaf: Tensor, path: Path, keys: Path) -> Any:
        """Add a leaf as a column, and return its place; None if its elements are not those of rows."""
        if leaf.is_nested:
            cells = self._make_jagged(leaf, keys) if len(self.lead) == 1 else None
            return None if cells is None else {"column": self.add_column(path, cells)}
        if tuple(leaf.shape[: len(self.lead)]) != self.lead:
            return None
        cell = tuple(leaf.shape[len(self.lead) :])
        if 0 in cell:
            return {"empty": list(cell), "dtype": str(leaf.dtype)}
        valid, elements = self._take_mask(keys, leaf)
        flat = leaf.reshape(self.rows, *cell)
        cells = make_cells(flat, self.tensors.get(keys), valid=valid, elements=elements)
        nullable = valid is not None or elements is not None
        return {"column": self.add_column(path, cells, nullable)}

    def _take_mask(self, keys: Path, leaf: Tensor) -> tuple[Any, Any]:
        """Return the mask of rows and that of elements of an entry, or None."""
        mask = self.masks.pop(keys, None)
        if mask is None:
            return None, None
        if mask.dtype != torch.bool or mask.shape not in (leaf.shape, leaf.shape[: len(self.lead)]):
            raise ValueError(
                f"the mask of {show_path(keys)} has the dtype {mask.dtype} and the shape {list(mask.shape)}; expected "
                f"torch.bool and that of its rows or elements, {list(leaf.shape)}"
            )
        mask = mask.cpu()
        if mask.ndim == len(self.lead) and leaf.ndim > mask.ndim:
            return mask.reshape(-1), None
        return (mask.reshape(-1), None) if mask.ndim == len(self.lead) else (None, mask.reshape(-1))

    def _make_jagged(self, leaf: Any, keys: Path) -> Cells | None:
        """Return the rows of a nested tensor as lists; None if these cannot hold it."""
        mask = self.masks.pop(keys, None)
        if leaf.layout is not torch.jagged or leaf.size(0) != self.rows:
            return None
        dim = next(i for i, size in enumerate(leaf.shape) if i and not isinstance(size, int))
        values, offsets = leaf.values().detach().cpu(), leaf.offsets().cpu()
        lengths = leaf.lengths()
        values = values.movedim(dim - 1, 0)
        if 0 in values.shape[1:]:
            return None
        starts, ends = offsets[:-1], offsets[1:]
        if lengths is not None:
            ends = starts + lengths.cpu()
        if lengths is not None or int(offsets[0]):
            pieces = [values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
            values = torch.cat(pieces) if pieces else values[:0]
            offsets = torch.cat([offsets.new_zeros(1), (ends - starts).cumsum(0)])
        values = values[: int(offsets[-1])]
        valid = elements = None
        if mask is not None and mask.is_nested:
            elements = mask.values().reshape(-1).cpu()
        elif mask is not None:
            valid = mask.cpu()
        choice = self.tensors.get(keys)
        inner = make_cells(values, choice if choice == "extension" else "list", elements=elements)
        facts = {**inner.facts, **({"jagged": dim} if dim != 1 else {})}
        return Cells(make_lists(offsets.to(torch.int64).numpy(), inner.array, valid), facts)
