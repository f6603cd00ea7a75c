"""Read saves: find the datasets of a file, and build the collection that its header or its groups describe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import h5py
import torch
from torch import Tensor

from td_core import NestedKey
from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import Encoded, Serializer, check_mode, make_reporter, run_parallel, select_keys
from td_core.typing import DeviceType, Progress
from td_store import StoredTensor
from td_store.arrays import (
    Place,
    add_texts,
    build_collection,
    build_leaves,
    check_in_place,
    get_stored,
    is_nested,
    list_names,
    list_texts,
    make_table_header,
    open_place,
    prune_table,
    read_into,
    read_stored,
    read_texts,
    refuse_objects,
    refuse_values,
    restore,
    view_mapped,
)

from ._dataset_source import DatasetSource
from ._datasets import (
    NATIVE,
    Array,
    DatasetOptions,
    can_hold,
    count_links,
    find_array,
    get_file_number,
    list_arrays,
    locate,
    read_header,
    read_part,
    read_whole,
)
from ._foreign_h5 import Stacks, read_foreign, read_foreign_dataset
from ._h5_files import (
    H5_ERRORS,
    Location,
    StoreFile,
    convert_errors,
    find_filename,
    has_path,
    is_mappable,
    map_anew,
    open_path,
    show_error,
)
from ._h5_layout import add_parents, read_arrays
from ._object_h5 import ObjectH5File, open_object
from ._text_datasets import read_text_dataset
from ._write_h5 import create_new


@dataclass(slots=True)
class Save:
    """An open save.

    Attributes:
        path: path of the file.
        file: the ``FileID``, or the ``GroupID`` of a group of it.
        table: the encoded collection, with places as leaves. A row has the name of its ``group``, or None.
        arrays: dtype and shape of the datasets.
        hashes: algorithm and digest of each dataset; None if the file has none.
        is_foreign: True if the file has no header of td.
        others: names of links that belong to no leaf.
        loaded: arrays in memory, by names that the file does not have.
        prefix: what precedes the names of the datasets of a group in the file.
        remote: the file in an object store, or None.
    """

    path: str
    file: h5py.File
    table: Encoded
    arrays: dict[str, Array]
    hashes: Any
    is_foreign: bool
    others: list[str] = field(default_factory=list)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = ""
    remote: ObjectH5File | None = None

    def make_blank(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype of a dataset."""
        array = self.arrays[name]
        return torch.empty(array.shape, dtype=array.dtype, device="meta")

    def list_links(self) -> set[str]:
        """Return the names of all datasets and groups but the root."""
        groups = [row.get("group") for row in self.table.nodes]
        return add_parents(filter(None, (*self.arrays, *list_texts(self.table), *self.others, *groups)))

    def read_texts(self, table: Encoded) -> Encoded:
        """Return a table of the open save with the strings of its text columns."""
        return read_texts(table, lambda text: read_text_dataset(self.file, text, self.path))

    def make_header(self) -> dict[str, Any]:
        """Return the header that describes the save."""
        rows = [{key: value for key, value in row.items() if key != "group"} for row in self.table.nodes]
        header = make_table_header(replace(self.table, nodes=rows))
        groups = [row.get("group") for row in self.table.nodes]
        fields = {"groups": groups, "others": self.others, "arrays": list_arrays(self.arrays)}
        return {**add_texts(header), **fields}


@contextlib.contextmanager
def open_save(path: Location, *, strict: bool | None = None, stacks: Stacks = True) -> Iterator[Save]:
    """Open a file during a block, and read its header. The arguments are those of :func:`read_foreign`.

    A group of a file that the caller has opened has a header of its own, or is a node of the save in the file.
    """
    if isinstance(path, h5py.Group):
        yield _describe_group(path, strict, stacks)
        return
    objects = Serializer.find_objects(path)
    if objects is not None:
        remote = open_object(objects)
        with remote.use() as (_, opened):
            found = describe_file(opened, objects.where, strict=strict, stacks=stacks)
            found.remote = remote
            yield found
        return
    place = os.fspath(path)
    with open_path(place) as file:
        yield describe_file(file, place, strict=strict, stacks=stacks)


