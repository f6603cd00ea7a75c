"""Archives: the files of a save in one zip file, with leaves aligned so that they can be mapped in place.

Any zip tool reads them. The entry of a leaf is stored uncompressed by default and starts at a multiple of 64 bytes:
an extra block ``td`` of zeros in its header pads it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import CodecError, FormatError
from td_core.spi import make_reporter, open_regular
from td_core.typing import NestedKey, Progress
from td_store.files import NewFile

from . import _file_names, _fs
from ._chunks import iter_chunks
from ._commit import Staging
from ._errors import FileTakenError
from ._fs import DirectoryTree, Parts
from ._listed_files import ListedTree
from ._load import LoadOptions, Node, Reader, check_metadata, retry_on_replace
from ._mapped_memory import map_memory, view_elements
from ._memmap_like import make_load_options, map_same_structure
from ._meta import find_directory, format_manifest, has_level
from ._options import MemmapOptions
from ._plan import Plan
from ._save import plan_save
from ._save_files import find_save_files
from ._shapes import Shape, check_size, element_count, make_empty, reshape_flat
from ._tensor import Place

if TYPE_CHECKING:
    from typing_extensions import Self

_ALIGNMENT = 64
_PAD_BLOCK = 0x6474  # These are the bytes "td".
_LOCAL_HEADER = 30
_ZIP64_BLOCK = 20
_LONGEST_NAME = (1 << 16) - 1
#: Exceptions of ``zipfile`` for a file that is not a valid zip file.
_BAD_ZIP = (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OverflowError)

#: Exceptions of reading a damaged entry, except the exceptions of the decompressors.
_BAD_ENTRY = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, struct.error, UnicodeDecodeError)

_METHODS = {
    None: zipfile.ZIP_STORED,
    "stored": zipfile.ZIP_STORED,
    "deflate": zipfile.ZIP_DEFLATED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}
#: The levels of the methods that have some; zipfile ignores a level of the others.
_LEVELS = {zipfile.ZIP_DEFLATED: range(-1, 10), zipfile.ZIP_BZIP2: range(1, 10)}


def is_memmap_archive(path: str | Path) -> bool:
    """Return True if a path is an archive of a save: a zip file with a ``meta.json`` at its root.

    >>> is_memmap_archive("nowhere.tdz")
    False
    """
    if not _fs.is_file(_fs.make_absolute(path)):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return _file_names.META in archive.NameToInfo
    except (*_BAD_ZIP, OSError):
        return False


def _is_foreign(path: str) -> bool:
    """Return True if a path is a zip file that does not contain a save."""
    if not _fs.is_file(path) or not zipfile.is_zipfile(path):
        return False
    try:
        with ArchiveTree(path) as archive:
            return not has_level(archive)
    except FormatError:
        return not is_memmap_archive(path)


def _method(compression: str | int | None) -> int:
    method = compression if isinstance(compression, int) else _METHODS.get(compression)
    if method is None or method not in _METHODS.values():
        raise ValueError(
            f"unknown compression {compression!r}: one of {sorted(filter(None, _METHODS))}, or a constant of zipfile"
        )
    return method


@contextlib.contextmanager
def _write_atomically(
    path: str, compression: str | int | None, *, level: int | None = None, durable: bool = False
) -> Iterator[_ArchiveWriter]:
    """Write an archive to a temporary file next to ``path``, and rename it to ``path`` when it is complete."""
    method, path = _method(compression), _fs.resolve_path(path)
    if level is not None and level not in _LEVELS.get(method, (level,)):
        levels = _LEVELS[method]
        raise ValueError(
            f"compresslevel is from {levels.start} to {levels.stop - 1} with {compression!r}; got {level!r}"
        )
    if os.path.isdir(path):
        raise FileTakenError(
            f"cannot write the archive {path}: it is a directory; memmap(archive=False) saves into it"
        )
    if _is_foreign(path):
        raise FileTakenError(
            f"cannot write the archive {path}: it exists and is not an archive of a save; move it away, or choose "
            "another path"
        )
    _fs.make_directories(os.path.dirname(path))
    with NewFile(path) as new:
        with os.fdopen(os.dup(new.fd), "w+b") as file, _pack(file, method, level) as packing:
            yield packing
        new.commit(durable=durable)


@contextlib.contextmanager
def _pack(file: IO[bytes], method: int, level: int | None = None) -> Iterator[_ArchiveWriter]:
    """Write an archive to an open file."""
    packing = _ArchiveWriter(file, method, level)
    try:
        yield packing
    except BaseException:
        packing.zip.fp = None  # This keeps ZipFile.close() from writing a zip directory.
        raise
    packing.zip.close()


class _ArchiveWriter:
    """Writer of a new archive to an open file."""

    def __init__(self, file: IO[bytes], method: int, level: int | None) -> None:
        self._file = file
        self._method = method
        self._level = level
        self.zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def add(self, path: Parts, content: Iterable[Any], nbytes: int) -> None:
        """Add a file of ``nbytes`` bytes, given in chunks; raise CodecError if its path is too long."""
        name = "/".join(path)
        if len(name.encode()) > _LONGEST_NAME:
            raise CodecError(
                f"an archive cannot hold paths of more than {_LONGEST_NAME} bytes: {name[:100]}...; use a directory"
            )
        info = zipfile.ZipInfo(name, time.localtime()[:6])
        info.external_attr = 0o644 << 16
        if path[-1].endswith(".memmap"):
            info.compress_type = self._method
            # Before Python 3.13 this attribute has a leading underscore.
            setattr(
                info, "compress_level" if hasattr(info, "compress_level") else "_compresslevel", self._level
            )
            if self._method == zipfile.ZIP_STORED:
                info.extra = self._padding(info.filename)
        info.file_size = nbytes
        with self.zip.open(info, "w", force_zip64=True) as entry:
            for piece in content:
                entry.write(piece)

    def _padding(self, name: str) -> bytes:
        raw = name.encode()
        # zipfile appends a block of 64-bit sizes to the header, so add its length to the start of the content.
        start = self._file.tell() + _LOCAL_HEADER + len(raw) + 4 + _ZIP64_BLOCK
        size = -start % _ALIGNMENT
        return struct.pack("<HH", _PAD_BLOCK, size) + bytes(size)


def _order(path: Parts) -> str:
    """Return the sort key of a path: a directory's metadata first, then its files by name, then its directories."""
    # File names contain no NUL, so a NUL can end each part of the sort key.
    *parts, name = path
    return "".join(f"2{part}\0" for part in parts) + ("0" if name == _file_names.META else f"1{name}")


