"""HDF5 files that this process keeps open: one handle for each file, which survives forks and writes of other processes.

HDF5 caches metadata and chunks of a file in the process. So a handle is closed before a fork, and opened again where it is
used. Each operation locks the file, as HDF5 itself does, and opens it again if another process has changed it meanwhile;
each write is flushed before the lock is released. Between two operations the file is not locked. HDF5 also writes when it
closes a file, and would put its old superblock over that of another process: then it gets another descriptor before.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import h5py
import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from td_core.errors import FormatError, TensorDictError
from td_core.spi import check_regular, open_regular
from td_core.typing import ObjectLocation
from td_store.arrays import map_file, sync_file
from td_store.files import allocate_file, identify_file

#: Longest time to wait for another program that has the file open for writing, in seconds.
_PATIENCE = 10.0
#: Longest time to wait until another thread has closed a file that is no longer used, in seconds.
_CLOSING = 0.5
#: The most times that a file is opened again because a save has replaced it meanwhile.
_ATTEMPTS = 100
#: What a block has changed: nothing, elements through a mapping, or what HDF5 caches.
_NOTHING, _MAPPED, _CACHED = range(3)
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


#: A path, or an open file or group of h5py; a URL or an object store where that is said.
Location: TypeAlias = "str | os.PathLike[str] | h5py.Group"


def find_filename(location: Location | h5py.Dataset | ObjectLocation) -> str:
    """Return the path of the file of a location."""
    if isinstance(location, (str, os.PathLike)):
        return os.fspath(location)
    if isinstance(location, ObjectLocation):
        return location.where
    if not isinstance(location, (h5py.Group, h5py.Dataset)):
        raise TypeError(
            f"a file is at a path, a URL, or open as an h5py.File; got a {type(location).__name__}"
        )
    return str(location.file.filename)


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


def find_full_disk(error: BaseException, what: str) -> OSError | None:
    """Return the error for a write that failed because the disk is full, of which h5py tells in several ways; else None."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if f"errno = {number}," in text or (isinstance(error, OSError) and error.errno == number):
            return OSError(number, f"cannot write {what}: {os.strerror(number)}")
    return None


def flush_file(file: h5py.h5f.FileID, path: str, size: int) -> None:
    """Write what HDF5 has cached of a file that had ``size`` bytes before; if the disk is full, an OSError comes before.

    HDF5 writes one part of its metadata after the other, so without space for all the file would be damaged.
    """
    try:
        end = file.get_filesize()
        if end > size and is_mappable(file):
            allocate_file(file.get_vfd_handle(), end, start=size)
        h5py.h5f.flush(file)
    except (OSError, RuntimeError) as error:
        raise find_full_disk(error, path) or error from error


