"""Tensors as Arrow arrays, and back: dtypes, cells with dims, and views of buffers without a copy.

A row of a tensor is a *cell*. Its dims are nested fixed-size lists, whose fields are not nullable, one extension type, or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from td_core.errors import CodecError, FormatError
from td_core.spi import STORABLE, check_whole
from td_store.arrays import as_storable, restore, view_mapped

#: The Arrow type of each dtype that Arrow has.
ARROW = {
    torch.bool: pa.bool_(), torch.uint8: pa.uint8(), torch.uint16: pa.uint16(), torch.uint32: pa.uint32(),
    torch.uint64: pa.uint64(), torch.int8: pa.int8(), torch.int16: pa.int16(), torch.int32: pa.int32(),
    torch.int64: pa.int64(), torch.float16: pa.float16(), torch.float32: pa.float32(), torch.float64: pa.float64(),
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in ARROW.items()}
#: What ``tensors=`` can be; ``"auto"`` is bytes for cells of more elements than :data:`_MOST_LISTED`.
CHOICES = ("list", "extension", "binary", "auto")
_MOST_LISTED = 1024
#: The extension types of Arrow that hold a tensor of one shape, or tensors of one number of dims.
FIXED, VARIABLE = "arrow.fixed_shape_tensor", "arrow.variable_shape_tensor"


#: The numbers of the types of lists.
_LISTS = {
    kind.id
    for kind in (
        pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1), pa.list_view(pa.null()),
        pa.large_list_view(pa.null()),
    )
}  # fmt: skip


def is_list(kind: pa.DataType) -> bool:
    """Return True for a type of lists; False for maps."""
    return kind.id in _LISTS


#: What a field says in addition to its type, as JSON.
Facts = dict[str, Any]
#: Which rows or elements are not null.
Valid = Tensor | npt.NDArray[np.bool_] | None


class Cells(NamedTuple):
    """A column of tensors: its array, and what its field says in addition to its type."""

    array: pa.Array
    facts: Facts


class Dense(NamedTuple):
    """The cells of a column whose type fixes their shape: dtype and shape of the leaf, and how they are stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: torch.dtype
    stored_shape: tuple[int, ...]
    order: tuple[int, ...] | None = None


