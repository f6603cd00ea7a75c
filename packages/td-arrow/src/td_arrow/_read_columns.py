"""Columns of a table as leaves, values of rows, or levels: by their Arrow type, and what their field says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from td_core.errors import FormatError

from ._arrow_types import Dense, convert, find_dense, peel, view_buffer, view_numbers
from ._dialects import find_shape, get_extension, read_lance
from ._nulls import Nulls, Path, show_column
from ._row_values import read_values
from ._table_header import read_facts

LISTS = ("jagged", "dense", "padded", "values", "auto")
TIMES = ("values", "numbers")
CATEGORIES = ("values", "codes", "labels")


class RowValues(NamedTuple):
    """The values of rows."""

    values: list[Any]


class Padded(NamedTuple):
    """Lists as a dense leaf, and the length of each."""

    leaf: Tensor
    lengths: Tensor


#: What a column becomes; a dict is a level.
Item = Any


@dataclass(slots=True)
class ColumnReader:
    """Reads columns with the options of the caller.

    Attributes:
        nulls: the policy for nulls.
        lists: what lists of numbers become.
        times: what times become.
        categories: what dictionary columns become.
        copy: True copies; None views what can be written; False views all that has the form of a leaf.
        make_view: makes the leaf of numbers that cannot be written, if ``copy`` is False.
        shapes: shapes of columns by key path, which the schema says in the way of another program.
        mapped: the memory of a mapped file, which can be written.
    """

    nulls: Nulls
    lists: str = "jagged"
    times: str = "values"
    categories: str = "values"
    copy: bool | None = None
    make_view: Callable[[Any, Dense], Tensor] | None = None
    shapes: Mapping[Path, tuple[Any, ...]] = field(default_factory=dict)
    mapped: torch.UntypedStorage | None = None

    def __post_init__(self) -> None:
        for name, choices in (("lists", LISTS), ("times", TIMES), ("categories", CATEGORIES)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r:.100}")

    def read(self, array: Any, column: Any, path: Path) -> Item:
        """Return a leaf, :class:`RowValues`, :class:`Padded` or a level.

        Raises:
            FormatError: the column cannot be read; the message has its key path.
            ValueError: it has nulls, or lists of several lengths, which the options refuse.
        """
        try:
            return self._read(join_chunks(array), column, path)
        except FormatError as error:
            raise FormatError(f"column {show_column(path)}: {error}") from error

    def _read(self, array: Any, column: Any, path: Path) -> Item:
        facts = read_facts(column)
        if facts.get("kind") in ("values", "one"):
            # The collection had None there, which the header says is a value.
            return RowValues(self.nulls.keep(path, read_values(array, facts), own=True))
        if facts.get("lists"):
            return self._read_parts(array, facts, path)
        shape = self.shapes.get(path) or find_shape(column)
        array = get_extension(array, column)
        if shape is not None:
            return self._read_shaped(array, shape, path)
        dense = read_lance(column) or find_dense(array.type, facts)
        if dense is not None:
            return self._read_dense(array, dense, path)
        return self._choose(array.type)(array, column, facts, path)

    def _choose(self, kind: Any) -> Callable[[Any, Any, dict[str, Any], Path], Item]:
        """Return the function that reads columns of a type."""
        types = pa.types
        if types.is_struct(kind):
            return self._read_struct
        if types.is_dictionary(kind) and self.categories != "values":
            return self._read_codes
        if types.is_run_end_encoded(kind):
            return self._read_run_ends
        if is_list(kind) and not types.is_fixed_size_list(kind):
            return self._read_lists
        if types.is_temporal(kind) and self.times == "numbers" and not types.is_interval(kind):
            return self._read_times
        return self._read_values

    def _read_values(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        return RowValues(self.nulls.keep(path, read_values(array, facts)))

    def _read_run_ends(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        return self._read(pc.run_end_decode(array), pa.field(column.name, array.type.value_type), path)

    def _read_dense(self, array: Any, dense: Dense, path: Path) -> Tensor:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        valid = None
        if pa.types.is_fixed_size_binary(array.type):
            width = array.type.byte_width
            count = len(array) * width // dense.stored.itemsize
            flat = view_buffer(
                array.buffers()[1], dense.stored, count, array.offset * width, self.copy, self.mapped
            )
            valid = array.is_valid() if array.null_count else None
        else:
            valid = self._find_valid(array, dense)
            numbers, _ = peel(array)
            if self.copy is False and self.make_view is not None and valid is None:
                return self.make_view(numbers, dense)
            flat = view_numbers(numbers, dense.stored, self.copy, self.mapped)
        leaf = convert(flat, dense)
        return leaf if valid is None else self.nulls.fill(path, leaf, _as_mask(valid))

    def _find_valid(self, array: Any, dense: Dense) -> Any:
        """Return a mask of the rows, or of the elements if single ones are null; None without nulls."""
        numbers, levels = peel(array)
        inner = numbers.is_valid() if numbers.null_count else None
        if inner is None and all(level is None for level in levels[1:]):
            return levels[0] if levels else None
        sizes = dense.stored_shape
        valid: Any = np.ones((len(array), *sizes), bool)
        for number, level in enumerate([*levels, inner]):
            if level is not None:
                mask = _as_mask(level).reshape(len(array), *sizes[:number])
                valid &= mask.reshape(*mask.shape, *[1] * (valid.ndim - mask.ndim))
        if len(dense.shape) < len(sizes):  # pairs of numbers
            valid = valid.all(-1)
        if levels and levels[0] is not None and bool(valid[_as_mask(levels[0])].all()):
            return levels[0]  # what is in a null has no meaning
        if dense.order is not None:
            valid = valid.transpose(0, *(1 + place for place in dense.order))
        return valid

    def _read_struct(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        fields = [array.type.field(i) for i in range(array.type.num_fields)]
        return {
            each.name: self._read(part, each, (*path, each.name))
            for each, part in zip(fields, array.flatten(), strict=True)
        }

    def _read_codes(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        codes = array.indices
        valid = _as_mask(codes.is_valid()) if codes.null_count else None
        leaf = view_numbers(codes, torch.from_numpy(np.empty(0, codes.type.to_pandas_dtype())).dtype, True)
        if valid is not None:
            leaf = self.nulls.fill(path, leaf, valid)
        if self.categories == "codes":
            return leaf
        labels = read_values(array.dictionary, {})
        return {"codes": leaf, "labels": labels}

    def _read_times(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        valid = _as_mask(array.is_valid()) if array.null_count else None
        wide = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64()).cast(pa.int64())
        leaf = view_numbers(wide, torch.int64, self.copy)
        return leaf if valid is None else self.nulls.fill(path, leaf, valid)

    def _read_lists(self, array: Any, column: Any, facts: dict[str, Any], path: Path) -> Item:
        inner_field = array.type.value_field
        if get_extension(array, column) is not array or pa.types.is_map(array.type):
            return self._read_values(array, column, facts, path)
        dense = find_dense(array.type.value_type, {key: facts[key] for key in ("dtype",) if key in facts})
        if dense is None or self.lists == "values" or read_facts(inner_field).get("kind"):
            return self._read_values(array, column, facts, path)
        lengths, inner, valid = split_lists(array)
        if valid is not None and self.nulls.check(path, valid, always=True) == "mask":
            self.nulls.masks[path] = torch.from_numpy(valid)
        nulls = Nulls(self.nulls.policies)
        values = ColumnReader(nulls, copy=self.copy, mapped=self.mapped)._read_dense(inner, dense, path)
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
        item = self._arrange(path, values, lengths, offsets, facts.get("jagged", 1))
        if path in nulls.masks:
            mask = self._arrange(path, nulls.masks[path], lengths, offsets, 1)
            self.nulls.masks[path] = mask.leaf if isinstance(mask, Padded) else mask
        return item

    def _arrange(self, path: Path, values: Tensor, lengths: Any, offsets: Tensor, dim: int) -> Item:
        """Return the leaf of lists, in the form that the options say."""
        even = not len(lengths) or bool((lengths == lengths[0]).all())
        if self.lists == "dense" or (self.lists == "auto" and even and len(lengths)):
            if not even:
                row = int((lengths != lengths[0]).argmax())
                raise ValueError(
                    f"column {show_column(path)}: the list of row {row} has {lengths[row]} items, that of row 0 has "
                    f'{lengths[0]}: pass lists="jagged" or lists="padded"'
                )
            size = int(lengths[0]) if len(lengths) else 0
            return values.view(len(lengths), size, *values.shape[1:])
        if self.lists == "padded":
            width = int(lengths.max()) if len(lengths) else 0
            leaf = values.new_zeros(len(lengths), width, *values.shape[1:])
            leaf[torch.arange(width) < torch.from_numpy(lengths)[:, None]] = values
            return Padded(leaf, torch.from_numpy(lengths))
        # torch has no jagged tensor without rows.
        if not len(lengths):
            return values.view(0, 0, *values.shape[1:])
        return torch.nested.nested_tensor_from_jagged(values.movedim(0, dim - 1), offsets, jagged_dim=dim)

    def _read_shaped(self, array: Any, shape: tuple[Any, ...], path: Path) -> Item:
        """Read lists of lists whose sizes the schema says, except maybe the first one."""
        lengths, valid = None, None
        rows = len(array)
        for number, size in enumerate(shape):
            if not is_list(array.type):
                break
            counts, array, present = split_lists(array)
            valid = present if number == 0 else valid
            if number == 0 and size is None:
                lengths = counts
            elif size is not None and bool(
                (counts[counts > 0] != size).any() if number == 0 else (counts != size).any()
            ):
                raise FormatError(
                    f"its schema says cells of the shape {list(shape)}, and a list has another size"
                )
        if valid is not None and not bool(valid.all()):
            self.nulls.check(path, valid, always=True)
            raise FormatError("it has cells that are null: leave it out with keys=")
        dense = find_dense(array.type, {})
        if dense is None:
            raise FormatError(f"its items have the type {array.type}, which is not a number")
        flat = ColumnReader(Nulls(self.nulls.policies), copy=self.copy)._read_dense(array, dense, path)
        if lengths is None:
            return flat.view(rows, *shape)
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
        return self._arrange(path, flat.view(-1, *shape[1:]), lengths, offsets, 1)

    def _read_parts(self, array: Any, facts: dict[str, Any], path: Path) -> Item:
        """Read lists of lists that are tensors of several shapes: a list of a tensor, or None, for each row."""
        levels, valid = [], None
        for number in range(facts["lists"]):
            if not is_list(array.type):
                raise FormatError(f"its header says lists of lists, and it has the type {array.type}")
            lengths, array, present = split_lists(array)
            valid = present if number == 0 else valid
            levels.append(lengths)
        dense = find_dense(array.type, {key: item for key, item in facts.items() if key == "dtype"})
        if dense is None:
            raise FormatError(f"its items have the type {array.type}, which is not a number")
        flat = ColumnReader(self.nulls, copy=self.copy)._read_dense(array, dense, path)
        counts = [1] * len(levels[0])
        shapes: list[list[int]] = [[] for _ in counts]
        for lengths in levels:
            ends = np.cumsum(counts)
            for row, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
                sizes = lengths[end - count : end]
                if len({*sizes.tolist()}) > 1:
                    raise FormatError(f"the lists in row {row} have several lengths, so they are no tensor")
                shapes[row].append(int(sizes[0]) if count else 0)
                counts[row] = int(sizes.sum())
        pieces = flat.split(counts)
        parts = [piece.view(*shape, *flat.shape[1:]) for piece, shape in zip(pieces, shapes, strict=True)]
        present = [True] * len(parts) if valid is None else valid.tolist()
        return Parts([part if here else None for part, here in zip(parts, present, strict=True)])


class Parts(NamedTuple):
    """Tensors of several shapes, one for each row; None where the row is null."""

    tensors: list[Tensor | None]


def is_list(kind: Any) -> bool:
    """Return True for a type of lists; False for maps."""
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _as_mask(valid: Any) -> Any:
    return valid if isinstance(valid, np.ndarray) else valid.to_numpy(zero_copy_only=False)


def split_lists(array: Any) -> tuple[Any, Any, Any]:
    """Return the length of each list, the items of all, and which lists are not null, or None if all are."""
    valid = _as_mask(array.is_valid()) if array.null_count else None
    if pa.types.is_fixed_size_list(array.type) and valid is None:
        size = array.type.list_size
        return (
            np.full(len(array), size, np.int64),
            array.values.slice(array.offset * size, len(array) * size),
            None,
        )
    lengths = pc.list_value_length(array)
    counts = _as_mask(lengths.fill_null(0) if lengths.null_count else lengths).astype(np.int64)
    if valid is None and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        start = array.offsets[0].as_py() if len(array) else 0
        return counts, array.values.slice(start, int(counts.sum())), None
    return counts, array.flatten(), valid


def join_chunks(array: Any) -> Any:
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


def find_form(column: Any, path: Path, shapes: Mapping[Path, Any]) -> Dense | None:
    """Return the form of a column of numbers whose cells have one shape, from its field alone; None for others."""
    facts = read_facts(column)
    if facts.get("kind") or facts.get("lists") or facts.get("absent") or path in shapes or find_shape(column):
        return None
    return read_lance(column) or find_dense(column.type, facts)
