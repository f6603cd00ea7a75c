"""Write a file or a directory so that it appears at its path complete or not at all, whenever the process is killed.

The content is written under a temporary name in the same directory, which gets the final name in one step. The temporary is
locked while it is written, so that the next save to the same path removes those of killed processes only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ReadT = TypeVar("ReadT")

#: The most buffers that one call of ``writev`` takes.
_MAX_BUFFERS = 1000
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
#: The end of the name of a temporary. A save uses the first number that is free.
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}\Z")
#: Stale temporaries are looked for under this many numbers after that of a new one.
_GAP = 4
#: Flags of :func:`rename_with`: refuse to replace the target, and exchange the two names.
NO_REPLACE, EXCHANGE = 1, 2
#: The working directory, and the errors of systems without these flags.
_AT_CWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
#: Errors of allocating space on a file system that cannot.
_NOT_ALLOCATED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
#: Errors of renaming a directory over one that has files, and of two renames beside those of another save.
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_TAKEN = (*_OCCUPIED, errno.ENOENT)
#: A reader gives up after this many saves that replaced what it read.
_MOST_READS = 100


class _Temporary:
    """A file or directory under a temporary name beside its path."""

    fd = -1
    temporary = ""
    _is_locked = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # A save through a link replaces what the link refers to.
        self.path = os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path)
        _check_replaceable(self.path)
        try:
            number = self._take_number()
            for later in range(number + 1, number + 1 + _GAP):
                name = _name_temporary(self.path, f"{later:08x}")
                if os.path.lexists(name):
                    _remove_if_stale(name)
        except BaseException:
            self.discard()
            raise

    def _take_number(self) -> int:
        """Create and lock the temporary under the first number that is free, and return the number."""
        has_parents = False
        for number in itertools.count():
            self.temporary = _name_temporary(self.path, f"{number:08x}")
            try:
                self.fd = self._create()
            except FileExistsError:
                _remove_if_stale(self.temporary)
                continue
            except OSError as error:
                if has_parents or not isinstance(error, FileNotFoundError):
                    raise self._name_path(error) from error
                _make_parents(self.path)  # unless another save has just done it
                has_parents = True
                continue
            self._is_locked = lock(self.fd)
            # Another save can remove the temporary before it is locked.
            if not self._is_locked or self.is_pending:
                break
            self._close()
        return number

    def _create(self) -> int:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        hidden = self.temporary
        self.discard()
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, hidden):
            raise self._name_path(error) from error

    def _name_path(self, error: OSError) -> OSError:
        """Return an error with the path of the save, of which users know, in place of the temporary name."""
        code = error.errno or 0
        return OSError(code, f"cannot write it: {os.strerror(code)}", self.path)

    @property
    def is_pending(self) -> bool:
        """True if the content has not got its name: an interrupt can come in :meth:`commit`, before or after the rename."""
        if self.fd < 0:  # directories cannot be opened on Windows
            return bool(self.temporary) and os.name == "nt"
        return bool(self.temporary) and _is_named(self.fd, self.temporary)

    def discard(self) -> None:
        """Remove the temporary, unless it is committed."""
        if self.is_pending:
            _remove(self.temporary)  # before the lock is released
        elif self.temporary:
            # It is the directory that was exchanged for this one, or the temporary of another save.
            _remove_if_stale(self.temporary)
        self._close()

    def _finish(self, durable: bool) -> None:
        self.temporary = ""  # committed, also if the names cannot be synced
        if durable:
            _sync_names(os.path.dirname(self.path))
        self._close()

    def _close(self) -> None:
        self.temporary, fd, self.fd = "", self.fd, -1
        if fd >= 0:
            _unlock_and_close(fd)


class NewFile(_Temporary):
    """A file that gets its name when it is complete; :meth:`commit` renames it, else the end of the block removes it.

    A file at the path is replaced, and its permissions are kept; with ``replace=False``, FileExistsError is raised, as for a
    pipe, a device and a socket. Missing directories above the path are made. A library that opens files by path can write to
    ``temporary``.

    The file can be the last one of a save of several files in its directory, such as their index: ``beside`` has the suffixes
    of these. Then the block is entered by one process at a time, if the file system has locks, and what killed saves left of
    files with these suffixes is removed.

    Attributes:
        path: the final path, links resolved.
        temporary: the path until then; empty after it.
        fd: file descriptor, open for reading and writing, with an exclusive ``flock``.

    >>> from pathlib import Path
    >>> with NewFile("data.bin") as file:
    ...     file.write([b"ab", b"c"])
    ...     file.commit()
    >>> Path("data.bin").read_bytes()
    b'abc'
    """

    def __init__(
        self, path: str | os.PathLike[str], *, replace: bool = True, beside: tuple[str, ...] = ()
    ) -> None:
        self._replaces = replace
        if not replace and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        with contextlib.ExitStack() as locks:
            if beside:
                locks.enter_context(_lock_directory(os.path.dirname(os.path.abspath(path)), beside))
            super().__init__(path)
            self._locks = locks.pop_all()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._locks:
            super().__exit__(kind, error, trace)

    def _create(self) -> int:
        return os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def write(
        self, buffers: Sequence[Any], position: int = 0, report: Callable[[int], None] | None = None
    ) -> None:
        """Write buffers of bytes, one after the other, from a position on; ``report`` receives the number of bytes."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            count = os.pwritev(self.fd, views[:_MAX_BUFFERS], position)
            position += count
            if report is not None:
                report(count)
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def extend(self, size: int) -> None:
        """Give the file a size, with disk space for all of it; what was not written is zero.

        Raises:
            OSError: the disk is full.
        """
        allocate_file(self.fd, size)

    def commit(self, *, durable: bool = False) -> None:
        """Give the file its final name; with ``durable``, return after its content and its name are on the disk."""
        _copy_mode(self.path, self.temporary)
        if durable:
            os.fsync(self.fd)
        if self._replaces:
            os.replace(self.temporary, self.path)
        else:
            os.link(self.temporary, self.path)
            os.unlink(self.temporary)
        self._finish(durable)


