"""Object stores on the file systems of fsspec: every scheme for which it has one.

Options of a store are secrets: a pickle has the URL alone, unless it is made for a process that is a worker of this one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import quote

from td_core.errors import FormatError, MissingPluginError, TensorDictError
from td_core.spi import run_parallel, set_module
from td_core.typing import ObjectInfo, ObjectLocation, Range

#: Fields of the description of an object that change if it is replaced.
_STAMP = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "created", "generation")
#: The status of the answer to a request for bytes after the end, or of an empty object.
_NO_SUCH_RANGE = 416
#: The most requests at the same time for what fsspec has no function of many paths for.
_CONCURRENT = 16


@set_module("td_store.store_pickles")
class FsspecStore:
    """The objects below a URL, by a file system of fsspec, which is made anew in each process.

    Args:
        url: the location.
        options: arguments of the file system.

    Attributes:
        checked_for: how many seconds the stamp of an object that is read is taken to be the same.
    """

    gap = 1 << 18
    checked_for = 1.0

    def __init__(self, url: str, options: Mapping[str, object], missing: Sequence[str] = ()) -> None:
        self.url, self.options, self.missing = url, dict(options), tuple(missing)
        self.where = ObjectLocation.hide_secrets(url)
        self._opened: tuple[int, Any, str] | None = None
        #: The stamp of each object that was read, and when it was last compared.
        self._checked: dict[str, tuple[str, float]] = {}

    def __repr__(self) -> str:
        return f"FsspecStore({self.where!r})"

    def __reduce__(self) -> Any:
        names = [*self.options, *self.missing]
        if self.where != self.url.partition("?")[0]:
            names.append("user and password of the URL")
        return FsspecStore, (_strip_user(self.url), {}, names)

    def __copy__(self) -> FsspecStore:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FsspecStore:
        return self

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the store its options again, which its pickle does not contain."""
        self.options, self.missing, self._opened = dict(storage_options), (), None

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""
        found: list[ObjectInfo | None] = [None] * len(names)

        def find(i: int) -> Callable[[], None]:
            def work() -> None:
                found[i] = self._find(names[i])

            return work

        run_parallel([find(i) for i in range(len(names))], min(len(names) - 1, _CONCURRENT))
        return found

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return exactly the bytes of each range; fsspec sends several requests at the same time."""
        placed = self._place(ranges)
        results = self._fetch(placed)
        self._check_stamps(ranges)
        for item, piece in zip(placed, results, strict=True):
            if item.stop is not None and len(piece) != item.stop - item.start:
                raise self._short_error(item, len(piece))
        return [memoryview(piece) for piece in results]

    def _fetch(self, placed: Sequence[Range]) -> Sequence[bytes]:
        """Return what the server answers for each range; it can be shorter."""
        system, _ = self._connect()
        wanted = [item for item in placed if item.start != item.stop]
        with self._translate("read", ""):
            found = system.cat_ranges(
                [self._locate(item.name) for item in wanted],
                [item.start for item in wanted],
                [item.stop for item in wanted],
                on_error="return",
            )
        pieces: dict[Range, Any] = {}
        for item, piece in zip(wanted, found, strict=True):
            pieces[item] = b"" if getattr(piece, "status", None) == _NO_SUCH_RANGE else piece
            if isinstance(pieces[item], BaseException):
                with self._translate("read", item.name):
                    raise pieces[item]
        return [pieces.get(item, b"") for item in placed]

    def write(self, name: str, content: Iterable[Any], *, create: bool = False) -> ObjectInfo:
        """Write an object with one request; ``create`` is atomic where the file system is, otherwise it looks first."""
        whole = b"".join(memoryview(buffer).cast("B") for buffer in content)
        system, _ = self._connect()
        if create and self._find(name) is not None:
            raise FileExistsError(f"{self.where}: the object {name!r} exists")
        has_mode = "mode" in inspect.signature(system.pipe_file).parameters
        with self._translate("write", name):
            system.pipe_file(self._locate(name), whole, **({"mode": "create"} if create and has_mode else {}))
        info = self._find(name)
        if info is None:
            raise OSError(f"{self.where}: the object {name!r} was removed while it was written")
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        system, base = self._connect()
        system.invalidate_cache()
        with self._translate("list", prefix):
            found = system.find(base, detail=True)
            if not found and base.startswith(("http://", "https://")):
                raise OSError("the server lists no objects")
        for path, info in sorted(found.items()):
            name = path[len(base.rstrip("/")) + 1 :]
            if name.startswith(prefix):
                yield self._describe(name, info)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is not an error."""
        system, _ = self._connect()
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._translate("delete", name):
                system.rm_file(self._locate(name))

    def _connect(self) -> tuple[Any, str]:
        """Return the file system of this process, and the path of the location in it."""
        if self.missing:
            raise OSError(
                f"{self.where}: a pickle does not contain storage options: call td_core.reopen(collection, "
                f"storage_options=...) with {', '.join(map(repr, self.missing))}, or open the save again"
            )
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                from fsspec.core import url_to_fs
            except ModuleNotFoundError as error:
                raise MissingPluginError(f"{self.where} needs fsspec: pip install fsspec") from error
            try:
                with self._translate("open", ""):
                    system, path = url_to_fs(self.url, **self.options)
            except ImportError as error:
                raise MissingPluginError(f"{self.where} needs a package: {error}") from error
            self._opened = os.getpid(), system, path
        return self._opened[1], self._opened[2]

    def _locate(self, name: str) -> str:
        """Return the path of an object in the file system."""
        base = self._connect()[1]
        if not name:
            return base
        if base.startswith(("http://", "https://")):
            path, mark, query = base.partition("?")
            return f"{path.rstrip('/')}/{quote(name)}{mark}{query}"
        return f"{base.rstrip('/')}/{name}"

    def _find(self, name: str) -> ObjectInfo | None:
        system, path = self._connect()[0], self._locate(name)
        system.invalidate_cache(path)
        try:
            with self._translate("find", name):
                info = system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if info.get("type") == "directory":
            return None
        found = self._describe(name, info)
        self._checked[name] = found.stamp, time.monotonic()
        return found

    def _describe(self, name: str, info: Mapping[str, Any]) -> ObjectInfo:
        size = info.get("size")
        if not isinstance(size, int):
            raise FormatError(
                f"{self.where}: the server does not give the size of {name!r}: download it first"
            )
        # A listing has seconds where a description of one object has a date.
        fields = {field: info[field] for field in _STAMP if info.get(field) is not None}
        times = {field: value.timestamp() for field, value in fields.items() if isinstance(value, datetime)}
        return ObjectInfo(
            name, size, " ".join(f"{field}={value}" for field, value in {**fields, **times}.items())
        )

    def _place(self, ranges: Sequence[Range]) -> Sequence[Range]:
        """Return ranges without positions that only the size of an object gives."""
        open_ended = {item.name for item in ranges if item.start < 0 or (item.stop is None and item.start)}
        names = sorted(open_ended)
        sizes = dict(zip(names, self.stat(names), strict=True))
        placed = []
        for item in ranges:
            if item.name in sizes:
                info = sizes[item.name]
                if info is None:
                    raise self._missing_error(item.name)
                start = item.start if item.start >= 0 else info.size + item.start
                stop = info.size if item.stop is None else item.stop
                if not 0 <= start <= stop <= info.size:
                    raise self._short_error(item, info.size)
                item = item._replace(start=start, stop=stop)
            placed.append(item)
        return placed

    def _check_stamps(self, ranges: Sequence[Range]) -> None:
        """Raise FormatError for an object that was replaced; ask for a stamp at most once in ``checked_for`` seconds."""
        wanted = {item.name: item.stamp for item in ranges if item.stamp is not None}
        now = time.monotonic()
        known = {name: self._checked.get(name, ("", -self.checked_for)) for name in wanted}
        old = [name for name, (_, at) in known.items() if now - at >= self.checked_for]
        if old:
            self.stat(old)
        for item in ranges:
            if item.stamp is not None and self._checked.get(item.name, ("", 0))[0] != item.stamp:
                raise FormatError(
                    f"{self.where}: the object {item.name!r} was replaced since it was opened: open it again"
                )

    @contextlib.contextmanager
    def _translate(self, operation: str, name: str) -> Iterator[None]:
        """Raise an OSError that names the object for an error of fsspec, or of a library that it uses."""
        try:
            yield
        except (TensorDictError, ImportError):
            raise
        except FileNotFoundError as error:
            raise self._missing_error(name) from error
        except Exception as error:  # each file system has errors of its own
            known = (FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError, TimeoutError)
            cls = next((cls for cls in known if isinstance(error, cls)), OSError)
            detail = self._hide(f"{type(error).__name__}: {error}")
            raise cls(f"{self.where}: cannot {operation} the object {name!r}: {detail}") from error

    def _hide(self, text: str) -> str:
        """Return a text without the URL and the texts in the options, which can be secrets."""
        text, todo = text.replace(self.url, self.where), list(self.options.values())
        for value in todo:  # which grows
            if isinstance(value, Mapping):
                todo += value.values()
            elif isinstance(value, (list, tuple)):
                todo += value
            elif isinstance(value, str) and len(value) > 3:
                text = text.replace(value, "***")
        return text

    def _missing_error(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(f"{self.where}: there is no object {name!r}")

    def _short_error(self, item: Range, size: int) -> FormatError:
        return FormatError(
            f"{self.where}: the object {item.name!r} is truncated: the bytes from {item.start} to {item.stop} gave {size}"
        )


def _strip_user(url: str) -> str:
    """Return a URL without user and password."""
    return ObjectLocation.hide_secrets(url).replace("***@", "") + "".join(url.partition("?")[1:])


def _reduce_for_worker(store: FsspecStore) -> Any:
    """Reduce a store with its options, for a process that this one starts, or its queues."""
    return FsspecStore, (store.url, store.options, store.missing)


ForkingPickler.register(FsspecStore, _reduce_for_worker)
