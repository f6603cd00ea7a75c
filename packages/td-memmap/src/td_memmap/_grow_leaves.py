"""Where new rows go in the files of a save: those of plain leaves, of jagged tensors, and of values by rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from td_core import kinds
from td_core.errors import CodecError
from td_core.spi import JaggedParts, Node, show_path

from . import _file_names, _fs
from ._errors import AppendError
from ._fs import DirectoryTree, Parts
from ._meta import LeafEntry
from ._plan import JsonObject, KeyPath, Plan, encode_node
from ._value_rows import SLOT, RowEncoder, list_row_files


@dataclass(slots=True)
class Growth:
    """Elements to add to a file.

    Attributes:
        place: path of the file.
        key: key path, for messages.
        tensor: the elements to add.
        start: the byte at which they are written; what follows there is no part of the save.
    """

    place: Parts
    key: KeyPath
    tensor: Tensor
    start: int

    @property
    def nbytes(self) -> int:
        """Number of bytes to add."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def has_file(self) -> bool:
        """Whether the file exists afterwards: a leaf without elements has none."""
        return bool(self.start or self.nbytes or _file_names.is_row_file(self.place[-1]))


class LeafGrowth:
    """The new rows of a leaf, and its metadata with them; raises AppendError if they do not fit."""

    def __init__(self, tree: DirectoryTree, place: Parts, key: KeyPath, entry: LeafEntry) -> None:
        self.tree, self.place, self.key, self.entry = tree, place, key, entry

    def list_files(self, leaf: Tensor, meta: JsonObject) -> list[Growth]:
        """Return what to add to the files of the leaf; change its metadata."""
        entry = self.entry
        if entry.jagged is not None:
            return self._grow_jagged(leaf, entry.jagged, meta)
        if entry.nested or leaf.is_nested:
            raise self._make_error(
                "nested tensors cannot grow, but for saved ones with the layout torch.jagged"
            )
        if leaf.dtype != entry.dtype or leaf.shape[1:] != entry.shape[1:]:
            raise self._make_error(
                f"it has the shape {list(entry.shape)} of {entry.dtype}, the rows have {list(leaf.shape)} of {leaf.dtype}"
            )
        meta["shape"][0] += leaf.shape[0]
        return [self._add(".memmap", leaf, entry.nbytes)]

    def _add(self, ending: str, tensor: Tensor, start: int) -> Growth:
        return Growth((*self.place, self.entry.files[0] + ending), self.key, tensor, start)

    def _grow_jagged(self, leaf: Tensor, known: JsonObject, meta: JsonObject) -> list[Growth]:
        entry, ragged = self.entry, known["ragged"]
        if leaf.layout is not torch.jagged:
            raise self._make_error(f"it is a jagged tensor, the rows have {_show_layout(leaf)} there")
        dim, values, lengths = _compact(leaf)
        fixed = [list(entry.shape), list(values.shape)]
        for shape in fixed:
            del shape[ragged - 1 : ragged]
        if dim != ragged or leaf.dtype != entry.dtype or fixed[0] != fixed[1]:
            raise self._make_error(
                f"it is a jagged tensor of {entry.dtype} with the ragged dim {ragged} and the other sizes {fixed[0]}, the "
                f"rows have {leaf.dtype}, the dim {dim} and {fixed[1]}"
            )
        if ragged != 1:
            raise self._make_error(
                f"only jagged tensors whose ragged dim is 1 can grow, that of this one is {ragged}; load the save, join it "
                "with the rows, and save that"
            )
        offsets_type = torch.int32 if known["offsets_dtype"] == "torch.int32" else torch.int64
        count, size = known["components"], offsets_type.itemsize
        end = self._read_last_offset(count, offsets_type)
        offsets = end + lengths.cumsum(0)
        total = int(offsets[-1]) if len(offsets) else end
        if total > torch.iinfo(offsets_type).max:
            raise self._make_error(f"its offsets of {offsets_type} end before {total}")
        meta["shape"][0], meta["components"] = total, count + len(lengths)
        row = entry.shape[1:].numel() * entry.dtype.itemsize
        files = [
            self._add(".memmap", values, end * row),
            self._add(".offsets.memmap", offsets.to(offsets_type), (count + 1) * size),
        ]
        if known["lengths"]:
            files.append(self._add(".lengths.memmap", lengths.to(offsets_type), count * size))
        return files

    def _read_last_offset(self, count: int, dtype: torch.dtype) -> int:
        """Return the row of the values that follows the last component."""
        name = self.entry.files[0] + ".offsets.memmap"
        fd, _ = self.tree.open(self.place, name)
        with _fs.closing(fd):
            offsets = _fs.read_at(fd, dtype.itemsize, count * dtype.itemsize)
        end = int.from_bytes(offsets, sys.byteorder, signed=True)
        if len(offsets) < dtype.itemsize or not 0 <= end <= self.entry.shape[0]:
            raise self._make_error(
                f"its last offset is {end}, of {self.entry.shape[0]} rows; the save is damaged"
            )
        return end

    def _make_error(self, what: str) -> AppendError:
        return AppendError(f"cannot append to {show_path(self.key)}: {what}")