class NewDirectory(_Temporary):
    """A directory that gets its name when it is complete: files are written below ``temporary`` until :meth:`commit`.

    A directory at the path is replaced in one step where the system can exchange two names (Linux), and is then removed with
    all files in it. Elsewhere a process that is killed between two renames leaves the old one under a temporary name, which
    the next save to this path renames back. Read it with :func:`read_unreplaced`: a loop over its files can otherwise read
    those of two saves.

    Attributes:
        path: the final path, links resolved.
        temporary: the path until then; empty after it.

    Raises:
        NotADirectoryError: a file is at the path.

    >>> import os
    >>> from pathlib import Path
    >>> with NewDirectory("data") as folder:
    ...     _ = Path(folder.temporary, "a.txt").write_text("text")
    ...     folder.commit()
    >>> os.listdir("data")
    ['a.txt']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.path.realpath(path)
        if os.path.isfile(path):  # one question, as other saves rename a directory there
            raise NotADirectoryError(
                f"cannot save to {path!r}, which is a file: remove it, or choose another path"
            )
        _make_parents(path)
        _recover(path)
        super().__init__(path)

    def _create(self) -> int:
        while True:
            os.mkdir(self.temporary)
            # Another save can remove the directory before it is opened and locked.
            with contextlib.suppress(FileNotFoundError):
                return -1 if os.name == "nt" else os.open(self.temporary, os.O_RDONLY)

    def commit(self, *, durable: bool = False) -> None:
        """Give the directory its final name; with ``durable``, return after all files and names are on the disk."""
        _copy_mode(self.path, self.temporary)
        if durable:
            _sync_tree(self.temporary)
        while True:
            try:
                os.rename(self.temporary, self.path)  # over nothing, or over an empty directory
                break
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
            if self._is_locked:
                # Under a name that no save uses again, nothing else can be removed in place of the old directory.
                aside = _name_aside(self.path)
                os.rename(self.temporary, aside)
                self.temporary = aside
            if _replace_directory(self.temporary, self.path):
                break
        self._finish(durable)


def _replace_directory(new: str, path: str) -> bool:
    """Put a directory in the place of another one, and remove that one; return False if there is none now."""
    if _exchange(new, path):
        _remove(new)
        return True
    aside = _name_aside(path)
    try:
        os.rename(path, aside)
        os.rename(new, path)
    except BaseException as error:  # also an interrupt between the two
        if os.path.lexists(aside):
            _put_back(aside, path, wait=True)
        if isinstance(error, OSError) and error.errno in _TAKEN and os.path.lexists(new):
            return False
        raise
    _call_if_stale(
        _remove, aside, wait=True, without_locks=True
    )  # locked, as a part of it must not be recovered
    return True


#: The end of the name of a directory that is being replaced, or that is about to replace it.
_OLD = "-old"


def _name_aside(path: str) -> str:
    return f"{_name_temporary(path, secrets.token_hex(4))}{_OLD}"


def _recover(path: str) -> None:
    """Rename back a directory that a killed process had moved aside, if nothing is in its place; else remove it."""
    folder, name = os.path.split(path)
    for item in _list(folder):
        if item.endswith(_OLD) and _TEMPORARY.sub("", item.removesuffix(_OLD)) == _hide(name):
            _put_back(os.path.join(folder, item), path)


def _put_back(aside: str, path: str, *, wait: bool = False) -> None:
    change = _remove if os.path.lexists(path) else functools.partial(os.rename, dst=path)
    _call_if_stale(change, aside, wait=wait, without_locks=True)


def _exchange(one: str, other: str) -> bool:
    """Exchange two names in one step; return False if the system cannot."""
    try:
        return rename_with(EXCHANGE, _AT_CWD, one, _AT_CWD, other)
    except FileNotFoundError:
        return False


@functools.cache
def _find_renameat2() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return function


def rename_with(flag: int, source_fd: int, source: str, target_fd: int, target: str) -> bool:
    """Rename with a flag of Linux's renameat2, below two open directories; return False if the system has no such call.

    Raises:
        OSError: a name is missing, or the target is taken.

    >>> fd = os.open(".", os.O_RDONLY)
    >>> rename_with(NO_REPLACE, fd, "one", fd, "other") if sys.platform == "linux" else os.stat("one")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'one'...
    >>> os.close(fd)
    """
    function = _find_renameat2()
    if function is None:
        return False
    if function(source_fd, os.fsencode(source), target_fd, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def allocate_file(fd: int, size: int, start: int = 0) -> None:
    """Give an open file a size, with disk space for all of it, so that no write to a mapping of the file can fail.

    A write to a mapping of a file without space would end the process (SIGBUS). What is before ``start`` has space.

    Raises:
        OSError: the disk is full.

    >>> with open("data.bin", "wb") as file:
    ...     allocate_file(file.fileno(), 1000)
    >>> import os
    >>> os.stat("data.bin").st_size
    1000
    """
    try:
        if size > start:
            os.posix_fallocate(fd, start, size - start)
    except (AttributeError, OSError) as error:  # some systems and file systems have no such call
        if isinstance(error, OSError) and error.errno not in _NOT_ALLOCATED:
            raise
    os.ftruncate(fd, size)


def read_unreplaced(path: str | os.PathLike[str], read: Callable[[], ReadT]) -> ReadT:
    """Return the result of ``read()``, which reads the files of a directory; repeat it if a save replaced the directory.

    So the result is never a mixture of two saves, and a file that is missing because of a save raises no error.

    >>> import os
    >>> os.mkdir("folder")
    >>> read_unreplaced("folder", lambda: os.listdir("folder"))
    []
    """
    for _ in range(0 if os.name == "nt" else _MOST_READS - 1):
        # While the directory is open, no other one gets its number.
        fd = os.open(path, os.O_RDONLY | _BINARY)
        try:
            result = read()
        except Exception:
            if _is_named(fd, path):
                raise
        else:
            if _is_named(fd, path):
                return result
        finally:
            os.close(fd)
    return read()


def _remove_if_stale(path: str) -> None:
    _call_if_stale(_remove, path)


def _call_if_stale(
    change: Callable[[str], object], path: str, *, wait: bool = False, without_locks: bool = False
) -> None:
    """Change a temporary unless it is locked, and ignore an OSError; ``without_locks`` also if there are no locks."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
        try:
            # Between opening and locking it, another save can commit it, and a third one take its name.
            if lock(fd, wait=wait, otherwise=without_locks) and _is_named(fd, path):
                change(path)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _lock_directory(path: str, suffixes: tuple[str, ...]) -> Iterator[None]:
    """Let only one process at a time into the block, without the stale temporaries of files with one of the suffixes."""
    fd = -1 if os.name == "nt" else os.open(path, os.O_RDONLY)
    try:
        if fd >= 0:
            lock(fd)
        for item in _list(path):
            if item[:1] == "." and _TEMPORARY.search(item) and _TEMPORARY.sub("", item).endswith(suffixes):
                _remove_if_stale(os.path.join(path, item))
        yield
    finally:
        if fd >= 0:
            _unlock_and_close(fd)