def save_archive(data: TensorCollection, path: str, options: MemmapOptions) -> Callable[[], TensorCollection]:
    """Plan an archive. Return a function that writes it and returns the collection mapped from it."""
    if not options.existsok and _fs.get_status(path) is not None:
        raise FileTakenError(f"the archive {path} exists; pass existsok=True to replace it")
    plan, tree = plan_save(data, options)
    _method(options.compression)

    def write() -> Any:
        if options.like and _fs.is_file(path):
            _check_same_files(tree, plan, path, options)
        else:
            _write(plan, path, options)
        return load_archive(
            path, replace(make_load_options(options), mode="r+" if options.like else None), None
        )

    return write


def _check_same_files(tree: TensorCollection, plan: Plan, path: str, options: MemmapOptions) -> None:
    """Raise FileTakenError if an existing archive is compressed or differs in structure from the plan."""
    try:
        with ArchiveTree(path) as files:
            packed = [
                info.filename for info in files.files.values() if info.compress_type != zipfile.ZIP_STORED
            ]
            reader = _ArchiveReader(files, make_load_options(options))
            same = packed or map_same_structure(reader, tree, plan, path, options).is_same
    except FormatError as error:
        raise FileTakenError(f"cannot create the archive {path}: {error}; remove it first") from error
    if not same or packed:
        what = f"{packed[0]} is compressed" if packed else "batch sizes or names are others"
        raise FileTakenError(
            f"cannot create the archive {path}: of what is there, {what}; remove it first, or save() over it"
        )


def _write(plan: Plan, path: str, options: MemmapOptions) -> None:
    with _write_atomically(path, options.compression, durable=options.durable) as packing:
        _add_files(packing, plan, options)


