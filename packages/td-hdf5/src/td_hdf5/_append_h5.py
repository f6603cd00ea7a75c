"""Add rows to a save: in place where its datasets can grow, else by a new file in its place."""

from __future__ import annotations

import os
from typing import Any

import h5py
import torch

from td_core import TensorCollection
from td_core.errors import KeyMismatchError, StructureError, UnsupportedOperationError
from td_core.spi import show_path
from td_store.arrays import as_storable, check_growing, join_rows, refuse_objects

from ._datasets import NATIVE, find_array, read_header, write_header, write_part
from ._h5_files import Location, StoreFile, find_filename, flush_file, has_path, open_path
from ._read_h5 import Save, load, open_save
from ._write_h5 import save, write_facts


def append(rows: TensorCollection, path: Location) -> None:
    """Add rows along the first batch dim of a save.

    Datasets with chunks grow in place; the header follows when the rows are written, so that a process that is killed before
    leaves the old rows. A save with other datasets, or with values or lazy stacks, is replaced by a new one with chunks.

    Args:
        rows: a collection with the keys, dtypes and shapes of the save, except for the first batch dim.
        path: the file, or an open ``h5py.File`` or ``h5py.Group``.

    Raises:
        StructureError: the rows do not have the structure of the save; it does not change.
        UnsupportedOperationError: the save has checksums, a strided nested tensor, or no batch dim, or td has not written it.

    >>> from td_hdf5 import load, save
    >>> td = TensorDict({"a": torch.arange(3)}, [3])
    >>> _ = save(td, "data.h5", chunks=True)
    >>> append(td[1:], "data.h5")
    >>> load("data.h5")["a"]
    tensor([0, 1, 2, 1, 2])
    """
    if isinstance(path, h5py.Group):
        leaves = _append(rows, path)
        if leaves is not None:
            _grow(path, path.id, leaves, rows.batch_size[0])
        return
    refuse_objects(path, "append to", "save() the rows to another location, or use the format 'zarr'")
    place = os.fspath(path)
    # Another process must not add rows between the read of the old ones and the write of all.
    with open_path(place, maps=True):
        leaves = _append(rows, place)
    if leaves is not None:
        with open_path(place, write=True) as file:
            leaves = _append(rows, place)  # the file can be another one now
            if leaves is not None:
                _grow(place, file, leaves, rows.batch_size[0])


def _append(rows: TensorCollection, path: Location) -> list[tuple[str, torch.Tensor]] | None:
    """Return the dataset and the new rows of each leaf; None after the save was replaced by one with the rows."""
    place = find_filename(path)
    with open_save(path) as found:
        if found.is_foreign:  # a new file in its place would lose its attributes and links
            raise UnsupportedOperationError(
                f"cannot append rows to {place}: td has not written it; save() the rows of both to another location"
            )
        check_growing(found.table, place)
    like = load(path, device="meta")
    with open_save(path) as found:
        if found.hashes is not None:
            raise UnsupportedOperationError(
                f"{place} has checksums, which new rows would contradict: save it without"
            )
        _check_structure(like, rows, place)
        home = path.id if isinstance(path, h5py.Group) else found.file
        has_header = read_header(home, place) is not None
        leaves = _list_growing(found, rows) if has_header else None
        options = {} if leaves else _read_options(found)
    if leaves is None:
        save(join_rows(load(path), rows), path, **options)
    return leaves


def _check_structure(like: TensorCollection, rows: TensorCollection, path: str) -> None:
    if not like.batch_size:
        raise UnsupportedOperationError(f"{path} has no batch dim along which rows can be added")
    ndim = len(like.batch_size)
    if len(rows.batch_size) != ndim or rows.batch_size[1:] != like.batch_size[1:]:
        raise StructureError(
            f"cannot append to {path}: the rows have the batch size {list(rows.batch_size)}, the save "
            f"{list(like.batch_size)}; only the first dim can differ"
        )
    expected, given = dict(like.items(True, True)), dict(rows.items(True, True))
    if expected.keys() != given.keys():
        missing, extra = (
            [key for key in expected if key not in given],
            [key for key in given if key not in expected],
        )
        raise KeyMismatchError(
            f"cannot append to {path}: the rows lack the keys {missing}, and have the other keys {extra}"
        )
    for key, leaf in expected.items():
        other = given[key]
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            _check_leaf(
                leaf,
                other,
                f"cannot append to {path}: {show_path(key if isinstance(key, tuple) else (key,))}",
            )