def _describe_group(group: h5py.Group, strict: bool | None, stacks: Stacks) -> Save:
    file, path, name = h5py.h5i.get_file_id(group.id), find_filename(group), group.name.strip("/")
    if group.file.mode != "r":
        h5py.h5f.flush(file)  # contiguous datasets are read without HDF5
    if read_header(group.id, path) is None and read_header(file, path) is not None:
        whole = describe_file(file, path, strict=strict, stacks=stacks)
        groups = [row.get("group") for row in whole.table.nodes]
        if name in groups:
            table = prune_table(whole.table, groups.index(name))
            names = {name for place in table.leaves for name in list_names(place)}
            arrays = {name: array for name, array in whole.arrays.items() if name in names}
            return Save(path, file, table, arrays, None, whole.is_foreign, loaded=whole.loaded)
    found = describe_file(group.id, path, strict=strict, stacks=stacks)
    found.prefix = f"{name}/" if name else ""
    return found


def describe_file(file: object, path: str, *, strict: bool | None = None, stacks: Stacks = True) -> Save:
    """Read the header of an open file, or what describes a file of another program."""
    header = read_header(file, path)
    if header is not None:
        found = read_save(header, path, file)
        difference = _find_difference(found)
        if difference is None:
            return found
        if strict is not False:
            raise FormatError(
                f"{path}: the td header does not describe the file: {difference}; another program changed it. "
                "Pass strict=False to load what the file has, without the header"
            )
    other = read_foreign(file, path, strict=strict, stacks=stacks)
    return Save(path, file, other.table, other.arrays, None, True, other.others, other.loaded)


def read_save(header: Mapping[str, Any], path: str, file: object = None) -> Save:
    """Return the save that a header describes; FormatError if it is damaged, or of a later version."""
    table, arrays = read_arrays(header, path)
    others = list(header.get("others", ()))
    return Save(path, file, table, arrays, header.get("hashes"), False, others)


def _find_difference(save: Save) -> str | None:
    """Return how the groups of a file differ from those of its header, or None. Datasets are checked when they are read."""
    counts: dict[str, int] = {"": 0}
    try:
        links = save.list_links()
        counts.update((row["group"], 0) for row in save.table.nodes if row.get("group"))
        for name in links:
            above = name.rpartition("/")[0]
            counts[above] = counts.get(above, 0) + 1
    except (TypeError, AttributeError) as error:
        return f"its groups are {error!r}"
    for name, count in counts.items():
        try:
            found = count_links(save.file, name)
        except H5_ERRORS as error:
            return f"the group {'/' + name!r} is missing or damaged ({show_error(error)})"
        if found != count:
            return f"the group {'/' + name!r} has {found} entries, the header lists {count}"
    return None


def load(
    path: Location,
    *,
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: object = None,
    strategy: str = "auto",
    strict: bool | None = None,
    num_threads: int = 0,
    progress: Progress = False,
) -> Any:
    """Load a collection from an HDF5 file.

    Files of tensordict and of other programs load too: groups are nested collections, datasets are leaves, and text is a value.

    Args:
        path: the file, also a URL or an object store, or an open ``h5py.File`` or ``h5py.Group``.
        device: device of the leaves; ``"meta"`` reads no leaf.
        keys: keys or key paths to load, with all that is below them. Nothing else is read.
        rows: index of the first batch dim: an int, a slice or positions. Other rows are not read.
        strategy: ``"mmap"`` maps contiguous datasets, so that elements are read when they are used, and writes stay in memory.
            ``"read"`` reads at once. ``"auto"`` is ``"mmap"``.
        strict: by default, a tensorclass that is not defined is an error, and what a collection cannot have, such as a dangling
            link, is left out with a warning. True raises an error for that, too; attributes are never read. False loads a
            TensorDict instead of the tensorclass, gives no warning, and ignores a header that does not describe the file.
        num_threads: number of threads that read contiguous datasets; 0 reads in this thread.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FileNotFoundError: there is no file at ``path``.
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.

    >>> from td_hdf5 import save
    >>> _ = save(TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3)}}, [3]), "data.h5")
    >>> load("data.h5", keys="a", rows=slice(1, None))["a"]
    tensor([1, 2])
    """
    if strategy not in ("auto", "mmap", "read"):
        raise ValueError(f"strategy is 'auto', 'mmap' or 'read'; got {strategy!r}")
    target = None if device is None else torch.device(device)
    is_meta = target is not None and target.type == "meta"
    objects = Serializer.find_objects(path)
    if objects is not None and not is_meta:
        if strategy == "mmap":
            raise ValueError(f"{objects.where} is a URL, which cannot be mapped: leave out strategy")
        lazy = open_collection(objects, mode="c", keys=keys, strict=strict)
        result = read_stored(lazy, rows, progress)
        return result if target is None else result.to(target)
    if rows is not None and not is_meta and has_path(path):
        held = contextlib.nullcontext() if isinstance(path, h5py.Group) else open_path(os.fspath(path))
        with held:  # a save could replace the file before the rows are read
            part = open_collection(path, mode="c", keys=keys, strict=strict)[rows].clone()
        return part if target is None else part.to(target)
    with open_save(path, strict=strict) as save:
        table = select_keys(save.table, keys, save.path)
        names = dict.fromkeys(name for place in table.leaves for name in list_names(place))
        if is_meta:
            arrays = {name: save.make_blank(name) for name in names}
        else:
            report = make_reporter(progress, sum(save.arrays[name].nbytes for name in names), "load")
            arrays = read_arrays_of(save, list(names), strategy != "read", num_threads, report)
            if target is not None:
                arrays = {name: array.to(target) for name, array in arrays.items()}
        table = save.read_texts(table)
        result = build_collection(table, save.path, arrays.__getitem__, target, strict=strict is not False)
    return result if rows is None else result[rows]


