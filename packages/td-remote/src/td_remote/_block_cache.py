"""Blocks of objects on disk, for any number of processes: bounded, and checked at each read.

A block is a file whose name is a hash of its object, the stamp of that, and its number. It appears complete, by a rename, and
ends with a checksum; nothing is locked. What is wrong or missing is read from the server again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from td_core.errors import FormatError
from td_core.spi import set_module
from td_core.typing import ObjectInfo, Range
from td_store.files import Checksum

BLOCK = 1 << 22
_MARK = "td-remote-cache"
_NAME = re.compile(r"[0-9a-f]{32}-\d+")
_TEMPORARY = re.compile(r"[0-9a-f]{32}-\d+\.[0-9a-f]{32}\.tmp")
#: Bytes at the end of a block: the algorithm and the checksum.
_TAIL = 48
#: Bytes that remain free on the disk.
_FREE = 1 << 30
#: Seconds after which the use of a block is recorded again, and after which a temporary file is that of a killed process.
_USED, _STALE = 60.0, 600.0
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class CacheInfo(NamedTuple):
    """What a cache directory has.

    Attributes:
        path: the directory.
        blocks: the number of blocks of 4 MB, of which the last of an object is shorter.
        size: their size in bytes.

    >>> CacheInfo("blocks", 2, 8_388_704).blocks
    2
    """

    path: str
    blocks: int
    size: int


class BlockCache:
    """A directory of blocks.

    Args:
        folder: the directory; a new or empty one becomes a cache.
        limit: the most bytes in it.
        keeps_whole: whether reads of whole objects are kept, too.
    """

    def __init__(self, folder: Path, limit: int, *, keeps_whole: bool = True) -> None:
        self.folder, self.limit, self.keeps_whole = folder, limit, keeps_whole
        self._is_open = False
        #: How many bytes can be written before the directory is listed again.
        self._room = 0

    def read(
        self,
        where: str,
        ranges: Sequence[tuple[Range, ObjectInfo]],
        fetch: Callable[[Sequence[Range]], Sequence[memoryview]],
    ) -> Sequence[memoryview]:
        """Return the bytes of ranges, from blocks where they are kept, and with one call of ``fetch`` for the others."""
        blocks: dict[tuple[str, int], Range] = {}
        for item, info in ranges:
            if self.keeps_whole or not _is_whole(ranges, info):
                for number in _list_blocks(item):
                    stop = min(info.size, (number + 1) * BLOCK)
                    blocks[item.name, number] = Range(item.name, number * BLOCK, stop, info.stamp)
        if sum(map(_measure, blocks.values())) + _TAIL * len(blocks) > self.limit:
            blocks = {}
        if blocks:
            self._open()
        names = {key: self._name(where, block, key[1]) for key, block in blocks.items()}
        kept = {key: self._get(names[key], _measure(block)) for key, block in blocks.items()}
        missing = [key for key, content in kept.items() if content is None]
        past = [item for item, _ in ranges if (item.name, item.start // BLOCK) not in blocks]
        found = fetch([*(blocks[key] for key in missing), *past])
        kept.update(zip(missing, found, strict=False))
        if missing:
            self._put({names[key]: content for key, content in zip(missing, found, strict=False)})
        rest = iter(found[len(missing) :])
        return [
            _join(item, kept) if (item.name, item.start // BLOCK) in blocks else next(rest)
            for item, _ in ranges
        ]

    def list_files(self) -> Iterator[tuple[float, int, str]]:
        """Yield time of last use, size and path of each block, and of each temporary file."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, entry.path

    def clear(self) -> None:
        """Remove all blocks."""
        self._open()
        for _, _, path in [*self.list_files()]:
            _remove(path)

    def _open(self) -> None:
        """Make the directory a cache; ValueError if it has anything else, which must not be deleted."""
        if self._is_open:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(self.folder)
        strange = [
            name
            for name in names
            if name != _MARK and not _NAME.fullmatch(name) and not _TEMPORARY.fullmatch(name)
        ]
        if strange or (names and _MARK not in names):
            raise ValueError(
                f"{self.folder} is not a cache of td-remote: it has {(strange or names)[0]!r}; pass a new or empty directory"
            )
        (self.folder / _MARK).touch()
        self._is_open = True

    def _name(self, where: str, block: Range, number: int) -> str:
        text = "\0".join((where, block.name, block.stamp or "", str(BLOCK)))
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{number}"

    def _get(self, name: str, size: int) -> memoryview | None:
        """Return a block; None if it is not kept. One that is damaged is removed, with a warning."""
        path = self.folder / name
        try:
            with path.open("rb", buffering=0) as file:
                content = memoryview(os.pread(file.fileno(), size + _TAIL + 1, 0))
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if len(content) != size + _TAIL or not _is_intact(content[:size], bytes(content[size:])):
            warnings.warn(
                f"{self.folder}: a block of the cache is damaged and is read again: {name}", stacklevel=2
            )
            _remove(path)
            return None
        if time.time() - used > _USED:
            with contextlib.suppress(OSError):
                os.utime(path)
        return content[:size]

    def _put(self, blocks: dict[str, memoryview]) -> None:
        """Keep blocks, after others were removed to make room; a disk that is full is no reason to fail."""
        need = sum(map(len, blocks.values())) + _TAIL * len(blocks)
        try:
            if need > self._room and not self._make_room(need):
                return
            self._room -= need
            for name, content in blocks.items():
                path = self.folder / f"{name}.{uuid.uuid4().hex}.tmp"
                try:
                    with path.open("wb", buffering=0) as file:
                        os.writev(file.fileno(), [content, _seal(content)])
                    path.replace(self.folder / name)
                except BaseException:
                    _remove(path)
                    raise
        except OSError as error:
            warnings.warn(f"{self.folder}: the cache cannot be written: {error}", stacklevel=2)

    def _make_room(self, need: int) -> bool:
        """Remove the blocks that were not used for longest, and what killed processes left; False if that is not enough."""
        now, entries = time.time(), sorted(self.list_files())
        total = sum(size for _, size, _ in entries)
        free = shutil.disk_usage(self.folder).free - _FREE
        # A sixteenth stays free, so that the directory is not listed for each block.
        excess = max(total + need - self.limit, need - free)
        if excess > 0:
            excess += self.limit // 16
        for used, size, path in entries:
            is_stale = path.endswith(".tmp") and now - used > _STALE
            if is_stale or (excess > 0 and not path.endswith(".tmp")):
                _remove(path)
                excess, total, free = excess - size, total - size, free + size
        room = min(self.limit - total, free)
        # Other processes write, too: each of them a part of what is free, until it looks again.
        self._room = max(need, room // 16)
        return room >= need


def _list_blocks(item: Range) -> range:
    assert item.stop is not None
    return range(item.start // BLOCK, (item.stop - 1) // BLOCK + 1)


def _measure(block: Range) -> int:
    assert block.stop is not None
    return block.stop - block.start


def _is_whole(ranges: Sequence[tuple[Range, ObjectInfo]], info: ObjectInfo) -> bool:
    """Return True if ranges have most of a large object."""
    wanted = sum(_measure(item) for item, other in ranges if other.name == info.name)
    return info.size > BLOCK and wanted > info.size // 2


def _join(item: Range, kept: dict[tuple[str, int], memoryview | None]) -> memoryview:
    """Return the bytes of a range from its blocks."""
    assert item.stop is not None
    pieces: list[Any] = []
    for number in _list_blocks(item):
        block = kept[item.name, number]
        assert block is not None
        start = number * BLOCK
        pieces.append(block[max(item.start - start, 0) : item.stop - start])
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _seal(content: memoryview) -> bytes:
    checksum = Checksum(None, [content])
    return f"{checksum.algorithm}:{checksum.hexdigest()}".encode().ljust(_TAIL)


def _is_intact(content: memoryview, tail: bytes) -> bool:
    try:
        algorithm, _, expected = tail.decode().strip().partition(":")
        return Checksum(algorithm, [content]).hexdigest() == expected
    except (UnicodeDecodeError, FormatError):  # damaged, or of a process that has another algorithm
        return False


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_size(text: int | str) -> int:
    """Return a number of bytes from a number, or a text such as ``"10GB"``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(text), re.IGNORECASE)
    if found is None or isinstance(text, bool):
        raise ValueError(f"a size is a number of bytes or a text such as '10GB'; got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@set_module("td_remote")
def cache_info(path: str | os.PathLike[str] | None = None) -> CacheInfo:
    """Return how much a cache directory has; by default that of ``TD_REMOTE_CACHE``.

    Raises:
        ValueError: there is no path, or the directory is not a cache.

    >>> from td_remote import Remote
    >>> shelf = Remote("memory://books", cache="blocks")
    >>> info = shelf.write("a.bin", [bytes(100)])
    >>> _ = shelf.read([Range("a.bin", 0, 10)])
    >>> cache_info("blocks").blocks
    1
    """
    return _measure_cache(open_cache(path))


def _measure_cache(cache: BlockCache) -> CacheInfo:
    sizes = [size for _, size, name in cache.list_files() if not name.endswith(".tmp")]
    return CacheInfo(str(cache.folder), len(sizes), sum(sizes))


def open_cache(path: str | os.PathLike[str] | None) -> BlockCache:
    """Return the cache in a directory, by default that of the environment."""
    folder = os.environ.get("TD_REMOTE_CACHE") if path is None else path
    if not folder:
        raise ValueError("there is no cache directory: pass one, or set TD_REMOTE_CACHE")
    if not (Path(folder) / _MARK).exists():
        raise ValueError(f"{os.fspath(folder)} is not a cache of td-remote")
    return BlockCache(Path(folder), 0)