def _check_leaf(leaf: torch.Tensor, rows: torch.Tensor, what: str) -> None:
    """Raise StructureError unless rows have the layout, dtype and row shape of a saved leaf; ``what`` begins the message."""
    if leaf.layout != rows.layout or leaf.is_nested != rows.is_nested:
        raise StructureError(f"{what} has the layout {_name_layout(rows)}, in the save {_name_layout(leaf)}")
    if not leaf.is_nested and (rows.dtype != leaf.dtype or rows.shape[1:] != leaf.shape[1:]):
        raise StructureError(
            f"{what} has the dtype {rows.dtype} and rows of the shape {list(rows.shape[1:])}; "
            f"the save has {leaf.dtype} and {list(leaf.shape[1:])}"
        )


def _name_layout(leaf: torch.Tensor) -> str:
    return f"{leaf.layout}{' (nested)' * leaf.is_nested}"


def _list_growing(found: Save, rows: TensorCollection) -> list[tuple[str, torch.Tensor]] | None:
    """Return the dataset and the new rows of each leaf; None if the save must be written anew."""
    if any(
        row["kind"] != "TensorDict"
        or "class" in row
        or row["members"]
        or row["values"]
        or not row["meta"]["batch_size"]  # a level whose leaves have rows, but not itself
        for row in found.table.nodes
    ):
        return None
    result: list[tuple[str, torch.Tensor]] = []
    for place, path in zip(found.table.leaves, found.table.leaf_paths(), strict=True):
        if isinstance(place, dict) and place.keys() == {"tensor", "dtype"}:
            place = place["tensor"]
        if not isinstance(place, str):
            return None
        dataset, _ = find_array(found.file, place, found.path)
        if dataset.get_space().get_simple_extent_dims(maxdims=True)[:1] != (h5py.h5s.UNLIMITED,):
            return None
        result.append((place, rows.get(path)))
    names = {name for name, _ in result}
    return result if len(names) == len(result) else None


def _read_options(found: Save) -> dict[str, Any]:
    """Return the chunks and filters of the first dataset that has chunks, for a new file; chunks of 1 MB if none has."""
    for name in found.arrays:
        dataset = h5py.Dataset(h5py.h5d.open(found.file, name.encode()))
        if dataset.chunks:
            options = {
                "compression": dataset.compression,
                "compression_opts": dataset.compression_opts,
                "shuffle": dataset.shuffle or None,
                "fletcher32": dataset.fletcher32 or None,
            }
            return {"chunks": dataset.chunks[0], **options}
    return {"chunks": True}


def _grow(location: Location, file: object, leaves: list[tuple[str, torch.Tensor]], count: int) -> None:
    path = find_filename(location)
    before = os.path.getsize(path) if has_path(location) else 0
    header = read_header(file, path)
    opened = []  # h5py drops the error of a dataset that cannot write its chunks when it is freed
    for name, leaf in leaves:
        dataset, _ = find_array(file, name, path)
        opened.append(dataset)
        value = as_storable(leaf, NATIVE)
        start, *rest = header["arrays"][name][1]
        dataset.set_extent((start + count, *rest))
        if value.numel():
            write_part(dataset, value, (slice(start, start + count, 1), *(slice(0, n, 1) for n in rest)))
        header["arrays"][name][1][0] = start + count
    flush_file(h5py.h5i.get_file_id(file), path, before)
    for row, group in zip(header["nodes"], header["groups"], strict=True):
        row["meta"]["batch_size"][0] += count
        if group is not None:
            write_facts(h5py.h5g.open(file, group.encode() or b"."), row["meta"])
    write_header(file, header)
    StoreFile.at(path).content = None
