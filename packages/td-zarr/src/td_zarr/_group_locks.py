"""Locks of groups: one thread of one process at a time writes to a group, and holds its lock for an operation.

Threads of a process are excluded by a lock in memory, which all that have the same group open share. Other processes are
excluded by ``flock`` on the directory of the group, where the file system has such locks; for a store that is not a local
directory they are not excluded.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class GroupLock:
    """The lock of one group in this process; the thread that holds it can hold it again.

    Attributes:
        saves: number of the saves of this process to the group, for a store that has no other mark of them.
        edits: number of the changes of its metadata by this process.
    """

    def __init__(self, fd: int = -1) -> None:
        self.saves = self.edits = 0
        self._fd, self._depth = fd, 0
        self._threads = threading.RLock()
        if fd >= 0:
            weakref.finalize(self, os.close, fd)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Exclude other threads and processes during a block."""
        with self._threads:
            is_first = self._depth == 0
            if is_first:
                self._flock(release=False)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if is_first:
                    self._flock(release=True)

    def _flock(self, release: bool) -> None:
        if fcntl is not None and self._fd >= 0:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._fd, fcntl.LOCK_UN if release else fcntl.LOCK_EX)


#: The locks of this process: of a directory by its device and number, of another store by its name.
_LOCKS: weakref.WeakValueDictionary[object, GroupLock] = weakref.WeakValueDictionary()
_REGISTRY = threading.Lock()


def lock_directory(path: str) -> GroupLock:
    """Return the lock of a directory, which keeps the number of the directory; FileNotFoundError if there is none."""
    if os.name == "nt":
        return lock_store(os.path.normcase(os.path.realpath(path)))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(fd)
    with _REGISTRY:
        # A child process has its own locks: the open directory of its parent would be locked for both.
        key = status.st_dev, status.st_ino, os.getpid()
        lock = _LOCKS.get(key)
        if lock is None:
            lock = _LOCKS[key] = GroupLock(fd)
            return lock
    os.close(fd)
    return lock


@contextlib.contextmanager
def hold_directory(path: str) -> Iterator[None]:
    """Hold the lock of the directory at a path, if there is one, so that nobody writes to it while it is replaced."""
    while os.path.isdir(path):
        lock = lock_directory(path)
        status = os.stat(path)
        with lock.hold():
            if _is_same(path, status):
                yield
                return
    yield


def _is_same(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False


def lock_store(name: str) -> GroupLock:
    """Return the lock of a group in a store, which excludes the threads of this process."""
    with _REGISTRY:
        key = name, os.getpid()
        lock = _LOCKS.get(key)
        if lock is None:
            lock = _LOCKS[key] = GroupLock()
    return lock


def _renew_registry() -> None:
    global _REGISTRY
    _REGISTRY = threading.Lock()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent could hold it, and does not exist in the child.
    os.register_at_fork(after_in_child=_renew_registry)
