"""HDF5 files that this process keeps open: one handle for each file, which survives forks and writes of other processes.

HDF5 caches metadata and chunks of a file in the process. So a handle is closed before a fork, and opened again where it is
used. Each operation locks the file, as HDF5 itself does, and opens it again if another process has changed it meanwhile;
each write is flushed before the lock is released. Between two operations the file is not locked.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import h5py
import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from td_core.array_formats import map_file, sync_file
from td_core.errors import FormatError, TensorDictError

#: Longest time to wait for another program that has the file open for writing, in seconds.
_PATIENCE = 10.0
#: The errors that h5py raises for damaged files.
H5_ERRORS = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
)


#: A path, or an open file or group of h5py.
Location: TypeAlias = "str | os.PathLike[str] | h5py.Group"


def find_filename(location: Location) -> str:
    """Return the path of the file of a location."""
    return str(location.file.filename) if isinstance(location, h5py.Group) else os.fspath(location)


def has_path(location: Location) -> bool:
    """Return True if the file of a location can be opened by its path: it is not one in memory."""
    return not isinstance(location, h5py.Group) or is_mappable(h5py.h5i.get_file_id(location.id))


def show_error(error: BaseException) -> str:
    """Return the message of an error of h5py in one line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextlib.contextmanager
def convert_errors(what: str) -> Iterator[None]:
    """Raise FormatError for an error of h5py in a block: ``what`` is damaged."""
    try:
        yield
    except TensorDictError:
        raise
    except H5_ERRORS as error:
        raise FormatError(f"{what} is damaged: {show_error(error)}") from error


def make_access() -> Any:
    """Return the property list with which all files are opened and created."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    # Headers with checksums, which every release since 1.8 reads.
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    # Contiguous datasets are also read through mappings, beside which a buffer in the process would be stale.
    access.set_sieve_buf_size(0)
    return access


def open_by_path(path: str, *, write: bool = False) -> Any:
    """Open an HDF5 file, and return its ``FileID``. Wait a while if another program has it open for writing.

    Raises:
        FileNotFoundError: there is no file.
        FormatError: the file is damaged, or is not an HDF5 file.
        BlockingIOError: another program keeps it open.
    """
    os.stat(path)  # raises FileNotFoundError, which h5py does not
    if os.path.isdir(path):
        raise FormatError(f"{path} is a directory, not an HDF5 file")
    flags = h5py.h5f.ACC_RDWR if write else h5py.h5f.ACC_RDONLY
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return h5py.h5f.open(os.fsencode(path), flags, make_access())
        except H5_ERRORS as error:
            text = show_error(error)
            if "unable to lock" in text:
                if time.monotonic() < end:
                    time.sleep(0.005)
                    continue
                raise _make_busy_error(path) from error
            if "already open" in text:
                raise BlockingIOError(
                    f"{path} is open in this process through h5py, in another mode: close that file first ({text})"
                ) from error
            if isinstance(error, PermissionError) or "Permission denied" in text:
                raise PermissionError(f"{path} cannot be opened{' for writing' * write}: {text}") from error
            raise FormatError(f"{path} is not an HDF5 file, or is damaged: {text}") from error


def _make_busy_error(path: str) -> BlockingIOError:
    return BlockingIOError(
        f"{path} is in use: another program, or an h5py.File of this one, has it open for writing; close it there"
    )


def close_file(file: Any) -> None:
    """Close a file, with the datasets and groups that were opened through it: HDF5 would keep it open for them."""
    kinds = (h5py.h5f.OBJ_ALL & ~h5py.h5f.OBJ_FILE) | h5py.h5f.OBJ_LOCAL
    for item in h5py.h5f.get_obj_ids(file, kinds):
        while item.valid:
            h5py.h5i.dec_ref(item)
    file.close()


def is_mappable(file: Any) -> bool:
    """Return True if an open file is one in the file system, whose bytes are where HDF5 says."""
    return bool(file.get_access_plist().get_driver() == h5py.h5fd.SEC2)


@contextlib.contextmanager
def open_path(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading during a block."""
    file = open_by_path(path)
    try:
        yield file
    finally:
        if is_mappable(file):
            _unlock(file.get_vfd_handle())  # a mapping of the file would keep its lock
        close_file(file)