def read_arrays_of(
    save: Save, names: list[str], maps: bool, num_threads: int, report: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return the datasets of some names: contiguous ones mapped, or read in threads; others read by HDF5."""
    result: dict[str, Tensor] = {}
    work: list[Callable[[], None]] = []
    file = h5py.h5i.get_file_id(save.file)
    fd = file.get_vfd_handle() if is_mappable(file) else -1
    size, home = file.get_filesize() if fd >= 0 else 0, get_file_number(save.file)
    mapped = map_anew(file, save.path) if maps and size else None
    for name in names:
        if name in save.loaded:
            result[name] = save.loaded[name]
            continue
        with convert_errors(f"{save.path}: the dataset {name!r}"):
            wanted = save.arrays[name]
            dataset, found = find_array(save.file, name, save.path, wanted, home)
            offset = locate(dataset, found, size)
            if can_hold(found, wanted):  # rows were written, but are not yet recorded in the header
                result[name] = read_part(dataset, tuple(slice(0, n, 1) for n in wanted.shape), wanted.dtype)
            elif found != wanted:
                raise FormatError(
                    f"{save.path}: the dataset {name!r} has the dtype {found.dtype} and the shape {list(found.shape)}; "
                    f"its header has {wanted.dtype} and {list(wanted.shape)}"
                )
            elif offset is not None and mapped is not None:
                result[name] = view_mapped(mapped, found.dtype, found.shape, offset)
            else:
                target = result[name] = torch.empty(found.shape, dtype=found.dtype)
                if offset is not None:
                    work.append(partial(_read_bytes, fd, target, offset, report, name))
                    continue
                read_whole(dataset, target)
            report(found.nbytes)
    run_parallel(work, num_threads)
    return result


def _read_bytes(fd: int, target: Tensor, position: int, report: Callable[[int], None], name: str) -> None:
    try:
        read_into(fd, target, position, report)
    except FormatError as error:
        raise FormatError(f"the dataset {name!r}: {error}") from error


def open_collection(
    path: Location,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    strict: bool | None = None,
) -> Any:
    """Open an HDF5 file without reading its leaves, which are :class:`td_store.StoredTensor`.

    A leaf in a contiguous dataset is mapped when it is used; of a dataset with chunks, only the chunks with wanted elements are
    read. A pickle of an opened collection, as one that a DataLoader sends to a worker, has the names of the datasets.

    Args:
        path: the file, also a URL or an object store, or an open ``h5py.File`` or ``h5py.Group``, whose file is opened again.
        mode: ``"r"`` refuses writes, ``"r+"`` writes into the file, ``"c"`` keeps writes in the memory of this process.
            Except with ``"c"``, the collection is locked: see :class:`td_hdf5.PersistentTensorDict` to add and remove keys.
        keys: keys or key paths to open, with all that is below them.
        strict: as for :func:`load`.

    Raises:
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.
        UnsupportedOperationError: the mode is ``"r+"``, and the save has a nested tensor.

    >>> from td_hdf5 import save
    >>> _ = save(TensorDict({"a": torch.arange(1000)}, [1000]), "data.h5")
    >>> open_collection("data.h5")[[7, 5]]["a"]
    tensor([7, 5])
    """
    check_mode(mode)
    if mode == "r+":
        refuse_objects(path, "write into", "open it with mode='c', and save() the result")
    with open_save(path, strict=strict) as save:
        table = select_keys(save.table, keys, save.path)
        if mode == "r+":
            check_writable(save, table)
        result = open_table(save, table, mode, strict=strict)
        if mode == "r+":
            refuse_values(result, save.path)
    return result if mode == "c" else result.lock_()


def read_object(item: h5py.Group | h5py.Dataset) -> Any:
    """Read a group or dataset of a file of the caller, who can close, change or replace the file later.

    Raises:
        FormatError: torch lacks the dtype of a dataset, or its elements are not in the file.
    """
    if isinstance(item, h5py.Group):
        return load(item, strategy="read")
    file, path = h5py.h5i.get_file_id(item.id), find_filename(item)
    if item.file.mode != "r":
        h5py.h5f.flush(file)  # contiguous datasets are read without HDF5
    found = read_foreign_dataset(item, path)
    save = Save(path, file, found.table, found.arrays, None, True, found.others, found.loaded)
    arrays = read_arrays_of(save, list(save.arrays), False, 0, lambda count: None)
    return build_collection(save.table, path, arrays.__getitem__)._children()["data"]


def create(
    like: object,
    path: Location,
    *,
    chunks: int | tuple[int, ...] | bool | None = None,
    compression: str | int | None = None,
    compression_opts: object = None,
    shuffle: bool | None = None,
    fletcher32: bool | None = None,
) -> Any:
    """Write a file of zeros with the structure, shapes and dtypes of a collection, and open it for writing.

    The options are those of :func:`td_hdf5.save`.

    Raises:
        FileExistsError: something is at ``path``.
    """
    refuse_objects(path, "create a file to fill at", "save() the collection when it is complete")
    options = DatasetOptions(chunks, compression, compression_opts, shuffle, fletcher32)
    create_new(like, path, vars(options))
    return open_collection(path, mode="r+")


def check_writable(save: Save, table: Encoded) -> None:
    """Raise an error if the file, or a leaf of it, cannot be written in place."""
    if not os.access(save.path, os.W_OK):
        raise PermissionError(f"{save.path} cannot be opened for writing: permission denied")
    check_in_place(table, save.path)


def open_table(
    save: Save, table: Encoded, mode: str, device: torch.device | None = None, *, strict: bool | None = None
) -> Any:
    """Build the collection of a table, with stored tensors as leaves; nested tensors and fields of datasets are in memory."""
    if save.remote is not None:
        return _open_remote_table(save, save.remote, table, mode, strict)
    if not os.path.exists(save.path):
        raise UnsupportedOperationError(
            f"{save.path} is not a file in the file system: only load() can read it"
        )
    file = StoreFile.at(save.path)
    nested = [name for place in table.leaves if is_nested(place) for name in list_names(place)]
    memory = (
        {**save.loaded, **read_arrays_of(save, nested, False, 0, lambda count: None)}
        if nested
        else save.loaded
    )

    def read(name: str) -> Tensor:
        return memory[name] if name in memory else save.make_blank(name)

    def open_array(name: str, dtype: torch.dtype) -> Tensor:
        stored = save.arrays[name].shape
        # Some dtypes are stored as pairs, which are one more dim.
        shape = stored[: len(stored) - len(get_stored(dtype, (), NATIVE)[1])]
        source = DatasetSource(file, file.identity, save.prefix + name, shape, dtype)
        return StoredTensor(source, device, mode)

    def open_leaf(place: Place) -> Tensor:
        leaf = restore(place, read)
        if not leaf.is_meta:
            return leaf
        if isinstance(place, list):
            name, dim, position = place
            return open_array(name, leaf.dtype).select(dim, position)
        if isinstance(place, str):
            return open_array(place, leaf.dtype)
        opened = open_array(place["tensor"], leaf.dtype)
        return opened.expand(leaf.shape) if "expand" in place else opened

    return build_leaves(save.read_texts(table), save.path, open_leaf, device, strict=strict is not False)


def _open_remote_table(
    save: Save, remote: ObjectH5File, table: Encoded, mode: str, strict: bool | None
) -> Any:
    """Build the collection of a table of a file in an object store."""

    def open_array(name: str, place: Place) -> Any:
        return remote.make_source(name, save.arrays[name], place)

    def open_leaf(place: Place) -> Tensor:
        if save.loaded.keys() >= set(list_names(place)):
            return restore(place, save.loaded.__getitem__)
        return open_place(place, open_array, mode)

    return build_leaves(save.read_texts(table), save.path, open_leaf, strict=strict is not False)
