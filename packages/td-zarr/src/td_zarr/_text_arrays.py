"""Arrays of strings: the dtype ``string`` of Zarr, with the codec ``vlen-utf8``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from td_core.errors import FormatError
from td_store.arrays import StoredText, TextColumn, check_text

from ._array_documents import ArrayInfo
from ._array_engines import open_array, wait_for_all
from ._zarr_objects import Objects


def write_texts(objects: Objects, texts: Iterable[tuple[ArrayInfo, TextColumn]]) -> None:
    """Write text columns as whole arrays, several at the same time."""
    opened = [(open_array(objects, info, strict=False), column) for info, column in texts]
    wait_for_all([array.write_all(_as_array(column)) for array, column in opened])


def write_text_rows(objects: Objects, info: ArrayInfo, column: TextColumn, begin: int, end: int) -> None:
    """Write some rows of a text column into its array."""
    if begin < end:
        index = slice(begin, end), *(slice(0, size) for size in column.shape[1:])
        open_array(objects, info, strict=False).write(index, _as_array(column)[index])


def write_changed_rows(objects: Objects, info: ArrayInfo, column: TextColumn) -> None:
    """Write the rows of a text column that differ from those of its array, and those between them."""
    text = StoredText(info.name, column.shape)
    old = read_text(objects, {info.name: info}, text, strict=False)
    changed = [i for i, (left, right) in enumerate(zip(old, column.strings, strict=True)) if left != right]
    row = len(column.strings) // column.shape[0]
    if changed:
        write_text_rows(objects, info, column, changed[0] // row, changed[-1] // row + 1)


def read_text(
    objects: Objects, arrays: Mapping[str, ArrayInfo], text: StoredText, *, strict: bool
) -> list[str]:
    """Return the strings of a text column, one after the other; FormatError if its array is damaged, or has no strings."""
    info = arrays[text.name]
    check_text(text, info.shape, objects.where)
    if info.document.get("data_type") != "string":
        raise FormatError(
            f"{objects.where}: the array {text.name!r} has the dtype {info.document.get('data_type')!r:.100}; its header "
            "has strings"
        )
    (found,) = wait_for_all([open_array(objects, info, strict=strict).read()])
    strings: list[str] = found.reshape(-1).tolist()
    return strings


def _as_array(column: TextColumn) -> np.ndarray[Any, Any]:
    array = np.empty(len(column.strings), dtype=object)
    array[:] = column.strings
    return array.reshape(column.shape)
