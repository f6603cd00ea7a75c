"""Methods of mapped collections, also exported as functions: memory mapping, saving, loading.

:mod:`td_core.plugins.memmap_methods` has their signatures and docstrings. This module is imported together with td-core.
To keep that import fast, the functions import other modules when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from td_core import TensorCollection, TensorDictFuture
from td_core.plugins.declarations import implements, implements_classmethod, takes
from td_core.plugins.memmap_methods import (
    LoadMemmapInplaceOptions,
    LoadMemmapOptions,
    MemmapInplaceOptions,
    MemmapLikeOptions,
    MemmapMethods,
    MemmapOptions,
)
from td_core.spi import check_in_memory, save_together

if TYPE_CHECKING:
    from td_core.typing import NestedKey


@implements(MemmapMethods.memmap)
def memmap(data: TensorCollection, options: MemmapOptions) -> TensorCollection | TensorDictFuture:
    def write(whole: TensorCollection) -> TensorCollection | TensorDictFuture:
        return _run(whole, _plan_mapping(whole, options), options)

    read = None if options.prefix is None or options.return_early else partial(load_memmap, options.prefix)
    result: TensorCollection | TensorDictFuture = save_together(data, write, read, options.return_early)
    return result


save = memmap


@implements(MemmapMethods.memmap_)
def memmap_(data: TensorCollection, options: MemmapInplaceOptions) -> TensorCollection | TensorDictFuture:
    check_in_memory(data, "map")
    work = _plan_mapping(data, options)
    if options.return_early:
        from ._save import lock_then_run

        work = lock_then_run(data, work)
    return _run(data, work, options)


@implements(MemmapMethods.memmap_like)
def memmap_like(data: Any, options: MemmapLikeOptions) -> TensorCollection | TensorDictFuture:
    return _run(data, _plan_mapping(data, options), options)


@implements_classmethod(MemmapMethods.load_memmap)
def load_memmap(cls: type | None, options: LoadMemmapOptions) -> Any:
    return load_as(cls, options)


def load_as(cls: type | None, chosen: LoadMemmapOptions, *, complete: bool = True) -> Any:
    """Load as an instance of ``cls`` if it has declared fields; ``complete`` sets missing fields to their defaults."""
    from . import _fs
    from ._load import LoadOptions, check_target, drop_missing, load_directory
    from ._mapped_memory import check_mode
    from ._value_file import ValueFile

    mode, device, out = chosen.mode, chosen.device, chosen.out
    check_mode(mode)
    check_target(out)
    if mode == "r+" and device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise ValueError(
            f"mode='r+' maps the files, so that writes reach them, and device={str(device)!r} copies the leaves; choose one"
        )
    named = type(out) if out is not None else cls
    options = LoadOptions(**vars(chosen), named=named, complete=complete, keeper=ValueFile)
    path = _fs.make_absolute(chosen.prefix)
    if chosen.verify:
        from ._manifest import check

        check(path)
    if _fs.is_file(path):
        from ._archive import load_archive

        result = load_archive(path, options, chosen.subpath)
    else:
        result = load_directory(path, options, chosen.subpath)
    if out is None:
        return result
    drop_missing(out.update(result), result)
    return out


load = load_memmap


def open_memmap(
    prefix: str | Path,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | None = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    allow_pickle: bool | None = None,
    verify: bool = False,
    strict: bool = True,
) -> Any:
    """Return the collection saved at ``prefix``, mapped from its files; see ``td_core.open``."""
    # Mapped memory cannot refuse a write, so the mode "r" is the same as "c": pages that are written are copied.
    opened = load_memmap(
        prefix,
        mode="r+" if mode == "r+" else "r",
        robust_key=robust_key,
        subpath=subpath,
        allow_pickle=allow_pickle,
        verify=verify,
        strict=strict,
    )
    return opened if keys is None else opened.select(*keys).lock_()


@dataclass(frozen=True, eq=False, kw_only=True)
class CreateOptions(MemmapLikeOptions):
    """Options of ``td_core.create``: those of ``memmap_like`` for a save that does not exist yet."""

    copy_existing: bool = field(default=False, init=False)
    return_early: bool = field(default=False, init=False)
    share_non_tensor: bool = field(default=False, init=False)
    existsok: bool = False
    sparse: ClassVar[bool] = False


@takes(CreateOptions)
def create_memmap(like: Any, options: CreateOptions) -> TensorCollection:
    """Create files of zeros, with space for all elements; ``existsok=True`` opens a save of the same structure."""
    return _plan_mapping(like, options)()


@implements(MemmapMethods.load_memmap_)
def load_memmap_(data: TensorCollection, options: LoadMemmapInplaceOptions) -> Any:
    return copy_save(data, options)


def copy_save(data: Any, options: LoadMemmapOptions) -> Any:
    """Copy a save into a collection in place; entries that the save lacks are kept."""
    loaded = load_as(type(data), options, complete=False)
    with torch.no_grad():  # Loaded elements have no autograd history.
        return data.update(loaded, inplace=True)


@implements(MemmapMethods.memmap_refresh_)
def memmap_refresh_(data, *, allow_pickle):
    from ._edit import refresh

    return refresh(data, allow_pickle=bool(allow_pickle))


@implements(MemmapMethods.make_memmap)
def make_memmap(data, key, shape, *, dtype, robust_key):
    from ._edit import add

    return add(data, key, shape, dtype or torch.get_default_dtype(), None, robust_key)


@implements(MemmapMethods.make_memmap_from_storage)
def make_memmap_from_storage(data, key, storage, shape, *, dtype, robust_key):
    from ._edit import add
    from ._tensor import MemoryMappedTensor

    wrapped = MemoryMappedTensor.from_storage(storage, shape=shape, dtype=dtype)
    return add(data, key, wrapped.parent_shape, wrapped.dtype, wrapped, robust_key)


@implements(MemmapMethods.make_memmap_from_tensor)
def make_memmap_from_tensor(data, key, tensor, *, copy_data, existsok, robust_key):
    from ._edit import add
    from ._shapes import shape_of

    content = tensor if copy_data else None
    return add(data, key, shape_of(tensor), tensor.dtype, content, robust_key, existsok=existsok)


@implements(MemmapMethods.is_memmap)
def is_memmap(data):
    from ._memmap_backend import get_backend

    return get_backend(data) is not None


@implements(MemmapMethods.saved_path)
def saved_path(data):
    from ._memmap_backend import get_backend, get_directory

    saved = get_backend(data)
    if saved is None:
        raise AttributeError(f"this {type(data).__name__} has no saved path: it is not memory-mapped")
    path = get_directory(data, saved)
    return None if path is None else Path(path)


def _plan_mapping(data: TensorCollection, options: MemmapOptions) -> Callable[[], TensorCollection]:
    """Return a function that maps a collection to an archive, a directory, its current files or an anonymous file."""
    prefix, archive = options.prefix, options.archive
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