def _sync_names(path: str) -> None:
    """Write the names in a directory to the disk."""
    if os.name == "nt":
        return
    fd = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(path: str) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDWR | _BINARY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        _sync_names(folder)


def _make_parents(path: str) -> None:
    """Make the directories above a path that are missing."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        code = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno or 0  # a file is there
        raise OSError(code, os.strerror(code), path) from error


def _name_temporary(path: str, number: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_hide(name)}.tmp-{number}")  # as _TEMPORARY


def _hide(name: str) -> str:
    """Return the beginning of the names of temporaries; a long name is hashed, since file systems allow 255 bytes."""
    raw = os.fsencode(name)
    return f".{name if len(raw) <= 200 else hashlib.sha1(raw).hexdigest()}"


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except FileNotFoundError:
        return []


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _copy_mode(source: str, target: str) -> None:
    """Copy the permissions of a file or directory that exists."""
    with contextlib.suppress(OSError):
        os.chmod(target, stat.S_IMODE(os.stat(source).st_mode))


def _is_named(fd: int, path: str | os.PathLike[str]) -> bool:
    """Return True if a path is the name of an open file or directory."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def lock(fd: int, *, wait: bool = True, otherwise: bool = False) -> bool:
    """Lock an open file or directory until this process ends, or it is unlocked.

    Return False if it is locked elsewhere, and ``otherwise`` if the file system has no locks.

    >>> with open("data", "wb") as file:
    ...     lock(file.fileno(), otherwise=True)
    True
    """
    if fcntl is None:
        return otherwise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return otherwise
    return True


def _unlock_and_close(fd: int) -> None:
    # Closing alone would keep the lock if another thread forked meanwhile: the process that it started has the file open too.
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _check_replaceable(path: str) -> None:
    """Raise FileExistsError if a save would replace a pipe, a device or a socket."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # nothing is there, or creating the file raises the error
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FileExistsError(
            errno.EEXIST, "cannot save over what is not a file or directory, choose another path", path
        )