def write_to_file(plan: Plan, options: MemmapOptions, file: IO[bytes]) -> None:
    """Write an archive to an open file."""
    with _pack(file, _method(options.compression)) as packing:
        _add_files(packing, plan, options)


def _add_files(packing: _ArchiveWriter, plan: Plan, options: MemmapOptions) -> None:
    texts = {(*parts, name): text for parts, name, text in plan.texts}
    leaves = {file.path: file for file in plan.leaves if file.nbytes}
    report = make_reporter(options.progress, sum(file.nbytes for file in leaves.values()), "save")
    for place in sorted((*texts, *leaves), key=_order):
        if place in texts:
            packing.add(place, [texts[place]], len(texts[place]))
            continue
        file = leaves[place]
        empty = options.like and file.leaf is not None
        packing.add(place, _zeros(file.nbytes) if empty else iter_chunks(file.tensor), file.nbytes)
        report(file.nbytes)


def _zeros(nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, _fs.PIECE):
        yield bytes(min(_fs.PIECE, nbytes - start))


def pack_memmap(
    prefix: str | Path,
    archive_path: str | Path,
    *,
    compression: str | int | None = None,
    compresslevel: int | None = None,
    progress: Progress = False,
) -> Path:
    """Write the files of a saved directory into one archive.

    Args:
        prefix: the directory.
        archive_path: the archive to write; an existing archive is replaced in one step.
        compression: how to compress the leaves: ``"deflate"``, ``"bzip2"``, ``"lzma"`` or a constant of ``zipfile``;
            None stores them uncompressed.
        compresslevel: the level of compression, as in ``zipfile``.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FormatError: the directory has no save, or its save is damaged.
        FileNotFoundError: the directory does not exist.
        ValueError: the compression or its level does not exist.

    >>> _ = TensorDict({"a": 1}).memmap("save")
    >>> pack_memmap("save", "save.tdz").name
    'save.tdz'
    """

    def pack(tree: DirectoryTree) -> tuple[None, bool]:
        tree.close_spare()
        with _write_atomically(_fs.make_absolute(archive_path), compression, level=compresslevel) as packing:
            left = find_save_files(tree)
            if (_file_names.META,) not in left.files:
                exists = tree.stat_path((_file_names.META,)) is not None
                why = (
                    f"its {_file_names.META} is not that of a save"
                    if exists
                    else f"it has no {_file_names.META}"
                )
                raise FormatError(f"no save is at {prefix}: {why}")
            for *_, error in check_metadata(tree)[1]:
                raise error
            sizes = {
                path: result.st_size
                for path in sorted(left.files)
                if (result := tree.stat_path(path)) is not None
            }
            # Leave out the manifest: it has file times of the directory, and zip entries have their own checksums.
            sizes.pop((_file_names.MANIFEST,), None)
            report = make_reporter(progress, sum(sizes.values()), "pack")
            for path in sorted(sizes, key=_order):
                fd, status = tree.open(path[:-1], path[-1])
                with _fs.closing(fd):
                    packing.add(path, _fs.read_chunks(fd), status.st_size)
                report(sizes[path])
            if tree.is_replaced():
                raise FormatError(f"{prefix} was replaced while it was packed")
        return None, True

    retry_on_replace(_fs.make_absolute(prefix), pack)
    return Path(archive_path)


