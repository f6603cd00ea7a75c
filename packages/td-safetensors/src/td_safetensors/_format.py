"""The safetensors file: eight bytes of length, a JSON header, and the bytes of the tensors without gaps.

This module is independent of collections. It lists the dtypes, reads and checks headers, and builds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from td_core import spi
from td_core.errors import FormatError
from td_store.arrays import read_shape

#: The largest header that the format allows.
MAX_HEADER = 100_000_000
#: The data of a new file begins at a multiple of this.
ALIGNMENT = 64
_CHECK_LINE = len(spi.add_check_line(b""))

#: The dtypes of torch by their name in the format. Names of torch that this release lacks are skipped.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
        "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64",
        "I64": "int64", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
        "F4": "float4_e2m1fn_x2",
    }.items()
    if hasattr(torch, dtype)
}  # fmt: skip
#: The names in the format by dtype.
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Array(NamedTuple):
    """One tensor of a file: its dtype, its shape in torch, and the bytes that it occupies after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors by name, its metadata, and the position of the first byte of data."""

    arrays: dict[str, Array]
    metadata: dict[str, str]
    start: int


def read_header(read: Callable[[int, int], bytes], size: int, path: str) -> Header:
    """Read the header of a file, and compare the tensors that it lists with the size of the file.

    Args:
        read: returns bytes of the file; takes their number and the position of the first one.
        size: size of the file.
        path: path of the file, for messages.

    Raises:
        FormatError: the file is truncated or damaged, or is not a safetensors file.
    """
    length = int.from_bytes(read(8, 0), "little") if size >= 8 else 0
    if size < 8 or length > MAX_HEADER:
        found = f"it has {size} bytes" if size < 8 else f"its header would have {length} bytes"
        raise FormatError(f"{path} is not a safetensors file, or is damaged: {found}")
    if size < 8 + length:
        raise FormatError(f"{path} is truncated: it has {size} bytes, its header alone needs {8 + length}")
    try:
        text = read(length, 8)
        text.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: its header is not UTF-8: {error}") from error
    rows = spi.parse_json(text, f"{path}: its header")
    if not isinstance(rows, dict):
        raise FormatError(f"{path}: its header is not a JSON object; got {type(rows).__name__}")
    metadata = rows.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ of its header is not a mapping of strings")
    arrays = {name: _parse_row(name, row, path) for name, row in rows.items()}
    end = _check_ranges(arrays, path)
    if size != 8 + length + end:
        problem = "truncated" if size < 8 + length + end else "too long"
        raise FormatError(
            f"{path} is {problem}: it has {size} bytes, its header describes {8 + length + end}"
        )
    return Header(arrays, metadata, 8 + length)


def get_dtype(name: str, array: Array) -> torch.dtype:
    """Return the stored dtype of a tensor; raise FormatError if this torch lacks it."""
    if array.dtype not in DTYPES:
        raise FormatError(
            f"the tensor {name!r} has the dtype {array.dtype!r}, which this torch does not have"
        )
    return DTYPES[array.dtype]


def _parse_row(name: str, row: Any, path: str) -> Array:
    try:
        dtype, shape, (begin, end) = row["dtype"], row["shape"], row["data_offsets"]
        for number in (*shape, begin, end):
            if type(number) is not int or number < 0:
                raise ValueError("a size or position is not a natural number")
        if begin == end:  # otherwise the elements take as many bytes
            read_shape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: the row of the tensor {name!r} is damaged, {row!r:.200}: {error!r}"
        ) from error
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        return Array(str(dtype), tuple(shape), begin, end)
    if dtype == "F4":  # two elements in a byte: torch counts bytes
        if not shape or shape[-1] % 2:
            raise FormatError(f"{path}: the tensor {name!r} of dtype F4 has the odd shape {shape}")
        shape = [*shape[:-1], shape[-1] // 2]
    needed = math.prod(shape) * known.itemsize
    if end - begin != needed:
        raise FormatError(
            f"{path}: the tensor {name!r} of dtype {dtype} and shape {shape} needs {needed} bytes; "
            f"its header gives {end - begin}"
        )
    return Array(dtype, tuple(shape), begin, end)


def _check_ranges(arrays: Mapping[str, Array], path: str) -> int:
    """Check that the tensors lie one after the other without gaps, and return the end of the last one."""
    position = 0
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].end)):
        if array.begin != position or array.end < position:
            raise FormatError(
                f"{path}: the tensor {name!r} is at {array.begin} to {array.end}; expected its begin at {position}"
            )
        position = array.end
    return position


def build_header(arrays: Iterable[tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
    """Build the length and header of a file, padded so that data begins at a multiple of 64; FormatError if too large."""
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, array in arrays:
        shape = list(array.shape)
        if array.dtype == "F4":
            shape[-1] *= 2
        rows[name] = {"dtype": array.dtype, "shape": shape, "data_offsets": [array.begin, array.end]}
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + _CHECK_LINE + 8) % ALIGNMENT)
    text = spi.add_check_line(text)
    if len(text) > MAX_HEADER:
        raise FormatError(
            f"the header needs {len(text)} bytes, the format allows {MAX_HEADER}: store fewer or shorter keys and values"
        )
    return len(text).to_bytes(8, "little") + text
