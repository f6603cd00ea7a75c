"""Columns of a table as leaves, values of rows, or levels: by their Arrow type, and what their field says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from td_core.errors import FormatError
from td_store import StoredTensor
from td_store.arrays import KeptSource

from ._arrow_types import Dense, Facts, convert, find_dense, is_list, peel, view_buffer, view_numbers
from ._dialects import Shape, find_shape, get_extension, has_extension, read_lance
from ._nulls import Bools, Nulls, Path, show_column
from ._row_values import read_values
from ._table_header import read_facts

_CHOICES = {
    "lists": ("jagged", "dense", "padded", "values", "auto"),
    "times": ("values", "numbers"),
    "categories": ("values", "codes", "labels"),
}


Ints = npt.NDArray[np.int64]


class RowValues(NamedTuple):
    """The values of rows."""

    values: list[Any]


class One(NamedTuple):
    """A value that all rows have."""

    value: object


class Padded(NamedTuple):
    """Lists as a dense leaf, and the length of each."""

    leaf: Tensor
    lengths: Tensor


class Parts(NamedTuple):
    """Tensors of several shapes, one for each row; None where the row is null."""

    tensors: list[Tensor | None]


#: What a column becomes; a dict is a level, and a list has the labels of categories.
Item = Tensor | RowValues | One | Padded | Parts | dict[str, Any] | list[Any]


@dataclass(slots=True)
class ColumnReader:
    """Reads columns with the options of the caller.

    Attributes:
        nulls: the policy for nulls.
        lists: what lists of numbers become.
        times: what times become.
        categories: what dictionary columns become.
        copy: True copies; None views what can be written; False views all that has the form of a leaf.
        shapes: shapes of columns by key path, which the schema says in the way of another program.
        mapped: the memory of a mapped file, which can be written.
    """

    nulls: Nulls
    lists: str = "jagged"
    times: str = "values"
    categories: str = "values"
    copy: bool | None = None
    shapes: Mapping[Path, Shape] = field(default_factory=dict)
    mapped: torch.UntypedStorage | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r:.100}")
        if self.copy not in (None, True, False):
            raise TypeError(f"copy is None, True or False; got {self.copy!r:.100}")

    def read(self, array: pa.ChunkedArray, column: pa.Field, path: Path) -> Item:
        """Return what a column becomes; messages of errors have its key path."""
        try:
            return self._read(join_chunks(array), column, path)
        except FormatError as error:
            raise FormatError(f"column {show_column(path)}: {error}") from error

    def _read(self, array: pa.Array, column: pa.Field, path: Path) -> Item:
        facts = read_facts(column)
        if facts.get("kind") == "one":
            found = array.unique() if len(array) else array
            if len(found) == 1 and not found.null_count:
                return One(read_values(found, facts)[0])
        if facts.get("kind") in ("values", "one"):
            # The collection had None there, which the header says is a value.
            return RowValues(self.nulls.keep(path, read_values(array, facts), own=True))
        if facts.get("lists"):
            return self._read_parts(array, facts, path)
        shape, dense = self.shapes.get(path), None
        if has_extension(column):
            shape, dense = shape or find_shape(column), read_lance(column)
            array = get_extension(array, column)
        if shape is not None:
            return self._read_shaped(array, shape, path)
        dense = dense or find_dense(array.type, facts)
        if dense is not None:
            return self._read_dense(array, dense, path)
        return self._read_other(array, column, facts, path)

    def _read_other(self, array: pa.Array, column: pa.Field, facts: Facts, path: Path) -> Item:
        """Read a column that is not numbers in cells of one shape."""
        kind, types = array.type, pa.types
        if types.is_struct(kind):
            parts = zip(kind, array.flatten(), strict=True)
            return {each.name: self._read(part, each, (*path, each.name)) for each, part in parts}
        if types.is_dictionary(kind) and self.categories != "values":
            return self._read_codes(array, path)
        if types.is_run_end_encoded(kind):
            return self._read(pc.run_end_decode(array), pa.field(column.name, kind.value_type), path)
        if is_list(kind) and not types.is_fixed_size_list(kind) and self.lists != "values":
            dense = find_dense(kind.value_type, _keep_dtype(facts))
            if dense is not None and not read_facts(kind.value_field).get("kind"):
                return self._read_lists(array, dense, facts.get("jagged", 1), path)
        if self.times == "numbers" and types.is_temporal(kind) and not types.is_interval(kind):
            wide = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
            return self._fill(path, view_numbers(wide, torch.int64, self.copy), array)
        return RowValues(self.nulls.keep(path, read_values(array, facts)))

    def _fill(self, path: Path, leaf: Tensor, array: pa.Array) -> Tensor:
        """Return a leaf with numbers in place of the nulls of its array."""
        return self.nulls.fill(path, leaf, as_mask(array.is_valid())) if array.null_count else leaf

    def _read_dense(self, array: pa.Array, dense: Dense, path: Path) -> Tensor:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_fixed_size_binary(array.type):
            width = array.type.byte_width
            count, begin = len(array) * width // dense.stored.itemsize, array.offset * width
            flat = view_buffer(array.buffers()[1], dense.stored, count, begin, self.copy, self.mapped)
            return self._fill(path, convert(flat, dense), array)
        valid = _find_valid(array, dense)
        numbers, _ = peel(array)
        plain = self.copy is False and valid is None and len(numbers) and dense.stored != torch.bool
        if plain and not numbers.buffers()[1].is_mutable:  # torch has no tensors that cannot be written
            return StoredTensor(KeptSource(convert(torch.utils.dlpack.from_dlpack(numbers), dense)), mode="r")
        leaf = convert(view_numbers(numbers, dense.stored, self.copy, self.mapped), dense, len(array))
        return leaf if valid is None else self.nulls.fill(path, leaf, valid)

    def _read_codes(self, array: pa.Array, path: Path) -> Item:
        codes = array.indices
        leaf = view_numbers(codes, torch.from_numpy(np.empty(0, codes.type.to_pandas_dtype())).dtype, True)
        leaf = self._fill(path, leaf, codes)
        return (
            leaf
            if self.categories == "codes"
            else {"codes": leaf, "labels": read_values(array.dictionary, {})}
        )

    def _read_lists(self, array: pa.Array, dense: Dense, dim: int, path: Path) -> Item:
        lengths, inner, valid = split_lists(array)
        if valid is not None and self.nulls.check(path, valid, always=True) == "mask":
            self.nulls.masks[path] = torch.from_numpy(valid)
        nulls = Nulls(self.nulls.policies)
        values = self._for_items(nulls)._read_dense(inner, dense, path)
        item = self._arrange(path, values, lengths, dim)
        if path in nulls.masks:
            if path in self.nulls.masks:  # a mask of the items cannot tell a null list from an empty one
                row = int(self.nulls.masks[path].int().argmin())
                raise ValueError(
                    f"column {show_column(path)} has lists that are null, the first in row {row}, and "
                    'nulls in lists, and a mask holds one of the two: pass lists="values", or nulls="fill" for this key'
                )
            mask = self._arrange(path, nulls.masks[path], lengths, 1)
            self.nulls.masks[path] = mask.leaf if isinstance(mask, Padded) else mask
        return item

    def _for_items(self, nulls: Nulls) -> ColumnReader:
        """Return a reader of the items of lists, which are views or copies."""
        return replace(self, nulls=nulls, copy=self.copy or None)

    def _arrange(self, path: Path, values: Tensor, lengths: Ints, dim: int) -> Tensor | Padded:
        """Return the leaf of lists, in the form that the options say."""
        rows, sizes = len(lengths), values.shape[1:]
        even = not rows or bool((lengths == lengths[0]).all())
        if self.lists == "dense" or (self.lists == "auto" and even and rows):
            if not even:
                row = int((lengths != lengths[0]).argmax())
                raise ValueError(
                    f"column {show_column(path)}: the list of row {row} has {lengths[row]} items, that of row 0 has "
                    f'{lengths[0]}: pass lists="jagged" or lists="padded"'
                )
            return values.view(rows, int(lengths[0]) if rows else 0, *sizes)
        if self.lists == "padded":
            width = int(lengths.max()) if rows else 0
            leaf = values.new_zeros(rows, width, *sizes)
            leaf[torch.arange(width) < torch.from_numpy(lengths)[:, None]] = values
            return Padded(leaf, torch.from_numpy(lengths))
        if not rows:  # torch has no jagged tensor without rows
            return values.view(0, 0, *sizes)
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
        return torch.nested.nested_tensor_from_jagged(values.movedim(0, dim - 1), offsets, jagged_dim=dim)

    def _read_shaped(self, array: pa.Array, shape: Shape, path: Path) -> Item:
        """Read lists of lists whose sizes the schema says, except maybe the first one."""
        lengths, rows = None, len(array)
        for number, size in enumerate(shape):
            if not is_list(array.type):
                break
            counts, array, valid = split_lists(array)
            if number == 0 and valid is not None and not valid.all():
                self.nulls.check(path, valid, always=True)
                raise FormatError("it has cells that are null: leave it out with keys=")
            if number == 0 and size is None:
                lengths = counts
            elif size is not None and bool((counts != size).any()):
                raise FormatError(
                    f"its schema says cells of the shape {list(shape)}, and a list has another size"
                )
        flat = self._read_items(array, {}, Nulls(self.nulls.policies), path)
        sizes = [-1 if size is None else size for size in shape]
        if lengths is None:
            return flat.view(rows, *sizes)
        return self._arrange(path, flat.view(-1, *sizes[1:]), lengths, 1)

    def _read_items(self, array: pa.Array, facts: Facts, nulls: Nulls, path: Path) -> Tensor:
        """Read the numbers in lists of lists."""
        dense = find_dense(array.type, facts)
        if dense is None:
            raise FormatError(f"its items have the type {array.type}, which is not a number")
        return self._for_items(nulls)._read_dense(array, dense, path)

    def _read_parts(self, array: pa.Array, facts: Facts, path: Path) -> Item:
        """Read lists of lists that are tensors of several shapes: a list of a tensor, or None, for each row."""
        present = as_mask(array.is_valid()).tolist()
        counts = [1] * len(array)
        shapes: list[list[int]] = [[] for _ in counts]
        for _ in range(facts["lists"]):
            if not is_list(array.type):
                raise FormatError(f"its header says lists of lists, and it has the type {array.type}")
            lengths, array, _ = split_lists(array)
            ends = np.cumsum(counts)
            for row, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
                sizes = lengths[end - count : end]
                if len({*sizes.tolist()}) > 1:
                    raise FormatError(f"the lists in row {row} have several lengths, so they are no tensor")
                shapes[row].append(int(sizes[0]) if count else 0)
                counts[row] = int(sizes.sum())
        flat = self._read_items(array, _keep_dtype(facts), self.nulls, path)
        pieces = zip(flat.split(counts), shapes, present, strict=True)
        return Parts([piece.view(*shape, *flat.shape[1:]) if here else None for piece, shape, here in pieces])


def _keep_dtype(facts: Facts) -> Facts:
    return {key: item for key, item in facts.items() if key == "dtype"}


def _find_valid(array: pa.Array, dense: Dense) -> Bools | None:
    """Return a mask of the rows, or of the elements if single ones are null; None without nulls."""
    numbers, levels = peel(array)
    inner = numbers.is_valid() if numbers.null_count else None
    if inner is None and all(level is None for level in levels[1:]):
        return as_mask(levels[0]) if levels and levels[0] is not None else None
    sizes = dense.stored_shape
    valid: Bools = np.ones((len(array), *sizes), bool)
    for number, level in enumerate([*levels, inner]):
        if level is not None:
            mask = as_mask(level).reshape(len(array), *sizes[:number])
            valid &= mask.reshape(*mask.shape, *[1] * (valid.ndim - mask.ndim))
    if len(dense.shape) < len(sizes):  # pairs of numbers
        valid = np.all(valid, -1)
    if levels and levels[0] is not None and bool(valid[as_mask(levels[0])].all()):
        return as_mask(levels[0])  # what is in a null has no meaning
    if dense.order is not None:
        valid = valid.transpose(0, *(1 + place for place in dense.order))
    return valid


def as_mask(valid: pa.Array | Bools) -> Bools:
    """Return a bool array of Arrow as one of numpy."""
    found: Bools = valid if isinstance(valid, np.ndarray) else valid.to_numpy(zero_copy_only=False)
    return found


def split_lists(array: pa.Array) -> tuple[Ints, pa.Array, Bools | None]:
    """Return the length of each list, the items of all, and which lists are not null, or None if all are."""
    valid = as_mask(array.is_valid()) if array.null_count else None
    if pa.types.is_fixed_size_list(array.type) and valid is None:
        size = array.type.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return np.full(len(array), size, np.int64), items, None
    lengths = pc.list_value_length(array)
    counts = as_mask(lengths.fill_null(0) if lengths.null_count else lengths).astype(np.int64)
    if valid is None and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        start = array.offsets[0].as_py() if len(array) else 0
        return counts, array.values.slice(start, int(counts.sum())), None
    return counts, array.flatten(), valid


def join_chunks(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array; a view if it is one."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    if array.num_chunks == 0:
        return pa.array([], array.type)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        # Offsets of 32 bits may not reach the end of all chunks.
        array = array.cast(pa.large_string() if pa.types.is_string(kind) else pa.large_binary())
    if isinstance(kind, pa.BaseExtensionType):
        storage = pa.chunked_array([chunk.storage for chunk in array.chunks], kind.storage_type)
        return pa.ExtensionArray.from_storage(kind, join_chunks(storage))
    if pa.types.is_dictionary(kind):
        array = array.unify_dictionaries()
    return pa.concat_arrays(array.chunks)


def find_form(column: pa.Field, path: Path, shapes: Mapping[Path, Shape]) -> Dense | None:
    """Return the form of a column of numbers whose cells have one shape, from its field alone; None for others."""
    facts = read_facts(column)
    if facts.get("kind") or facts.get("lists") or facts.get("absent") or path in shapes:
        return None
    if has_extension(column) and (find_shape(column) or read_lance(column)):
        return None if find_shape(column) else read_lance(column)
    return find_dense(column.type, facts)
