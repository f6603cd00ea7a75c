"""Read the groups and datasets of a file without a header of td: files of tensordict and of other programs.

A group is a nested collection, a dataset of numbers a leaf, one with fields a nested collection of its fields, and text a
value. The batch size of a node has the dims that all of its leaves share.
"""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import STORABLE, Encoded, split_value
from td_store.arrays import TableBuilder, find_batch_sizes, get_most_nodes

from ._datasets import NATIVE, Array, describe, find_elsewhere, get_file_number
from ._h5_files import convert_errors, show_error

#: Attributes of tensordict: of a value for each row with its shape, and of a text.
_STACK = "__tensordict_stack__"
#: A group or a field takes at least this many bytes of a file, unless it is linked more than once.
_SMALLEST_NODE = 16
#: Attribute with the dtype of a leaf that HDF5 lacks.
_DTYPE = "td_dtype"
#: Whether text for each row is a stack of values, or the batch size that a caller has chosen for the file.
Stacks = bool | torch.Size


@dataclass(slots=True)
class Foreign:
    """The content of a file.

    Attributes:
        table: the encoded collection, with places as leaves. A row has the name of its ``group``, or None.
        arrays: dtype and shape of the datasets.
        others: names of links that belong to no leaf.
        loaded: arrays in memory, for datasets whose elements are fields.
    """

    table: Encoded
    arrays: dict[str, Array] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    loaded: dict[str, Tensor] = field(default_factory=dict)


def read_foreign(file: object, path: str, *, strict: bool | None, stacks: Stacks = True) -> Foreign:
    """Read what describes the groups and datasets of an open file.

    Args:
        file: the ``FileID``, or the ``GroupID`` of a group.
        path: path of the file, for messages.
        strict: True raises an error for what a collection cannot have, such as a dangling link; None leaves it out with a
            warning, False without.
        stacks: text for each row is a stack of values; False makes it one value, a list. A batch size has the rows of a file
            of text alone.

    Raises:
        FormatError: the file is damaged, or ``strict`` is True.
    """
    reader = _Reader(path, h5py.h5i.get_file_id(file).get_filesize(), strict, stacks)
    with convert_errors(f"{path}: it, or one of its groups,"):
        reader.read_group(file)
    return reader.finish()


def read_foreign_dataset(dataset: h5py.Dataset, path: str) -> Foreign:
    """Read what describes a dataset of an open file, as the entry ``data``; FormatError if a collection cannot have it."""
    reader = _Reader(path, 0, True, False)
    reader.name = dataset.name.strip("/")
    why = find_elsewhere(dataset.id, get_file_number(h5py.h5i.get_file_id(dataset.id)))
    if why is not None:
        reader.leave_out(reader.name, why)
    with convert_errors(f"{path}: the dataset {reader.name!r}"):
        reader.add_dataset(reader.add_row(-1, None, ""), "data", reader.name, dataset)
    return reader.finish()


