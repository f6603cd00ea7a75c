"""File system access: every system call on files is in this module, or in td-core.

A :class:`DirectoryTree` is a directory that was opened once. Names below it are resolved relative to the open
directory, one component at a time and never through a link. So a read continues in the opened directory if another
process replaces it, and no name or link leaves it. Files are written with ``write()``, where a full disk is an
OSError; a store into a mapping of a sparse file would kill the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from td_core.errors import FormatError
from td_core.spi import open_regular, visit
from td_store.files import EXCHANGE, NO_REPLACE, allocate_file, identify_file, lock, rename_with

from . import _file_names

if TYPE_CHECKING:
    from typing_extensions import Buffer

Parts = tuple[str, ...]
#: Inode and time of birth of the file of a pickled tensor; the device has another number on another machine.
Stamp = tuple[object, ...]
Opened = TypeVar("Opened")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ, _WRITE = os.O_RDONLY | _FILE, os.O_RDWR | _FILE
_FD_DIRECTORY = "/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd"
_OPEN_DIRECTORIES = 128
#: Chunk size of reads, in bytes.
PIECE = 16 << 20
#: Errors of opening for writing after which the file may still be readable.
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)
#: Errors of a file system without hard links, or if a file has the maximal number of links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
# Linux writes at most 2**31 - 4096 bytes per call, so longer buffers are split.
_LONGEST_WRITE = 1 << 30


def add_path(error: OSError, what: str, path: str) -> OSError:
    """Return an OSError with the failed action and the path in its message."""
    if error.errno is None:
        return error
    return OSError(error.errno, f"{what}: {os.strerror(error.errno)}", path)


def _open_error(error: OSError, path: str) -> OSError:
    """Add the path to an error of opening a file; turn a too long name into "not found"."""
    code = errno.ENOENT if error.errno == errno.ENAMETOOLONG else error.errno or 0
    return OSError(code, os.strerror(code), path)


def write_all(fd: int, data: Buffer) -> None:
    """Write a complete buffer to an open file."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view[:_LONGEST_WRITE]) :]


def write_at(fd: int, data: Buffer, offset: int) -> None:
    """Write a complete buffer at byte ``offset`` of an open file."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view[:_LONGEST_WRITE], offset)
        view, offset = view[done:], offset + done


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read up to ``nbytes`` bytes of an open file from byte ``offset``."""
    return os.pread(fd, nbytes, offset)


def reserve(fd: int, nbytes: int) -> None:
    """Allocate ``nbytes`` bytes of disk space for an open file, so that no write to its mapping can fail."""
    if nbytes:
        allocate_file(fd, nbytes)


def open_anonymous() -> int:
    """Open a file without a name, which is freed when it is closed and unmapped."""
    try:
        return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):
        # Some platforms and file systems lack O_TMPFILE; this fallback is slower.
        with tempfile.TemporaryFile(buffering=0) as file:
            return os.dup(file.fileno())


def read_chunks(fd: int) -> Iterator[bytes]:
    """Yield the content of an open file in chunks."""
    while piece := os.read(fd, PIECE):
        yield piece


def set_time(file: int | str, dir_fd: int | None = None) -> None:
    """Set the time of a file to now; file systems round it down to a clock tick, which may equal the time of a save."""
    now = time.time_ns()
    os.utime(file, ns=(now, now), dir_fd=dir_fd)


def set_size(fd: int, nbytes: int) -> None:
    """Set the size of an open file without allocating disk space."""
    os.ftruncate(fd, nbytes)


def may_share(name: object) -> bool:
    """Return whether to map a file shared if it is writable; a program of tensordict may replace this function."""
    return True


def open_in_mode(mode: str | None, opener: Callable[..., Opened], *name: object) -> tuple[Opened, bool]:
    """Open a file in a ``mode`` of ``load_memmap``; return the file and whether writes reach it."""
    if mode == "r+" or (mode is None and may_share(name[-1])):
        try:
            return opener(*name, True), True
        except OSError as error:
            if mode is not None or error.errno not in NOT_WRITABLE:
                raise
    return opener(*name, False), False


