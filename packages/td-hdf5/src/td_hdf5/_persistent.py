"""``PersistentTensorDict``: an HDF5 file as a collection, whose entries are added to and removed from the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any

import h5py
import torch

from td_core import TensorDict, kinds
from td_core.errors import UnsupportedOperationError
from td_core.spi import Encoded, Node, as_batch_size, as_named, select_keys, set_module
from td_core.typing import BatchSize, DeviceType
from td_store import StoredTensor
from td_store.arrays import (
    Change,
    LiveCollection,
    LiveStore,
    TableEdit,
    TextColumn,
    find_old_names,
    find_row,
    list_names,
    list_texts,
    refuse_objects,
    take_texts,
)

from ._dataset_source import DatasetSource
from ._datasets import DatasetOptions, read_header, write_header
from ._foreign_h5 import Stacks
from ._h5_files import StoreFile, find_filename
from ._h5_layout import Layout, choose_name, make_entry_layout, make_layout, read_arrays
from ._read_h5 import Save, check_writable, open_save, open_table, read_save
from ._text_datasets import TextChanges, write_text_dataset
from ._write_h5 import save, write_arrays, write_facts

KeyPath = tuple[str, ...]

#: The modes of h5py.File, by the mode of td_core.open after the file was created.
_MODES = ("r", "r+", "a", "w", "w-", "x")


class _Store(LiveStore):
    """The file of a collection.

    Attributes:
        file: the open file.
        mode: ``"r"`` or ``"r+"``.
        opened: the content of the file when it was opened.
        device: device of the leaves.
        options: options of new datasets.
    """

    def __init__(
        self,
        file: StoreFile,
        mode: str,
        opened: Save,
        device: torch.device | None,
        options: dict[str, object],
    ) -> None:
        self.file, self.mode, self.opened, self.device, self.options = file, mode, opened, device, options
        self.is_writable = mode != "r"

    @property
    def where(self) -> str:
        """Path of the file."""
        return self.file.path

    def read(self, file: object) -> Save:
        """Return the present content of the open file."""
        if self.file.content is None:
            header = read_header(file, self.where)
            self.file.content = self.opened if header is None else read_save(header, self.where)
        found: Save = self.file.content
        if found.loaded:
            raise UnsupportedOperationError(
                f"cannot change the structure of {self.where}: it has datasets of fields, which are read as a whole; load() "
                "and save() it"
            )
        return found

    def check_entry(self, data: Node) -> None:
        """Raise CodecError if the only entry of a collection cannot be stored."""
        make_layout(data)

    def read_table(self) -> Encoded:
        """Return the table of the header as it is now."""
        with self.file.use() as file:
            return self.read(file).table

    def commit(self, change: Change) -> None:
        """Write new entries and the header, and remove the links of old entries; an error leaves the file as it is."""
        with self.file.use(write=True) as file:
            found = self.read(file)
            edit = TableEdit(found.table)
            change.edit(edit)
            plan = _Plan(found, edit, change)
            links, texts = Links(file), TextChanges(file, self.where)
            try:
                links.remove(found.list_links() - plan.kept)
                for layout, group in plan.layouts:
                    links.added += [name for name, _ in layout.list_links()]
                    find_linked = partial(self._find_linked, links)
                    write_arrays(file, layout, self.options, above=group, find_linked=find_linked)
                new = plan.finish()
                self._write_texts(found, new, plan.columns, links, texts)
                self._write_facts(file, found, new)
                write_header(file, new.make_header())
            except BaseException:
                texts.undo()
                links.undo()
                write_header(file, found.make_header())
                raise
            self.file.content = new
            if links.removed:
                self.file.structure += 1
            for source in change.release():
                source.keep(links.find_dataset(source.name))

    def _write_texts(
        self, before: Save, after: Save, columns: Mapping[str, TextColumn], links: Links, texts: TextChanges
    ) -> None:
        """Write text columns that were written in place, and remove the datasets of those that are no text any more."""
        known = list_texts(before.table)
        for name, column in columns.items():
            if name in known:
                texts.write(name, column)
            else:
                links.added.append(name)
                parent, _, last = name.rpartition("/")
                group = h5py.h5g.open(links.file, parent.encode() or b"/")
                write_text_dataset(group, last, column, self.options)
        links.remove(known.keys() - list_texts(after.table).keys() - links.removed.keys())

    def _find_linked(self, links: Links, leaf: object) -> h5py.h5d.DatasetID | None:
        """Return the dataset of a whole leaf of this file, or None."""
        if not isinstance(leaf, StoredTensor) or not self.can_link(leaf):
            return None
        return links.find_dataset(leaf.source.name)  # type: ignore[attr-defined]

    def _write_facts(self, file: h5py.h5f.FileID, before: Save, after: Save) -> None:
        """Write the metadata of the groups for which it has changed."""
        known = {row.get("group"): row["meta"] for row in before.table.nodes}
        for row in after.table.nodes:
            group = row.get("group")
            if group is not None and group in known and row["meta"] != known[group]:
                write_facts(h5py.h5g.open(file, group.encode() or b"/"), row["meta"])

    def owns(self, leaf: StoredTensor) -> bool:
        """Return False for a leaf in another HDF5 file."""
        source = leaf.source
        return not isinstance(source, DatasetSource) or source.file is self.file

    def can_link(self, leaf: StoredTensor) -> bool:
        """Return True for the leaf of a whole dataset of this file."""
        source = leaf.source
        if not isinstance(source, DatasetSource) or source.file is not self.file or source.is_kept:
            return False
        return leaf.shape == source.shape and leaf.is_contiguous()

    def open_entries(self, paths: Sequence[KeyPath]) -> Any:
        """Open a collection with the stored entries of some key paths alone."""
        with self.file.use() as file:
            found = replace(self.read(file), file=file)
            table = found.read_texts(select_keys(found.table, list(paths), self.where))
        return open_table(found, table, self.mode, self.device)


class _Plan:
    """What a change writes into a file.

    Attributes:
        kept: names of the links that stay.
        layouts: the layouts of new entries, with the names of the groups that get them.
        columns: the text columns that were written in place, by the names of their datasets.
    """

    def __init__(self, found: Save, edit: TableEdit, change: Change) -> None:
        self.found, self.edit = found, edit
        self.layouts: list[tuple[Layout, str]] = []
        self.columns: dict[str, TextColumn] = {}
        self.arrays = dict(found.arrays)
        others = [name for name in found.others if name is not None]
        for path in change.removed:
            group = find_row(found.table, path[:-1]).get("group") or ""
            link = f"{group}/{path[-1]}".removeprefix("/")
            others = [name for name in others if name != link and not name.startswith(f"{link}/")]
        self.others = others
        for path in change.added:
            edit.put(path, None)
        if change.removed:
            self.kept = self._make_save(edit.finish()).list_links()
        else:
            self.kept = found.list_links()
        taken = set(self.kept)
        for path, data in change.added.items():
            group = edit.get_row(path[:-1]).get("group") or ""
            layout = make_entry_layout(data, path[-1], group, taken)
            entry, arrays = read_arrays(layout.make_header(), found.path)
            edit.add(path, entry, (path[-1],))
            self.arrays.update(arrays)
            taken.update(name for name, _ in layout.list_links())
            self.layouts.append((layout, group))

    def finish(self) -> Save:
        """Return the content of the file after the change."""
        new = self._make_save(self.edit.finish())
        table, known = new.table, find_old_names(self.found.table, new.table)
        parents = {
            ref: (row.get("group"), key)
            for row in table.nodes
            for key, ref in row["entries"]
            if type(ref) is int
        }
        taken = new.list_links()

        def choose(position: int) -> str:
            group, key = parents.get(position, (None, ""))
            if position in known or group is None:
                return known.get(position, "")
            name = choose_name(group, key, taken)
            taken.add(name)
            return name

        self.columns = take_texts(table.nodes, table.values, choose, self.found.table.values)
        return new

    def _make_save(self, table: Encoded) -> Save:
        used = {name for place in table.leaves for name in list_names(place)}
        arrays = {name: array for name, array in self.arrays.items() if name in used}
        return replace(self.found, table=table, arrays=arrays, others=self.others)


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
        non_tensor_as_stack: text for each row of a file of another program is one value per row; False makes it one list.
        allow_pickle: must not be True: values are never pickled.
        **kwargs: options of new datasets, as for :func:`td_hdf5.save`.

    >>> stored = PersistentTensorDict(filename="data.h5", batch_size=[3], mode="w")
    >>> stored["a"] = torch.arange(3)
    >>> stored["n", "b"] = torch.zeros(3, 2)
    >>> PersistentTensorDict(filename="data.h5")["a"]
    StoredTensor(DatasetSource, size=(3,), dtype=torch.int64)
    """

    _store: _Store

    def __init__(
        self,
        *,
        batch_size: Any = None,
        filename: str | os.PathLike[str] | None = None,
        group: Any = None,
        mode: str = "r",
        backend: str = "h5",
        device: DeviceType | None = None,
        validate_batch_size: bool = True,
        non_tensor_as_stack: bool = True,
        allow_pickle: bool | None = None,
        **kwargs: Any,
    ) -> None:
        _check_backend(backend, allow_pickle)
        if (filename is None) == (group is None):
            raise TypeError("a PersistentTensorDict takes a filename or a group, and not both")
        if mode not in _MODES:
            raise ValueError(f"mode is one of {', '.join(map(repr, _MODES))}; got {mode!r}")
        path = os.fspath(filename) if filename is not None else find_filename(group)
        _create_if_needed(path, mode, batch_size)
        stacks = _choose_stacks(batch_size, non_tensor_as_stack)
        opened = _open(path, "r" if mode == "r" else "r+", device, kwargs, stacks=stacks)
        if group is not None and group.name != "/":
            table = opened._store.opened.table
            names = [row.get("group") for row in table.nodes]
            opened = opened.get(table.node_paths()[names.index(group.name.strip("/"))])
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
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
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
        refuse_objects(filename, "open for writing", "td_core.save() saves it there")
        save(data, filename, **kwargs)
        return _open(os.fspath(filename), "r+", device, kwargs)

    @property
    def filename(self) -> str:
        """Path of the file."""
        return self._store.file.path

    @property
    def file(self) -> Any:
        """The open ``h5py.File``, for use until the next operation. The header does not describe what is added to it directly."""
        return h5py.File(self._store.file.hand_out(write=self._store.mode != "r"))

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

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Reduce to the path of the file and the keys of a nested collection."""
        return rebuild_persistent, (
            self.filename,
            self._store.file.identity,
            self._path,
            self.mode,
            self._store.options,
        )


def _create_if_needed(path: str, mode: str, batch_size: Any) -> None:
    """Create the file of a collection, or empty it, as a mode of h5py requires."""
    exists = os.path.lexists(path)
    if mode in ("w-", "x") and exists:
        raise FileExistsError(f"cannot create {path!r}: it exists")
    if mode == "r+" and not exists:
        raise FileNotFoundError(f"there is no file at {path!r}: create it with mode='w'")
    if mode == "w" or (mode != "r" and not exists):
        save(TensorDict({}, batch_size=batch_size or []), path)


def _choose_stacks(batch_size: Any, stacks: bool) -> Stacks:
    return stacks if batch_size is None or not stacks else as_batch_size(batch_size)


def _check_backend(backend: str, allow_pickle: bool | None) -> None:
    if backend != "h5":
        raise ValueError(
            f"td-hdf5 has the backend 'h5' alone; got {backend!r}: td-zarr has TensorDict.to_zarr()"
        )
    if allow_pickle:
        raise ValueError("td-hdf5 never reads or writes pickles: allow_pickle must be None or False")


def _open(
    path: str, mode: str, device: DeviceType | None, options: dict[str, Any], *, stacks: Stacks = True
) -> Any:
    """Open a file; a TensorDict as a PersistentTensorDict."""
    target = None if device is None else torch.device(device)
    with open_save(path, stacks=stacks) as opened:
        file = StoreFile.at(path)
        if mode != "r":
            check_writable(opened, opened.table)
        result = open_table(opened, opened.table, mode, target)
    if type(result) is not TensorDict:
        return result.lock_()
    store = _Store(file, mode, replace(opened, file=None), target, options)
    return PersistentTensorDict._of_opened(store, (), result)


@set_module("td_hdf5.h5_pickles")
def rebuild_persistent(
    path: str, identity: Any, keys: tuple[str, ...], mode: str, options: dict[str, Any]
) -> Any:
    """Open the collection of a pickle; FormatError if another file was saved under the path."""
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
    refuse_objects(filename, "open for writing", "td_core.save() saves it there")
    save(data, filename, **options)
    kept = {item.name: options[item.name] for item in fields(DatasetOptions) if item.name in options}
    return _open(os.fspath(filename), "r+", None, kept)


def from_h5(
    filename: str | os.PathLike[str],
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: Any = None,
    non_tensor_as_stack: bool = True,
) -> Any:
    """Open an HDF5 file without reading its leaves; a TensorDict is returned as a :class:`PersistentTensorDict`.

    Args:
        filename: the file, also of tensordict or of another program.
        mode: ``"r"`` refuses writes, ``"r+"`` writes into the file.
        auto_batch_size: compute the batch sizes from the shapes of the leaves, instead of those in the file.
        batch_dims: the most batch dims that ``auto_batch_size`` finds.
        batch_size: batch size of the result; with ``mode="r+"``, also that of the file.
        non_tensor_as_stack: text for each row of a file of another program is one value per row; False makes it one list.

    >>> _ = to_h5(TensorDict({"a": torch.ones(2, 3)}), "data.h5")
    >>> from_h5("data.h5", auto_batch_size=True, batch_dims=1).batch_size
    torch.Size([2])
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is 'r' or 'r+'; got {mode!r}")

    refuse_objects(filename, "open as a live collection", "td_core.open() reads it")
    stacks = _choose_stacks(batch_size, non_tensor_as_stack)
    opened = _open(os.fspath(filename), mode, None, {}, stacks=stacks)
    if batch_size is not None:
        opened.batch_size = batch_size
    elif auto_batch_size:
        opened.auto_batch_size_(batch_dims)
    return opened


