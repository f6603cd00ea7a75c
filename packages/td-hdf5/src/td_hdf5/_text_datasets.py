"""Datasets of strings, as h5py and tensordict write them: variable-length UTF-8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import h5py
import numpy as np

from td_core.errors import FormatError
from td_store.arrays import StoredText, TextColumn, check_text

from ._datasets import choose_chunks, find_elsewhere, get_file_number
from ._h5_files import H5_ERRORS, show_error

if TYPE_CHECKING:
    import numpy.typing as npt

#: Attribute by which tensordict reads a dataset as a stack of values, with the shape of the batch.
STACK = "__tensordict_stack__"
#: Bytes that a dataset has for each string: its length and address.
_ADDRESS = 16


def write_text_dataset(
    parent: h5py.h5g.GroupID, name: str, column: TextColumn, options: Mapping[str, object]
) -> None:
    """Write a text column as a new dataset of a group. It has no filters, which HDF5 would apply to addresses of strings."""
    how: dict[str, object] = {}
    if any(options.values()):  # the first dim of a dataset with chunks can grow
        chunks = choose_chunks(column.shape, _ADDRESS, options.get("chunks") or True)
        how = {"chunks": chunks, "maxshape": (None, *column.shape[1:])}
    dataset = h5py.Group(parent).create_dataset(
        name,
        data=_as_array(column.strings, column.shape),
        dtype=h5py.string_dtype(),
        track_times=False,
        **how,
    )
    dataset.attrs[STACK] = list(column.shape)
    for dim, label in enumerate(column.batch_names):
        if label is not None:
            h5py.h5ds.set_label(dataset.id, dim, label.encode())


def read_text_dataset(file: object, text: StoredText, path: str) -> list[str]:
    """Return the strings of a dataset, one after the other; FormatError if it is missing, damaged or not of strings."""
    dataset = _open_dataset(file, text.name, path)
    check_text(text, dataset.shape, path)
    try:
        found: list[str] = dataset.asstr(errors="surrogateescape")[()].reshape(-1).tolist()
    except H5_ERRORS as error:
        raise FormatError(f"{path}: the dataset {text.name!r} is damaged: {show_error(error)}") from error
    return found


def _open_dataset(file: object, name: str, path: str) -> h5py.Dataset:
    try:
        dataset = h5py.Dataset(h5py.h5d.open(file, name.encode()))
        why = find_elsewhere(dataset.id, get_file_number(file))
        if h5py.check_string_dtype(dataset.dtype) is None:
            why = f"it has the dtype {dataset.dtype}; its header has strings"
    except H5_ERRORS as error:
        raise FormatError(
            f"{path}: the dataset {name!r} is missing or damaged: {show_error(error)}"
        ) from error
    if why is not None:
        raise FormatError(f"{path}: the dataset {name!r} is not read: {why}")
    return dataset


class TextChanges:
    """The strings that one change writes into the datasets of a file, until it ends or is undone."""

    def __init__(self, file: object, path: str) -> None:
        self.file, self.path = file, path
        self._old: list[tuple[h5py.Dataset, list[str]]] = []

    def write(self, name: str, column: TextColumn) -> None:
        """Write the elements of a dataset that differ from those of a column of its shape."""
        dataset = _open_dataset(self.file, name, self.path)
        old = read_text_dataset(self.file, StoredText(name, column.shape), self.path)
        self._old.append((dataset, old))
        _write_changed(dataset, old, column.strings)

    def undo(self) -> None:
        """Write the old strings again."""
        for dataset, old in self._old:
            dataset[...] = _as_array(old, dataset.shape)


def _write_changed(dataset: h5py.Dataset, old: Sequence[str], new: Sequence[str]) -> None:
    """Write the elements that differ; all of them if these are many, since each write of one has its own cost."""
    changed = [position for position, (left, right) in enumerate(zip(old, new, strict=True)) if left != right]
    if len(changed) > len(new) // 8 + 1:
        dataset[...] = _as_array(new, dataset.shape)
        return
    for position in changed:
        dataset[np.unravel_index(position, dataset.shape)] = new[position]


def _as_array(strings: Sequence[str], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    array = np.empty(len(strings), dtype=object)
    array[:] = strings
    return array.reshape(shape)