#: Close a file descriptor.
close = os.close


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end of the ``with`` block."""
    try:
        yield fd
    finally:
        os.close(fd)


def get_open_status(fd: int) -> os.stat_result:
    """Return the ``os.stat_result`` of an open file."""
    return os.fstat(fd)


class DirectoryTree:
    """Open directory, with access to the files below it.

    Paths are given as ``parts``, the directories on the way, and a name. Methods that read raise FileNotFoundError
    if the file is missing and FormatError if it must not be followed.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.root = fd
        self.path = path
        self._open: dict[Parts, int] = {}
        self._others: tuple[DirectoryTree, ...] = ()

    @classmethod
    def at_path(cls, path: str, dir_fd: int | None = None) -> DirectoryTree:
        """Open a directory by its path, following links; raise NotADirectoryError if it is a file."""
        return cls(os.open(path, _DIRECTORY, dir_fd=dir_fd), path)

    def __enter__(self) -> DirectoryTree:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all directories that this tree holds open."""
        self._others = ()
        if self._open:
            self.close_spare()
        root, self.root = self.root, -1
        if root >= 0:
            os.close(root)

    # Close in the destructor too: an interrupt can arrive before the caller can close the tree.
    __del__ = close

    def close_spare(self, kept: int = -1) -> bool:
        """Close the cached directories except ``kept``; return True if any was open."""
        result = False
        for tree in (self, *self._others):
            for parts in [parts for parts, fd in tree._open.items() if fd != kept]:
                os.close(tree._open.pop(parts))
                result = True
        return result

    def share_fds(self, *others: DirectoryTree) -> None:
        """Let trees that are used alternately free each other's cached file descriptors when they run out."""
        trees = (self, *others)
        for tree in trees:
            tree._others = trees

    def show(self, parts: Parts, name: str = "") -> str:
        """Format a path below the root for error messages."""
        return "/".join((self.path, *parts, name) if name else (self.path, *parts))

    def fd(self, parts: Parts) -> int:
        """Return a file descriptor of a directory below the root, valid until the next call."""
        start, fd = len(parts), self._open.get(parts) if parts else self.root
        if fd is None:
            start, fd = start - 1, self._open.get(parts[:-1])
        if fd is None:
            # Start at the deepest parent that is still open.
            above = (item for item in self._open if parts[: len(item)] == item)
            start = max(map(len, above), default=0)
            fd = self._open[parts[:start]] if start else self.root
        for depth in range(start + 1, len(parts) + 1):
            fd = self._step(fd, parts[:depth])
        return fd

    def _step(self, fd: int, parts: Parts) -> int:
        try:
            below = os.open(parts[-1], _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.EMFILE and self.close_spare(fd):
                return self._step(fd, parts)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FormatError(
                    f"{self.show(parts)} is a file or a link where a directory should be"
                ) from error
            raise _open_error(error, self.show(parts)) from error
        self._open[parts] = below
        if len(self._open) > _OPEN_DIRECTORIES:
            os.close(self._open.pop(next(iter(self._open))))
        return below

    def _inside(self, parts: Parts) -> Parts | None:
        """Return the target of a link as a path below the root, or None if it is outside."""
        top = os.path.realpath(f"{_FD_DIRECTORY}/{self.root}")
        target = Path(os.path.realpath(os.path.join(top, *parts)))
        return (target.relative_to(top).parts or None) if target.is_relative_to(top) else None

    def open(self, parts: Parts, name: str, writable: bool = False) -> tuple[int, os.stat_result]:
        """Open a regular file, which the caller closes.

        Raises FileNotFoundError, or FormatError for a device, pipe or directory and for a link that leaves the
        tree.
        """
        try:
            fd = os.open(name, _WRITE if writable else _READ, dir_fd=self.fd(parts))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                inside = self._inside((*parts, name))
                if inside is not None and inside != (*parts, name):
                    return self.open(inside[:-1], inside[-1], writable=writable)
                raise FormatError(f"{self.show(parts, name)} is a link that leaves {self.path}") from error
            if error.errno in (errno.EISDIR, errno.ENXIO):
                raise FormatError(f"{self.show(parts, name)} is not a regular file") from error
            if error.errno == errno.EMFILE and self.close_spare(self.fd(parts)):
                return self.open(parts, name, writable)
            raise _open_error(error, self.show(parts, name)) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{self.show(parts, name)} is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd, status

    def read(self, parts: Parts, name: str, limit: int) -> bytes:
        """Return the content of a small file; raise FormatError if it is longer than ``limit`` bytes."""
        fd, status = self.open(parts, name)
        try:
            if status.st_size > limit:
                raise FormatError(
                    f"{self.show(parts, name)} is longer than a file of this kind can be: "
                    f"{status.st_size} bytes, at most {limit}"
                )
            # The file may grow concurrently, so read only the size that was checked.
            size = status.st_size
            content = os.read(fd, size)
            while len(content) < size and (piece := os.read(fd, size - len(content))):
                content += piece
            return content
        finally:
            os.close(fd)  # This is faster than a ``with`` block.

    def chunks(self, path: Parts) -> Iterator[bytes]:
        """Yield the content of a file in chunks."""
        fd, _ = self.open(path[:-1], path[-1])
        with closing(fd):
            yield from read_chunks(fd)

    def entries(self, parts: Parts = ()) -> dict[str, bool]:
        """Return the names in a directory, mapped to True for subdirectories and to False for files."""
        try:
            with os.scandir(self.fd(parts)) as listing:
                return {entry.name: entry.is_dir(follow_symlinks=False) for entry in listing}
        except OSError as error:
            if error.errno != errno.EMFILE or not self.close_spare(self.fd(parts)):
                raise add_path(error, "cannot list it", self.show(parts)) from error
            return self.entries(parts)

    def stat(self, parts: Parts, name: str) -> os.stat_result | None:
        """Return the ``os.stat_result`` of a name without following links, or None if it does not exist."""
        try:
            return get_status(name, self.fd(parts), follow=False)
        except FileNotFoundError:
            return None  # The parent directory does not exist.

    def stat_path(self, path: Parts) -> os.stat_result | None:
        """Return the ``os.stat_result`` of a path below the root, or None if it or a parent does not exist."""
        try:
            return self.stat(path[:-1], path[-1])
        except (FileNotFoundError, FormatError):
            return None

    def remove_path(self, path: Parts) -> None:
        """Remove a file below the root if it exists and is not a directory."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, FormatError):
            self.remove(path[:-1], path[-1])

    def open_below(self, parts: Parts) -> DirectoryTree:
        """Open a subdirectory as a separate tree, which remains valid if this tree is replaced."""
        tree = DirectoryTree(self.reopen(parts), self.show(parts))
        self.close_spare()
        return tree

    def reopen(self, parts: Parts) -> int:
        """Duplicate the file descriptor of a subdirectory; the caller closes it."""
        fd = self.fd(parts)
        try:
            return os.dup(fd)
        except OSError as error:
            if error.errno != errno.EMFILE or not self.close_spare(fd):
                raise add_path(error, "cannot open it", self.show(parts)) from error
            return self.reopen(parts)

    def is_replaced(self) -> bool:
        """Return True if the path no longer names the directory that was opened."""
        try:
            return not is_same_file(os.stat(self.path), os.fstat(self.root))
        except FileNotFoundError:
            return True

    def make(self, parts: Parts) -> None:
        """Create a directory."""
        os.mkdir(parts[-1], dir_fd=self.fd(parts[:-1]))

    def make_parents(self, path: Parts) -> None:
        """Create the missing parent directories of a path below the root."""
        start = len(path) - 1
        while start and self.stat_path(path[:start]) is None:
            start -= 1
        for depth in range(start + 1, len(path)):
            self.make(path[:depth])

    def create(self, parts: Parts, name: str) -> int:
        """Create a file for reading and writing; raise FileExistsError if it exists."""
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=self.fd(parts))
        except OSError as error:
            if error.errno != errno.EMFILE or not self.close_spare(self.fd(parts)):
                raise OSError(error.errno, os.strerror(error.errno or 0), self.show(parts, name)) from error
            return self.create(parts, name)

    def write(self, parts: Parts, name: str, data: Buffer, *, sync: bool = False) -> None:
        """Write a new small file."""
        try:
            with closing(self.create(parts, name)) as fd:
                write_all(fd, data)
                if sync:
                    os.fsync(fd)
        except OSError as error:
            raise add_path(error, "cannot write it", self.show(parts, name)) from error

    def replace(
        self, parts: Parts, name: str, data: Buffer, *, sync: bool = False, temporary: str = ""
    ) -> None:
        """Replace a small file in one step: readers see either the old or the new content."""
        temporary = temporary or f"{_file_names.TEMPORARY}{secrets.token_hex(4)}"
        try:
            self.write(parts, temporary, data, sync=sync)
            result, fd = self.stat(parts, name), self.fd(parts)
            if result is not None:
                os.chmod(temporary, stat.S_IMODE(result.st_mode), dir_fd=fd)
                set_time(temporary, fd)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            self.remove(parts, temporary)
            raise
        if sync:
            os.fsync(self.fd(parts))

    def link(self, source: DirectoryTree, old: Parts, new: Parts) -> None:
        """Hard-link a file of another tree into this one."""
        # Duplicate the source's descriptor: opening ``new`` may close it, since both can be in one tree.
        with closing(source.reopen(old[:-1])) as there:
            here = self.fd(new[:-1])
            os.link(old[-1], new[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)

    def remove(self, parts: Parts, name: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd(parts))

    def remove_directory(self, parts: Parts) -> bool:
        """Remove a directory if it is empty; return True if it no longer exists."""
        opened = self._open.pop(parts, None)
        if opened is not None:
            os.close(opened)
        try:
            os.rmdir(parts[-1], dir_fd=self.fd(parts[:-1]))
        except (FileNotFoundError, FormatError):
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):
                return False
            raise
        return True

    def remove_empty(self, places: Iterable[Parts]) -> None:
        """Remove the directories that are empty or contain only empty directories."""
        for parts in sorted(filter(None, places), key=len, reverse=True):
            self.remove_directory(parts)

    def remove_all(self) -> None:
        """Remove all files and directories of the tree."""
        seen: list[Parts] = []

        def remove_files(place: Parts) -> Iterator[tuple[Parts]]:
            seen.append(place)
            for name, is_directory in self.entries(place).items():
                if is_directory:
                    yield ((*place, name),)
                else:
                    self.remove(place, name)

        visit(remove_files, ())
        self.remove_empty(seen)

    def sync(self, parts: Parts = ()) -> None:
        """Sync a directory to disk, which makes the names in it durable."""
        os.fsync(self.fd(parts))


def sync_file(fd: int) -> None:
    """Sync the content of an open file to disk."""
    os.fsync(fd)


def exchange(dir_fd: int, name: str, other: str) -> bool:
    """Exchange two names in a directory in one step; return False if the platform cannot."""
    return rename_with(EXCHANGE, dir_fd, name, dir_fd, other)


def rename_new(source_fd: int, source: str, target_fd: int, target: str) -> bool:
    """Rename without replacing; return False if the target exists."""
    try:
        if rename_with(NO_REPLACE, source_fd, source, target_fd, target):
            return True
    except FileExistsError:
        return False
    if is_name(target, target_fd):
        return False
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    return True


def rename(dir_fd: int, name: str, other: str) -> None:
    """Rename in an open directory, replacing the target."""
    os.rename(name, other, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def make_directories(path: str) -> None:
    """Create a directory and its missing parents."""
    os.makedirs(path, exist_ok=True)


def make_directory(name: str, dir_fd: int) -> None:
    """Create a directory; raise FileExistsError if it exists."""
    os.mkdir(name, dir_fd=dir_fd)


def copy_mode(fd: int, source: str | int) -> None:
    """Copy the permissions of ``source``, if it exists, to an open file or directory."""
    result = get_status(source)
    if result is not None:
        os.fchmod(fd, stat.S_IMODE(result.st_mode))


def mark_in_use(fd: int, *, without_locks: bool) -> bool:
    """Lock a file or directory until this process ends; return False if another process holds the lock."""
    return lock(fd, wait=False, otherwise=without_locks)


@contextlib.contextmanager
def lock_file(folder: DirectoryTree, name: str) -> Iterator[bool]:
    """Hold an exclusive lock on a file that exists only while locked; yield False if locking is not possible."""
    dir_fd = folder.root
    while True:
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, 0o666, dir_fd=dir_fd)
        except OSError as error:
            if error.errno not in NOT_WRITABLE:
                raise add_path(error, "cannot create a file", folder.show((), name)) from error
            yield False
            return
        try:
            locked = lock(fd)
            # The previous holder has deleted the file, so this lock excludes no other process. Try again.
            if locked and not is_named(fd, name, dir_fd):
                continue
            try:
                yield locked
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=dir_fd)
                if locked:
                    # Unlock explicitly: closing would not, since a process forked inside the block has the file
                    # open too.
                    fcntl.flock(fd, fcntl.LOCK_UN)
            return
        finally:
            os.close(fd)


@contextlib.contextmanager
def lock_directory(dir_fd: int) -> Iterator[None]:
    """Hold an exclusive lock on an open directory; without effect on file systems without locks."""
    locked = lock(dir_fd)
    try:
        yield
    finally:
        if locked:
            fcntl.flock(dir_fd, fcntl.LOCK_UN)


def is_named(fd: int, name: str, dir_fd: int) -> bool:
    """Return True if a name in an open directory refers to the open file or directory ``fd``."""
    result = get_status(name, dir_fd)
    return result is not None and is_same_file(result, os.fstat(fd))


def make_absolute(path: str | Path) -> str:
    """Return an absolute path. Links are kept, unless the path contains ``..``."""
    whole = Path(path).absolute()
    # ``link/..`` is the parent of the link's target, so resolve the links first.
    return os.path.realpath(whole) if ".." in whole.parts else str(whole)


def resolve_path(path: str) -> str:
    """Return the absolute path with all links resolved."""
    return os.path.realpath(path)


def is_same_file(left: os.stat_result, other: os.stat_result) -> bool:
    """Return True if two stat results belong to the same file."""
    return get_identity(left) == get_identity(other)


def get_identity(actual: os.stat_result) -> tuple[int, int]:
    """Return the device and inode numbers of a stat result, which identify a file."""
    return actual.st_dev, actual.st_ino


#: Return what distinguishes an open file or directory from a later one with its inode.
identify_open = identify_file


def identify_path(path: str) -> tuple[int, int, int | None] | None:
    """Return what distinguishes a file or directory from a later one with its inode, or None if it does not exist."""
    status = get_status(path)
    return None if status is None else identify_file(path, status)


def find_stamp(path: str) -> Stamp:
    """Return the stamp of the file at a path."""
    with closing(open_regular(path)) as fd:
        return tuple(identify_file(fd, get_open_status(fd))[1:])


def check_stamp(path: str, stamp: Stamp | None) -> None:
    """Raise FormatError if another save has replaced a file since it was pickled; earlier releases stored no stamp."""
    if stamp is not None and find_stamp(path) != stamp:
        raise FormatError(
            f"{path} was replaced since the tensor was pickled: load the save again, or pickle the elements of clone()"
        )


def is_path_of(path: str | None, wanted: tuple[int, int] | None) -> bool:
    """Return True if a path leads to the file with the identity ``wanted``."""
    result = None if path is None else get_status(path)
    return result is not None and get_identity(result) == wanted


def is_link(actual: os.stat_result) -> bool:
    """Return True if a stat result belongs to a symbolic link."""
    return stat.S_ISLNK(actual.st_mode)


def follow_cwd(old_fd: int, new_fd: int) -> None:
    """Change the working directory to ``new_fd`` if it was ``old_fd``, which the new directory replaced."""
    try:
        here = os.stat(".")
    except FileNotFoundError:
        return
    if is_same_file(here, os.fstat(old_fd)):
        os.fchdir(new_fd)


def is_mount(path: str) -> bool:
    """Return True if ``path`` is a mount point."""
    if os.path.ismount(path):
        return True
    try:
        # stat() cannot detect a bind mount from the same file system; the mount table lists it.
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return False
    escaped = os.fsencode(path).replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\n", b"\\012")
    return b" " + escaped.replace(b"\t", b"\\011") + b" " in table


def get_status(path: str | int, dir_fd: int | None = None, *, follow: bool = True) -> os.stat_result | None:
    """Return the ``os.stat_result`` of a path, None if it does not exist; raise FormatError for a cycle of links."""
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None  # A file with such a long path is reachable only from an open directory.
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path} is a link that leads back to itself") from error
        raise


def is_file(path: str) -> bool:
    """Return True if a path is a regular file."""
    return os.path.isfile(path)


def is_name(name: str, dir_fd: int) -> bool:
    """Return True if a name exists in an open directory."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
