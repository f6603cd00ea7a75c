"""Servers that tests start on a free port: a web server with faults, and one with the interface of S3."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

#: Answers that are not the right one, by name.
FAULTS: dict[str, Callable[[FaultyHandler, bytes], None]] = {}


class FaultyHandler(http.server.BaseHTTPRequestHandler):
    """Answers requests with the objects of its server, and the first ones with its fault."""

    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        fault = self.server.take_fault(self.path)
        content = self.server.contents.get(self.name)
        if fault is not None and content is not None:
            self.close_connection = True
            FAULTS[fault](self, content)
        else:
            self.answer(with_body=True)

    def do_PUT(self) -> None:
        self.server.log.append((self.command, self.path, None))
        length = self.headers["Content-Length"]
        content = self.rfile.read(int(length)) if length is not None else self.read_chunks()
        fault = self.server.take_fault(self.path)
        if fault is not None:
            self.close_connection = True
            FAULTS[fault](self, content)
            return
        self.server.put(self.name, content)
        self.send("204", {}, b"")

    def do_DELETE(self) -> None:
        self.server.contents.pop(self.name, None)
        self.send("204", {}, b"")

    def read_chunks(self) -> bytes:
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    @property
    def name(self) -> str:
        """The name of the object."""
        return unquote(self.path.partition("?")[0])

    def answer(self, *, with_body: bool) -> None:
        """Answer a request for an object, or for a range of it."""
        self.server.log.append((self.command, self.path, self.headers.get("Range")))
        self.server.seen.append(dict(self.headers))
        time.sleep(self.server.latency)
        content = self.server.contents.get(self.name)
        if content is None:
            self.send("404", {}, b"", with_body=with_body)
            return
        first, last = self.find_range(content)
        if first > last and self.headers.get("Range"):
            self.send("416", {"Content-Range": f"bytes */{len(content)}"}, b"", with_body=with_body)
        elif self.headers.get("Range"):
            self.send_range(content, first, last, with_body=with_body)
        else:
            self.send("200", {}, content, with_body=with_body)

    def find_range(self, content: bytes) -> tuple[int, int]:
        """Return the first and the last byte that are asked for."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "bytes=0-")
        assert match is not None
        if not match[1]:
            return max(0, len(content) - int(match[2])), len(content) - 1
        return int(match[1]), min(int(match[2] or len(content)), len(content) - 1)

    def send_range(self, content: bytes, first: int, last: int, *, with_body: bool = True) -> None:
        """Answer with a range."""
        headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self.send("206", headers, content[first : last + 1], with_body=with_body)

    def send(self, status: str, headers: dict[str, str], body: bytes, *, with_body: bool = True) -> None:
        """Send an answer with its headers."""
        self.send_response(int(status))
        given = {
            "Content-Length": str(len(body)),
            "ETag": self.server.find_stamp(self.name),
            **self.server.headers,
        }
        for key, value in {**given, "Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT", **headers}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if with_body:
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class WebServer(http.server.ThreadingHTTPServer):
    """A web server with objects by path.

    Attributes:
        contents: the objects.
        log: method, path and range of each request.
        seen: the headers of each request.
        fault: the name of the fault with which requests for content are answered.
        count: how many requests are answered with it.
        latency: the seconds before each answer.
        headers: headers of all answers.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.contents: dict[str, bytes] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.seen: list[dict[str, str]] = []
        self.fault: str | None = None
        self.count, self.latency = 0, 0.0
        self.headers: dict[str, str] = {}
        self.other: WebServer | None = None
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def take_fault(self, path: str) -> str | None:
        """Return the name of the fault for the next request, None for a right answer."""
        with self._lock:
            if self.fault is None or self.count <= 0:
                return None
            self.count -= 1
            return self.fault

    def put(self, name: str, content: bytes) -> None:
        """Write an object, which gets another ETag."""
        self._versions[name] = self._versions.get(name, 0) + 1
        self.contents[name] = content

    def find_stamp(self, name: str) -> str:
        """Return the ETag of an object."""
        return f'"v{self._versions.get(name, 0)}-{hash(self.contents.get(name))}"'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that go away are part of the tests."""


