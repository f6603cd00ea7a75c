"""Publishing a directory in one step.

A save is built in a directory beside its prefix, ``.<name>.td-new-<number>``. When it is complete, it is renamed to
``.<name>.td-old-<number>`` and then exchanged with the prefix in one step; what was at the prefix, now under that other
name, is removed. Whatever stops the process leaves a complete save at the prefix, the old one or the new one, and
litter that the next save at that prefix removes: of a directory called ``new`` everything is ours, from one called
``old`` files that belong to no save are first brought back to the prefix, which makes a ``new`` one of it.

One process at a time looks for litter, replaces a save, and removes what it replaced: the one that holds the lock on
``.<name>.td-lock``, a file that is there only meanwhile. Building needs no such lock, and two processes may do it at
once; who builds holds a lock on its directory, so that nobody takes it for litter. What is called ``old`` is only in use
while its user holds the first lock. Where nothing is at the prefix, the directory takes its place in one step and without
that lock, which would be a third of the time that saving a few leaves takes.

Where the prefix is itself a mount point, or its parent must not be written to, the save is built in place, the
``meta.json`` of the root last, and the file ``%saving`` says what is unfinished. This is refused where a save is already
there, since that one would be lost on failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator

from td_core.errors import FormatError

from . import _file_names, _fs
from ._errors import FileTakenError
from ._fs import DirectoryTree, Parts
from ._new_file import iter_numbered
from ._save_files import SaveFiles, find_save_files, find_unknown_files

_LITTER = re.compile(r"^\..*\.td-((new|old)-[0-9a-f]{8}|lock)$")


@contextlib.contextmanager
def lock_prefix(prefix: str) -> Iterator[None]:
    """Keep other processes from replacing a save; a :class:`Staging` in this context is told so."""
    parent, name = os.path.split(_fs.resolve_path(prefix))
    with (
        DirectoryTree.at_path(parent) as tree,
        _fs.lock_file(tree, f"{_file_names.list_temporary_prefixes(name)}lock"),
    ):
        yield


class Staging:
    """A directory under construction, published as a whole.

    Args:
        prefix: where it shall appear.
        files: what will be written, as paths below the prefix.
        durable: make everything durable, in order.
        alone: whether the caller is :func:`lock_prefix` at the prefix.
        own: which files below the prefix belong to the new save already; they must be carried over.

    Raises:
        FileTakenError: a file that belongs to no save is in the way, or a save that cannot be replaced in one step.
        NotADirectoryError: the prefix is a file.

    Attributes:
        tree: where to write.
        prefix: the absolute prefix, links resolved.
        previous: what is at the prefix now; None where nothing is.
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
        """Keep so many files open in reserve: with fewer than are let go then, neither an end nor an abort can be completed."""
        while len(self._held) < count:
            self._held.append(self._parent.reopen(()))

    def _release_fds(self) -> None:
        while self._held:
            _fs.close(self._held.pop())

    def _exclusive(self) -> contextlib.AbstractContextManager[bool]:
        if self._alone:
            return contextlib.nullcontext(True)
        return _fs.lock_file(self._parent, f"{self._litter}lock")

    def _begin_first(self) -> bool:
        """Begin without the lock, where nothing is at the prefix and nothing unfinished beside it; tell whether that was so.

        Who looks for litter meanwhile may take the directory for some: then it is gone, or marked, before it is ours.
        """
        parent = self._parent.root
        there = (_fs.is_name(name, parent) for name in (self._name, f"{self._litter}lock"))
        if any(there) or next(iter_numbered(parent, *self._unfinished), None) is not None:
            return False
        try:
            self.tree = self._make_temporary(next(_file_names.iter_numbers()))
        except OSError:
            return False  # somebody was faster, or the other way says what is wrong
        if _fs.is_named(self.tree.root, self._temporary, parent):
            return True
        self.tree.close()
        return False

    def _begin(self, files: set[Parts], excluded: bool) -> None:
        if excluded:
            self._remove_stale()
        self._open_previous()
        if self.previous is not None:
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
        """Open what is at the prefix now."""
        if self.previous is not None:
            self.previous.close()
        self.previous = (
            DirectoryTree.at_path(self.prefix) if _fs.get_status(self.prefix) is not None else None
        )

    def _find_free_number(self, excluded: bool) -> str:
        """Return what nothing unfinished at this prefix is called: the lowest number, which the next save looks at first.

        Processes that cannot keep each other out take a random one.
        """
        if not excluded:
            return secrets.token_hex(4)
        return next(
            number
            for number in _file_names.iter_numbers()
            if not any(_fs.is_name(start + number, self._parent.root) for start in self._unfinished)
        )

    def _make_temporary(self, token: str) -> DirectoryTree:
        """Create the directory to build in, and mark it as in use; BlockingIOError where another process has it already."""
        self._token = token
        self._temporary = f"{self._litter}new-{self._token}"
        _fs.make_directory(self._temporary, self._parent.root)
        try:
            tree = DirectoryTree.at_path(self._temporary, self._parent.root)
        except OSError as error:
            # In any other case it is no longer this one's.
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
        """Return what belongs to the save that is replaced, or to the one that replaces it."""
        result = find_save_files(previous, self._directories)
        if self._own is not None and not self.in_place:
            for path in self._own(previous):
                result.add(path)
        return result

    def _check_conflicts(self, previous: DirectoryTree, files: set[Parts]) -> None:
        others, folders = find_unknown_files(previous, self._find_save_files(previous), self._directories)
        # To save in place takes one file more.
        taken = [path for path in (*others, *folders) if path in files or path == (_file_names.SAVING,)]
        taken += [path for path in others if path in self._directories]
        if taken:
            shown = ", ".join(repr("/".join(path)) for path in sorted(taken)[:5])
            raise FileTakenError(
                f"cannot save at {self.prefix}: {shown} is in the way and belongs to no save; move it away, or choose "
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
        """Write the metadata of the root, which makes the save complete."""
        if self.in_place:
            self.tree.replace((), name, content, sync=self._durable, temporary=_file_names.UNFINISHED_META)
        else:
            self.tree.write((), name, content, sync=self._durable)

    def publish(self) -> None:
        """Let the directory, which is complete but for nothing, take the place of the prefix."""
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
                # As long as nobody else can take the complete directory for a replaced one.
                if not self._finished:
                    self._abort()
                raise

    def _try_rename_new(self) -> bool:
        """Take the prefix without the lock, where nothing is there; tell whether that was so."""
        if self._durable:
            self.tree.sync()
        parent = self._parent.root
        try:
            if not _fs.rename_new(parent, self._temporary, parent, self._name):
                return False
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False  # where a name cannot be asked for and taken in one step, somebody was faster
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
        # From here on nothing may be missing.
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
        """Take the place of the prefix; tell whether something was there, which now has the temporary name."""
        parent = self._parent.root
        for _ in range(100):
            if _fs.rename_new(parent, self._temporary, parent, self._name):
                return False
            try:
                if _fs.exchange(parent, self._temporary, self._name):
                    return True
            except FileNotFoundError:
                continue
            # Without an exchange the prefix is missing for a moment; a process that dies in it leaves the old save
            # under a name from which the next save restores it.
            token = self._find_free_number(excluded)
            aside = f"{self._litter}old-{token}"
            done = False
            try:
                _fs.rename(parent, self._name, aside)
                done = _fs.rename_new(parent, self._temporary, parent, self._name)
            finally:
                # Its place is taken, by this save or another one, or it comes back.
                if not done:
                    _fs.rename_new(parent, aside, parent, self._name)
            if done:
                self._token = token
                return True
        raise FileTakenError(f"cannot save at {self.prefix}: other processes replace it all the time")

    def _link_unknown(self, previous: DirectoryTree, left: SaveFiles) -> None:
        """Link files that belong to no save into the new directory."""
        others, _ = find_unknown_files(previous, left, self._directories)
        for path in others:
            self.tree.make_parents(path)
            try:
                self.tree.link(previous, path, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                # Without hard links it is moved over, like a directory, once the new save is in place.
                if error.errno not in _fs.NO_LINKS:
                    raise

    def _remove_replaced(self, old: DirectoryTree, token: str, left: SaveFiles) -> None:
        """Remove a replaced save."""
        parent, name, doomed = self._parent.root, f"{self._litter}old-{token}", f"{self._litter}new-{token}"
        with DirectoryTree.at_path(self.prefix) as now:
            now.share_fds(old)
            clean = _recover_all(old, now, left)
        if clean:
            _fs.rename(parent, name, doomed)
        # The metadata goes last, so that it still says what is ours if this is interrupted.
        last = [
            path
            for path in left.files
            if path[-1] in (_file_names.META, _file_names.MANIFEST, _file_names.SAVING)
        ]
        # What only its owner may remove is litter, which the next save of that owner removes.
        with contextlib.suppress(PermissionError):
            for path in (*sorted(left.files.difference(last)), *sorted(last, key=len, reverse=True)):
                old.remove_path(path)
            old.remove_empty(left.directories)
        if not self._parent.remove_directory((doomed if clean else name,)) and clean:
            # Somebody put a file there meanwhile.
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
                elif _fs.mark_in_use(tree.root, without_locks=False):
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
            # Else it was interrupted just when the directory had taken its place.
            self.tree.remove_all()
            self._parent.remove_directory((self._temporary,))

    def _close(self) -> None:
        self._release_fds()
        for tree in (self.previous, getattr(self, "tree", None), self._parent):
            if tree is not None:
                tree.close()


def _recover_all(old: DirectoryTree, now: DirectoryTree, left: SaveFiles) -> bool:
    """Bring what belongs to no save from a replaced directory to the prefix; tell whether that was all of it."""
    others, folders = find_unknown_files(old, left)
    if folders:
        # Directories that the new save has too are emptied, and go with those of the old one.
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
    """Move something from a replaced directory to the prefix; False where its name is taken."""
    try:
        now.make_parents(path)
        with _fs.closing(old.reopen(path[:-1])) as there:
            return _fs.rename_new(there, path[-1], now.fd(path[:-1]), path[-1])
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return False
