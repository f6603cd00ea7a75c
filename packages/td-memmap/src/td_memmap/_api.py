"""The functions of the package, which its methods call."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from td_core._collection import Core
from td_core.typing import NestedKey

from . import _fs, _names
from ._archive import is_archive_name, is_memmap_archive, load_archive, save_archive
from ._edit import add, refresh
from ._future import TensorDictFuture
from ._like import like_directory
from ._load import Loading, load_directory
from ._manifest import check
from ._progress import Progress
from ._save import Options, save_anonymous, save_directory
from ._saved import ATTACHMENT, Saved, attach, directory
from ._subpath import subdirectory
from ._tensor import MemoryMappedTensor, check_mode

__all__ = [
    "load",
    "load_memmap",
    "make",
    "memmap",
    "memmap_like",
    "refresh",
    "save",
    "saved_at",
    "saved_path",
]


def memmap(
    data: Core,
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
    inplace: bool = False,
) -> Any:
    """Write ``data`` to files and return the mapped collection; see :meth:`TensorDict.memmap`.

    >>> import torch
    >>> from td_core import TensorDict
    >>> memmap(TensorDict({"a": torch.ones(2)}))["a"]
    MemoryMappedTensor([1., 1.])
    """
    packed = _packed(prefix, archive)
    _check(share_non_tensor, atomic, prefix is not None and not packed)
    options = Options(
        copy_existing=copy_existing,
        num_threads=num_threads,
        existsok=existsok,
        robust_key=robust_key is not False,
        durable=durable,
        checksums=checksums,
        progress=progress,
        allow_pickle=allow_pickle,
        share_non_tensor=share_non_tensor,
        inplace=inplace,
    )
    work: Callable[[], Any]
    if prefix is not None and packed:
        work = save_archive(data, os.fspath(prefix), options, compression)
    elif archive or compression is not None:
        raise ValueError(
            f"only an archive can be compressed, and it needs a path; got prefix={prefix!r}, archive={archive!r}, "
            f"compression={compression!r}"
        )
    elif prefix is not None:
        work = save_directory(data, os.fspath(prefix), options)
    elif saved_at(data) is None:
        work = lambda: save_anonymous(data, inplace=inplace)  # noqa: E731
    else:
        work = lambda: _again(data, inplace)  # noqa: E731
    return _run(work, num_threads, return_early)


def save(
    data: Core,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: str | int | None = None,
    atomic: bool = False,
    durable: bool = False,
    checksums: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
) -> Any:
    """Write ``data`` to files and return the mapped collection; see :meth:`TensorDict.memmap`.

    >>> from td_core import TensorDict
    >>> save(TensorDict()).is_memmap()
    True
    """
    return memmap(
        data,
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        robust_key=robust_key,
        archive=archive,
        compression=compression,
        atomic=atomic,
        durable=durable,
        checksums=checksums,
        progress=progress,
        allow_pickle=allow_pickle,
    )


def memmap_like(
    data: Core,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    existsok: bool = True,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
    archive: bool | None = None,
    durable: bool = False,
    progress: Progress = False,
    allow_pickle: bool = False,
) -> Any:
    """Create sparse files with the structure of ``data``; see :meth:`TensorDict.memmap_like`."""
    packed = _packed(prefix, archive)
    _check(share_non_tensor, False, prefix is not None and not packed)
    options = Options(
        copy_existing=copy_existing,
        num_threads=num_threads,
        existsok=existsok,
        robust_key=robust_key is not False,
        durable=durable,
        progress=progress,
        allow_pickle=allow_pickle,
        share_non_tensor=share_non_tensor,
        like=True,
    )
    work: Callable[[], Any]
    if prefix is None:
        work = lambda: save_anonymous(data, inplace=False, like=True)  # noqa: E731
    elif packed:
        work = save_archive(data, os.fspath(prefix), options, None)
    else:
        work = like_directory(data, os.fspath(prefix), options)
    return _run(work, num_threads, return_early)


def load_memmap(
    prefix: str | Path,
    device: torch.device | None = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: NestedKey | None = None,
    mode: str | None = None,
    num_threads: int = 0,
    allow_pickle: bool | None = None,
    verify: bool = False,
    strict: bool = True,
    progress: Progress = False,
) -> Any:
    """Return the collection saved at ``prefix``; see :meth:`TensorDict.load_memmap`.

    >>> load_memmap("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: '...nowhere'
    """
    check_mode(mode)
    options = Loading(
        device=None if device is None else torch.device(device),
        non_blocking=non_blocking,
        robust_key=robust_key is not False,
        mode=mode,
        num_threads=num_threads,
        allow_pickle=bool(allow_pickle),
        strict=strict,
        progress=progress,
    )
    path = os.path.abspath(prefix)
    if verify:
        check(path)
    if _fs.is_file(path):
        result = load_archive(path, options, subpath)
    else:
        result = load_directory(path if subpath is None else subdirectory(path, subpath, options), options)
    return result if out is None else out.update(result)


load = load_memmap


def detect(path: Path) -> bool:
    """Tell whether a save is at ``path``.

    >>> detect(Path("nowhere"))
    False
    """
    place = os.fspath(path)
    if _fs.is_file(place):
        return is_memmap_archive(place)
    return any(_fs.status(os.path.join(place, name)) is not None for name in (_names.META, _names.OLD_META))


def make(
    data: Core,
    key: NestedKey,
    shape: Any,
    dtype: torch.dtype | None,
    content: Any,
    robust_key: bool | None,
    *,
    existsok: bool = True,
) -> Any:
    """Add an entry to a mapped collection: zeros, the elements of a tensor, or those of a storage."""
    if isinstance(content, torch.UntypedStorage):
        wrapped = MemoryMappedTensor.from_storage(content, shape=torch.Size(shape), dtype=dtype)
        shape, dtype, content = wrapped.shape, wrapped.dtype, wrapped.detach()
    dtype = dtype or torch.get_default_dtype()
    return add(data, key, shape, dtype, content, robust_key is not False, existsok=existsok)


def saved_at(data: Any) -> Saved | None:
    """Return what a collection knows of its save; None where it is not mapped."""
    attachments = data._inner()._attachments
    return None if attachments is None else attachments.get(ATTACHMENT)


def saved_path(data: Any) -> Path | None:
    """Return the directory that a collection maps; see :attr:`TensorDict.saved_path`."""
    saved = saved_at(data)
    if saved is None:
        raise AttributeError(f"this {type(data).__name__} has no saved path: it is not memory-mapped")
    path = directory(data, saved)
    return None if path is None else Path(path)


def _packed(prefix: str | Path | None, archive: bool | None) -> bool:
    return prefix is not None and is_archive_name(prefix) if archive is None else archive


def _check(share_non_tensor: bool, atomic: bool, directory: bool) -> None:
    if share_non_tensor and not directory:
        raise ValueError(
            "share_non_tensor=True needs a prefix that is a directory: values are shared through its files"
        )
    if not isinstance(atomic, bool):
        raise TypeError(f"atomic is a bool, and both save atomically; got {atomic!r}")


def _again(data: Any, inplace: bool) -> Any:
    """Return a collection that is mapped already, or another one on the same files."""
    if inplace:
        return data
    saved = saved_at(data)
    assert saved is not None
    return attach(data._map(lambda leaf: leaf), directory(data, saved), saved.robust_key, saved.allow_pickle)


def _run(work: Callable[[], Any], num_threads: int, return_early: bool) -> Any:
    if not (return_early and num_threads > 0):
        return work()
    pool = ThreadPoolExecutor(1, "td-memmap-save")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return TensorDictFuture([future], None)
