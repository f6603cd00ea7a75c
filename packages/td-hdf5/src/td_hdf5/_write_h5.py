"""Write a planned save to a new file, which gets its name when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import h5py
from torch import Tensor

from td_core.errors import LockedError
from td_core.spi import Serializer, make_reporter, run_in_background, show_path
from td_core.typing import Progress
from td_store import StoredTensor
from td_store.arrays import PlannedArray, TextColumn, as_storable
from td_store.files import Checksum, NewFile, allocate_file

from ._datasets import (
    NATIVE,
    Array,
    DatasetOptions,
    create_dataset,
    create_file,
    create_group,
    iter_parts,
    read_header,
    write_header,
    write_part,
    write_text,
)
from ._h5_files import (
    H5_ERRORS,
    Location,
    close_file,
    discard_file,
    find_filename,
    find_full_disk,
    flush_file,
    has_path,
    make_access,
    show_error,
)
from ._h5_layout import Layout, make_layout
from ._object_h5 import upload_file
from ._text_datasets import write_text_dataset

#: A leaf in a store is read and written in parts of this many bytes.
_PART = 1 << 23


def save(
    data: Any,
    path: Location,
    *,
    chunks: int | tuple[int, ...] | bool | None = None,
    compression: str | int | None = None,
    compression_opts: Any = None,
    shuffle: bool | None = None,
    fletcher32: bool | None = None,
    checksums: bool = False,
    durable: bool = False,
    return_early: bool = False,
    progress: Progress = False,
) -> Any:
    """Save a collection as an HDF5 file.

    The file has its complete content under its name, or the old file remains, whenever the process is killed. A group of an open
    file is written in place.

    Args:
        data: the collection.
        path: the file to write, also a URL or an object store; or a group of an ``h5py.File`` that is open for writing: an empty
            one, or that of another save.
        chunks: sizes of the first dims of chunks, which have whole rows in the other dims; True for chunks of about 1 MB. None
            stores contiguous datasets, which can be mapped, unless there is another option that needs chunks.
        compression: ``"gzip"``, ``"lzf"``, ``"szip"`` or the number of a filter, as for ``h5py.Group.create_dataset``.
        compression_opts: options of the compression, such as the level of gzip.
        shuffle: order bytes by significance before compression.
        fletcher32: store a checksum of each chunk, which HDF5 compares whenever it reads one.
        checksums: store a hash of each dataset, which ``verify`` compares.
        durable: return after the data has reached the disk.
        return_early: write in the background and return a :class:`TensorDictFuture`. The leaves must not change before
            its ``result()`` returns.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Returns:
        ``data``, or a future of it.

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.
        IsADirectoryError: ``path`` is a directory.
        FileExistsError: ``path`` is a group with entries that td has not written.

    >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(3)}})
    >>> save(td, "data.h5") is td
    True
    """
    objects = Serializer.find_objects(path)
    place = find_filename(objects or path)
    if isinstance(path, h5py.Group):
        check_replaceable(path)
        if any(isinstance(leaf, StoredTensor) for leaf in data._leaves()):
            data = data.clone()  # it can be the save that is replaced
    elif objects is None and os.path.isdir(place):
        raise IsADirectoryError(f"cannot save to {place!r}, which is a directory: pass the path of a file")
    options = vars(DatasetOptions(chunks, compression, compression_opts, shuffle, fletcher32))
    layout = make_layout(data)
    total = sum(array.nbytes for array in layout.plan.arrays.values())
    report = make_reporter(progress, total, "save")

    fill = partial(_fill, layout, options, checksums=checksums, report=report)
    if isinstance(path, h5py.Group):
        write = partial(_write_group, path, fill)
    elif objects is not None:
        write = partial(upload_file, objects, fill, total)
    else:
        write = partial(_write_new, place, fill, durable)
    if not return_early:
        write()
        return data
    return run_in_background(write, "td-hdf5-save", data)


def create_new(data: object, path: Location, options: Mapping[str, object]) -> None:
    """Write a file of zeros with the structure, shapes and dtypes of a collection; FileExistsError if the path is taken."""
    fill = partial(_fill, make_layout(data, blank=True), options, blank=True)
    if isinstance(path, h5py.Group):
        if len(path):
            raise FileExistsError(
                f"cannot create a save in {path.name!r} of {path.file.filename}: it has entries"
            )
        _write_group(path, fill)
        return
    place = os.fspath(path)
    if os.path.lexists(place):
        raise FileExistsError(f"cannot create {place!r}: it exists")
    _write_new(place, fill, blank=True)


def check_replaceable(group: h5py.Group) -> None:
    """Raise an error for a group that is opened for reading, or has entries of another program."""
    where = f"{group.name!r} of {group.file.filename}"
    if group.file.mode == "r":
        raise LockedError(f"cannot write to {where}: open the file with mode='r+'")
    if len(group) and read_header(group.id, group.file.filename) is None:
        raise FileExistsError(f"cannot save to {where}: it has entries that td has not written; remove them")


def _write_group(group: h5py.Group, fill: Callable[[object], None]) -> None:
    size = os.path.getsize(group.file.filename) if has_path(group) else 0
    for name in list(group):
        del group[name]
    fill(group.id)
    flush_file(h5py.h5i.get_file_id(group.id), find_filename(group), size)


def _write_new(
    path: str, fill: Callable[[object], None], durable: bool = False, *, blank: bool = False
) -> None:
    with NewFile(path) as new:
        file = create_file(new.temporary, make_access())
        try:
            fill(file)
            h5py.h5f.flush(file)
        except BaseException as error:
            discard_file(file, file.get_vfd_handle())
            raise find_full_disk(error, path) or error from error
        close_file(file)
        if blank:
            allocate_file(new.fd, os.fstat(new.fd).st_size)
        new.commit(durable=durable)


def _fill(layout: Layout, options: Mapping[str, object], file: h5py.h5g.GroupID, **how: Any) -> None:
    digests = write_arrays(file, layout, options, **how)
    write_header(file, layout.make_header(digests))


def _create_planned(
    parent: h5py.h5g.GroupID, name: str, planned: PlannedArray, options: Mapping[str, object]
) -> h5py.h5d.DatasetID:
    """Create the dataset of a planned array; an error has its key path."""
    array = Array(planned.dtype, planned.shape)
    try:
        dataset = create_dataset(parent, name, array, options, names=planned.batch_names)
    except H5_ERRORS as error:
        what = f"{show_path(planned.path)} as a dataset"
        full = find_full_disk(error, what)
        raise full or type(error)(f"cannot store {what}: {show_error(error)}") from error
    if planned.logical is not None:
        write_text(dataset, "td_dtype", str(planned.logical).removeprefix("torch."))
    return dataset


def _write_text_column(
    parent: h5py.h5g.GroupID, name: str, column: TextColumn, options: Mapping[str, object]
) -> None:
    """Write a text column; an error has its key path."""
    try:
        write_text_dataset(parent, name, column, options)
    except H5_ERRORS as error:
        what = f"{show_path(column.path)} as a dataset"
        full = find_full_disk(error, what)
        raise full or type(error)(f"cannot store {what}: {show_error(error)}") from error


def write_arrays(
    file: h5py.h5g.GroupID,
    layout: Layout,
    options: Mapping[str, object],
    *,
    checksums: bool = False,
    blank: bool = False,
    above: str = "",
    find_linked: Callable[[Tensor], h5py.h5d.DatasetID | None] = lambda leaf: None,
    report: Callable[[int], None] = lambda count: None,
) -> dict[str, Any] | None:
    """Write the groups and datasets of a layout into an open file, and return the hashes of the datasets.

    ``above`` is the name of a group, whose collection gets the entries of the layout. ``find_linked`` returns the dataset of the
    file that a leaf is, which gets another link, or None.
    """
    digests: dict[str, str] = {}
    groups: dict[str, h5py.h5g.GroupID] = {above: h5py.h5g.open(file, above.encode() or b".")}
    if not above:
        write_facts(groups[""], layout.rows[0]["meta"])
    for name, position in layout.list_links():
        parent, _, last = name.rpartition("/")
        if position is not None:
            groups[name] = create_group(groups[parent], last)
            write_facts(groups[name], layout.rows[position]["meta"])
            continue
        if name in layout.plan.texts:
            column = layout.plan.texts[name]
            _write_text_column(groups[parent], last, column, options)
            if checksums:
                digests[name] = Checksum(content=[column.encode()]).hexdigest()
            continue
        planned = layout.plan.arrays[name]
        linked = find_linked(planned.parts[0]) if len(planned.parts) == 1 and planned.dim is None else None
        if linked is not None:
            h5py.h5o.link(linked, groups[parent], last.encode())
            continue
        dataset = _create_planned(groups[parent], last, planned, options)
        if blank:
            continue
        checksum = Checksum() if checksums else None
        _write_elements(dataset, planned, Array(planned.dtype, planned.shape), checksum, report)
        if dataset.get_create_plist().get_layout() == h5py.h5d.CHUNKED:
            dataset.flush()  # h5py drops the error of a dataset that cannot write its chunks when it is freed
        if checksum is not None:
            digests[name] = checksum.hexdigest()
    return {"algorithm": Checksum().algorithm, "datasets": digests} if checksums else None


def write_facts(group: object, meta: Mapping[str, object]) -> None:
    """Write batch size and dim names of a node into attributes, for people who look at the file."""
    for name, value in (("td_batch_size", meta.get("batch_size")), ("td_names", meta.get("names"))):
        if value is not None:
            write_text(group, name, json.dumps(value))


def _write_elements(
    dataset: object,
    planned: PlannedArray,
    array: Array,
    checksum: Checksum | None,
    report: Callable[[int], None],
) -> None:
    if planned.dim is None and isinstance(planned.parts[0], StoredTensor):
        (leaf,) = planned.parts
        for part in iter_parts(tuple(leaf.shape), leaf.dtype.itemsize, _PART):
            piece = as_storable(leaf[part].clone(), NATIVE)
            write_part(dataset, piece, (*part, *(slice(0, n, 1) for n in array.shape[len(part) :])))
            _note(piece, checksum, report)
        return
    pieces = planned.read()
    for number, piece in enumerate(pieces):
        if planned.dim == 0:
            part = (slice(number, number + 1, 1), *(slice(0, n, 1) for n in piece.shape))
            if piece.numel():
                write_part(dataset, piece.unsqueeze(0), part)
        else:
            write_part(dataset, piece)
        _note(piece, checksum, report)


def _note(piece: Tensor, checksum: Checksum | None, report: Callable[[int], None]) -> None:
    if checksum is not None:
        checksum.update(piece)
    report(piece.nbytes)
