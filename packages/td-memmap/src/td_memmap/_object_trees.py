"""The files of a save in an object store: a tree of objects, or an archive that is one object."""

from __future__ import annotations

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from td_core.errors import FormatError
from td_core.spi import parse_json
from td_core.typing import ObjectInfo, ObjectLocation, Range
from td_store.arrays import ObjectFile, ObjectReader

from . import _file_names
from ._archive import ArchiveTree
from ._fs import Parts
from ._listed_files import ListedTree, is_metadata
from ._meta import LIMIT

#: Field of the root of a tree until its save has ended, with the names of the objects of this save and of the one before.
UNFINISHED = "_unfinished"
#: Bytes of a block of an archive: headers of entries are read by blocks.
_BLOCK = 1 << 12
#: Bytes of the header of an entry besides its name and its extra blocks, with room for one that the directory does not list.
_HEADER = 96


class Content(NamedTuple):
    """Where the bytes of a file are: what reads the object, and their first one in it."""

    reader: ObjectReader
    begin: int


class ObjectTree(ListedTree):
    """The objects below a location, all of one save. Metadata and small files are read together; each stamp is known."""

    def __init__(self, place: ObjectLocation, *, is_lenient: bool = False) -> None:
        self.store = place.store
        infos = {
            path: info
            for info in _list_objects(place)
            if info.name and (path := _file_names.split_relative(info.name)) is not None
        }
        if not infos and not is_lenient:
            raise FileNotFoundError(f"cannot load: there is nothing at {place.where}")
        super().__init__(place.where, ((path, info.size) for path, info in infos.items()))
        self.infos = infos
        self._contents: dict[Parts, bytes] = {}
        self._readers: dict[Parts, ObjectReader] = {}
        self._fetch([path for path, info in infos.items() if is_metadata(path) and info.size <= LIMIT])
        if not is_lenient:
            self._check_one_save()

    def __enter__(self) -> ObjectTree:
        return self

    def __exit__(self, *error: object) -> None:
        self._contents.clear()

    def _fetch(self, paths: Sequence[Parts]) -> None:
        """Read objects, all with one call."""
        wanted = [self.infos[path] for path in paths if path not in self._contents]
        if wanted:
            found = self.store.read([Range(info.name, 0, info.size, info.stamp) for info in wanted])
            pieces = zip(wanted, found, strict=True)
            self._contents.update((tuple(info.name.split("/")), bytes(piece)) for info, piece in pieces)

    def list_unfinished(self) -> list[str] | None:
        """Return the names of the objects of a save that has not ended; None if there is none."""
        if f'"{UNFINISHED}"'.encode() not in self._contents.get((_file_names.META,), b"")[:64]:
            return None
        return self._list_names(_file_names.META, UNFINISHED)

    def list_left(self) -> list[str]:
        """Return the names of the objects of an older save, which its successor was to remove."""
        return self._list_names(_file_names.MANIFEST, "left")

    def _list_names(self, file: str, field: str) -> list[str]:
        """Return the strings in a field of a JSON file; none if it is damaged."""
        with contextlib.suppress(FormatError):
            content = parse_json(self._contents.get((file,), b""), file)
            names = content.get(field) if isinstance(content, dict) else None
            return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return []

    def _check_one_save(self) -> None:
        """Raise FormatError if a save has not ended, or if the manifest was written here beside other objects."""
        if self.list_unfinished() is not None:
            raise FormatError(f"{self.path}: a save to this location has not ended: save it again")
        manifest: Any = self._contents.get((_file_names.MANIFEST,))
        root = self._contents.get((_file_names.META,))
        if manifest is None or root is None:
            return
        manifest = parse_json(manifest, self.show((), _file_names.MANIFEST))
        stamps = manifest.get("stamps") if isinstance(manifest, dict) else None
        if not isinstance(stamps, dict) or manifest.get("where") != self.store.where:
            return  # another program has copied the objects, which have other stamps now
        names = {info.name: info.stamp for info in self.infos.values()}
        texts = manifest.get("texts")
        crc = texts.get(_file_names.META) if isinstance(texts, dict) else None
        wrong = [_file_names.META] if crc != f"{zlib.crc32(root):08x}" else []
        wrong += [name for name, stamp in stamps.items() if names.get(name) != stamp]
        if wrong:
            raise FormatError(
                f"{self.path}: {wrong[0]!r} is not of the save that the manifest lists, as two processes saved here at the same "
                "time, or another program has replaced it: save it again"
            )

    def read(self, parts: Parts, name: str, limit: int) -> bytes:
        """Return the content of a small file."""
        path = (*self.base, *parts, name)
        if path not in self.infos:
            raise FileNotFoundError(f"{self.show(parts, name)} is missing")
        if self.infos[path].size > limit:
            raise FormatError(
                f"{self.show(parts, name)} has {self.infos[path].size} bytes, at most {limit} are read"
            )
        self._fetch([path])
        return self._contents[path]

    def chunks(self, path: Parts) -> Iterator[memoryview]:
        """Yield the content of a file in parts."""
        place = (*self.base, *path)
        info = self.infos[place]
        for start in range(0, info.size, 1 << 24):
            stop = min(start + (1 << 24), info.size)
            yield self.store.read([Range(info.name, start, stop, info.stamp)])[0]

    def find_content(self, parts: Parts, name: str) -> Content | None:
        """Return where the bytes of a file are; None if it is compressed, and must be read whole."""
        path = (*self.base, *parts, name)
        if path not in self._readers:
            self._readers[path] = ObjectReader(self.store, self.infos[path])
        return Content(self._readers[path], 0)


