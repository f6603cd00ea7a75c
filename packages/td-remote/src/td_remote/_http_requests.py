"""Requests to web servers, with the session of fsspec: what its file system does not check is checked here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from td_core.errors import FormatError
from td_core.typing import ObjectInfo, Range

from ._engines import HEAD, PART, Answer, WholeObjects, fit_range, format_range, measure
from ._fsspec_engine import AsyncEngine
from ._retries import Policy, ShortAnswerError

_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_MAX_REDIRECTS = 10


class HttpEngine(AsyncEngine):
    """Objects on a web server."""

    describes = takes_ends = True

    def __init__(self, url: str, system: Any, path: str, policy: Policy) -> None:
        super().__init__(url, system, path, policy)
        self._whole = WholeObjects(policy)
        self._lock: asyncio.Lock | None = None
        self._bare: Any = None
        import aiohttp  # the file system has imported it

        seconds = policy.timeout
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
        self._given = {"timeout": timeout, **system.kwargs}
        self._given.pop("allow_redirects", None)

    def locate(self, name: str) -> str:
        """Return the URL of an object."""
        if not name:
            return self.path
        path, mark, query = self.path.partition("?")
        return f"{path.rstrip('/')}/{quote(name)}{mark}{query}"

    def put(self, name: str, content: Iterable[Any], create: bool) -> None:
        """Write an object with one request; ``create`` looks first."""
        if create and self.find([name]) != [None]:
            raise FileExistsError(f"{self.policy.where}: the object {name!r} exists")
        # A server needs the size first, and another attempt the content.
        with SpooledTemporaryFile(PART) as file:
            for buffer in content:
                file.write(buffer)
            size = file.tell()

            async def produce() -> AsyncIterator[bytes]:
                while piece := file.read(1 << 20):
                    yield piece

            async def work() -> None:
                file.seek(0)
                session = await self.system.set_session()
                options = self._options({"Content-Length": str(size)})
                url = self.system.encode_url(self.locate(name))
                async with session.put(url, data=produce(), **options) as answer:
                    answer.raise_for_status()

            self.gather("write", [(name, size, work)])

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are missing."""

        async def work(name: str) -> None:
            async with self._request("DELETE", name) as answer:
                if answer.status not in (404, 410):
                    answer.raise_for_status()

        self.gather("delete", [(name, 0, partial(work, name)) for name in names])

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Raise OSError: HTTP has no lists."""
        raise OSError(f"{self.policy.where}: a web server lists no objects")

    async def find_one(self, name: str) -> ObjectInfo | None:
        """Return a description of an object, None if it is missing."""
        async with self._request("HEAD", name) as answer:
            if answer.status in (404, 410):
                return None
            if answer.status not in (405, 501):
                answer.raise_for_status()
                if "Content-Length" in answer.headers:
                    return self._describe(name, answer, int(answer.headers["Content-Length"]))
        try:
            return (await self.fetch_one(Range(name, 0, 1))).info
        except FileNotFoundError:
            return None

    async def fetch_one(self, item: Range) -> Answer:
        """Return the content of a range; FormatError if the server sends another one."""
        if self._whole.has(item.name, item.stamp):
            return self._whole.cut(item)
        headers = {"Range": format_range(item)} if item[1:3] != (0, None) else {}
        async with self._request("GET", item.name, headers) as answer:
            if answer.status == 416:
                total = _RANGE.match(answer.headers.get("Content-Range", ""))
                if total is None or not total[3].isdigit():
                    answer.raise_for_status()
                    raise FormatError(
                        f"{self.policy.where}: the server does not give the size of {item.name!r}"
                    )
                return Answer(b"", self._describe(item.name, answer, int(total[3])))
            answer.raise_for_status()
            if answer.headers.get("Content-Encoding", "identity") not in ("identity", ""):
                raise FormatError(
                    f"{self.policy.where}: the server sends {item.name!r} compressed, which has no ranges"
                )
            if answer.status == 206:
                return await self._read_part(item, answer)
            return await self._read_whole(item, answer)

    async def _read_part(self, item: Range, answer: Any) -> Answer:
        found = _RANGE.match(answer.headers.get("Content-Range", ""))
        if found is None or found[1] is None or not found[3].isdigit():
            raise self._wrong_error(item, answer)
        info = self._describe(item.name, answer, int(found[3]))
        fitted = fit_range(item, info)
        if (int(found[1]), int(found[2]) + 1) != fitted[1:3]:
            raise self._wrong_error(item, answer)
        return Answer(await _read_exactly(answer, measure(fitted) or 0), info)

    async def _read_whole(self, item: Range, answer: Any) -> Answer:
        """Read an answer that is the object from its first byte on: all of it was asked for, or the server has no ranges."""
        size = answer.headers.get("Content-Length")
        if item[1:3] == (0, None) and size is not None:
            return Answer(
                await _read_exactly(answer, int(size)), self._describe(item.name, answer, int(size))
            )
        if item.start == 0 and size is not None and min(item.stop or 0, int(size)) <= HEAD:
            content = await _read_exactly(answer, min(item.stop or 0, int(size)))
            return Answer(content, self._describe(item.name, answer, int(size)))
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:  # other requests for the object wait, and their answers are not read
            if not self._whole.has(item.name, self._describe(item.name, answer, int(size or 0)).stamp):
                self._whole.check(item.name, int(size or 0))
                content = bytearray()
                async for piece in answer.content.iter_chunked(1 << 20):
                    content += piece
                    self._whole.check(item.name, len(content))
                if size is not None and len(content) != int(size):
                    raise ShortAnswerError("the answer is shorter than it says")
                self._whole.add(content, self._describe(item.name, answer, len(content)))
        return self._whole.cut(item)

    @asynccontextmanager
    async def _request(
        self, method: str, name: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """Send a request, and follow redirects; another host does not get headers and credentials of the options."""
        url, options, system = self.system.encode_url(self.locate(name)), self._options(headers), self.system
        for _ in range(_MAX_REDIRECTS):
            session = await system.set_session()
            async with session.request(method, url, allow_redirects=False, **options) as answer:
                if answer.status not in (301, 302, 303, 307, 308) or "Location" not in answer.headers:
                    yield answer
                    return
                target = urljoin(str(answer.url), answer.headers["Location"])
            if urlsplit(target)[:2] != urlsplit(str(url))[:2] and (
                self.system.kwargs or self.system.client_kwargs
            ):
                self._bare = self._bare or type(self.system)(skip_instance_cache=True)
                timeout = {"timeout": self._given["timeout"]}
                system, options = self._bare, self._options(headers, timeout)
            url = self.system.encode_url(target)
        raise OSError(f"the server redirects more than {_MAX_REDIRECTS} times")

    def _options(self, headers: dict[str, str] | None, given: dict[str, Any] | None = None) -> dict[str, Any]:
        options = dict(self._given if given is None else given)
        options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity", **(headers or {})}
        return options

    def _describe(self, name: str, answer: Any, size: int) -> ObjectInfo:
        stamp = (
            answer.headers.get("ETag") or f"size={size} {answer.headers.get('Last-Modified', '')}".rstrip()
        )
        return ObjectInfo(name, size, stamp)

    def _wrong_error(self, item: Range, answer: Any) -> FormatError:
        return FormatError(
            f"{self.policy.where}: the server answers with another range of the object {item.name!r} than {format_range(item)}: "
            f"{answer.headers.get('Content-Range')!r}"
        )


async def _read_exactly(answer: Any, size: int) -> bytes | bytearray:
    """Return the first bytes of an answer, and no more, however many it has."""
    if answer.headers.get("Content-Length") == str(size):
        whole: bytes = await answer.read()
        return whole
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        piece = await answer.content.read(min(size - done, 1 << 20))
        if not piece:
            raise ShortAnswerError("the answer is shorter than it says")
        view[done : done + len(piece)] = piece
        done += len(piece)
    return content
