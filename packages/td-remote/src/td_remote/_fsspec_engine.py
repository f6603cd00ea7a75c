"""The engine on file systems of fsspec. Those that are asynchronous read all ranges at once; others use threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from td_core.errors import FormatError
from td_core.spi import run_parallel
from td_core.typing import ObjectInfo, Range

from ._engines import PART, Answer, measure, place_range, share_limit, split_parts
from ._retries import Attempts, Policy, ShortAnswerError, make_missing_error, make_short_error, translate

T = TypeVar("T")
#: The object of a request, the size of its answer or body, and the function that sends it.
Request = tuple[str, int, Callable[[], Coroutine[Any, Any, T]]]

#: Fields of a description that change with the content of an object; the first one that is there is its stamp.
_STAMPS = ("ETag", "etag", "generation", "version_aware_id", "blob_id", "sha", "checksum")
#: Fields that together are the stamp of an object without these.
_TIMES = ("size", "LastModified", "last_modified", "Last-Modified", "mtime", "created", "modified")
_timeout: Any = getattr(asyncio, "timeout", None)  # new in Python 3.11
#: Threads for a file system that is not asynchronous.
_THREADS = 16
#: The bounds on requests by host and number of requests, in the loop of fsspec; each loop has its own.
_limits: dict[tuple[int, str, int], asyncio.Semaphore] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_limits.clear)


class FsspecEngine:
    """Objects on a file system that is not asynchronous: its functions run in threads."""

    name = "fsspec"
    describes = False

    def __init__(self, url: str, system: Any, path: str, policy: Policy) -> None:
        self.system, self.path, self.policy = system, path, policy
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        #: A cache of fsspec is a file that several threads must not write.
        self.num_threads = 1 if "::" in url else min(_THREADS, policy.concurrency)

    def locate(self, name: str) -> str:
        """Return the path of an object in the file system."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def find(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""
        return self.run_all("find", [(name, partial(self._find, name)) for name in names])

    def fetch(self, ranges: Sequence[Range]) -> list[Answer]:
        """Return what the file system has for each range."""
        return self.run_all("read", [(item.name, partial(self._fetch, item)) for item in self._place(ranges)])

    def put(self, name: str, content: Iterable[Any], create: bool) -> None:
        """Write an object in parts, which the file system publishes together; ``create`` looks first."""
        path = self.locate(name)
        if create and self.find([name]) != [None]:
            raise FileExistsError(f"{self.policy.where}: the object {name!r} exists")
        if isinstance(self.system, MemoryFileSystem):  # its files are published when they are opened
            whole = b"".join(split_parts(content))
            with translate(self.policy, "write", name):
                self.system.pipe_file(path, whole)
            return
        with translate(self.policy, "write", name):
            if not isinstance(self.system, AsyncFileSystem):  # the others have no folders
                self.system.makedirs(self.system._parent(path), exist_ok=True)
            file = self.system.open(path, "wb", block_size=PART, autocommit=False)
        try:
            for part in split_parts(content):
                with translate(self.policy, "write", name):
                    file.write(part)
            with translate(self.policy, "write", name):
                file.close()
                file.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True  # a file that is collected as garbage is closed, and closing publishes it
            raise

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        folder = self.locate(prefix.rpartition("/")[0])
        self.system.invalidate_cache()
        find = partial(self.system.find, folder, detail=True)
        try:
            found = Attempts(self.policy, "list", prefix).run(find)
        except FileNotFoundError:
            return
        for path, info in sorted(found.items()):
            name = path[len(self.path.rstrip("/")) + 1 :]
            if name.startswith(prefix) and info.get("type") != "directory":
                yield self.describe(name, info)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are missing."""

        def work(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm_file(self.locate(name))

        self.run_all("delete", [(name, partial(work, name)) for name in names])

    def run_all(self, operation: str, work: Sequence[tuple[str, Callable[[], T]]]) -> list[T]:
        """Return the results of requests, which are repeated as the policy says."""
        results: list[Any] = [None] * len(work)
        limit = share_limit(f"{type(self.system).__name__} {self.host}", self.policy.concurrency)

        def run(i: int) -> Callable[[], None]:
            name, function = work[i]

            def attempt() -> T:
                with limit:
                    return function()

            def call() -> None:
                results[i] = Attempts(self.policy, operation, name).run(attempt)

            return call

        run_parallel([run(i) for i in range(len(work))], min(len(work), self.num_threads))
        return results

    def describe(self, name: str, info: Mapping[str, Any]) -> ObjectInfo:
        """Return size and stamp from what a file system says of an object."""
        size = info.get("size")
        if not isinstance(size, int):
            raise FormatError(
                f"{self.policy.where}: the server does not give the size of {name!r}: download it first"
            )
        stamp = next((str(info[field]) for field in _STAMPS if info.get(field)), None)
        if stamp is None:
            # A listing has seconds where a description of one object has a date.
            fields = {field: info[field] for field in _TIMES if info.get(field) is not None}
            times = {
                field: value.timestamp() for field, value in fields.items() if isinstance(value, datetime)
            }
            stamp = " ".join(f"{field}={value}" for field, value in {**fields, **times}.items())
        return ObjectInfo(name, size, stamp)

    def _find(self, name: str) -> ObjectInfo | None:
        path, system = self.locate(name), self.system
        if isinstance(system, CachingFileSystem):  # which lists the folder above, and web servers have none
            system = system.fs
        system.invalidate_cache(path)
        try:
            info = system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if info.get("type") == "directory" else self.describe(name, info)

    def _fetch(self, item: Range) -> Answer:
        content = self.system.cat_file(self.locate(item.name), start=item.start, end=item.stop)
        if len(content) != measure(item):
            self.check_short(item, self._find(item.name))
        return Answer(content, None)

    def check_short(self, item: Range, info: ObjectInfo | None) -> None:
        """Raise FormatError if a short answer is due to the end of the object, otherwise an error that is worth a retry."""
        if info is None:
            raise make_missing_error(self.policy.where, item.name)
        if item.stop is None or info.size < item.stop:
            raise make_short_error(self.policy.where, item, info.size)
        raise ShortAnswerError("the answer is shorter than the range")

    def _place(self, ranges: Sequence[Range]) -> list[Range]:
        """Return ranges without positions that only the size of an object gives."""
        names = sorted({item.name for item in ranges if measure(item) is None or item.start < 0})
        sizes = dict(zip(names, self.find(names), strict=True))
        return [
            place_range(self.policy.where, item, sizes[item.name]) if item.name in sizes else item
            for item in ranges
        ]


class AsyncEngine(FsspecEngine):
    """Objects on an asynchronous file system: all requests of a call run in the loop of fsspec.

    Attributes:
        takes_ends: whether :meth:`fetch_one` takes ranges that count from the end, which a server finds.
    """

    takes_ends = False

    def find(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""
        return self.gather("find", [(name, 0, partial(self.find_one, name)) for name in names])

    def fetch(self, ranges: Sequence[Range]) -> list[Answer]:
        """Return what the server answers for each range."""
        placed = ranges if self.takes_ends else self._place(ranges)
        return self.gather(
            "read",
            [(item.name, measure(item) or 0, partial(self.fetch_one, item)) for item in placed],
        )

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are missing."""

        async def work(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self.system._rm_file(self.locate(name))

        self.gather("delete", [(name, 0, partial(work, name)) for name in names])

    def gather(self, operation: str, work: Sequence[Request[T]]) -> list[T]:
        """Return the results of requests, which run in the loop of fsspec."""

        async def run(name: str, size: int, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
            async def attempt() -> T:
                async with limit:
                    if _timeout is None:
                        return await asyncio.wait_for(request(), self.policy.limit(size))
                    async with _timeout(self.policy.limit(size)):  # needs no task of its own
                        return await request()

            return await Attempts(self.policy, operation, name).run_async(attempt)

        async def run_all() -> tuple[list[T], Exception | None]:
            tasks = [asyncio.ensure_future(run(*item)) for item in work]
            try:
                return await asyncio.gather(*tasks), None
            except Exception as error:  # fsspec would raise another one for a time-out
                return [], error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        if not work:
            return []
        loop = self.system.loop
        key = id(loop), self.host, self.policy.concurrency
        limit = _limits.setdefault(key, asyncio.Semaphore(self.policy.concurrency))
        results, error = sync(loop, run_all)
        if error is not None:
            raise error
        return list(results)

    async def find_one(self, name: str) -> ObjectInfo | None:
        """Return a description of an object, None if it is missing."""
        path = self.locate(name)
        self.system.invalidate_cache(path)
        try:
            info = await self.system._info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if info.get("type") == "directory" else self.describe(name, info)

    async def fetch_one(self, item: Range) -> Answer:
        """Return the content of a range."""
        content = await self.system._cat_file(self.locate(item.name), start=item.start, end=item.stop)
        if len(content) != measure(item):
            self.check_short(item, await self.find_one(item.name))
        return Answer(content, None)
