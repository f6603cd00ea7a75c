"""``PersistentTensorDict``: an HDF5 file as a collection, whose entries are added to and removed from the file."""

from __future__ import annotations

import os
from dataclasses import fields
from types import TracebackType
from typing import Any

import h5py
import torch

from td_core import Encoded, StoredTensor, TensorDict, encode, kinds
from td_core.array_formats import LiveCollection
from td_core.errors import LockedError
from td_core.spi import Node, as_batch_size, as_named, set_module, show_path

from ._dataset_source import DatasetSource
from ._datasets import DatasetOptions, write_text
from ._h5_files import StoreFile
from ._h5_layout import make_entry_layout, make_layout
from ._live_header import LiveHeader, Row, build_rows, make_table
from ._read_h5 import Save, check_writable, open_save, open_table
from ._write_h5 import save, write_arrays

#: The modes of h5py.File, by the mode of td_core.open after the file was created.
_MODES = ("r", "r+", "a", "w", "w-", "x")


class _Store:
    """The file of a collection: how it is opened, and its header.

    Attributes:
        file: the open file.
        mode: ``"r"`` or ``"r+"``.
        header: the rows of the file.
        device: device of the leaves.
        options: options of new datasets.
    """

    def __init__(
        self, file: StoreFile, mode: str, header: LiveHeader, device: object, options: dict[str, object]
    ) -> None:
        self.file, self.mode, self.header, self.device, self.options = file, mode, header, device, options

    def check_writable(self, path: tuple[str, ...], what: str) -> None:
        """Raise LockedError if the file is opened for reading."""
        if self.mode == "r":
            raise LockedError(
                f"cannot {what} {show_path(path)} in {self.file.path}: it is opened with mode='r'; open it with mode='r+'"
            )

    @property
    def where(self) -> str:
        """Path of the file."""
        return self.file.path

    def find_row(self, row: Row, key: str) -> Row | list[Any]:
        """Return the row of an entry, or the place of a leaf in a list."""
        below: Row | list[Any] = row.entries[key]
        return below

    def write_values(self, path: tuple[str, ...], row: Row, node: Node) -> None:
        """Write the values of an entry into the header."""
        made = build_rows(Encoded.of_header(encode(node).make_header([]), self.where), [None])
        with self.file.use(write=True) as file:
            row.fields, row.values = made.fields, made.values
            self.header.write(file)

    def record(self, path: tuple[str, ...], row: Row, size: torch.Size, names: Any) -> None:
        """Write batch size and dim names of a node into the header, if the file is opened for writing."""
        meta = {**row.fields["meta"], "batch_size": list(size)}
        meta.pop("names", None)
        if names is not None:
            meta["names"] = list(names)
        if self.mode == "r" or meta == row.fields["meta"]:
            return
        row.fields["meta"] = meta
        with self.file.use(write=True) as file:
            self.header.write(file)
            if row.group is not None:
                group = h5py.h5g.open(file, row.group.encode() or b"/")
                write_text(group, "td_batch_size", str(list(size)))

    def open_leaves(self, table: Encoded) -> Any:
        """Return the collection of a table, whose leaves are in this file."""
        opened = Save(self.file.path, None, table, self.header.arrays, None, False)
        return open_table(opened, table, self.mode, self.device)


