"""Objects as files: read through a cache of blocks, or written to a temporary file first; and trees of objects."""

from __future__ import annotations

import errno
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from td_core.errors import UnsupportedOperationError
from td_core.spi import Serializer, decode, encode, make_reporter
from td_core.typing import ObjectInfo, ObjectStore, Progress

from .byte_ranges import Bytes, read_objects

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: So many bytes of an object are cached, and those of the last fetch.
_CACHED = 1 << 26
#: A temporary file is uploaded in pieces of this many bytes.
_PIECE = 1 << 24


class ObjectFile(io.RawIOBase):
    r"""An object in a store as a file that is read, in blocks, which are cached. It can be pickled, without them.

    Args:
        store: the store.
        info: the object, which must keep its stamp.
        block: the size of a block in bytes.

    >>> from td_store.testing import MemoryStore
    >>> store = MemoryStore({"a": bytes(range(100))})
    >>> file = ObjectFile(store, store.stat(["a"])[0], block=10)
    >>> file.fetch([(5, 12), (95, 100)])
    >>> file.seek(8), file.read(3)
    (8, b'\x08\t\n')
    >>> [operation for operation, _ in store.log]
    ['stat', 'read']
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo, block: int = 1 << 20) -> None:
        super().__init__()
        self.store, self.info, self.block = store, info, block
        self._blocks: dict[int, bytes | bytearray | memoryview] = {}
        self._kept: list[tuple[int, memoryview]] = []
        self._at = 0

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectFile, (self.store, self.info, self.block)

    def keep(self, start: int, content: bytes | memoryview) -> None:
        """Keep bytes that the caller has read, as long as the file."""
        self._kept.append((start, memoryview(content)))

    def _is_kept(self, begin: int, end: int) -> bool:
        return any(start <= begin and end <= start + len(content) for start, content in self._kept)

    def fetch(self, ranges: Sequence[Bytes]) -> None:
        """Read the blocks of some ranges that are not yet cached, with one call of the store."""
        wanted = {
            number
            for begin, end in ranges
            if begin < end and not self._is_kept(begin, end)
            for number in range(begin // self.block, (min(end, self.info.size) - 1) // self.block + 1)
        }
        ends = {number: min((number + 1) * self.block, self.info.size) for number in wanted}
        missing = sorted(
            number
            for number in wanted - self._blocks.keys()
            if not self._is_kept(number * self.block, ends[number])
        )
        if not missing:
            return
        spans = [(number * self.block, ends[number]) for number in missing]
        (found,) = read_objects(self.store, [(self.info.name, self.info.stamp, spans)])
        left = len(self._blocks) + len(missing) - _CACHED // self.block
        for number in [number for number in self._blocks if number not in wanted][: max(left, 0)]:
            del self._blocks[number]
        self._blocks.update(zip(missing, found, strict=True))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read."""
        self._at = max(
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.info.size}[whence], 0
        )
        return self._at

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer."""
        target = memoryview(buffer).cast("B")
        begin, end = self._at, min(self._at + len(target), self.info.size)
        if begin >= end:
            return 0
        self.fetch([(begin, end)])
        while self._at < end:
            piece = self._find(self._at)[: end - self._at]
            target[self._at - begin : self._at - begin + len(piece)] = piece
            self._at += len(piece)
        return end - begin

    def _find(self, position: int) -> memoryview:
        """Return the cached bytes from a position on."""
        number, start = divmod(position, self.block)
        if number in self._blocks:
            return memoryview(self._blocks[number])[start:]
        begin, content = next(item for item in self._kept if item[0] <= position < item[0] + len(item[1]))
        return content[position - begin :]


def upload(
    store: ObjectStore,
    file: IO[bytes],
    report: Callable[[int], None] = lambda size: None,
    *,
    name: str = "",
    create: bool = False,
) -> ObjectInfo:
    """Write an object, by default that at the location of a store, from a temporary file: it is complete before it is sent.

    Raises:
        FileExistsError: ``create`` is True, and there is an object.

    >>> import tempfile
    >>> from td_store.testing import MemoryStore
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(b"abc")
    ...     upload(MemoryStore(), file).size
    3
    """
    file.seek(0)

    def produce() -> Iterator[bytes]:
        while piece := file.read(_PIECE):
            yield piece
            report(len(piece))

    return store.write(name, produce(), create=create)


def refuse_objects(location: object, operation: str, instead: str) -> None:
    """Raise UnsupportedOperationError if a location is a URL or an object store: objects cannot be written in part.

    >>> from td_store.testing import MemoryStore
    >>> refuse_objects(MemoryStore(), "append to", "save it again")
    Traceback (most recent call last):
    td_core.errors.UnsupportedOperationError: cannot append to memory://test: ...
    """
    objects = Serializer.find_objects(location)
    if objects is not None:
        raise UnsupportedOperationError(
            f"cannot {operation} {objects.where}: an object cannot be written in part; {instead}"
        )


def read_stored(lazy: Any, rows: object = None, progress: Progress = False) -> Any:
    """Return an opened collection, or some rows of it, in memory; all leaves are read together, tied ones once."""
    read = encode(lazy if rows is None else lazy[rows], in_memory=True)
    memory = {id(leaf): leaf for leaf in read.leaves}
    total = sum(leaf.numel() * leaf.element_size() for leaf in memory.values())
    make_reporter(progress, total, "load")(total)
    return decode(read)


class NewTree:
    """A save of several objects: readers see the old one, that it has not ended, or the new one, which its root completes.

    Args:
        store: the store.
        root: the name of the object that is written last.
        marker: its content until then, which readers refuse. A new location always has it: of two savers, one is refused.
        overwrite: whether to replace what is there.
        marks_old: False if the objects of the new save have other names than those of the old one, which can then be read
            until the new one is complete.

    Raises:
        FileExistsError: there is a root, or another saver makes one, and ``overwrite`` is False.
    """

    def __init__(
        self, store: ObjectStore, root: str, marker: bytes, *, overwrite: bool, marks_old: bool = True
    ) -> None:
        self.store, self.root = store, root
        self.written: dict[str, ObjectInfo] = {}
        single, old = store.stat(["", root])
        if single is not None:
            raise FileExistsError(
                errno.EEXIST,
                "there is one object, beside which a tree would not be found: delete it",
                store.where,
            )
        if overwrite and old is not None:
            if marks_old:
                store.write(root, [marker])
            return
        try:
            store.write(root, [marker], create=True)
        except FileExistsError as error:
            raise FileExistsError(
                errno.EEXIST,
                "there is a save, or another process is saving here: pass overwrite=True to replace it",
                store.where,
            ) from error

    def write(self, name: str, content: Iterable[Buffer]) -> None:
        """Write an object of the new save."""
        self.written[name] = self.store.write(name, content)

    def commit(self, content: Iterable[Buffer], old: Iterable[str] = ()) -> None:
        """Write the root, and remove the objects of the old save that the new one does not have."""
        self.write(self.root, content)
        left = sorted(set(old) - self.written.keys())
        if not left:
            return
        try:
            self.store.delete(left)
        except OSError as error:
            warnings.warn(
                f"{self.store.where}: the save is complete, but {len(left)} objects of the old one are left: {error}",
                stacklevel=2,
            )
