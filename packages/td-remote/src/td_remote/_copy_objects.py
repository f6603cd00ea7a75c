"""Copy objects between any two locations. The root object of a tree is written last: then the copy is complete."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from td_core.spi import Serializer, make_reporter, run_parallel, set_module
from td_core.typing import ObjectInfo, ObjectLocation, ObjectStore, Progress, Range
from td_store.files import Checksum, NewFile

from ._engines import place_range
from ._retries import make_replaced_error

#: Bytes that are read at once, and objects that are copied at the same time.
_PART, _THREADS = 1 << 23, 8
#: An ETag that is often, but not with every encryption, the MD5 of the content.
_MD5 = re.compile(r'"[0-9a-f]{32}"')


class LocalObjects:
    """The files in a directory, or one file, as an object store."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each file, None for one that is missing."""
        return [self._find(name) for name in names]

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return the bytes of each range."""
        return [self._read(item) for item in ranges]

    def write(self, name: str, content: Iterable[Any], *, create: bool = False) -> ObjectInfo:
        """Write a file, which appears complete."""
        position = 0
        with NewFile(self.path / name, replace=not create) as file:
            for buffer in content:
                file.write([buffer], position)
                position += memoryview(buffer).nbytes
            file.commit()
        info = self._find(name)
        assert info is not None
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files in the directory and those below it; links to directories are not followed."""
        for folder, _, names in os.walk(self.path):
            for file in sorted(names):
                name = (Path(folder) / file).relative_to(self.path).as_posix()
                info = self._find(name) if name.startswith(prefix) else None
                if info is not None:
                    yield info

    def delete(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def _find(self, name: str) -> ObjectInfo | None:
        path = self.path / name
        if not path.is_file():
            return None
        status = path.stat()
        return ObjectInfo(name, status.st_size, f"{status.st_ino} {status.st_mtime_ns}")

    def _read(self, item: Range) -> memoryview:
        info = self._find(item.name)
        placed = place_range(self.where, item, info)
        if info is None or item.stamp not in (None, info.stamp):
            raise make_replaced_error(self.where, item.name)
        with (self.path / item.name).open("rb") as file:
            file.seek(placed.start)
            return memoryview(file.read((placed.stop or 0) - placed.start))


@set_module("td_remote")
def copy(source: object, target: object, *, progress: Progress = False, overwrite: bool = False) -> int:
    """Copy an object, or all objects of a tree, between two locations: paths, URLs, :class:`Remote` or object stores.

    Bytes are copied as they are; sizes are compared, and contents where both servers give the same kind of hash. The objects
    that mark a tree, such as ``meta.json``, are written last, so that readers never see a part of it.

    Args:
        source: the location of the objects.
        target: the location to copy to, which has the name of the copy.
        progress: True for a progress bar, or a function of (bytes done, total bytes).
        overwrite: whether objects at the target are replaced. Those that the source does not have are removed.

    Returns:
        The number of objects.

    Raises:
        FileNotFoundError: there is nothing at ``source``.
        FileExistsError: there is something at ``target``.

    >>> from td_core import load, save
    >>> _ = save(TensorDict({"a": torch.arange(3)}), "data.safetensors")
    >>> copy("data.safetensors", "memory://shelf/data.safetensors")
    1
    >>> load("memory://shelf/data.safetensors")["a"]
    tensor([0, 1, 2])
    """
    from_store, to_store = _find_store(source), _find_store(target)
    infos = list_objects(from_store)
    if not infos:
        raise FileNotFoundError(f"cannot copy: there is nothing at {from_store.where}")
    old = list_objects(to_store)
    if old and not overwrite:
        raise FileExistsError(f"{to_store.where} has {len(old)} objects: pass overwrite=True to replace them")
    if (infos[0].name == "") != (old[0].name == "" if old else infos[0].name == ""):
        raise FileExistsError(f"{to_store.where} is an object and a tree of objects: remove it first")
    report = make_reporter(progress, sum(info.size for info in infos), "copy")
    roots = [info for info in infos if info.name in ObjectLocation.MARKS]
    to_store.delete([info.name for info in old if info.name in ObjectLocation.MARKS])

    def work(info: ObjectInfo) -> Callable[[], None]:
        return lambda: _copy_object(from_store, to_store, info, report)

    run_parallel([work(info) for info in infos if info not in roots], _THREADS)
    for info in sorted(roots, key=lambda info: ObjectLocation.MARKS[::-1].index(info.name)):
        _copy_object(from_store, to_store, info, report)
    names = {info.name for info in infos}
    to_store.delete([info.name for info in old if info.name not in names])
    return len(infos)


def _find_store(location: Any) -> ObjectStore:
    place = Serializer.find_objects(location)
    return LocalObjects(Path(location)) if place is None else place.store


def list_objects(location: object) -> list[ObjectInfo]:
    """Return the object at a location, or those below it."""
    store = _find_store(location)
    (info,) = store.stat([""])
    return [*store.list()] if info is None else [info]


def _copy_object(
    source: ObjectStore, target: ObjectStore, info: ObjectInfo, report: Callable[[int], None]
) -> None:
    checksum, again = Checksum(), Checksum()

    def produce() -> Iterator[memoryview]:
        for part in _read_parts(source, info):
            checksum.update(part)
            yield part
            report(len(part))

    written = target.write(info.name, produce())
    is_same = written.size == info.size
    has_hashes = _MD5.fullmatch(written.stamp) and _MD5.fullmatch(info.stamp)
    if is_same and has_hashes and written.stamp != info.stamp:  # with some encryptions they are none
        for part in _read_parts(target, written):
            again.update(part)
        is_same = again.hexdigest() == checksum.hexdigest()
    if not is_same:
        raise OSError(
            f"{target.where}: the copy of {info.name!r} has other bytes than the original: copy it again"
        )


def _read_parts(store: ObjectStore, info: ObjectInfo) -> Iterator[memoryview]:
    for start in range(0, info.size, _PART):
        yield from store.read([Range(info.name, start, min(start + _PART, info.size), info.stamp)])