def unpack_memmap(
    archive_path: str | Path, prefix: str | Path, *, checksums: bool = False, progress: Progress = False
) -> Path:
    """Write the files of an archive into a directory, which appears in one step.

    Args:
        archive_path: the archive.
        prefix: the directory; an existing save is replaced.
        checksums: record the archive's CRC-32 of each file in the manifest, for ``td_memmap.verify``.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FormatError: the file is not an archive of a save, or it is damaged.
        FileNotFoundError: the file does not exist.

    >>> _ = TensorDict({"a": 1}).memmap("save.tdz")
    >>> unpack_memmap("save.tdz", "save").name
    'save'
    """
    with ArchiveTree(_fs.make_absolute(archive_path)) as archive:
        # Leave out the archive's manifest: unpacking writes a new one.
        ours = (_file_names.MANIFEST,), (_file_names.SAVING,)
        files = {path: info for path, info in archive.files.items() if path not in ours}
        left = sorted(files.keys() & find_save_files(archive).files)
        report = make_reporter(progress, sum(info.file_size for info in files.values()), "unpack")
        with Staging(_fs.make_absolute(prefix), [*files, (_file_names.MANIFEST,)]) as staging:
            meta = files.pop((_file_names.META,))
            rows: dict[Parts, list[object]] = {(_file_names.META,): [meta.file_size, None]}
            for path, info in files.items():
                staging.tree.make_parents(path)
                fd = staging.tree.create(path[:-1], path[-1])
                try:
                    for piece in archive.contents(info):
                        _fs.write_all(fd, piece)
                        report(len(piece))
                    rows[path] = [info.file_size, _fs.get_open_status(fd).st_mtime_ns]
                except OSError as error:
                    raise _fs.add_path(error, "cannot write it", "/".join((staging.prefix, *path))) from error
                finally:
                    _fs.close(fd)
            hashes = {path: f"{archive.files[path].CRC:08x}" for path in left}
            texts = {path: value for path, value in hashes.items() if not path[-1].endswith(".memmap")}
            text = format_manifest(
                {path: rows[path] for path in left}, "crc32" if checksums else None, hashes, texts
            )
            staging.tree.write((), _file_names.MANIFEST, text)
            # Write the root metadata last, as in every save: it completes the save.
            staging.write_last(_file_names.META, b"".join(archive.contents(meta)))
            report(meta.file_size)
            staging.publish()
    return Path(prefix)


