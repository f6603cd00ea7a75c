"""Methods of mapped collections, also exported as functions: memory mapping, saving, loading.

This module is imported together with td-core.
To keep that import fast, the functions import other modules when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from td_core import TensorCollection, TensorDictFuture, UnsupportedOperationError
from td_core.spi import Serializer, check_in_memory, save_together

from ._options import LoadMemmapOptions, MemmapOptions

if TYPE_CHECKING:
    from torch import Tensor

    from td_core.typing import DeviceType, DtypeLike, NestedKey, Progress

CollectionT = TypeVar("CollectionT", bound=TensorCollection)


def memmap(
    data: CollectionT,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: str | int | None = None,
    atomic: bool = False,
    durable: bool = False,
    checksums: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
    compatible: bool = False,
) -> CollectionT:
    """Write every leaf to a file under ``prefix`` and return a locked collection that maps those files.

    The save is atomic: it is built next to ``prefix`` and replaces it in one step. Collections that map an earlier
    save at ``prefix`` keep their elements. Leaves of type ``DTensor`` are saved whole: all ranks of their mesh call this with
    the same ``prefix``, and the first rank writes.

    Args:
        prefix: directory of the save; None uses an anonymous file, which is freed with the result. A loaded
            collection whose leaves and values are still those of its save remains mapped to that save.
        copy_existing: copy leaves that are mapped from another file, instead of raising.
        num_threads: number of threads that write; 0 writes in the calling thread.
        return_early: with threads, return a :class:`TensorDictFuture` immediately, and write the current collection
            in the background; do not write to its elements until the future is done.
        share_non_tensor: reload a non-tensor value whenever its file was replaced, so that all processes that
            have the result see a value that any of them writes in place. Without it they see the value after
            :meth:`memmap_refresh_`. Requires a ``prefix`` that is a directory.
        existsok: False raises if ``prefix`` already has a save.
        robust_key: encode keys that are not safe file names; None means True.
        archive: write one archive file instead of a directory; None decides by the suffix of ``prefix``.
        compression: compression of the archive: ``"deflate"``, ``"bzip2"``, ``"lzma"``; None for no compression.
        atomic: accepted for compatibility; every save is atomic.
        durable: sync the save to disk before returning.
        checksums: record a hash for each file, for ``td_memmap.verify``.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
        allow_pickle: pickle values that cannot be stored otherwise, instead of raising.
        compatible: store values of a batch (``NonTensorStack``) in one JSON list, as tensordict reads them. By default they
            are stored by rows: one value is written in place, and rows can be appended, in the same time for any number of
            rows. Programs that use td in place of tensordict always save this way.

    Raises:
        CodecError: a leaf or value cannot be stored; nothing was written.
        FileTakenError: a leaf is mapped from another file, or ``prefix`` has a file that belongs to no save and
            whose name the save needs.
        OSError: a file cannot be written, for instance because the disk is full. The message has key and file;
            the old save is unchanged.

    >>> saved = TensorDict({"a": torch.arange(3)}).memmap("save")
    >>> saved["a"]
    MemoryMappedTensor([0, 1, 2])
    """
    options = MemmapOptions(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        existsok=existsok,
        robust_key=robust_key,
        archive=archive,
        compression=compression,
        atomic=atomic,
        durable=durable,
        checksums=checksums,
        progress=progress,
        allow_pickle=allow_pickle,
        compatible=compatible,
    )

    def write(whole: TensorCollection) -> TensorCollection | TensorDictFuture:
        return _run(whole, _plan_mapping(whole, options), options)

    read = None if prefix is None or return_early else partial(load_memmap, prefix)
    mapped: CollectionT = save_together(data, write, read, return_early)
    return mapped


save = memmap


def memmap_(
    data: CollectionT,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    atomic: bool = False,
    durable: bool = False,
    checksums: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
    compatible: bool = False,
) -> CollectionT:
    """Write every leaf to a file under ``prefix``, map it in place, and lock the collection.

    The arguments are those of :meth:`memmap`. A node or value under two keys becomes a separate object under each,
    as in the save. The leaves of a :class:`TensorDictParams` remain the same objects, with their elements in the
    files.

    >>> td = TensorDict({"a": torch.arange(3)})
    >>> td.memmap_() is td, td.is_memmap(), td["a"]
    (True, True, MemoryMappedTensor([0, 1, 2]))
    """
    check_in_memory(data, "map")
    options = MemmapOptions(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        existsok=existsok,
        robust_key=robust_key,
        atomic=atomic,
        durable=durable,
        checksums=checksums,
        progress=progress,
        allow_pickle=allow_pickle,
        compatible=compatible,
        archive=False,
        inplace=True,
    )
    work = _plan_mapping(data, options)
    if return_early:
        from ._save import lock_then_run

        work = lock_then_run(data, work)
    return cast(CollectionT, _run(data, work, options))


def memmap_like(
    data: CollectionT,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    archive: bool | None = None,
    durable: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
    compatible: bool = False,
) -> CollectionT:
    """Return a mapped, locked collection of the same structure whose files are sparse zeros, to be filled.

    The files take no space until they are written to. Filling them on a full disk kills the process; Python cannot
    catch that error. If ``prefix`` has a save of the same structure, its elements and values are kept. The arguments are those
    of :meth:`memmap`; ``copy_existing`` has no effect, since no element is copied.

    Raises:
        FileTakenError: a save of another structure is at ``prefix``.

    >>> datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0})
    >>> datum.expand(1_000_000).memmap_like()["image"].shape
    torch.Size([1000000, 3, 64, 64])
    """
    options = MemmapOptions(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        existsok=existsok,
        robust_key=robust_key,
        archive=archive,
        durable=durable,
        progress=progress,
        allow_pickle=allow_pickle,
        compatible=compatible,
        like=True,
        sparse=True,
    )
    return cast(CollectionT, _run(data, _plan_mapping(data, options), options))


def load_memmap(
    prefix: str | Path,
    device: DeviceType | None = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    mode: str | None = None,
    num_threads: int = 0,
    allow_pickle: bool | None = None,
    verify: bool = False,
    strict: bool = True,
    progress: Progress = False,
) -> TensorCollection:
    """Return the collection saved at ``prefix``, mapped from its files.

    All metadata is checked before any file is mapped. Nothing is written or imported, and values are unpickled only
    with ``allow_pickle=True``. Called on a class with declared fields, as in ``Record.load_memmap(path)``, it
    returns an instance of that class. This works also if the save is a plain collection with those entries, and if
    the class was defined in ``__main__``, renamed or moved since.

    Writes in place, as by ``set_``, ``update_`` or ``loaded[index] = row``, reach the files unless ``mode`` says otherwise. The
    result is not locked: ``loaded[key] = value`` replaces an entry in memory, and leaves its file as it is; ``lock_()`` it
    to make that an error.

    Args:
        prefix: directory or archive of the save; also a URL or an object store, whose leaves are read.
        device: copy every leaf to this device; None keeps them mapped; ``"meta"`` reads no leaf.
        non_blocking: as in ``Tensor.to``.
        out: a collection to load into: it gets the entries of the save, and its other entries are deleted.
        robust_key: whether keys were encoded as file names; None means True.
        subpath: load only the collection under this key: a nested key, or ``"a/b"``.
        keys: keys or key paths to load, with all that is below them. No element of another leaf is read or copied.
        mode: ``"r+"`` maps files shared, so that writes reach them, or raises if they are not writable; ``"r"``
            copies on write; None is as ``"r+"`` for writable files of a directory, else as ``"r"``. Values
            written in place reach the save whenever leaves do.
        num_threads: number of threads that copy to ``device``; 0 copies in the calling thread, which also maps
            the files.
        allow_pickle: unpickle pickled values of the save; None means False.
        verify: compare every file with its recorded size and hash first.
        strict: False skips entries that cannot be read, instead of raising.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FileNotFoundError: ``prefix`` has no save.
        FormatError: the save is damaged, or ``prefix`` is not a save.
        KeyPathError: the save has no such key.
        StructureError: the save does not have the fields of the class on which this is called.
        ValueError: the save has no collection under ``subpath``, ``mode`` is unknown, or it is ``"r+"`` with
            another ``device`` than the CPU.
        MissingPluginError: a part of the save was written by a package that is not installed.
        PermissionError: ``mode`` is ``"r+"`` and a file is not writable, or is compressed in an archive.

    >>> _ = TensorDict({"a": torch.arange(3)}).memmap("save")
    >>> TensorDict.load_memmap("save")["a"]
    MemoryMappedTensor([0, 1, 2])
    """
    options = LoadMemmapOptions(
        prefix,
        device,
        non_blocking,
        out=out,
        robust_key=robust_key,
        subpath=subpath,
        keys=keys,
        mode=mode,
        num_threads=num_threads,
        allow_pickle=allow_pickle,
        verify=verify,
        strict=strict,
        progress=progress,
    )
    return load_as(None, options)


def load_as(cls: type | None, chosen: LoadMemmapOptions, *, complete: bool = True) -> TensorCollection:
    """Load as an instance of ``cls`` if it has declared fields; ``complete`` sets missing fields to their defaults."""
    from . import _fs
    from ._load import LoadOptions, check_target, drop_missing
    from ._load_part import load_local
    from ._mapped_memory import check_mode
    from ._value_file import CopiedValues, ValueFile

    mode, device, out = chosen.mode, chosen.device, chosen.out
    check_mode(mode)
    check_target(out)
    objects = Serializer.find_objects(chosen.prefix)
    if mode == "r+" and device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise ValueError(
            f"mode='r+' maps the files, so that writes reach them, and device={str(device)!r} copies the leaves; choose one"
        )
    named = type(out) if out is not None else cls
    options = LoadOptions(
        **vars(chosen), named=named, complete=complete, keeper=ValueFile, copier=CopiedValues
    )
    if objects is not None:
        from ._object_saves import load_objects

        result: Any = load_objects(objects, options)
    else:
        path = _fs.make_absolute(chosen.prefix)
        if chosen.verify:
            from ._manifest import check

            check(path)
        result = load_local(path, options)
    if out is not None:
        drop_missing(out.update(result), result)
    loaded: TensorCollection = result if out is None else out
    return loaded


load = load_memmap


def open_memmap(
    prefix: str | Path,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    allow_pickle: bool | None = None,
    verify: bool = False,
    strict: bool = True,
) -> Any:
    """Return the collection saved at ``prefix``, mapped from its files; see ``td_core.open``."""
    objects = Serializer.find_objects(prefix)
    if objects is not None:
        from ._load import LoadOptions
        from ._object_saves import open_objects

        options = LoadOptions(
            robust_key=robust_key,
            subpath=subpath,
            keys=keys,
            allow_pickle=allow_pickle,
            verify=verify,
            strict=strict,
        )
        return open_objects(objects, options, mode)
    # Mapped memory cannot refuse a write, so the mode "r" is the same as "c": pages that are written are copied.
    opened = load_memmap(
        prefix,
        mode="r+" if mode == "r+" else "r",
        robust_key=robust_key,
        subpath=subpath,
        keys=keys,
        allow_pickle=allow_pickle,
        verify=verify,
        strict=strict,
    )
    return opened if mode == "c" else opened.lock_()


def create_memmap(
    like: TensorCollection,
    prefix: str | Path | None = None,
    *,
    num_threads: int = 0,
    existsok: bool = False,
    robust_key: bool | None = True,
    archive: bool | None = None,
    durable: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
    compatible: bool = False,
) -> TensorCollection:
    """Create files of zeros, with space for all elements; ``existsok=True`` opens a save of the same structure."""
    options = MemmapOptions(
        prefix,
        num_threads=num_threads,
        existsok=existsok,
        robust_key=robust_key,
        archive=archive,
        durable=durable,
        progress=progress,
        allow_pickle=allow_pickle,
        compatible=compatible,
        like=True,
    )
    return _plan_mapping(like, options)()


def load_memmap_(
    data: CollectionT,
    prefix: str | Path,
    robust_key: bool | None = True,
    *,
    mode: str | None = None,
    allow_pickle: bool | None = None,
    verify: bool = False,
    strict: bool = True,
    progress: Progress = False,
) -> CollectionT:
    """Copy the content of the save at ``prefix`` into this collection, in place; add entries that it lacks.

    The arguments are those of :meth:`load_memmap`.

    >>> _ = TensorDict({"a": torch.arange(3)}).memmap("save")
    >>> TensorDict({"a": torch.zeros(3)}).load_memmap_("save")["a"]
    tensor([0., 1., 2.])
    """
    options = LoadMemmapOptions(
        prefix,
        robust_key=robust_key,
        mode=mode,
        allow_pickle=allow_pickle,
        verify=verify,
        strict=strict,
        progress=progress,
    )
    return copy_save(data, options)


def copy_save(data: CollectionT, options: LoadMemmapOptions) -> CollectionT:
    """Copy a save into a collection in place; entries that the save lacks are kept."""
    loaded = load_as(type(data), options, complete=False)
    with torch.no_grad():  # Loaded elements have no autograd history.
        return data.update(loaded, inplace=True)


def memmap_refresh_(data: CollectionT, *, allow_pickle: bool | None = None) -> CollectionT:
    """Reload this collection from its save, with the changes of other processes.

    A collection that was loaded, or opened in any mode, remains in that mode; entries that were set in memory are lost.

    Raises:
        StructureError: the collection is not one of a save: its leaves are in memory, or those of a part or of several saves.

    >>> td = TensorDict({"a": torch.arange(3)}).memmap("save")
    >>> _ = TensorDict({"b": torch.ones(2)}).memmap("save")
    >>> td.memmap_refresh_()["b"]
    MemoryMappedTensor([1., 1.])
    """
    from ._edit import refresh

    return refresh(data, allow_pickle=bool(allow_pickle))


def make_memmap(
    data: TensorCollection,
    key: NestedKey,
    shape: Sequence[int] | Tensor,
    *,
    dtype: DtypeLike | None = None,
    robust_key: bool | None = True,
) -> Tensor:
    """Add an entry of zeros to the save that this collection maps, and return its mapped tensor.

    Raises:
        StructureError: the key already exists, or the collection is not mapped.
        KeyPathError: a live save cannot hold the key; save the collection again with it.

    >>> td = TensorDict().memmap()
    >>> td.make_memmap("a", (2,))
    MemoryMappedTensor([0., 0.])
    """
    from ._edit import add

    return add(data, key, shape, dtype or torch.get_default_dtype(), None, robust_key)


def make_memmap_from_storage(
    data: TensorCollection,
    key: NestedKey,
    storage: torch.UntypedStorage,
    shape: Sequence[int] | Tensor,
    *,
    dtype: DtypeLike | None = None,
    robust_key: bool | None = True,
) -> Tensor:
    """Add an entry with the elements of ``storage`` to the save that this collection maps; return its tensor.

    >>> td = TensorDict().memmap()
    >>> td.make_memmap_from_storage("a", torch.ones(2).untyped_storage(), (2,))
    MemoryMappedTensor([1., 1.])
    """
    from ._edit import add
    from ._tensor import MemoryMappedTensor

    wrapped = MemoryMappedTensor.from_storage(storage, shape=shape, dtype=dtype)
    return add(data, key, wrapped.parent_shape, wrapped.dtype, wrapped, robust_key)


def make_memmap_from_tensor(
    data: TensorCollection,
    key: NestedKey,
    tensor: Tensor,
    *,
    copy_data: bool = True,
    existsok: bool = True,
    robust_key: bool | None = True,
) -> Tensor:
    """Add an entry with the elements of ``tensor`` to the save that this collection maps; return its tensor.

    Args:
        key: the new key.
        tensor: the tensor to copy.
        copy_data: False creates zeros with the shape and dtype of ``tensor``.
        existsok: False raises if the file of the entry already exists.
        robust_key: encode the key as a file name; None means True.

    >>> td = TensorDict().memmap()
    >>> td.make_memmap_from_tensor("a", torch.ones(2))
    MemoryMappedTensor([1., 1.])
    """
    from ._edit import add
    from ._shapes import shape_of

    content = tensor if copy_data else None
    return add(data, key, shape_of(tensor), tensor.dtype, content, robust_key, existsok=existsok)


def is_memmap(data: TensorCollection) -> bool:
    """Return True if the collection was mapped to files, and has been locked since: then it has a ``saved_path``.

    Views of a save and loaded collections are none; :meth:`is_shared` is True for them, too.

    >>> TensorDict().is_memmap(), TensorDict().memmap().is_memmap()
    (False, True)
    """
    from ._memmap_backend import get_backend

    return get_backend(data) is not None


def saved_path(data: TensorCollection) -> Path | None:
    """Directory that this collection maps, or None if it is mapped to anonymous files.

    Raises:
        AttributeError: the collection is not mapped.
    """
    from ._memmap_backend import get_backend, get_directory

    saved = get_backend(data)
    if saved is None:
        raise AttributeError(f"this {type(data).__name__} has no saved path: it is not memory-mapped")
    path = get_directory(data, saved)
    return None if path is None else Path(path)


def _plan_mapping(data: TensorCollection, options: MemmapOptions) -> Callable[[], TensorCollection]:
    """Return a function that maps a collection to an archive, a directory, its current files or an anonymous file."""
    prefix, archive = options.prefix, options.archive
    if not isinstance(data, TensorCollection):
        raise TypeError(f"a collection is mapped, such as a TensorDict; got {type(data).__name__}")
    objects = Serializer.find_objects(prefix)
    if objects is not None:
        raise UnsupportedOperationError(
            f"cannot map a collection at {objects.where}: objects are not files; td_core.save() saves it there"
        )
    is_packed = prefix is not None and (Path(prefix).suffix == ".tdz" if archive is None else archive)
    _check_options(options, is_packed)
    if prefix is None:
        return _plan_in_memory(data, options)
    from . import _fs

    path = _fs.make_absolute(prefix)
    if is_packed:
        from ._archive import save_archive

        return save_archive(data, path, options)
    if options.like:
        from ._memmap_like import like_directory

        return like_directory(data, path, options)
    from ._save import save_directory

    return save_directory(data, path, options)


def _check_options(options: MemmapOptions, is_packed: bool) -> None:
    """Raise ValueError for options that exclude each other; ``is_packed`` is True for a save in an archive."""
    prefix, archive = options.prefix, options.archive
    if (archive or options.compression is not None) and not is_packed:
        raise ValueError(
            f"only an archive can be compressed, and it needs a path; got prefix={prefix!r}, archive={archive!r}, "
            f"compression={options.compression!r}"
        )
    for name in ("durable", "checksums"):
        if prefix is None and getattr(options, name):
            raise ValueError(f"{name}=True needs a prefix: without one nothing is saved")
    if options.share_non_tensor and (is_packed or prefix is None):
        raise ValueError(
            "share_non_tensor=True needs a prefix that is a directory: values are shared through its files"
        )
    if not isinstance(options.atomic, bool):
        raise TypeError(f"atomic is a bool, and both save atomically; got {options.atomic!r}")


def _plan_in_memory(data: TensorCollection, options: MemmapOptions) -> Callable[[], TensorCollection]:
    """Return a function that maps a collection to the files that it was loaded from, or to an anonymous file."""
    from ._memmap_backend import MemmapBackend, attach_backend, get_backend, get_directory
    from ._save import copy_nodes, save_anonymous

    saved = None if options.like else get_backend(data)
    if saved is not None and options.inplace:
        return lambda: data
    tree = data if options.inplace else copy_nodes(data)
    if saved is None:
        from ._origin import origin

        loaded_from = None if options.like else origin(tree)
        if loaded_from is None:
            return lambda: save_anonymous(tree, options)
        return lambda: attach_backend(tree, loaded_from)
    root, as_saved = get_directory(data, saved), saved.is_current(data)
    return lambda: attach_backend(
        tree, MemmapBackend(root, saved.robust_key, saved.allow_pickle), as_saved=as_saved
    )


def _run(
    data: TensorCollection, work: Callable[[], TensorCollection], options: MemmapOptions
) -> TensorCollection | TensorDictFuture:
    if not (options.return_early and options.num_threads > 0):
        return work()
    from ._save import save_in_background

    return save_in_background(data, work)