def _show_layout(leaf: Tensor) -> str:
    return "a nested tensor of strided layout" if leaf.is_nested else f"a tensor of shape {list(leaf.shape)}"


def _compact(leaf: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the ragged dim of a jagged tensor, its values without gaps, and the lengths of its components."""
    ragged, values, offsets, lengths, _ = JaggedParts.of(leaf)
    sizes = (offsets.diff() if lengths is None else lengths).cpu().to(torch.int64)
    if lengths is not None or int(offsets[0]) or int(offsets[-1]) != values.shape[ragged - 1]:
        starts = offsets[:-1].tolist()
        parts = [
            values.narrow(ragged - 1, start, size) for start, size in zip(starts, sizes.tolist(), strict=True)
        ]
        values = torch.cat([values.narrow(ragged - 1, 0, 0), *parts], ragged - 1)
    return ragged, values, sizes


def list_row_growth(
    tree: DirectoryTree, place: Parts, key: KeyPath, meta: JsonObject, given: Node, count: int
) -> list[Growth]:
    """Return what to add to ``count`` values by rows for those of ``given``; change the metadata. Raises AppendError."""
    described = meta["values"]["data"]
    slots_name, heap_name = list_row_files(described["rows"])
    heap = tree.stat_path((*place, heap_name))
    encoder = RowEncoder(0 if heap is None else heap.st_size)
    try:
        slots = encoder.add(_list_values(given), _list_separate(meta["meta"].get("joints"), given))
    except CodecError as error:
        raise AppendError(f"cannot append to {show_path(key)}: {error}") from error
    described["heap"] += len(encoder.records)
    meta["meta"]["batch_size"][0] += given.batch_size[0]
    records = torch.frombuffer(encoder.records or bytearray(1), dtype=torch.uint8)[: len(encoder.records)]
    return [
        Growth((*place, heap_name), key, records, 0 if heap is None else heap.st_size),
        Growth((*place, slots_name), key, torch.from_numpy(slots.view("i8")), count * SLOT),
    ]


def _list_values(node: Node) -> list[object]:
    """Return one value for each element of a node of values, in C order of the batch."""
    values = node.tolist()
    for _ in node.batch_size[1:]:
        values = [item for row in values for item in row]
    return list(values)


def _list_separate(joints: JsonObject | None, given: Node) -> list[bool] | None:
    """Return for each value to add whether it is not the one value of a node, if the saved values have ``joints``."""
    if joints is None:
        return None
    record, count = kinds.of(given).record_of(given), given.batch_size.numel()
    own = record.meta.get("joints")
    if own is None:  # one value for all elements, or one for each of them
        return ["stack_dim" in encode_node(given).meta] * count
    ones = own["ones"] if own["dims"] == joints["dims"] else [False] * count
    return None if ones is None else [not one for one in ones]


def find_leaves(plan: Plan) -> dict[KeyPath, Tensor]:
    """Return the leaves of planned rows by key path."""
    jagged = {files["values"]: leaf for leaf, files, _ in plan.jagged}
    return {file.key: jagged.get(file, file.tensor) for file in plan.leaves if file.leaf is not None}
