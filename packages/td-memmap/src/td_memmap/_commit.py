"""Publish a save in one step.

A save is built in the directory ``.<name>.td-new-<number>`` next to its prefix. When it is complete, it is renamed
to ``.<name>.td-old-<number>`` and then exchanged with the prefix in one step. The replaced save, which now has that
other name, is removed. Whatever stops the process leaves a complete save at the prefix, the old or the new one, and
stale directories, which the next save at that prefix removes: a ``new`` directory with all its files; from an ``old`` directory
first the files that belong to no save are moved back to the prefix, then it is renamed to ``new`` and removed.

Removing stale directories, replacing a save and removing the replaced one require the lock on ``.<name>.td-lock``, a file that
exists only while it is locked. Building does not require it, so two processes can build concurrently; each holds a lock
on its directory, so that no other process removes it as stale. An ``old`` directory is in use only while its
process holds the first lock. If nothing exists at the prefix, the directory is renamed to it in one step and
without that lock, which would cost a third of the time of saving a few leaves.

If the prefix is a mount point, or its parent is not writable, the save is built in place, with the ``meta.json`` of
the root last, and the file ``%saving`` lists the unfinished files. This is refused if the prefix already has a
save, because a failure would destroy it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator

from td_core.errors import FormatError
from td_core.spi import check_same_format

from . import _file_names, _fs
from ._errors import FileTakenError
from ._fs import DirectoryTree, Parts
from ._save_files import SaveFiles, find_save_files, find_unknown_files

#: iter_numbered() stops after this many free numbers in a row; gaps come from concurrent processes that ended.
_GAP = 4
_LITTER = re.compile(r"^\..*\.td-((new|old)-[0-9a-f]{8}|lock)$")


@contextlib.contextmanager
def lock_prefix(prefix: str) -> Iterator[None]:
    """Prevent other processes from replacing a save. A :class:`Staging` in this context needs ``alone=True``."""
    parent, name = os.path.split(_fs.resolve_path(prefix))
    with (
        DirectoryTree.at_path(parent) as tree,
        _fs.lock_file(tree, f"{_file_names.list_temporary_prefixes(name)}lock"),
    ):
        yield


class Staging:
    """Directory of a new save that is built next to its prefix and published in one step.

    Args:
        prefix: path of the published directory.
        files: the files to write, as paths below the prefix.
        durable: sync all files and directories to disk, in order.
        alone: whether the caller holds :func:`lock_prefix` on the prefix.
        own: function that returns the files below the prefix to which the new save will link.

    Raises:
        FileTakenError: a file that belongs to no save has a required name, or the existing save cannot be
            replaced in one step.
        NotADirectoryError: the prefix is a file.

    Attributes:
        tree: the directory to write to.
        prefix: the absolute prefix, links resolved.
        previous: the directory at the prefix; None if it does not exist.
    """

    def __init__(
        self,
        prefix: str,
        files: Iterable[Parts],
        *,
        durable: bool = False,
        alone: bool = False,
        own: Callable[[DirectoryTree], Iterable[Parts]] | None = None,
    ) -> None:
        self.prefix = _fs.resolve_path(prefix)
        self._durable = durable
        self._own = own
        self._name = os.path.basename(self.prefix)
        if not self._name:
            raise FileTakenError(
                f"cannot save at {self.prefix}: the root of a file system cannot be replaced; save into a directory below it"
            )
        if _LITTER.search(self._name):
            raise ValueError(
                f"cannot save at {self.prefix}: names like this one are those of unfinished saves"
            )
        parent = os.path.dirname(self.prefix)
        self.previous: DirectoryTree | None = None
        self.in_place = False
        self._finished = False
        self._litter = _file_names.list_temporary_prefixes(self._name)
        self._unfinished = f"{self._litter}new-", f"{self._litter}old-"
        self._alone = alone
        self._token = self._temporary = ""
        self._held: list[int] = []
        try:
            self._parent = DirectoryTree.at_path(parent)
        except FileNotFoundError:
            _fs.make_directories(parent)
            self._parent = DirectoryTree.at_path(parent)
        wanted = set(files)
        self._directories = _file_names.leading(wanted)
        try:
            self._reserve_fds(2)
            if not self._begin_first():
                with self._exclusive() as excluded:
                    self._begin(wanted, excluded)
        except BaseException:
            self._close()
            raise

    def _reserve_fds(self, count: int) -> None:
        """Keep ``count`` spare file descriptors open, so that a publish or an abort can always open that many files."""
        while len(self._held) < count:
            self._held.append(self._parent.reopen(()))

    def _release_fds(self) -> None:
        held, self._held = self._held, []
        for fd in held:
            _fs.close(fd)

    def _exclusive(self) -> contextlib.AbstractContextManager[bool]:
        if self._alone:
            return contextlib.nullcontext(True)
        return _fs.lock_file(self._parent, f"{self._litter}lock")

    def _begin_first(self) -> bool:
        """Start staging without the lock. Return False if the prefix exists, has stale directories or is in use."""
        parent = self._parent.root
        there = (_fs.is_name(name, parent) for name in (self._name, f"{self._litter}lock"))
        if any(there) or next(iter_numbered(parent, *self._unfinished), None) is not None:
            return False
        try:
            self.tree = self._make_temporary(next(_file_names.iter_numbers()))
        except OSError:
            return False  # Another process took the name, or the slow path raises the error.

        # Another process may have removed the directory as stale before this process locked it.
        if _fs.is_named(self.tree.root, self._temporary, parent):
            return True
        self.tree.close()
        return False

    def _begin(self, files: set[Parts], excluded: bool) -> None:
        if excluded:
            self._remove_stale()
        self._open_previous()
        if self.previous is not None:
            check_same_format(self.prefix, "memmap")
            self._check_conflicts(self.previous, files)
            self.previous.close_spare()
            self.in_place = _fs.is_mount(self.prefix)
        if not self.in_place:
            try:
                self.tree = self._make_temporary(self._find_free_number(excluded))
            except OSError as error:
                if error.errno not in _fs.NOT_WRITABLE or self.previous is None:
                    raise
                self.in_place = True
        if self.in_place:
            self._begin_in_place(files)
        elif self.previous is not None:
            _fs.copy_mode(self.tree.root, self.previous.root)
        if self.previous is not None:
            self.tree.share_fds(self.previous)

    def _open_previous(self) -> None:
        """Open the directory that is at the prefix now."""
        if self.previous is not None:
            self.previous.close()
        try:
            self.previous = (
                DirectoryTree.at_path(self.prefix) if _fs.get_status(self.prefix) is not None else None
            )
        except NotADirectoryError:
            raise NotADirectoryError(
                f"cannot save to {self.prefix!r}, which is a file: remove it, or choose another path"
            ) from None

    def _find_free_number(self, excluded: bool) -> str:
        """Return the lowest number that no temporary directory has, or a random number without the lock."""
        if not excluded:
            return secrets.token_hex(4)
        return next(
            number
            for number in _file_names.iter_numbers()
            if not any(_fs.is_name(start + number, self._parent.root) for start in self._unfinished)
        )

    def _make_temporary(self, token: str) -> DirectoryTree:
        """Create and lock the directory to build in; raise BlockingIOError if another process removes it."""
        self._token = token
        self._temporary = f"{self._litter}new-{self._token}"
        _fs.make_directory(self._temporary, self._parent.root)
        try:
            tree = DirectoryTree.at_path(self._temporary, self._parent.root)
        except OSError as error:
            # Remove the directory only after EMFILE: other errors mean that another process has removed it already.
            if error.errno == errno.EMFILE:
                self._parent.remove_directory((self._temporary,))
            raise
        tree.path = f"{self._parent.path}/{self._temporary}"
        if not _fs.mark_in_use(tree.root, without_locks=True):
            tree.close()
            raise BlockingIOError(errno.EWOULDBLOCK, "another process removes it", tree.path)
        return tree

    def _begin_in_place(self, files: set[Parts]) -> None:
        self.tree = DirectoryTree.at_path(self.prefix)
        self._check_conflicts(self.tree, files)
        if not _fs.mark_in_use(self.tree.root, without_locks=True):
            raise FileTakenError(f"cannot save at {self.prefix}: another process does")
        if self.tree.stat((), _file_names.META) is not None:
            raise FileTakenError(
                f"cannot replace the save at {self.prefix} in one step: it is a mount point, or its parent directory "
                "is not writable, and a failure on the way would lose it; save into a directory below it, or remove "
                "it first"
            )
        unfinished = find_save_files(self.tree)
        unfinished.files.discard((_file_names.SAVING,))
        for path in unfinished.files:
            self.tree.remove_path(path)
        self.tree.remove_empty(unfinished.directories)
        self.tree.remove((), _file_names.SAVING)
        self._files = {*files, (_file_names.UNFINISHED_META,)}
        self.tree.write((), _file_names.SAVING, _file_names.format_listing(self._files))

    def _find_save_files(self, previous: DirectoryTree) -> SaveFiles:
        """Return the files of the old save, and the files at the prefix that the new save links to."""
        result = find_save_files(previous, self._directories)
        if self._own is not None and not self.in_place:
            for path in self._own(previous):
                result.add(path)
        return result

    def _check_conflicts(self, previous: DirectoryTree, files: set[Parts]) -> None:
        others, folders = find_unknown_files(previous, self._find_save_files(previous), self._directories)
        # A save that is built in place also needs the name ``%saving``.
        taken = [path for path in (*others, *folders) if path in files or path == (_file_names.SAVING,)]
        taken += [path for path in others if path in self._directories]
        if taken:
            shown = ", ".join(repr("/".join(path)) for path in sorted(taken)[:5])
            raise FileTakenError(
                f"cannot save at {self.prefix}: {shown} exists and is not part of a save; move it away, or choose "
                "another prefix"
            )

    def make(self, parts: Parts) -> None:
        """Create a directory."""
        try:
            self.tree.make(parts)
        except FileExistsError:
            if not self.in_place:
                raise

    def write_last(self, name: str, content: bytes) -> None:
        """Write the metadata of the root, which completes the save."""
        if self.in_place:
            self.tree.replace((), name, content, sync=self._durable, temporary=_file_names.UNFINISHED_META)
        else:
            self.tree.write((), name, content, sync=self._durable)

    def publish(self) -> None:
        """Replace the prefix with the completed directory."""
        if self.in_place:
            self._finished = True
            self.tree.remove((), _file_names.SAVING)
            if self._durable:
                self.tree.sync()
            return
        if self.previous is None and self._try_rename_new():
            return
        with self._exclusive() as excluded:
            try:
                self._publish(excluded)
            except BaseException:
                # Abort before the lock is released: another process would treat the complete directory as a
                # replaced save.
                if not self._finished:
                    self._abort()
                raise

    def _try_rename_new(self) -> bool:
        """Rename the directory to the prefix without the lock; return False if the prefix exists."""
        if self._durable:
            self.tree.sync()
        parent = self._parent.root
        try:
            if not _fs.rename_new(parent, self._temporary, parent, self._name):
                return False
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False  # Without RENAME_NOREPLACE, another process may have created the name.
        self._finished = True
        if self._durable:
            self._parent.sync()
        return True

    def _publish(self, excluded: bool) -> None:
        self.tree.close_spare()
        self._open_previous()
        left = None
        if self.previous is not None:
            self.tree.share_fds(self.previous)
            left = self._find_save_files(self.previous)
            self._link_unknown(self.previous, left)
            self.previous.close_spare()
        if self._durable:
            self.tree.sync()
        # The next steps must not fail for lack of file descriptors, so free the reserved descriptors now.
        self._reserve_fds(4)
        self._release_fds()
        complete = f"{self._litter}old-{self._token}"
        _fs.rename(self._parent.root, self._temporary, complete)
        self._temporary = complete
        replaced = self._exchange(excluded)
        self._finished = True
        if self.previous is not None:
            _fs.follow_cwd(self.previous.root, self.tree.root)
            self.previous.close()
        if self._durable:
            self._parent.sync()
        if replaced:
            with DirectoryTree.at_path(f"{self._litter}old-{self._token}", self._parent.root) as old:
                self._remove_replaced(old, self._token, left or find_save_files(old))

    def _exchange(self, excluded: bool) -> bool:
        """Move the new directory to the prefix; return True if the old directory now has the temporary name."""
        parent = self._parent.root
        for _ in range(100):
            if _fs.rename_new(parent, self._temporary, parent, self._name):
                return False
            try:
                if _fs.exchange(parent, self._temporary, self._name):
                    return True
            except FileNotFoundError:
                continue
            # Without RENAME_EXCHANGE the prefix is missing for a moment. If the process dies then, the next save
            # restores the old save from its temporary name.
            token = self._find_free_number(excluded)
            aside = f"{self._litter}old-{token}"
            done = False
            try:
                _fs.rename(parent, self._name, aside)
                done = _fs.rename_new(parent, self._temporary, parent, self._name)
            finally:
                # Move the old save back, unless another save is at the prefix now.
                if not done:
                    _fs.rename_new(parent, aside, parent, self._name)
            if done:
                self._token = token
                return True
        raise FileTakenError(f"cannot save at {self.prefix}: other processes keep replacing it")

    def _link_unknown(self, previous: DirectoryTree, left: SaveFiles) -> None:
        """Hard-link the files that belong to no save into the new directory."""
        others, _ = find_unknown_files(previous, left, self._directories)
        for path in others:
            self.tree.make_parents(path)
            try:
                self.tree.link(previous, path, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                # Without hard links, the file is moved to the new save after it is published.
                if error.errno not in _fs.NO_LINKS:
                    raise

    def _remove_replaced(self, old: DirectoryTree, token: str, left: SaveFiles) -> None:
        """Remove a replaced save, after moving the files that belong to no save back to the prefix."""
        parent, name, doomed = self._parent.root, f"{self._litter}old-{token}", f"{self._litter}new-{token}"
        with DirectoryTree.at_path(self.prefix) as now:
            now.share_fds(old)
            clean = _recover_all(old, now, left)
        if clean:
            _fs.rename(parent, name, doomed)
        # Remove the metadata last: if the removal is interrupted, it still lists the files of the save.
        last = [
            path
            for path in left.files
            if path[-1] in (_file_names.META, _file_names.MANIFEST, _file_names.SAVING)
        ]
        # Leave files that this user may not delete: the next save of their owner removes them.
        with contextlib.suppress(PermissionError):
            for path in (*sorted(left.files.difference(last)), *sorted(last, key=len, reverse=True)):
                old.remove_path(path)
            old.remove_empty(left.directories)
        if not self._parent.remove_directory((doomed if clean else name,)) and clean:
            # Another process has added a file since then. Rename back, so that a later save recovers the file.
            _fs.rename(parent, doomed, name)

    def _remove_stale(self) -> None:
        parent, (_, old) = self._parent.root, self._unfinished
        for name in iter_numbered(parent, *self._unfinished):
            try:
                tree = DirectoryTree.at_path(name, parent)
            except OSError:
                continue
            with tree, contextlib.suppress(PermissionError):
                if name.startswith(old):
                    if not _fs.rename_new(parent, name, parent, self._name):
                        self._remove_replaced(tree, name.removeprefix(old), find_save_files(tree))
                # Between opening and locking it, its save can publish it.
                elif _fs.mark_in_use(tree.root, without_locks=False) and _fs.is_named(
                    tree.root, name, parent
                ):
                    tree.remove_all()
                    self._parent.remove_directory((name,))

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if not self._finished:
                self._abort()
        finally:
            self._close()

    def _abort(self) -> None:
        self._finished = True
        self._release_fds()
        if self.in_place:
            for path in self._files:
                self.tree.remove_path(path)
            self.tree.remove_empty(self._directories)
            self.tree.remove((), _file_names.SAVING)
        elif not _fs.is_named(self.tree.root, self._name, self._parent.root):
            # Keep the directory if it was renamed to the prefix just before the interrupt.
            self.tree.remove_all()
            self._parent.remove_directory((self._temporary,))

    def _close(self) -> None:
        self._release_fds()
        for tree in (self.previous, getattr(self, "tree", None), self._parent):
            if tree is not None:
                tree.close()


def _recover_all(old: DirectoryTree, now: DirectoryTree, left: SaveFiles) -> bool:
    """Move the files that belong to no save from a replaced directory to the prefix; return True if all moved."""
    others, folders = find_unknown_files(old, left)
    if folders:
        # Move single files, not the directory, if the new save also has that directory.
        left.directories |= find_save_files(now).directories
        others, folders = find_unknown_files(old, left)
    clean = True
    for path in folders:
        clean = _recover(old, now, path) and clean
    for path in others:
        here, there = now.stat_path(path), old.stat_path(path)
        if here is not None and there is not None and _fs.is_same_file(here, there):
            old.remove(path[:-1], path[-1])
        else:
            clean = _recover(old, now, path) and clean
    return clean


def _recover(old: DirectoryTree, now: DirectoryTree, path: Parts) -> bool:
    """Move one file or directory from a replaced save to the prefix; return False if its name is taken."""
    try:
        now.make_parents(path)
        with _fs.closing(old.reopen(path[:-1])) as there:
            return _fs.rename_new(there, path[-1], now.fd(path[:-1]), path[-1])
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return False


def iter_numbered(dir_fd: int, *starts: str) -> Iterator[str]:
    """Yield existing names that start with any of ``starts`` and end with a number, up to a gap in the numbers."""
    gap = 0
    for number in _file_names.iter_numbers():
        results = [start + number for start in starts if _fs.is_name(start + number, dir_fd)]
        yield from results
        gap = 0 if results else gap + 1
        if gap == _GAP:
            return
