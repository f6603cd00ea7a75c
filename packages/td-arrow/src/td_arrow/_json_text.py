"""The JSON text of the cells of a column, made by Arrow for all rows at once."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from td_core.errors import CodecError

from ._arrow_types import is_list
from ._read_columns import as_mask, split_lists

#: What NaN and infinity become: NaN is null, and infinity an error; JSON of Python; or null.
NONFINITE = ("raise", "literal", "null")
_LITERALS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_TEXT = pa.large_string()


class InfiniteError(ValueError):
    """A number is infinite; ``position`` is that of its row."""

    def __init__(self, position: int) -> None:
        super().__init__("it is infinite, which JSON cannot hold")
        self.position = position


def write_cells(array: pa.Array, dtype: torch.dtype | None = None, nonfinite: str = "raise") -> pa.Array:
    """Return the JSON text of each cell, ``null`` for nulls. ``dtype`` is that of the numbers, if integers stand for them."""
    types = pa.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if dtype is not None and types.is_integer(array.type):
        array = view_floats(array, dtype)
    if types.is_floating(array.type):
        return _write_floats(array, nonfinite)
    if types.is_null(array.type):
        return pa.repeat(pa.scalar("null", _TEXT), len(array))
    if is_list(array.type):
        text = _write_lists(array, dtype, nonfinite)
    elif types.is_struct(array.type):
        cells = [write_cells(part, None, nonfinite) for part in array.flatten()]
        text = join_fields([item.name for item in array.type], cells, len(array))
    else:
        text = _write_scalars(array)
    return pc.if_else(array.is_valid(), text, pa.scalar("null", _TEXT)) if array.null_count else text


def _write_scalars(array: pa.Array) -> pa.Array:
    types, kind = pa.types, array.type
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        raise CodecError("bytes are not text: encode them first")
    if types.is_duration(kind):
        array = array.cast(pa.int64())
    text = array.cast(_TEXT) if types.is_large_string(kind) else array.cast(pa.string()).cast(_TEXT)
    is_plain = types.is_integer(array.type) or types.is_boolean(kind)
    return text if is_plain else _quote(text)


def view_floats(array: pa.Array, dtype: torch.dtype) -> pa.Array:
    """Return the numbers that integers of their width stand for, as float32."""
    numbers = torch.from_numpy(np.array(array.fill_null(0).to_numpy(zero_copy_only=False)))
    return pa.array(numbers.view(dtype).to(torch.float32).numpy(), mask=_mask_nulls(array))


def _mask_nulls(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    return as_mask(array.is_null()) if array.null_count else None


def write_numbers(array: pa.Array) -> pa.Array:
    """Return the shortest text of floats that is read as the same number, and as a float: ``1.0``, not ``1``."""
    if pa.types.is_float16(array.type):
        array = pa.array(array.to_numpy(zero_copy_only=False).astype("f4"), mask=_mask_nulls(array))
    text = array.cast(pa.string()).cast(_TEXT)
    if not pc.any(pc.equal(array, pc.trunc(array))).as_py():
        return text
    return pc.replace_substring_regex(text, r"^(-?\d+)$", r"\1.0")


def _write_floats(array: pa.Array, nonfinite: str) -> pa.Array:
    text = write_numbers(array)
    if array.null_count < len(array) and not pc.all(pc.is_finite(array.cast(pa.float64()))).as_py():
        infinite = pc.is_in(text, pa.array(["inf", "-inf"], _TEXT))
        if nonfinite == "raise" and pc.any(infinite).as_py():
            raise InfiniteError(pc.index(infinite, True).as_py())
        for number, literal in _LITERALS.items():
            found = literal if nonfinite == "literal" else "null"
            text = pc.if_else(pc.equal(text, number), pa.scalar(found, _TEXT), text)
    return text.fill_null("null")


def _quote(text: pa.Array) -> pa.Array:
    """Return text in quotes, with what JSON escapes."""
    for character in ("\\", '"'):
        text = pc.replace_substring(text, character, "\\" + character)
    if pc.any(pc.match_substring_regex(text, "[\x00-\x1f]")).as_py():
        for code in range(32):
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return _concatenate('"', text, '"')


def _concatenate(*parts: str | pa.Array) -> pa.Array:
    """Return the text of each row, of arrays and of what all rows have."""
    pieces = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*pieces, pa.scalar("", _TEXT))


def _write_lists(array: pa.Array, dtype: torch.dtype | None, nonfinite: str) -> pa.Array:
    lengths, items, _ = split_lists(array)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    try:
        text = write_cells(items, dtype, nonfinite)
    except InfiniteError as error:
        raise InfiniteError(int(np.searchsorted(offsets, error.position, "right")) - 1) from None
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), text)
    return _concatenate("[", pc.binary_join(lists, pa.scalar(", ", _TEXT)), "]")


def join_fields(names: list[str], cells: list[pa.Array], rows: int) -> pa.Array:
    """Return the text of an object for each row, of the names and the text of its fields."""
    pieces: list[str | pa.Array] = []
    for name, text in zip(names, cells, strict=True):
        pieces += [f"{', ' if pieces else '{'}{json.dumps(name, ensure_ascii=False)}: ", text]
    return _concatenate(*pieces, "}") if pieces else pa.repeat(pa.scalar("{}", _TEXT), rows)