@set_module("td_hdf5")
class PersistentTensorDict(LiveCollection):
    """An HDF5 file as a collection.

    Leaves are stored tensors: elements are read when they are used, and writes in place reach the file. So do new entries,
    removed and renamed ones, batch sizes and dim names, in this collection and in the nested ones. Results of operations, such
    as an index, ``clone()`` or ``to_tensordict()``, are TensorDicts. The space of removed entries is used for later ones, but
    the file does not get smaller.

    Args:
        batch_size: batch size, by default the stored one.
        filename: the file.
        group: an open ``h5py.Group`` instead, whose file is used.
        mode: ``"r"`` refuses writes, ``"r+"`` and ``"a"`` write into the file, ``"w"`` creates a new one, or empties it.
        backend: ``"h5"``.
        device: device of the leaves, to which elements are moved after they were read.
        validate_batch_size: compare ``batch_size`` with the leaves.
        non_tensor_as_stack: text for each row of a file of another program is a stack of values, not one list.
        allow_pickle: must not be True: values are never pickled.
        **kwargs: options of new datasets, as for :func:`td_hdf5.save`.

    >>> stored = PersistentTensorDict(filename="data.h5", batch_size=[3], mode="w")
    >>> stored["a"] = torch.arange(3)
    >>> stored["n", "b"] = torch.zeros(3, 2)
    >>> PersistentTensorDict(filename="data.h5")["a"]
    StoredTensor(DatasetSource, size=(3,), dtype=torch.int64)
    """

    _store: _Store
    _row: Row

    def __init__(
        self,
        *,
        batch_size: Any = None,
        filename: str | os.PathLike[str] | None = None,
        group: Any = None,
        mode: str = "r",
        backend: str = "h5",
        device: Any = None,
        validate_batch_size: bool = True,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool | None = None,
        **kwargs: Any,
    ) -> None:
        _check_backend(backend, allow_pickle)
        if (filename is None) == (group is None):
            raise TypeError("a PersistentTensorDict takes a filename or a group, and not both")
        if mode not in _MODES:
            raise ValueError(f"mode is one of {', '.join(map(repr, _MODES))}; got {mode!r}")
        path = os.fspath(filename) if filename is not None else group.file.filename
        _create_if_needed(path, mode, batch_size)
        opened = _open(path, "r" if mode == "r" else "r+", device, kwargs, stacks=non_tensor_as_stack)
        if group is not None and group.name != "/":
            opened = opened._find_group(group.name.strip("/"))
        if not isinstance(opened, PersistentTensorDict):
            raise TypeError(f"{path} has a {type(opened).__name__}: open it with td_core.open()")
        self.__dict__.update(vars(opened))
        if batch_size is not None and as_batch_size(batch_size) != self.batch_size:
            if validate_batch_size:
                self.batch_size = batch_size
            else:
                self._set_batch_size(as_batch_size(batch_size))

    @classmethod
    def from_dict(  # type: ignore[override]  # the signature of tensordict
        cls,
        input_dict: Any,
        filename: str | os.PathLike[str],
        *,
        auto_batch_size: bool = False,
        batch_size: Any = None,
        device: Any = None,
        backend: str = "h5",
        batch_dims: int | None = None,
        allow_pickle: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save a dict or collection as an HDF5 file, and return it opened for writing.

        >>> PersistentTensorDict.from_dict({"a": torch.ones(2)}, "data.h5", batch_size=[2]).batch_size
        torch.Size([2])
        """
        _check_backend(backend, allow_pickle)
        data = input_dict if hasattr(input_dict, "batch_size") else TensorDict(input_dict)
        if batch_size is not None:
            data = TensorDict(data, batch_size=batch_size)
        elif auto_batch_size or not hasattr(input_dict, "batch_size"):
            data = data.copy().auto_batch_size_(batch_dims)
        save(data, filename, **kwargs)
        return _open(os.fspath(filename), "r+", device, kwargs)

    def _find_group(self, name: str) -> Any:
        """Return the nested collection in a group of the file, or None."""
        todo = [self]
        while todo:
            node = todo.pop()
            if node._row.group == name:
                return node
            todo += [child for child in node._entries.values() if isinstance(child, PersistentTensorDict)]
        return None

    @property
    def filename(self) -> str:
        """Path of the file."""
        return self._store.file.path

    @property
    def file(self) -> Any:
        """The open ``h5py.File``. What is written to it directly is not in the header of the collection."""
        with self._store.file.use(write=self._store.mode != "r") as file:
            return h5py.File(file)

    @property
    def mode(self) -> str:
        """``"r"``, or ``"r+"`` if writes reach the file."""
        return self._store.mode

    @property
    def kwargs(self) -> dict[str, Any]:
        """Options of new datasets."""
        return self._store.options

    def close(self) -> None:
        """Close the file. It is opened again when elements are used."""
        self._store.file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the operation that returned the collection, if there is one, and close the file."""
        super().__exit__(
            kind or BaseException, error, trace
        )  # which refuses a block without such an operation
        self.close()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Reduce to the path of the file and the keys of a nested collection."""
        return rebuild_persistent, (
            self.filename,
            self._store.file.identity,
            self._path,
            self.mode,
            self._store.options,
        )

    def _write_entry(self, key: str, value: Any) -> None:
        store, row = self._store, self._row
        place = self._find_own(value)
        replaces = key in row.entries
        if place is None:
            if replaces:
                value = value.clone()  # it can have leaves of the entry that it replaces
            make_layout(self._with_children({key: value}))  # an error changes nothing
        with store.file.use(write=True) as file:
            if replaces:
                store.header.vacate(file, row, key)
                store.file.structure += 1
            if place is not None:
                store.header.add_link(file, row, key, place)
            else:
                group = row.group or ""
                links = store.header.list_links()
                layout = make_entry_layout(self._with_children({key: value}), key, group, links)
                write_arrays(file, layout, store.options, above=group)
                store.header.add(row, key, layout)
            store.header.write(file)
        self._entries[key] = self._open_entry(key)

    def _find_own(self, value: Any) -> Any:
        """Return the place of a leaf of this file, or None."""
        source = getattr(value, "source", None) if isinstance(value, StoredTensor) else None
        if not isinstance(source, DatasetSource) or source.file is not self._store.file:
            return None
        whole = value.shape == source.shape and value.is_contiguous()
        places = (place for place in self._store.header.root.iter_places() if isinstance(place, (str, dict)))
        found = (
            place
            for place in places
            if source.name == (place if isinstance(place, str) else place.get("tensor"))
        )
        return next(
            (place for place in found if whole and (isinstance(place, str) or "expand" not in place)), None
        )

    def _remove_entry(self, key: str) -> None:
        with self._store.file.use(write=True) as file:
            self._store.header.remove(file, self._row, key)
            self._store.file.structure += 1
            self._store.header.write(file)

    def _open_entry(self, key: str) -> Any:
        """Return the entry of a row that was written."""
        wrapper = Row(
            {"kind": "TensorDict", "meta": {"batch_size": list(self._size)}},
            None,
            {key: self._row.entries[key]},
        )
        opened = self._store.open_leaves(make_table(wrapper))
        return self._of_opened(self._store, self._path, self._row, opened)._entries[key]


def _create_if_needed(path: str, mode: str, batch_size: Any) -> None:
    """Create the file of a collection, or empty it, as a mode of h5py requires."""
    exists = os.path.lexists(path)
    if mode in ("w-", "x") and exists:
        raise FileExistsError(f"cannot create {path!r}: it exists")
    if mode == "r+" and not exists:
        raise FileNotFoundError(f"there is no file at {path!r}: create it with mode='w'")
    if mode == "w" or (mode != "r" and not exists):
        save(TensorDict({}, batch_size=batch_size or []), path)


def _check_backend(backend: str, allow_pickle: bool | None) -> None:
    if backend != "h5":
        raise ValueError(
            f"td-hdf5 has the backend 'h5' alone; got {backend!r}: td-zarr has TensorDict.to_zarr()"
        )
    if allow_pickle:
        raise ValueError("td-hdf5 never reads or writes pickles: allow_pickle must be None or False")


def _open(
    path: str, mode: str, device: Any, options: dict[str, Any], *, stacks: bool = True, strict: bool | None = None,
    change: Any = None,
) -> Any:  # fmt: skip
    """Open a file; a TensorDict as a PersistentTensorDict. ``change`` sets batch sizes of the plain collection."""
    target = None if device is None else torch.device(device)
    file = StoreFile.at(path)
    with open_save(path, strict=strict, stacks=stacks) as opened:
        if mode != "r":
            check_writable(opened, opened.table)
        result = open_table(opened, opened.table, mode, target, strict=strict)
        if change is not None:
            result = change(result)
        if type(result) is not TensorDict:
            return result.lock_()
        root = build_rows(opened.table, opened.groups)
        header = LiveHeader(root, opened.arrays, opened.others)
    store = _Store(file, mode, header, target, options)
    return PersistentTensorDict._of_opened(store, (), root, result)


@set_module("td_hdf5.h5_pickles")
def rebuild_persistent(
    path: str, identity: Any, keys: tuple[str, ...], mode: str, options: dict[str, Any]
) -> Any:
    """Open the collection of a pickle.

    Raises:
        FormatError: another file was saved under the path.
    """
    StoreFile.at(path, tuple(identity)).check()
    opened = _open(path, mode, None, options)
    return opened.get(keys) if keys else opened


def to_h5(data: Any, filename: str | os.PathLike[str], **options: Any) -> Any:
    """Save a collection as an HDF5 file, and return it opened for writing. The options are those of :func:`td_hdf5.save`.

    A TensorDict is returned as a :class:`PersistentTensorDict`.

    >>> stored = to_h5(TensorDict({"a": torch.ones(2)}), "data.h5")
    >>> stored["b"] = stored["a"].zero_() - 1
    >>> from_h5("data.h5")["b"].tolist()
    [-1.0, -1.0]
    """
    save(data, filename, **options)
    mode = "r" if options.get("checksums") else "r+"  # writes would contradict checksums
    kept = {item.name: options[item.name] for item in fields(DatasetOptions) if item.name in options}
    return _open(os.fspath(filename), mode, None, kept)


def from_h5(
    filename: str | os.PathLike[str],
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: Any = None,
    non_tensor_as_stack: bool = False,
) -> Any:
    """Open an HDF5 file without reading its leaves; a TensorDict is returned as a :class:`PersistentTensorDict`.

    Args:
        filename: the file, also of tensordict or of another program.
        mode: ``"r"`` refuses writes, ``"r+"`` writes into the file.
        auto_batch_size: compute the batch sizes from the shapes of the leaves, instead of those in the file.
        batch_dims: the most batch dims that ``auto_batch_size`` finds.
        batch_size: batch size of the result.
        non_tensor_as_stack: text for each row of a file of another program is a stack of values, not one list.

    >>> _ = to_h5(TensorDict({"a": torch.ones(2, 3)}), "data.h5")
    >>> from_h5("data.h5", auto_batch_size=True, batch_dims=1).batch_size
    torch.Size([2])
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is 'r' or 'r+'; got {mode!r}")

    def change(opened: Any) -> Any:
        if batch_size is not None:
            opened.batch_size = batch_size
        elif auto_batch_size:
            opened.auto_batch_size_(batch_dims)
        return opened

    return _open(os.fspath(filename), mode, None, {}, stacks=non_tensor_as_stack, change=change)


def open_as(cls: type, filename: Any, **options: Any) -> Any:
    """Open an HDF5 file as an instance of a class, if that has declared entries; the options are those of :func:`from_h5`."""
    return as_named(cls, from_h5(filename, **options), f"what is saved at {os.fspath(filename)!r}")


# A save or message of such a collection has TensorDicts.
kinds.store_as(PersistentTensorDict, "TensorDict")