def _index_entries(archive: zipfile.ZipFile, path: str) -> dict[Parts, zipfile.ZipInfo]:
    """Return the files of an archive by path; FormatError for an entry that cannot be read, or could leave its directory."""
    files: dict[Parts, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        place = _file_names.split_relative(name.rstrip("/"))
        if place is None:
            raise FormatError(f"{path}: the entry {name!r} would leave the directory it is unpacked to")
        if not 0 <= info.header_offset < archive.start_dir:
            raise FormatError(f"{path}: the entry {name!r} would start at byte {info.header_offset}")
        if info.flag_bits & 1:
            raise FormatError(f"{path}: the entry {name!r} is encrypted")
        if name.endswith("/"):
            # Skip directory entries of other tools: the paths of files imply every directory.
            continue
        if place in files:
            raise FormatError(f"{path}: duplicate entry {name!r}")
        files[place] = info
    if (_file_names.META,) not in files:
        raise FormatError(
            f"{path} is not an archive of a save: a zip file with a {_file_names.META} at its top is expected"
        )
    return files


class ArchiveTree(ListedTree):
    """Files of an archive, with the interface of a DirectoryTree.

    Args:
        path: the archive, for messages.
        file: the archive as an open file; by default that at ``path`` is opened.

    Raises:
        FormatError: the file is not an archive of a save, or it is damaged.
    """

    def __init__(self, path: str, file: Any = None) -> None:
        self._file = os.fdopen(open_regular(path), "rb") if file is None else file
        try:
            self.zip = zipfile.ZipFile(self._file)
            self.files = _index_entries(self.zip, path)
        except BaseException as error:
            self._file.close()
            if isinstance(error, FormatError) or not isinstance(error, _BAD_ZIP):
                raise
            raise FormatError(
                f"{path} is not an archive of a save: a zip file with a {_file_names.META} at its top is expected; {error}; "
                "MemoryMappedTensor.from_filename() maps a file of raw elements"
            ) from error
        super().__init__(path, ((place, info.file_size) for place, info in self.files.items()))
        self._starts = [*sorted(info.header_offset for info in self.files.values()), self.zip.start_dir]
        for place in self.files.keys() & self._listing.keys():
            self._file.close()
            raise FormatError(f"{path}: the entry {'/'.join(place)!r} is a file and a directory")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.zip.close()
        self._file.close()

    def find_end(self, info: zipfile.ZipInfo) -> int:
        """Return the byte at which what follows an entry begins."""
        return self._starts[bisect.bisect_right(self._starts, info.header_offset)]

    def _read_at(self, size: int, position: int) -> bytes:
        return os.pread(self._file.fileno(), size, position)

    def read(self, parts: Parts, name: str, limit: int) -> bytes:
        """Return the content of a small file; FormatError if its CRC-32 is wrong or it is longer than ``limit`` bytes."""
        info = self.find((*parts, name))
        if info is None:
            raise FileNotFoundError(f"{self.show(parts, name)} is missing")
        if info.file_size > limit:
            raise FormatError(
                f"{self.show(parts, name)} has {info.file_size} bytes, at most {limit} are read"
            )
        return b"".join(self.contents(info))

    def contents(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield the content of an entry in chunks; FormatError if it is damaged or of another size than is listed."""
        where = f"{self.path}: the entry {info.filename!r}"
        total = 0
        try:
            with self.zip.open(info) as entry:
                while piece := entry.read(_fs.PIECE):
                    total += len(piece)
                    yield piece
        except Exception as error:
            # The decompressors raise zlib.error and lzma.LZMAError, which have no common base class.
            decompressing = type(error).__module__ in ("zlib", "lzma", "_lzma", "_bz2")
            if not decompressing and not isinstance(error, _BAD_ENTRY):
                raise
            raise FormatError(f"{where} is damaged: {error}") from error
        if total != info.file_size:
            raise FormatError(f"{where} has {total} bytes, its directory says {info.file_size}")

    def find(self, path: Parts) -> zipfile.ZipInfo | None:
        """Return the entry at a path below the base, or None."""
        return self.files.get((*self.base, *path))

    def offset(self, info: zipfile.ZipInfo) -> int:
        """Return the byte at which the content of a stored entry starts."""
        header = self._read_at(_LOCAL_HEADER, info.header_offset)
        where = f"{self.path}: the entry {info.filename!r}"
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise FormatError(f"{where} has no header at byte {info.header_offset}")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        name = self._read_at(name_length, info.header_offset + _LOCAL_HEADER)
        if name != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
            raise FormatError(f"{where} is called {name!r} in its own header")
        start: int = info.header_offset + _LOCAL_HEADER + name_length + extra_length
        extra = self._read_at(extra_length, start - extra_length)
        position = 0
        while position + 4 <= extra_length:
            position += 4 + int.from_bytes(extra[position + 2 : position + 4], "little")
        if position > extra_length or any(extra[position:]):  # zipalign fills with up to three zeros
            raise FormatError(f"{where} has a damaged header")
        if start + info.file_size > self.find_end(info):
            raise FormatError(
                f"{where} ends at byte {start + info.file_size}, what follows is at {self.find_end(info)}"
            )
        return start

    def map_whole(self, *, shared: bool) -> Any:
        """Map the file of the archive to memory, for :func:`view_elements`."""
        own = self._file.fileno()
        size = _fs.get_open_status(own).st_size
        if not shared:
            return map_memory(own, size, False, self.path)
        with _fs.closing(open_regular(self.path, write=True)) as fd:
            return map_memory(fd, size, True, self.path)


class _ArchiveReader(Reader):
    """Reader of an archive that maps its file once; all leaves are views of that mapping."""

    _whole: Any = None
    _place: Place | None = None

    def _check_mappings(self, count: int) -> None:
        """Do nothing: all leaves share one mapping, so the system's limit on mappings does not apply."""

    def map_file(
        self, parts: Parts, name: str, dtype: torch.dtype, shape: Shape, nbytes: int | None = None
    ) -> Tensor:
        if nbytes is None:
            nbytes = element_count(shape) * dtype.itemsize
        if not nbytes:
            return make_empty(dtype, shape)
        info = self.tree.find((*parts, name))
        check_size(self.tree.show(parts, name), None if info is None else info.file_size, nbytes)
        writes = self.options.mode == "r+"
        if info.compress_type != zipfile.ZIP_STORED:
            if writes:
                raise self._unwritable(info, "it is compressed")
            # Append chunk by chunk: preallocating would trust the size that a damaged archive announces.
            content = bytearray()
            for piece in self.tree.contents(info):
                content += piece
            return reshape_flat(torch.frombuffer(content, dtype=dtype, count=nbytes // dtype.itemsize), shape)
        start = self.tree.offset(info)
        if self._whole is None:
            self._whole = self.tree.map_whole(shared=writes)
        # Give each leaf a separate storage: operations on a strided nested tensor act on its entire storage.
        if start % dtype.itemsize == 0:
            return reshape_flat(
                view_elements(self._whole, dtype, nbytes // dtype.itemsize, self._source(writes), start),
                shape,
            )
        if writes:
            raise self._unwritable(info, f"it starts at byte {start}, which is not aligned for {dtype}")
        return reshape_flat(
            view_elements(self._whole, torch.uint8, nbytes, None, start).clone().view(dtype), shape
        )

    def _source(self, writes: bool) -> Place | None:
        """Return the Place of the archive's file if writes reach it, so that another process can map the file."""
        if not writes:
            return None
        if self._place is None:
            result = _fs.get_status(self.tree.path)
            identity = None if result is None else _fs.get_identity(result)
            self._place = Place(torch.Size(), self.tree.path, mode="r+", identity=identity)
        return self._place

    def _unwritable(self, info: zipfile.ZipInfo, why: str) -> PermissionError:
        return PermissionError(
            errno.EACCES,
            f"cannot write into the entry {info.filename!r} of an archive: {why}; unpack_memmap() it, or load it without "
            "mode='r+'",
            self.tree.path,
        )

    def _choose_keeper(self) -> Callable[..., Any] | None:
        return self.options.keeper if self.options.mode == "r+" else None

    def keeper(self, node: Node) -> Any:
        path = self.tree.show(node.parts)
        why = (
            f"cannot write the values of {path}: an archive is written in place, and their place has the size that they "
            "have now; unpack_memmap() it, and load the directory"
        )
        make: Any = self.keeps
        return make(path, refused=why)


def load_archive(path: str, options: LoadOptions, subpath: NestedKey | None) -> object:
    """Load the collection in an archive, or only the node under ``subpath``."""
    with ArchiveTree(path) as tree:
        if subpath is not None:
            tree.base = find_directory(tree, subpath, robust_key=options.is_robust)
        return _ArchiveReader(tree, options).load()


def refresh_archive_checksums(archive_path: str | Path) -> Path:
    """Recompute the checksums of an archive after its leaves were written in place (mode ``"r+"``).

    >>> _ = TensorDict({"a": 1}).memmap("save.tdz")
    >>> _ = TensorDict.load_memmap("save.tdz", mode="r+")["a"].fill_(2)
    >>> refresh_archive_checksums("save.tdz").name
    'save.tdz'
    """
    path = _fs.make_absolute(archive_path)
    with ArchiveTree(path) as tree, _fs.closing(open_regular(path, write=True)) as fd:
        _rewrite_checksums(tree, fd)
    return Path(archive_path)


def _crc32(fd: int, start: int, nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` bytes of an open file from ``start``."""
    value = 0
    for position in range(start, start + nbytes, _fs.PIECE):
        value = zlib.crc32(os.pread(fd, min(_fs.PIECE, start + nbytes - position), position), value)
    return value


def _rewrite_checksums(tree: ArchiveTree, fd: int) -> None:
    position = tree.zip.start_dir
    for info in tree.zip.infolist():
        header = os.pread(fd, 46, position)
        if header[:4] != b"PK\x01\x02":
            raise FormatError(f"{tree.path}: its directory is damaged at byte {position}")
        if info.compress_type == zipfile.ZIP_STORED and not info.is_dir():
            value = struct.pack("<I", _crc32(fd, tree.offset(info), info.file_size))
            if info.flag_bits & 8:
                # With this flag a data descriptor, with or without a signature, follows the content and repeats the CRC-32.
                behind = tree.offset(info) + info.file_size
                signed = os.pread(fd, 4, behind) == b"PK\x07\x08"
                _fs.write_at(fd, value, behind + (4 if signed else 0))
            else:
                _fs.write_at(fd, value, info.header_offset + 14)
            _fs.write_at(fd, value, position + 16)
        position += 46 + sum(struct.unpack("<HHH", header[28:34]))