def _list_objects(place: ObjectLocation) -> list[ObjectInfo]:
    """Return the objects below a location: as its store lists them, or as the manifest does where a server has no lists."""
    try:
        return list(place.store.list())
    except OSError as error:
        infos = place.store.stat([_file_names.META, _file_names.MANIFEST])
        if None in infos:
            raise FileNotFoundError(
                f"{place.where} cannot be listed, and has no {_file_names.META} with {_file_names.MANIFEST}"
            ) from error
        content = place.store.read([Range(_file_names.MANIFEST, 0)])[0]
        manifest = parse_json(bytes(content), f"{place.where}/{_file_names.MANIFEST}")
        files = manifest.get("files") if isinstance(manifest, dict) else None
        names = [
            name for name in files or () if name != _file_names.META and _file_names.split_relative(name)
        ]
        return [info for info in (*infos, *place.store.stat(names)) if info is not None]


class ObjectArchive(ArchiveTree):
    """An archive that is an object; the directory of its entries and their metadata are read with two calls."""

    def __init__(self, place: ObjectLocation) -> None:
        if place.first is None:
            raise FileNotFoundError(f"cannot load: there is nothing at {place.where}")
        info, head = place.first
        self._object = ObjectFile(place.store, info, _BLOCK)
        self._object.keep(0, head)
        self._object.keep(info.size - len(place.last), place.last)
        super().__init__(place.where, self._object)
        self._reader = ObjectReader(place.store, info)
        self._fetch([entry for path, entry in self.files.items() if is_metadata(path)], with_headers=True)

    def _fetch(self, whole: Sequence[zipfile.ZipInfo], *, with_headers: bool = False) -> None:
        """Read entries, and the headers of all others, with one call."""
        ranges = [(info.header_offset, self.find_end(info)) for info in whole]
        for info in self.files.values() if with_headers else ():
            room = _HEADER + len(info.filename.encode()) + len(info.extra)
            ranges.append((info.header_offset, min(info.header_offset + room, self.find_end(info))))
        self._object.fetch(ranges)

    def _read_at(self, size: int, position: int) -> bytes:
        self._object.seek(position)
        return self._object.read(size) or b""

    def contents(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield the content of an entry, which is read with one call."""
        self._fetch([info])
        return super().contents(info)

    def find_content(self, parts: Parts, name: str) -> Content | None:
        """Return where the bytes of a file are; None if it is compressed, and must be read whole."""
        path = (*self.base, *parts, name)
        info = self.files[path]
        return Content(self._reader, self.offset(info)) if info.compress_type == zipfile.ZIP_STORED else None


def open_tree(place: ObjectLocation) -> ObjectTree | ObjectArchive:
    """Open the files of a save in an object store: an archive if the location is one object, otherwise a tree."""
    if place.where.lower().endswith(".tdz") and place.first is not None:
        return ObjectArchive(place)
    try:
        return ObjectTree(place)
    except FileNotFoundError:
        if place.first is None:
            raise
        return ObjectArchive(place)


def make_marker(names: Sequence[str]) -> bytes:
    """Return the root of a tree whose save has not ended."""
    return json.dumps({UNFINISHED: sorted(names)}).encode()