def _unlock(fd: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


class StoreFile:
    """A file that this process keeps open. :meth:`at` returns the same object for the same file.

    Attributes:
        path: absolute path.
        identity: device and inode, which differ after another file was saved under the path.
        structure: number of the changes of the structure by this process, after which datasets are looked up again.
        content: what the header describes, if it was read since the file was opened.
    """

    def __init__(self, path: str, identity: tuple[int, int]) -> None:
        self.path, self.identity, self.structure = path, identity, 0
        self._lock = threading.RLock()
        self._file: Any = None
        self._fd = -1
        self._is_writable = self._is_used = False
        self._stamp: tuple[int, int] | None = None
        self._maps: dict[bool, torch.UntypedStorage] = {}
        self.content: Any = None

    @classmethod
    def at(cls, path: str | os.PathLike[str], identity: tuple[int, int] | None = None) -> StoreFile:
        """Return the file at a path; with ``identity``, the file that was there when it was opened."""
        path = os.path.abspath(path)
        if identity is None:
            status = os.stat(path)
            identity = status.st_dev, status.st_ino
        key = (path, *identity)
        with _REGISTRY_LOCK:
            file = _FILES.get(key)
            if file is None:
                file = _FILES[key] = cls(path, identity)
        return file

    @contextlib.contextmanager
    def use(self, *, write: bool = False) -> Iterator[Any]:
        """Lock the file during a block, and pass its ``FileID``, which has the content that other processes wrote."""
        with self._lock:
            if self._is_used:  # by this thread: a leaf of the file is read while another one is written
                yield self._file
                return
            self._prepare(write)
            self._is_used = True
            try:
                yield self._file
                if write:
                    h5py.h5f.flush(self._file)
            finally:
                self._is_used = False
                self._release(write)

    def _prepare(self, write: bool) -> None:
        if self._file is None or (write and not self._is_writable):
            self._open(write)
            return
        self._lock_file(write)
        if self._read_stamp() != self._stamp:
            self._open(write or self._is_writable)

    def _open(self, write: bool) -> None:
        self.close()
        file = open_by_path(self.path, write=write)
        fd = file.get_vfd_handle()
        status = os.fstat(fd)
        self._compare(status)
        self._file, self._fd, self._is_writable, self.content = file, fd, write, None
        self._stamp = status.st_mtime_ns, status.st_size

    def _lock_file(self, write: bool) -> None:
        if fcntl is None:
            return
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._fd, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise _make_busy_error(self.path) from None
                time.sleep(0.001)
            except OSError:  # a file system without locks
                return

    def _release(self, write: bool) -> None:
        if self._file is None:
            return
        if write:
            # Another process must see that the file has changed, even if it changed twice within a tick of the clock.
            with contextlib.suppress(OSError):
                os.utime(self._fd, ns=(os.fstat(self._fd).st_atime_ns, time.time_ns()))
            self._stamp = self._read_stamp()
        _unlock(self._fd)

    def _read_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_mtime_ns, status.st_size

    def map(self, end: int, *, shared: bool) -> torch.UntypedStorage:
        """Return the mapped file, which has at least ``end`` bytes."""
        with self._lock:
            known = self._maps.get(shared)
            if known is None or known.nbytes() < end:
                fd = os.open(self.path, (os.O_RDWR if shared else os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0))
                try:
                    self._compare(os.fstat(fd))
                    known = self._maps[shared] = map_file(fd, shared=shared)
                finally:
                    os.close(fd)
            return known

    def check(self) -> None:
        """Raise FormatError if another file was saved under the path."""
        self._compare(os.stat(self.path))

    def _compare(self, status: os.stat_result) -> None:
        if (status.st_dev, status.st_ino) != self.identity:
            raise FormatError(f"{self.path} was replaced since it was opened: open it again")

    def sync(self) -> None:
        """Return when what was written has reached the disk."""
        with self._lock:
            sync_file(self.path)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._file is not None:
                file, self._file, self._fd = self._file, None, -1
                close_file(file)


_FILES: weakref.WeakValueDictionary[tuple[Any, ...], StoreFile] = weakref.WeakValueDictionary()
_REGISTRY_LOCK = threading.RLock()
#: The files that are locked while the process forks.
_LOCKED: list[StoreFile] = []


def _close_before_fork() -> None:
    """Close all files, so that no process inherits one: HDF5 would write what it had cached for its parent."""
    _REGISTRY_LOCK.acquire()
    for file in list(_FILES.values()):
        file._lock.acquire()
        _LOCKED.append(file)
        file.close()


def _unlock_after_fork() -> None:
    while _LOCKED:
        _LOCKED.pop()._lock.release()
    _REGISTRY_LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_close_before_fork, after_in_parent=_unlock_after_fork, after_in_child=_unlock_after_fork
    )