def make_access() -> h5py.h5p.PropFAID:
    """Return the property list with which all files are opened and created."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    # Headers with checksums, which every release since 1.8 reads.
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    # Contiguous datasets are also read through mappings, beside which a buffer in the process would be stale.
    access.set_sieve_buf_size(0)
    return access


def open_by_path(path: str, *, write: bool = False) -> h5py.h5f.FileID:
    """Open an HDF5 file, and return its ``FileID``. Wait a while if another program has it open for writing."""
    _check_file(path)
    flags = h5py.h5f.ACC_RDWR if write else h5py.h5f.ACC_RDONLY
    start = time.monotonic()
    while True:
        try:
            return h5py.h5f.open(os.fsencode(path), flags, make_access())
        except H5_ERRORS as error:
            text = show_error(error)
            patience = _PATIENCE if "unable to lock" in text else _CLOSING if "already open" in text else 0
            if time.monotonic() < start + patience:
                time.sleep(0.005)
                continue
            if "unable to lock" in text:
                raise _make_busy_error(path) from error
            if "already open" in text:
                raise BlockingIOError(
                    f"{path} is open in this process through h5py, in another mode: close that file first ({text})"
                ) from error
            if isinstance(error, PermissionError) or "Permission denied" in text:
                raise PermissionError(f"{path} cannot be opened{' for writing' * write}: {text}") from error
            raise FormatError(f"{path} is not an HDF5 file, or is damaged: {text}") from error


def _check_file(path: str) -> os.stat_result:
    """Return the status of a file; raise FileNotFoundError, which h5py does not, or FormatError for what is no file."""
    if os.path.isdir(path):
        raise FormatError(f"{path} is a directory, not an HDF5 file")
    return check_regular(path)


def _make_busy_error(path: str) -> BlockingIOError:
    return BlockingIOError(
        f"{path} is in use: another program, or an h5py.File of this one, has it open for writing; close it there"
    )


def close_file(file: h5py.h5f.FileID) -> None:
    """Close a file, with the datasets and groups that were opened through it: HDF5 would keep it open for them."""
    kinds = (h5py.h5f.OBJ_ALL & ~h5py.h5f.OBJ_FILE) | h5py.h5f.OBJ_LOCAL
    for item in h5py.h5f.get_obj_ids(file, kinds):
        while item.valid:
            h5py.h5i.dec_ref(item)
    file.close()


def discard_file(file: h5py.h5f.FileID, fd: int) -> None:
    """Close a file that HDF5 must not write, as another process has changed it or the disk is full: its writes go nowhere."""
    with open(
        os.devnull, "r+b", buffering=0
    ) as nowhere:  # a temporary file could be on the full disk, which kills the process
        os.dup2(nowhere.fileno(), fd, inheritable=False)
        with contextlib.suppress(*H5_ERRORS):
            while h5py.h5i.get_ref(file) > 1:  # an error that is handled has frames with other references
                h5py.h5i.dec_ref(file)
            close_file(file)


def is_mappable(file: h5py.h5f.FileID) -> bool:
    """Return True if an open file is one in the file system, whose bytes are where HDF5 says."""
    return bool(file.get_access_plist().get_driver() == h5py.h5fd.SEC2)


def map_anew(file: h5py.h5f.FileID, path: str) -> torch.UntypedStorage | None:
    """Map an open file privately, or return None if another one is at the path now."""
    fd = open_regular(path)  # a mapping of the descriptor of HDF5 would keep the lock of the file
    try:
        same = os.path.samestat(os.fstat(fd), os.fstat(file.get_vfd_handle()))
        return map_file(fd) if same else None
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_path(path: str, *, write: bool = False, maps: bool = False) -> Iterator[h5py.h5f.FileID]:
    """Lock the file that is at a path now, during a block, and pass its ``FileID``; arguments as for :meth:`StoreFile.use`."""
    with contextlib.ExitStack() as stack:
        for attempt in range(_ATTEMPTS):
            try:
                file = StoreFile.at(path)
                with contextlib.ExitStack() as opened:
                    if not file.is_open:
                        opened.callback(file.close)
                    result = opened.enter_context(file.use(write=write, maps=maps))
                    stack.push(opened.pop_all())
                    break
            except ReplacedError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        yield result


def _unlock(fd: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


class ReplacedError(FormatError):
    """Another file was saved under the path of a file."""


#: Device, inode and time of birth.
FileIdentity: TypeAlias = "tuple[int, int, int | None]"
#: What changes with the content of a file: time and size; and with its inode alone: time and number of names.
Stamp = tuple[int, int, int, int]


def _make_stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ctime_ns, status.st_nlink


class StoreFile:
    """A file of which this process reads and writes parts. :meth:`at` returns the same object for the same file.

    Attributes:
        path: absolute path, links resolved.
        identity: device, inode and time of birth, which differ after another file was saved under the path.
        structure: number of the changes of the structure, after which datasets are looked up again.
        content: what the header describes, if it was read since the file was opened.
    """

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path, self.identity, self.structure = path, identity, 0
        self._lock = threading.RLock()
        self._file: h5py.File | None = None
        self._fd = self._map_fd = -1
        self._is_writable = self._is_marked = self._is_lent = self._is_used = False
        self._change = _NOTHING
        self._stamp: Stamp | None = None
        self._maps: dict[bool, torch.UntypedStorage] = {}
        #: A mapped byte of the file, during whose life no other file gets its inode.
        self._pin: object = None
        self.content: Any = None

    @classmethod
    def at(cls, path: str | os.PathLike[str], identity: Sequence[Any] | None = None) -> StoreFile:
        """Return the file at a path; with ``identity``, the file that was there when it was opened."""
        path = os.path.realpath(path)
        if identity is None:
            found = identify_file(path, _check_file(path))
        else:
            device, inode, *birth = identity  # those of old pickles have no time of birth
            found = device, inode, birth[0] if birth else None
        with _REGISTRY_LOCK:
            file = _FILES.get(found)
            if file is None:
                file = _FILES[found] = cls(path, found)
        if identity is None:
            file.path = path
            file._keep_inode()
        return file

    def _keep_inode(self) -> None:
        if self._pin is None and os.name != "nt":
            with contextlib.suppress(RuntimeError):  # it cannot be read
                self._pin = torch.UntypedStorage.from_file(self.path, False, 1)
            self._compare(self.path)

    def __del__(self) -> None:
        self.close()
        if self._map_fd >= 0:
            os.close(self._map_fd)

    @property
    def is_open(self) -> bool:
        """True while HDF5 has the file open."""
        return self._file is not None

    @contextlib.contextmanager
    def use(self, *, write: bool = False, maps: bool = False) -> Iterator[h5py.h5f.FileID]:
        """Lock the file during a block, and pass its ``FileID``, which has the content that other processes wrote.

        Args:
            write: the block writes with HDF5. What it writes is in the file at its end.
            maps: the block writes through a mapping, or excludes other writers.
        """
        change = _CACHED if write else _MAPPED if maps else _NOTHING
        with self._lock:
            if self._is_used:  # by this thread: a leaf of the file is read while another one is written
                self._change = max(self._change, change)
                yield self._file
                return
            if self._is_lent:
                self._take_back()
                change = _CACHED
            self._prepare(change)
            self._is_used, self._change = True, change
            try:
                yield self._file
            except (OSError, RuntimeError) as error:
                full = find_full_disk(error, self.path)
                if full is None:
                    raise
                self._forget()
                raise full from error
            finally:
                self._is_used = False
                self._release()

    def _take_back(self) -> None:
        """Write what the program has changed in the file that it has, and which is locked."""
        self._is_lent = False
        flush_file(self._file, self.path, self._get_size())
        self._stamp = _make_stamp(os.fstat(self._fd))

    def _prepare(self, change: int) -> None:
        write = change == _CACHED
        if self._file is None or (write and not self._is_writable):
            self._open(write)
        try:
            while True:
                self._lock_file(exclusive=change != _NOTHING)
                stamp = _make_stamp(os.fstat(self._fd))
                if change or stamp != self._stamp:
                    self.check(may_be_removed=not change)
                if self._stamp is not None and stamp[:2] == self._stamp[:2]:
                    self._stamp = stamp
                    return
                if self._is_shared():
                    raise BlockingIOError(
                        f"another program has changed {self.path}, which an h5py.File of this process has open: close it there"
                    )
                self._open(self._is_writable)
        except BaseException:
            self._unlock()
            raise

    def _open(self, write: bool) -> None:
        self.close()
        file = open_by_path(self.path, write=write)
        fd = file.get_vfd_handle()
        try:
            self._compare(fd)
            self._keep_inode()
        except BaseException:
            _unlock(fd)
            close_file(file)
            raise
        self._file, self._fd, self._is_writable, self.content = file, fd, write, None
        # HDF5 marks such a file as open for writing, so that nobody else could open it.
        self._is_marked = write and file.get_create_plist().get_version()[0] >= 3
        stamp = _make_stamp(os.fstat(fd))
        if stamp != self._stamp:
            self.structure += 1
        self._stamp = stamp

    def _is_shared(self) -> bool:
        """Return True if an h5py.File of the program has the file open, too: then the lock is that of both."""
        return self._file is not None and h5py.h5f.get_obj_count(self._file, h5py.h5f.OBJ_FILE) > 1

    def _lock_file(self, *, exclusive: bool) -> None:
        if fcntl is None:
            return
        exclusive = exclusive or (self._is_writable and self._is_shared())
        kind = fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._fd, kind)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise _make_busy_error(self.path) from None
                time.sleep(0.001)
            except OSError:  # a file system without locks
                return

    def _unlock(self) -> None:
        if self._file is not None and not self._is_shared():
            _unlock(self._fd)

    def _release(self) -> None:
        if self._file is None:  # the block has closed it
            return
        try:
            if self._change == _CACHED:
                flush_file(self._file, self.path, self._get_size())
                # Another process must see that the file has changed, even if it changed twice within a tick of the clock.
                with contextlib.suppress(OSError):
                    os.utime(self._fd, ns=(os.fstat(self._fd).st_atime_ns, time.time_ns()))
            if self._change:
                self._stamp = _make_stamp(os.fstat(self._fd))
        except BaseException:
            self._forget()
            raise
        if self._is_lent:
            return
        if self._is_shared():
            # The lock belongs to the h5py.File of the program now.
            file, self._file = self._file, None
            close_file(file)
        elif self._is_marked and self._change == _CACHED:
            self.close()
        else:
            _unlock(self._fd)

    def _forget(self) -> None:
        """Close the file without what HDF5 could not write: that must not be written later."""
        self._stamp = None
        self.close()

    def _get_size(self) -> int:
        """Return the size that the file had when it was locked."""
        return 0 if self._stamp is None else self._stamp[1]

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._file is None:
                return
            if self._is_lent:
                self._take_back()
            is_current = not self._is_writable or self._is_shared() or self._can_write()
            file, fd, self._file, self._fd = self._file, self._fd, None, -1
            if not is_current:
                discard_file(file, fd)
                return
            if not self._is_writable:
                _unlock(fd)
            close_file(file)

    def _can_write(self) -> bool:
        """Lock the file, and return True if no other process has it locked, or has changed it since it was used."""
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
        return self._stamp is not None and _make_stamp(os.fstat(self._fd))[:2] == self._stamp[:2]

    def hand_out(self, *, write: bool) -> Any:
        """Return the ``FileID`` of the open file, for a use by the program: a written one stays locked until the next block."""
        with self.use(write=write) as file:
            self._is_lent = write
            return file

    def notice(self) -> None:
        """Notice that another process has changed the file, before elements are read through a mapping."""
        if self._map_fd < 0 or _make_stamp(os.fstat(self._map_fd)) != self._stamp:
            with self.use():
                pass

    def map(self, end: int, *, shared: bool) -> torch.UntypedStorage:
        """Return the mapped file, which has at least ``end`` bytes."""
        with self._lock:
            known = self._maps.get(shared)
            if known is None or known.nbytes() < end:
                fd = open_regular(self.path, shared)
                try:
                    self._compare(fd)
                    known = self._maps[shared] = map_file(fd, shared=shared)
                    if self._map_fd < 0:  # kept, since threads look at it without the lock
                        self._map_fd, fd = fd, -1
                finally:
                    if fd >= 0:
                        os.close(fd)
            return known

    def check(self, *, may_be_removed: bool = False) -> None:
        """Raise FormatError if another file was saved under the path."""
        try:
            self._compare(self.path)
        except FileNotFoundError:
            if not may_be_removed:
                raise

    def _compare(self, file: str | int) -> None:
        status = os.stat(file)
        same = (status.st_dev, status.st_ino) == self.identity[:2]
        if same and self._pin is None and self.identity[2] is not None:
            same = identify_file(file, status) == self.identity
        if not same:
            self._pin = None
            raise ReplacedError(f"{self.path} was replaced since it was opened: open it again")

    def sync(self) -> None:
        """Return when what was written has reached the disk."""
        with self._lock:
            self.check()
            sync_file(self.path)


_FILES: weakref.WeakValueDictionary[FileIdentity, StoreFile] = weakref.WeakValueDictionary()
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


@atexit.register
def _close_at_exit() -> None:
    """Close all files before HDF5 does it, unless a thread of the program uses them."""
    for file in list(_FILES.values()):
        if file._lock.acquire(blocking=False):
            file.close()
            file._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_close_before_fork, after_in_parent=_unlock_after_fork, after_in_child=_unlock_after_fork
    )