def split_type(kind: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the sizes of nested lists of a fixed size, and the type of what is in them."""
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes), kind


def list_type(inner: pa.DataType, size: int = -1) -> pa.DataType:
    """Return the type of lists of a type, whose items cannot be null: of a fixed size, or large."""
    field = pa.field("item", inner, nullable=False)
    return pa.large_list(field) if size < 0 else pa.list_(field, size)


def make_bitmap(valid: Valid) -> pa.Buffer | None:
    """Return the buffer of bits of a boolean tensor or array; None for None and if all are True."""
    if valid is None or bool(valid.all()):
        return None
    return pa.array(np.asarray(valid), pa.bool_()).buffers()[1]


def make_cells(tensor: Tensor, choice: str = "list", *, valid: Valid = None, elements: Valid = None) -> Cells:
    """Return the rows of a dense tensor as a column, a view where Arrow can have its memory; the masks are False for nulls."""
    shape = tuple(tensor.shape[1:])
    facts: Facts = {}
    stored = as_storable(tensor, ARROW)
    if stored.dtype != tensor.dtype:
        facts["dtype"] = str(tensor.dtype).removeprefix("torch.")
    sizes, kind = tuple(stored.shape[1:]), ARROW[stored.dtype]
    count = math.prod(sizes)
    if choice == "auto":
        choice = "binary" if count > _MOST_LISTED else "list"
    if not sizes or elements is not None:
        choice = "list"
    buffer = None if stored.dtype == torch.bool else pa.py_buffer(stored.numpy().reshape(-1))
    if choice == "binary":
        facts = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(shape)}
        if buffer is None:
            buffer = pa.py_buffer(stored.numpy().reshape(-1).view(np.uint8))
        width = count * stored.dtype.itemsize
        return Cells(
            pa.Array.from_buffers(pa.binary(width), len(stored), [make_bitmap(valid), buffer]), facts
        )
    bits = make_bitmap(elements if sizes else valid)
    number = stored.numel()
    if buffer is None:
        buffer = pa.array(stored.numpy().reshape(-1)).buffers()[1]
    array = pa.Array.from_buffers(kind, number, [bits, buffer])
    if choice == "extension":
        storage = pa.Array.from_buffers(
            pa.list_(kind, count), len(stored), [make_bitmap(valid)], children=[array]
        )
        return Cells(pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind, sizes), storage), facts)
    nullable = bits is not None
    for dim in range(len(sizes) - 1, -1, -1):
        field = pa.field("item", array.type, nullable=nullable)
        mask, nullable = make_bitmap(valid) if dim == 0 else None, False
        number = len(stored) * math.prod(sizes[:dim])
        array = pa.Array.from_buffers(pa.list_(field, sizes[dim]), number, [mask], children=[array])
    return Cells(array, facts)


def make_lists(offsets: npt.NDArray[np.int64], inner: pa.Array, valid: Valid = None) -> pa.Array:
    """Return large lists of consecutive items, given the offset of each and of the end."""
    buffers = [make_bitmap(valid), pa.py_buffer(np.ascontiguousarray(offsets, np.int64))]
    field = pa.field("item", inner.type, nullable=inner.null_count > 0)
    return pa.Array.from_buffers(pa.large_list(field), len(offsets) - 1, buffers, children=[inner])


def make_ragged(parts: Sequence[Tensor | None]) -> Cells | None:
    """Return tensors of one dtype and number of dims as lists of lists; None for those that lists cannot hold."""
    present = [part for part in parts if part is not None]
    shapes = [tuple(part.shape) for part in present]
    uneven = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    last = max(uneven, default=0)
    # An empty list has no items that would show the sizes of the dims behind.
    if any(0 in shape[:last] for shape in shapes) or 0 in shapes[0][last + 1 :]:
        return None
    flat = [part.reshape(-1, *part.shape[last + 1 :]) for part in present]
    cells = make_cells(torch.cat(flat))
    array, valid = cells.array, np.array([part is not None for part in parts])
    for dim in range(last, -1, -1):
        if dim:
            lengths = np.concatenate([np.full(math.prod(shape[:dim]), shape[dim]) for shape in shapes])
        else:
            lengths = np.zeros(len(parts), np.int64)
            lengths[valid] = [shape[0] for shape in shapes]
        array = make_lists(np.concatenate([[0], lengths.cumsum()]), array, None if dim else valid)
    return Cells(array, {**cells.facts, "lists": last + 1})


def find_dense(kind: pa.DataType, facts: Facts) -> Dense | None:
    """Return the form of cells of one shape that a type and the facts of its field describe; None for other columns."""
    order = None
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name != FIXED:
            return None
        stored, shape = DTYPES.get(kind.value_type), tuple(kind.shape)
        if kind.permutation is not None:
            order = None if list(kind.permutation) == sorted(kind.permutation) else tuple(kind.permutation)
    elif pa.types.is_fixed_size_binary(kind):
        if "shape" not in facts:
            return None
        dtype, shape = _get_dtype(facts), tuple(facts["shape"])
        stored, pair = _get_stored(dtype)
        stored_shape = (*shape, *pair)
        if math.prod(stored_shape) * stored.itemsize != kind.byte_width:
            raise FormatError(
                f"its cells have {kind.byte_width} bytes, and the header says {dtype} {list(shape)}"
            )
        return Dense(dtype, shape, stored, stored_shape)
    else:
        shape, inner = split_type(kind)
        stored = DTYPES.get(inner)
    if stored is None:
        return None
    dtype = _get_dtype(facts) if "dtype" in facts else stored
    wanted, pair = _get_stored(dtype)
    if wanted != stored or (pair and shape[-1:] != (2,)):
        return Dense(stored, shape, stored, shape, order)  # another program has changed the column
    return Dense(dtype, shape[:-1] if pair else shape, stored, shape, order)


def _get_dtype(facts: Facts) -> torch.dtype:
    name = f"torch.{facts.get('dtype')}"
    if name not in STORABLE:
        raise FormatError(f"its header has the dtype {name!r:.100}, which this torch lacks")
    return STORABLE[name]


def _get_stored(dtype: torch.dtype) -> tuple[torch.dtype, tuple[int, ...]]:
    if dtype in ARROW:
        return dtype, ()
    stored = as_storable(torch.empty(1, dtype=dtype), ARROW)
    return stored.dtype, tuple(stored.shape[1:])


def convert(flat: Tensor, dense: Dense, rows: int = -1) -> Tensor:
    """Return the leaf of the elements of a column, as they are stored; ``rows`` are those of cells without elements."""
    sizes = tuple(dense.stored_shape)
    tensor = flat.view(rows, *sizes) if sizes else flat
    if dense.order is not None:
        # The permutation is the order of logical dims in the stored shape.
        tensor = tensor.permute(0, *(1 + place for place in dense.order))
    if dense.dtype == dense.stored:
        return tensor
    return restore({"tensor": "", "dtype": str(dense.dtype)}, lambda name: tensor)


def view_numbers(
    array: pa.Array, dtype: torch.dtype, copy: bool | None = None, mapped: torch.UntypedStorage | None = None
) -> Tensor:
    """Return the numbers of an array as a tensor; a view if its memory can be written, or is in a mapped file."""
    size = len(array)
    if not size:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        values = array.fill_null(False) if array.null_count else array
        return torch.from_numpy(values.to_numpy(zero_copy_only=False))
    return view_buffer(array.buffers()[1], dtype, size, array.offset * dtype.itemsize, copy, mapped)


def view_buffer(
    buffer: pa.Buffer,
    dtype: torch.dtype,
    size: int,
    begin: int,
    copy: bool | None = None,
    mapped: torch.UntypedStorage | None = None,
) -> Tensor:
    """Return numbers of a buffer as a tensor; other arguments as for :func:`view_numbers`."""
    if not size:
        return torch.empty(0, dtype=dtype)
    if mapped is not None and copy is not True and is_inside(buffer, mapped):
        return view_mapped(mapped, dtype, [size], buffer.address - mapped.data_ptr() + begin)
    aligned = (buffer.address + begin) % dtype.itemsize == 0
    if aligned and copy is not True and buffer.is_mutable:
        return torch.frombuffer(buffer, dtype=dtype, count=size, offset=begin)
    raw = np.frombuffer(buffer, np.uint8, size * dtype.itemsize, begin)
    return torch.from_numpy(raw.copy()).view(dtype)


def is_inside(buffer: pa.Buffer, mapped: torch.UntypedStorage) -> bool:
    """Return True if a buffer of Arrow is a part of a mapped file, not a decompressed copy."""
    begin: int = mapped.data_ptr()
    return bool(begin <= buffer.address and buffer.address + buffer.size <= begin + mapped.nbytes())


def without_views(array: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a chunked array whose text and bytes are no views, as those of polars are: Arrow compares and takes none."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        plain = _find_plain(kind.value_type)
        if plain is None:
            return array
        chunks = [
            pa.DictionaryArray.from_arrays(chunk.indices, _cast_views(chunk.dictionary, plain))
            for chunk in array.chunks
        ]
        return pa.chunked_array(chunks, pa.dictionary(kind.index_type, plain))
    plain = _find_plain(kind)
    return array if plain is None else pa.chunked_array([_cast_views(c, plain) for c in array.chunks], plain)


def _cast_views(array: pa.Array, plain: pa.DataType) -> pa.Array:
    try:
        return array.cast(plain)
    except pa.ArrowNotImplementedError:  # pyarrow 16
        return pa.array(array.to_pylist(), plain)


def _find_plain(kind: pa.DataType) -> pa.DataType | None:
    """Return the type without views; None for one that has none."""
    if is_list(kind):
        plain = _find_plain(kind.value_type)
        if plain is None:
            return None
        return pa.list_(plain, kind.list_size) if pa.types.is_fixed_size_list(kind) else pa.large_list(plain)
    return _PLAIN.get(kind.id)


_PLAIN = {pa.string_view().id: pa.large_string(), pa.binary_view().id: pa.large_binary()}


def peel(array: pa.Array) -> tuple[pa.Array, list[pa.Array | None]]:
    """Return the flat items of nested fixed-size lists, and for each level which lists are valid, or None if all are."""
    levels = []
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        levels.append(array.is_valid() if array.null_count else None)
        array = array.values.slice(array.offset * size, len(array) * size)
    return array, levels


def check_storable(leaf: Tensor) -> None:
    """Raise CodecError for a leaf that no table can hold."""
    check_whole(leaf)
    if leaf.device.type == "meta":
        raise CodecError("a tensor on the device 'meta' has no elements to save")
    if leaf.is_quantized:
        raise CodecError(
            f"a quantized tensor ({leaf.dtype}) cannot be saved: save int_repr(), scale and zero point"
        )
    if leaf.layout not in (torch.strided, torch.jagged):
        raise CodecError(
            f"a tensor with the layout {leaf.layout} cannot be saved: convert it with to_dense()"
        )