def open_as(cls: type, filename: Any, **options: Any) -> Any:
    """Open an HDF5 file as an instance of a class, if that has declared entries; the options are those of :func:`from_h5`."""
    return as_named(cls, from_h5(filename, **options), f"what is saved at {os.fspath(filename)!r}")


# A save or message of such a collection has TensorDicts.
kinds.store_as(PersistentTensorDict, "TensorDict")


class Links:
    """The links that one change removes from a file and adds to it.

    Attributes:
        added: names of the links that the change may have added.
        removed: the objects of the removed links by name, open: HDF5 keeps them until they are closed.
    """

    def __init__(self, file: h5py.h5f.FileID) -> None:
        self.file, self.added = file, list[str]()
        self.removed: dict[str, h5py.h5g.GroupID | h5py.h5d.DatasetID] = {}
        self._root = h5py.h5g.open(file, b"/")

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of some groups and datasets that the file has."""
        for name in sorted(names, key=len, reverse=True):  # groups after their content
            with contextlib.suppress(KeyError):
                self.removed[name] = h5py.h5o.open(self._root, name.encode())
                self._root.unlink(name.encode())

    def find_dataset(self, name: str) -> h5py.h5d.DatasetID:
        """Return a dataset of the file, by the name that it had before the change."""
        return self.removed[name] if name in self.removed else h5py.h5d.open(self.file, name.encode())

    def undo(self) -> None:
        """Remove what was added, and restore what was removed."""
        for name in sorted(self.added, key=len, reverse=True):
            with contextlib.suppress(KeyError):
                self._root.unlink(name.encode())
        for name in sorted(self.removed, key=len):
            h5py.h5o.link(self.removed[name], self._root, name.encode())