class _Reader:
    """Builds the rows of a table, parents before children."""

    def __init__(self, path: str, nbytes: int, strict: bool | None, stacks: Stacks) -> None:
        self.path, self.strict, self.stacks = path, strict, stacks
        self.builder = TableBuilder(path, get_most_nodes(nbytes // _SMALLEST_NODE))
        self.result = Foreign(self.builder.table)
        self.name = ""
        self.home: object = None
        #: The shapes that determine the batch size of each row, and the position of the row above.
        self.shapes: list[list[tuple[int, ...]]] = []
        self.above: list[int] = []
        #: The addresses of groups by their row. A file can link a group many times, also below itself.
        self.addresses: dict[int, object] = {}
        #: Texts: position of their row, shape and elements.
        self.texts: list[tuple[int, tuple[int, ...], Any, bool]] = []

    def add_row(self, above: int, key: str | None, group: str | None) -> int:
        """Add the row of a node, and return its position."""
        position = self.builder.add_row("TensorDict", {"batch_size": []})
        self.builder.rows[position]["group"] = group
        if key is not None:
            self.builder.rows[above]["entries"].append([key, position])
        self.shapes.append([])
        self.above.append(above)
        return position

    def add_leaf(self, position: int, key: str, name: str, array: Array, place: object = None) -> None:
        self.result.arrays[name] = array
        self.add_place(position, key, name if place is None else place, array.shape)

    def add_place(self, position: int, key: str, place: object, shape: tuple[int, ...]) -> None:
        self.builder.rows[position]["entries"].append([key, self.builder.add_leaf(place)])
        self.shapes[position].append(shape)

    def read_group(self, file: object) -> None:
        """Read the groups of a file, parents first."""
        root = h5py.Group(h5py.h5g.open(file, b"."))
        self.home = get_file_number(root.id)
        todo = deque([(root, "", self.add_row(-1, None, ""))])
        self.addresses[0] = _get_address(root)
        while todo:
            group, above, position = todo.popleft()
            for key in group:
                self.name = name = f"{above}/{key}" if above else key
                item = self._open_link(group, key)
                if isinstance(item, h5py.Dataset):
                    self.add_dataset(position, key, name, item)
                elif isinstance(item, h5py.Group):
                    address = _get_address(item)
                    if self._is_within(position, address):
                        self.leave_out(name, "it is a group that contains itself")
                    else:
                        row = self.add_row(position, key, name)
                        self.addresses[row] = address
                        todo.append((item, name, row))
                elif item is not None:
                    self.leave_out(name, f"it is a {type(item).__name__.lower()}")

    def _is_within(self, position: int, address: object) -> bool:
        """Return True if a row, or one above it, is that of the group with an address."""
        while position >= 0 and self.addresses.get(position) != address:
            position = self.above[position]
        return position >= 0

    def _open_link(self, group: h5py.Group, key: str) -> object:
        link = group.get(key, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            self.leave_out(self.name, f"it is a link to another file, {link.filename!r}")
            return None
        try:
            item = group[key]
        except KeyError as error:
            if isinstance(link, h5py.SoftLink):
                self.leave_out(self.name, f"it is a link to {link.path!r}, which does not exist")
                return None
            raise FormatError(f"{self.path}: {'/' + self.name!r} is damaged: {show_error(error)}") from error
        if isinstance(item, h5py.Dataset):
            elsewhere = find_elsewhere(item.id, self.home)
        else:
            elsewhere = (
                None if get_file_number(item.id) == self.home else "a link leads to it in another file"
            )
        if elsewhere is not None:
            self.leave_out(self.name, elsewhere)
        return item if elsewhere is None else None

    def leave_out(self, name: str, why: str) -> None:
        """Leave out a link with a warning, or raise an error, as ``strict`` says."""
        self.result.others.append(name)
        message = f"{self.path}: {'/' + name!r} is not a part of the collection: {why}"
        if self.strict:
            raise FormatError(message)
        if self.strict is None:
            warnings.warn(f"{message}; strict=False leaves it out without a warning", stacklevel=2)

    def add_dataset(self, position: int, key: str, name: str, dataset: h5py.Dataset) -> None:
        """Add a dataset as a leaf, a value or a node."""
        dtype = dataset.dtype
        if dataset.shape is None:
            self.leave_out(name, "it has no elements and no shape")
        elif h5py.check_string_dtype(dtype) is not None or _is_opaque(dtype):
            self._add_text(position, key, dataset)
        elif _is_ragged(dataset):
            self._add_ragged(position, key, name, dataset)
        elif h5py.check_vlen_dtype(dtype) is not None:
            self.leave_out(
                name, "h5py does not convert its vectors: they are in several dims, or of another byte order"
            )
        elif dtype.names is not None:
            self._add_fields(position, key, name, dataset)
        elif dtype.subdtype is not None or dtype.newbyteorder("=") not in set(NATIVE.values()):
            self.leave_out(name, f"torch has no dtype for {dtype}")
        else:
            self._add_numbers(position, key, name, dataset)

    def _add_numbers(self, position: int, key: str, name: str, dataset: h5py.Dataset) -> None:
        array = describe(dataset.id, name, self.path)
        leaf, place = dataset.attrs.get(_DTYPE), None
        leaf = leaf.decode(errors="replace") if isinstance(leaf, bytes) else leaf
        if isinstance(leaf, str) and f"torch.{leaf}" in STORABLE:
            place = {"tensor": name, "dtype": f"torch.{leaf}"}
        self.add_leaf(position, key, name, array, place)

    def _add_ragged(self, position: int, key: str, name: str, dataset: h5py.Dataset) -> None:
        """Add a dataset of vectors of different lengths as a jagged tensor, whose elements are read now."""
        rows = dataset[()]
        values = np.concatenate([np.zeros(0, h5py.check_vlen_dtype(dataset.dtype)), *rows])
        offsets = np.cumsum([0, *map(len, rows)])
        parts = {"values": torch.from_numpy(values), "offsets": torch.from_numpy(offsets)}
        names = {part: f"{name}#{part}" for part in parts}
        for part, array in parts.items():
            self.result.loaded[names[part]] = array
            self.result.arrays[names[part]] = Array(array.dtype, tuple(array.shape))
        self.add_place(position, key, {"jagged": names, "dim": 1}, dataset.shape)
        self.result.others.append(name)

    def _add_text(self, position: int, key: str, dataset: h5py.Dataset) -> None:
        self.result.others.append(self.name)
        text = h5py.check_string_dtype(dataset.dtype) is not None
        content = dataset.asstr(errors="surrogateescape")[()] if text else dataset[()]
        plain = content.tolist() if isinstance(content, (np.ndarray, np.generic)) else content
        self.texts.append((self.add_row(position, key, None), dataset.shape, plain, _STACK in dataset.attrs))

    def _add_fields(self, position: int, key: str, name: str, dataset: h5py.Dataset) -> None:
        row = self.add_row(position, key, None)
        self.result.others.append(name)
        content = dataset[()]
        for part in content.dtype.names:
            values = np.ascontiguousarray(content[part])
            numpy = values.dtype.newbyteorder("=")
            if numpy not in set(NATIVE.values()):
                self.leave_out(f"{name}.{part}", f"torch has no dtype for {values.dtype}")
                continue
            tensor = torch.from_numpy(values.astype(numpy).copy())
            self.result.loaded[f"{name}.{part}"] = tensor
            self.add_leaf(row, part, f"{name}.{part}", Array(tensor.dtype, tuple(tensor.shape)))

    def finish(self) -> Foreign:
        """Set the batch sizes of the nodes, and add the values."""
        sizes = self._find_sizes()
        for row, size in zip(self.builder.rows, sizes, strict=True):
            row["meta"]["batch_size"] = list(size)
        for position, shape, content, is_stack in self.texts:
            above = list(sizes[self.above[position]])
            # A value for each row has the batch size as the beginning of its shape.
            stacked = is_stack or (
                self.stacks is not False and len(above) > 0 and list(shape[: len(above)]) == above
            )
            kind = "NonTensorStack" if stacked else "NonTensorData"
            self.builder.set_value(position, kind, shape if is_stack else above, split_value(content))
        return self.result

    def _find_sizes(self) -> list[tuple[int, ...]]:
        """Find the batch size of each row; text that has the rows of a level counts as a leaf of it."""
        sizes = find_batch_sizes(self.shapes, self.above)
        wanted = () if isinstance(self.stacks, bool) else tuple(self.stacks)
        found = False
        for position, shape, _, is_stack in self.texts:
            above = self.above[position]
            rows = (sizes[above] or wanted)[:1]
            if self.stacks is not False and not is_stack and rows and shape[:1] == rows:
                self.shapes[above].append(shape)
                found = True
        return find_batch_sizes(self.shapes, self.above) if found else sizes


def _is_ragged(dataset: h5py.Dataset) -> bool:
    """Return True for a vector of vectors of numbers, each of its own length, in the byte order of this machine."""
    base = h5py.check_vlen_dtype(dataset.dtype)
    return base is not None and len(dataset.shape) == 1 and base in set(NATIVE.values())


def _is_opaque(dtype: np.dtype[Any]) -> bool:
    """Return True for the dtype under which tensordict stores numbers that are values."""
    return bool(dtype.metadata and dtype.metadata.get("h5py_opaque"))


def _get_address(group: h5py.Group) -> object:
    info = h5py.h5o.get_info(group.id)
    return info.fileno, info.addr
