"""Columns of MDS, the format of mosaicml-streaming: their encodings, the bytes of their cells, and the way back."""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from td_core.errors import CodecError, FormatError

#: The dtype of each encoding of numbers.
SCALARS = {
    name: np.dtype(name)
    for name in (
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    )
}  # fmt: skip
SCALARS["int"] = np.dtype("int64")
#: Codes of the dtype of an array whose column does not say it, as the library numbers them.
_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32", 64: "uint64",
    65: "int64", 66: "float64",
}  # fmt: skip
_SHAPE_DTYPES = ("uint8", "uint16", "uint32", "uint64")
#: Encodings whose cells stay bytes.
BYTES = ("bytes", "jpeg", "png", "pil")
_ARRAY = re.compile(r"ndarray(?::(\w+)(?::(\d+(?:,\d+)*))?)?\Z")


Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]


class Arrays(NamedTuple):
    """Dtype and shape of the arrays of a column, as far as its encoding says them."""

    dtype: np.dtype[np.number[Any]] | None
    shape: tuple[int, ...] | None


def parse_arrays(encoding: str) -> Arrays | None:
    """Return what an encoding says about arrays; None for another encoding."""
    match = _ARRAY.match(encoding)
    if match is None or (match[1] is not None and match[1] not in SCALARS):
        return None
    shape = None if match[2] is None else tuple(map(int, match[2].split(",")))
    if shape is not None and 0 in shape:
        return None
    return Arrays(None if match[1] is None else SCALARS[match[1]], shape)


def find_size(encoding: str) -> int | None:
    """Return the number of bytes of each cell of an encoding, or None if they differ."""
    if encoding in SCALARS:
        return SCALARS[encoding].itemsize
    arrays = parse_arrays(encoding)
    if arrays is None or arrays.dtype is None or arrays.shape is None:
        return None
    return int(np.prod(arrays.shape)) * arrays.dtype.itemsize


def is_known(encoding: str) -> bool:
    """Return True for an encoding that is read and written; ``pkl`` is none, since a pickle can run any code."""
    known = ("str", "json", "str_int", "str_float", "str_decimal", *BYTES)
    return encoding in SCALARS or encoding in known or parse_arrays(encoding) is not None


def encode_cells(encoding: str, cells: Any) -> Bytes | list[bytes]:
    """Return the bytes of the cells of a column: a matrix if all have one size, else a list. Other cells are errors."""
    if encoding in SCALARS:
        return _view_bytes(np.asarray(cells).astype(SCALARS[encoding], casting="same_kind"))
    arrays = parse_arrays(encoding)
    if arrays is not None:
        return _encode_arrays(arrays, cells)
    if encoding in BYTES:
        return [bytes(cell) for cell in cells]
    if encoding == "json":
        return [json.dumps(_as_plain(cell)).encode() for cell in cells]
    return [str(_as_plain(cell)).encode() for cell in cells]


def _as_plain(cell: object) -> object:
    return cell.tolist() if isinstance(cell, (np.ndarray, np.generic)) else cell


def _view_bytes(array: Numbers) -> Bytes:
    """Return the bytes of each row of an array, in the byte order of the format."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    size = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return little.reshape(len(array), -1).view(np.uint8).reshape(len(array), size)


def _encode_arrays(arrays: Arrays, cells: Any) -> Bytes | list[bytes]:
    if arrays.dtype is not None and arrays.shape is not None:
        stacked = np.asarray(cells)
        if stacked.shape[1:] != arrays.shape or stacked.dtype != arrays.dtype:
            raise ValueError(f"cells have the shape {stacked.shape[1:]} and the dtype {stacked.dtype}")
        return _view_bytes(stacked)
    result = []
    for row, cell in enumerate(cells):
        array = np.asarray(cell)
        if not array.size:
            raise CodecError(f"row {row}: its cell has no elements, which MDS cannot hold")
        if arrays.dtype is not None and array.dtype != arrays.dtype:
            raise ValueError(f"row {row}: its cell has the dtype {array.dtype}")
        head = b""
        if arrays.dtype is None:
            head = bytes([next(code for code, name in _CODES.items() if name == array.dtype.name)])
        if arrays.shape is None:
            code = next(i for i, name in enumerate(_SHAPE_DTYPES) if max(array.shape) <= np.iinfo(name).max)
            sizes = np.array(array.shape, np.dtype(_SHAPE_DTYPES[code]).newbyteorder("<"))
            head += bytes([array.ndim << 2 | code]) + sizes.tobytes()
        result.append(head + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return result


def decode_cells(encoding: str, cells: Any) -> Any:
    """Return cells from a matrix or list of bytes: an array if all have one dtype and shape, else a list."""
    try:
        if encoding in SCALARS:
            return _join_bytes(cells, SCALARS[encoding], ())
        arrays = parse_arrays(encoding)
        if arrays is not None:
            if arrays.dtype is not None and arrays.shape is not None:
                return _join_bytes(cells, arrays.dtype, arrays.shape)
            return [_decode_array(arrays, bytes(cell)) for cell in cells]
        if encoding in BYTES:
            return [bytes(cell) for cell in cells]
        texts = [bytes(cell).decode() for cell in cells]
        if encoding == "str":
            return texts
        if encoding == "str_decimal":
            return [decimal.Decimal(text) for text in texts]
        parse: Any = {"json": json.loads, "str_int": int, "str_float": float}[encoding]
        return [parse(text) for text in texts]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise FormatError(
            f"its cells are not what the encoding {encoding!r} says: {type(error).__name__}"
        ) from error


def _join_bytes(cells: Bytes | Sequence[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Numbers:
    raw = cells if isinstance(cells, np.ndarray) else np.frombuffer(b"".join(cells), np.uint8)
    array = np.frombuffer(np.ascontiguousarray(raw).tobytes(), dtype.newbyteorder("<"))
    return array.reshape(len(cells), *shape).astype(dtype)


def _decode_array(arrays: Arrays, cell: bytes) -> Numbers:
    dtype, shape, begin = arrays.dtype, arrays.shape, 0
    if dtype is None:
        dtype, begin = np.dtype(_CODES[cell[0]]), 1
    if shape is None:
        count, code = cell[begin] >> 2, cell[begin] & 3
        sizes = np.dtype(_SHAPE_DTYPES[code]).newbyteorder("<")
        end = begin + 1 + count * sizes.itemsize
        shape, begin = tuple(np.frombuffer(cell[begin + 1 : end], sizes).tolist()), end
    return np.frombuffer(cell[begin:], dtype.newbyteorder("<")).reshape(shape).astype(dtype)