@contextlib.contextmanager
def serve() -> Iterator[WebServer]:
    """Run a web server without objects."""
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def add_fault(function: Callable[[FaultyHandler, bytes], None]) -> Callable[[FaultyHandler, bytes], None]:
    """Register a fault under the name of its function."""
    FAULTS[function.__name__] = function
    return function


def send_head(handler: FaultyHandler, status: int, size: int | None, **headers: str) -> None:
    """Send the head of an answer."""
    handler.send_response(status)
    handler.send_header("ETag", handler.server.find_stamp(handler.name))
    handler.send_header("Last-Modified", "Sun, 29 Nov 2026 10:00:00 GMT")
    if size is not None:
        handler.send_header("Content-Length", str(size))
    for key, value in headers.items():
        handler.send_header(key.replace("_", "-"), value)
    handler.send_header("Connection", "close")
    handler.end_headers()


@add_fault
def cut(handler: FaultyHandler, content: bytes) -> None:
    """Close the connection in the middle of the answer."""
    first, last = handler.find_range(content)
    send_head(handler, 206, last - first + 1, Content_Range=f"bytes {first}-{last}/{len(content)}")
    handler.wfile.write(content[first : (first + last + 1) // 2])
    handler.wfile.flush()
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


@add_fault
def reset(handler: FaultyHandler, content: bytes) -> None:
    """Reset the connection without an answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


@add_fault
def busy(handler: FaultyHandler, content: bytes) -> None:
    """Answer 503."""
    send_head(handler, 503, 0)


@add_fault
def limited(handler: FaultyHandler, content: bytes) -> None:
    """Answer 429, with the time to wait."""
    send_head(handler, 429, 0, Retry_After="0")


@add_fault
def whole(handler: FaultyHandler, content: bytes) -> None:
    """Answer a request for a range with the whole object."""
    send_head(handler, 200, len(content))
    with contextlib.suppress(ConnectionError):
        handler.wfile.write(content)


@add_fault
def wrong_range(handler: FaultyHandler, content: bytes) -> None:
    """Answer with another range than was asked for."""
    first, last = handler.find_range(content)
    first, last = (first + 1, last) if last > first else (first - 1, last - 1)
    send_head(handler, 206, last - first + 1, Content_Range=f"bytes {first}-{last}/{len(content)}")
    handler.wfile.write(content[first : last + 1])


@add_fault
def short(handler: FaultyHandler, content: bytes) -> None:
    """Answer with fewer bytes than the header says, in a complete answer."""
    if not handler.headers.get("Range"):  # it would be a complete object
        handler.answer(with_body=True)
        return
    first, last = handler.find_range(content)
    send_head(handler, 206, (last - first) // 2, Content_Range=f"bytes {first}-{last}/{len(content)}")
    handler.wfile.write(content[first : first + (last - first) // 2])


@add_fault
def replaced(handler: FaultyHandler, content: bytes) -> None:
    """Answer after the object was replaced."""
    handler.server.put(handler.name, content[::-1])
    handler.answer(with_body=True)


@add_fault
def silent(handler: FaultyHandler, content: bytes) -> None:
    """Send the head and half of the answer, and nothing more."""
    first, last = handler.find_range(content)
    send_head(handler, 206, last - first + 1, Content_Range=f"bytes {first}-{last}/{len(content)}")
    handler.wfile.write(content[first : (first + last + 1) // 2])
    handler.wfile.flush()
    time.sleep(1.5)


@add_fault
def endless(handler: FaultyHandler, content: bytes) -> None:
    """Send more than was asked for, until the client goes away."""
    first, last = handler.find_range(content)
    send_head(handler, 206, 10**12, Content_Range=f"bytes {first}-{last}/{len(content)}")
    handler.wfile.write(content[first : last + 1])
    with contextlib.suppress(OSError):
        for _ in range(1000):
            handler.wfile.write(bytes(1 << 16))


@add_fault
def redirect(handler: FaultyHandler, content: bytes) -> None:
    """Name another server, which has the object."""
    other = handler.server.other
    assert other is not None
    send_head(handler, 302, 0, Location=other.url + handler.path)
