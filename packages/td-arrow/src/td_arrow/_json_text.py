"""The JSON text of the cells of a column, made by Arrow for all rows at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from td_core.errors import CodecError
from td_core.spi import STORABLE

from ._read_columns import is_list, split_lists

#: What NaN and infinity become: NaN is null, and infinity an error; JSON of Python; or null.
NONFINITE = ("raise", "literal", "null")
_LITERALS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_TEXT = pa.large_string()


class InfiniteError(ValueError):
    """A number is infinite; ``position`` is that of its row."""

    def __init__(self, position: int) -> None:
        super().__init__("it is infinite, which JSON cannot hold")
        self.position = position


def write_cells(array: Any, dtype: str | None = None, nonfinite: str = "raise") -> Any:
    """Return an array with the JSON text of each cell, ``null`` for nulls.

    Args:
        array: an array of Arrow.
        dtype: dtype of the numbers, if the array has integers in their place.
        nonfinite: one of :data:`NONFINITE`.

    Raises:
        CodecError: JSON cannot hold the type.
        InfiniteError: a number is infinite, and ``nonfinite`` refuses that.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if isinstance(array, pa.ExtensionArray):
        return write_cells(array.storage, dtype, nonfinite)
    if is_list(kind):
        return _fill(_write_lists(array, dtype, nonfinite), array)
    if pa.types.is_struct(kind):
        return _fill(_write_levels(array, nonfinite), array)
    if pa.types.is_integer(kind) and dtype is not None:
        array = view_floats(array, dtype)
        kind = array.type
    if pa.types.is_floating(kind):
        return _write_floats(array, nonfinite)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        raise CodecError("bytes are not text: encode them first")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _fill(_quote(array.cast(_TEXT)), array)
    if pa.types.is_null(kind):
        return pa.repeat(pa.scalar("null", _TEXT), len(array))
    if pa.types.is_duration(kind):
        array = array.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return _fill(_quote(array.cast(pa.string()).cast(_TEXT)), array)
    return _fill(array.cast(pa.string()).cast(_TEXT), array)


def view_floats(array: Any, dtype: str) -> Any:
    """Return the numbers that integers of their width stand for, as float32."""
    kind = STORABLE[f"torch.{dtype}"]
    numbers = torch.from_numpy(np.array(array.fill_null(0).to_numpy(zero_copy_only=False)))
    floats = numbers.view(kind).to(torch.float32).numpy()
    return pa.array(floats, mask=array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None)


def _fill(text: Any, array: Any) -> Any:
    """Return the text of an array with ``null`` for its nulls."""
    return pc.if_else(array.is_valid(), text, pa.scalar("null", _TEXT)) if array.null_count else text


def write_numbers(array: Any) -> Any:
    """Return the shortest text of floats that is read as the same number, and as a float: ``1.0``, not ``1``."""
    if pa.types.is_float16(array.type):
        array = pa.array(array.to_numpy(zero_copy_only=False).astype("f4"), mask=_mask_nulls(array))
    text = array.cast(pa.string()).cast(_TEXT)
    if not pc.any(pc.equal(array, pc.trunc(array))).as_py():
        return text
    return pc.replace_substring_regex(text, r"^(-?\d+)$", r"\1.0")


def _mask_nulls(array: Any) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def _write_floats(array: Any, nonfinite: str) -> Any:
    text = write_numbers(array)
    if array.null_count < len(array) and not pc.all(pc.is_finite(array.cast(pa.float64()))).as_py():
        if nonfinite == "raise":
            infinite = pc.is_in(text, pa.array(["inf", "-inf"], _TEXT))
            if pc.any(infinite).as_py():
                raise InfiniteError(pc.index(infinite, True).as_py())
        for number, literal in _LITERALS.items():
            found = literal if nonfinite == "literal" else "null"
            text = pc.if_else(pc.equal(text, number), pa.scalar(found, _TEXT), text)
    return text.fill_null("null")


def _quote(text: Any) -> Any:
    """Return text in quotes, with what JSON escapes."""
    for character in ("\\", '"'):
        text = pc.replace_substring(text, character, "\\" + character)
    if pc.any(pc.match_substring_regex(text, "[\x00-\x1f]")).as_py():
        for code in range(32):
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    quote = pa.scalar('"', _TEXT)
    return pc.binary_join_element_wise(quote, text, quote, pa.scalar("", _TEXT))


def _write_lists(array: Any, dtype: str | None, nonfinite: str) -> Any:
    lengths, items, _ = split_lists(array)
    offsets = np.concatenate([[0], np.asarray(lengths).cumsum()]).astype(np.int64)
    try:
        text = write_cells(items, dtype, nonfinite)
    except InfiniteError as error:
        raise InfiniteError(int(np.searchsorted(offsets, error.position, "right")) - 1) from None
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), text)
    joined = pc.binary_join(lists, pa.scalar(", ", _TEXT))
    return pc.binary_join_element_wise(
        pa.scalar("[", _TEXT), joined, pa.scalar("]", _TEXT), pa.scalar("", _TEXT)
    )


def _write_levels(array: Any, nonfinite: str) -> Any:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    cells = [write_cells(part, None, nonfinite) for part in array.flatten()]
    return join_fields(names, cells, len(array))


def join_fields(names: list[str], cells: list[Any], rows: int) -> Any:
    """Return the text of an object for each row, of the names and the text of its fields."""
    pieces: list[Any] = []
    for name, text in zip(names, cells, strict=True):
        pieces += [
            pa.scalar(f"{', ' if pieces else '{'}{json.dumps(name, ensure_ascii=False)}: ", _TEXT),
            text,
        ]
    if not pieces:
        return pa.repeat(pa.scalar("{}", _TEXT), rows)
    return pc.binary_join_element_wise(*pieces, pa.scalar("}", _TEXT), pa.scalar("", _TEXT))
