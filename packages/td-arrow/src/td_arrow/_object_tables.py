"""Tables in object stores: the ends of all files are read together, columns as ranges; files are written whole."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from td_core.errors import FormatError
from td_core.typing import ObjectInfo, ObjectLocation, Range
from td_store.arrays import ObjectFile, upload

#: Files are cached in blocks of this many bytes.
_BLOCK = 1 << 14
_KEY_VALUE = re.compile(r"([^=/]+)=([^/]*)")
#: The name of a part that td has written; those of a save begin at 0, which is written last.
NUMBERED = re.compile(r"part-(\d{5})\.\w+")


class ObjectPart(NamedTuple):
    """A file of a table: its content, its name for messages, and the keys and values that its folders name."""

    content: ObjectFile
    where: str
    keys: dict[str, str]


def find_parts(place: ObjectLocation) -> list[ObjectPart]:
    """Return the file at a location, or those below it in the order of their names; the end of each is read."""
    if place.first is not None:
        info, head = place.first
        content = ObjectFile(place.store, info, _BLOCK)
        content.keep(0, head)
        content.keep(info.size - len(place.last), place.last)
        return [ObjectPart(content, place.where, {})]
    infos = list_files(place)
    if not infos:
        raise FileNotFoundError(f"cannot load: there is no table at {place.where}")
    numbers = {int(match[1]) for info in infos if (match := NUMBERED.fullmatch(info.name))}
    if numbers and numbers != set(range(len(numbers))):
        raise FormatError(f"{place.where}: a save to this location has not ended: save it to another one")
    size = ObjectLocation.HEAD_SIZE
    ranges = [Range(info.name, max(info.size - size, 0), info.size, info.stamp) for info in infos]
    parts = []
    for info, item, end in zip(infos, ranges, place.store.read(ranges), strict=True):
        content = ObjectFile(place.store, info, _BLOCK)
        content.keep(item.start, end)
        where = f"{place.where.rstrip('/')}/{info.name}"
        parts.append(ObjectPart(content, where, read_keys(info.name.split("/")[:-1])))
    return parts


def read_keys(folders: Iterable[str]) -> dict[str, str]:
    """Return the keys and values that folders name, as ``a=1``."""
    matches = map(_KEY_VALUE.fullmatch, folders)
    return {unquote(match[1]): unquote(match[2]) for match in matches if match}


def list_files(place: ObjectLocation) -> list[ObjectInfo]:
    """Return the objects below a location, without those whose name, or folder, begins with a point or an underscore."""
    found = [info for info in place.store.list() if info.name]
    shown = [info for info in found if not any(part[:1] in "._" for part in info.name.split("/"))]
    return sorted(shown, key=lambda info: info.name.split("/"))


@contextlib.contextmanager
def write_object(place: ObjectLocation, name: str = "", *, create: bool = False) -> Iterator[pa.NativeFile]:
    """Pass a file to a block, and write what it has at the end as an object; nothing after an error."""
    with tempfile.TemporaryFile() as file:
        sink = pa.PythonFile(file, "w")
        yield sink
        sink.flush()
        upload(place.store, file, name=name, create=create)


def write_parts(
    place: ObjectLocation, names: Sequence[str], write: Callable[[int, pa.NativeFile], None]
) -> None:
    """Write several files, the first one last: readers refuse the others without it. The location has no objects."""
    if place.first is not None or any(True for _ in place.store.list()):
        raise FileExistsError(
            f"cannot save several files to {place.where}: it has objects; save to another location"
        )
    for number in reversed(range(len(names))):
        with write_object(place, names[number], create=True) as sink:
            write(number, sink)
