"""Servers that fail: right bytes or the right error, in bounded time, with each engine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from servers import FAULTS, WebServer, serve

import td_core
from td_core import FormatError, TensorDict
from td_core.typing import Range
from td_remote import Remote
from td_remote._retries import Attempts, Policy, ShortAnswerError

CONTENT = bytes(range(256)) * 512
RANGES = [Range("a", 3, 5000), Range("a", 70_000, 70_100), Range("a", -50)]
#: What comes of a fault that does not end: an error, or the right bytes.
ENDS: dict[str, tuple[type[Exception], str] | None] = {
    "cut": (OSError, "cannot read the object 'a'.*tried 4 times"),
    "reset": (OSError, "cannot read the object 'a'.*tried 4 times"),
    "busy": (OSError, "cannot read the object 'a'.*503.*tried 4 times"),
    "limited": (OSError, "cannot read the object 'a'.*429.*tried 4 times"),
    "silent": (OSError, "cannot read the object 'a'"),
    "short": (FormatError, "the object 'a' is truncated"),
    "wrong_range": (FormatError, "another range of the object 'a'"),
    "replaced": (FormatError, "'a' was replaced since it was opened: open it again"),
    "whole": None,
    "endless": None,
    "redirect": None,
}
#: Faults that are errors at once, however many there are.
FINAL = {"wrong_range", "replaced"}


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait before another attempt."""
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)


def test_every_fault_has_an_end() -> None:
    assert ENDS.keys() == FAULTS.keys()


@pytest.mark.filterwarnings("ignore:.*the server does not answer requests for ranges")
@pytest.mark.parametrize("count", [1, 3, 10**6])
@pytest.mark.parametrize("fault", FAULTS)
def test_read_from_failing_server(
    fault: str, count: int, web: Callable[..., Remote], server: WebServer
) -> None:
    server.put("/x/a", CONTENT)
    remote = web("x", retries=3, timeout=0.5 if fault == "silent" else 5)
    (info,) = remote.stat(["a"])
    assert info is not None
    with serve() as other:
        other.put("/x/a", CONTENT)
        server.other, server.fault, server.count = other, fault, count
        ranges = [item._replace(stamp=info.stamp) for item in RANGES]
        expected = None if count <= 3 and fault not in FINAL else ENDS[fault]
        if expected is not None:
            with pytest.raises(expected[0], match=expected[1]) as caught:
                remote.read(ranges)
            assert remote.where in str(caught.value)
        else:
            assert [bytes(part) for part in remote.read(ranges)] == [
                CONTENT[it.start : it.stop] for it in RANGES
            ]


@pytest.mark.parametrize("count", [2, 10**6])
@pytest.mark.parametrize("fault", ["busy", "limited", "reset"])
def test_upload_to_failing_server_is_repeated_or_an_error(
    fault: str, count: int, web: Callable[..., Remote], server: WebServer
) -> None:
    remote = web("x", retries=3, allow_http=True)
    remote.write("a", [b"old"])
    server.log.clear()
    server.fault, server.count = fault, count
    if count == 2:
        assert remote.write("a", [CONTENT, CONTENT]).size == 2 * len(CONTENT)
        assert server.contents["/x/a"] == CONTENT * 2
    else:
        with pytest.raises(OSError, match="cannot write the object 'a'.*tried 4 times"):
            remote.write("a", [CONTENT])
        assert server.contents["/x/a"] == b"old"
    assert [method for method, _, _ in server.log].count("PUT") == min(count + 1, 4)


def save_in(name: str, data: TensorDict, tmp_path: Path) -> Path:
    """Save a collection in a format, and return its path."""
    packages = {"tdz": "memmap", "parquet": "arrow"}
    pytest.importorskip(f"td_{packages.get(name, name)}")
    suffix = {"memmap": "", "hdf5": ".h5"}.get(name, f".{name}")
    path = tmp_path / f"data{suffix}"
    if name == "memmap":
        data.memmap(path)
    else:
        td_core.save(data, path)
    return path


def publish(path: Path, server: WebServer) -> None:
    """Put a file, or the files of a directory, on a server."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        server.put(f"/{file.relative_to(path.parent).as_posix()}", file.read_bytes())


@pytest.mark.parametrize("fault", ["cut", "busy", "short", "redirect"])
@pytest.mark.parametrize("name", ["safetensors", "memmap", "tdz", "hdf5", "zarr", "parquet", "arrow"])
def test_format_reads_through_faults(
    name: str, fault: str, web: Callable[..., Remote], server: WebServer, tmp_path: Path
) -> None:
    data = TensorDict({"a": torch.arange(3000.0).view(300, 10), "n": {"b": torch.arange(300)}}, [300])
    path = save_in(name, data, tmp_path)
    publish(path, server)
    remote = web(path.name, retries=5)
    with serve() as other:
        publish(path, other)
        server.other, server.fault, server.count = other, fault, 3
        opened = td_core.open(remote)
        server.count = 3
        assert opened[[7, 290]]["n", "b"].tolist() == [7, 290]
        server.count = 3
        assert (td_core.load(remote) == data).all()


@pytest.mark.filterwarnings("ignore:(BasicAuth|The 'auth' parameter) is deprecated")
@pytest.mark.parametrize("option", ["headers", "auth", "url"])
def test_redirect_to_other_host_drops_credentials(option: str, server: WebServer) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    options: dict[str, Any] = {
        "headers": {"headers": {"Authorization": "Bearer token-1", "X-Key": "token-1"}},
        "auth": {"auth": aiohttp.BasicAuth("ann", "token-1")},
        "url": {},
    }[option]
    url = server.url.replace("://", "://ann:token-1@") if option == "url" else server.url
    server.put("/x/a", CONTENT)
    with serve() as other:
        other.put("/x/a", CONTENT)
        server.other, server.fault, server.count = other, "redirect", 1
        remote = Remote(f"{url}/x", engine="fsspec", **options)
        assert bytes(remote.read([Range("a", 1, 4)])[0]) == CONTENT[1:4]
        remote.read([Range("a", 1, 4)])
        assert "Authorization" in server.seen[-1]
        (seen,) = other.seen
        assert "Authorization" not in seen and "X-Key" not in seen


def test_redirect_with_obstore_drops_credentials(server: WebServer) -> None:
    pytest.importorskip("obstore")
    server.put("/x/a", CONTENT)
    headers = {"Authorization": "Bearer token-1", "Cookie": "token-1"}
    with serve() as other:
        other.put("/x/a", CONTENT)
        server.other, server.fault, server.count = other, "redirect", 1
        remote = Remote(f"{server.url}/x", engine="obstore", client_options={"default_headers": headers})
        assert bytes(remote.read([Range("a", 1, 4)])[0]) == CONTENT[1:4]
        remote.read([Range("a", 1, 4)])
        (seen,) = other.seen
        names = {name.lower() for name in seen}
        assert "authorization" in {name.lower() for name in server.seen[-1]}
        assert not names & {"authorization", "cookie"}


@pytest.mark.parametrize("size", [None, 200 << 20])
def test_large_object_of_server_without_ranges_raises(size: int | None, server: WebServer) -> None:
    pytest.importorskip("aiohttp")
    server.put("/x/a", bytes(100 << 10))
    server.headers = {"Content-Length": "" if size is None else str(size)}
    server.fault, server.count = "whole", 10**6
    import td_remote._engines as engines

    limit, engines.WHOLE = engines.WHOLE, 50_000
    try:
        with pytest.raises(
            FormatError, match="does not answer requests for ranges, and the object 'a' has more"
        ):
            Remote(f"{server.url}/x", engine="fsspec", retries=0).read([Range("a", 5, 10)])
    finally:
        engines.WHOLE = limit


def test_object_of_server_without_ranges_is_read_once(web: Callable[..., Remote], server: WebServer) -> None:
    server.put("/x/a", CONTENT)
    server.fault, server.count = "whole", 10**6
    remote = web("x")
    (info,) = remote.stat(["a"])
    assert info is not None
    with pytest.warns(UserWarning, match="the object 'a' is read whole"):
        remote.read([Range("a", 5, 10, info.stamp), Range("a", 50, 60, info.stamp)])
    left = server.count
    assert bytes(remote.read([Range("a", 500, 510, info.stamp)])[0]) == CONTENT[500:510]
    assert server.count == left


@pytest.mark.filterwarnings("ignore:.*the server does not answer requests for ranges")
def test_replaced_object_of_server_without_ranges_is_read_again(
    web: Callable[..., Remote], server: WebServer
) -> None:
    server.fault, server.count = "whole", 10**6
    remote = web("x")
    for content in (CONTENT, CONTENT[::-1]):
        server.put("/x/a", content)
        (info,) = remote.stat(["a"])
        assert info is not None
        assert bytes(remote.read([Range("a", 500, 510, info.stamp)])[0]) == content[500:510]


class BusyError(Exception):
    """An error of a library with the headers of an answer."""

    status = 429
    headers = {"retry-after": "7"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (BusyError(), 7.0),
        (TimeoutError(), 0.0),
        (ConnectionResetError(), 0.0),
        (ShortAnswerError(), 0.0),
        (PermissionError(), None),
        (FileNotFoundError(), None),
        (ValueError(), None),
        (FormatError(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_worth_another_attempt(error: Exception, pause: float | None) -> None:
    attempts = Attempts(Policy("memory://x", retries=1), "read", "a")
    if pause is None:
        with pytest.raises((OSError, FormatError)):
            attempts.pause(error)
        return
    assert attempts.pause(error) == pause
    with pytest.raises((OSError, FormatError), match=r"tried 2 times in \d"):
        attempts.pause(error)


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("3", 3.0),
        (" 4 ", 4.0),
        ("Sun, 29 Nov 2998 10:00:00 GMT", 20.0),
        ("Sun, 29 Nov 1998 10:00:00 GMT", 0.0),
        ("soon", 0.0),
        ("", 0.0),
    ],
)
def test_pause_that_a_server_asks_for_is_made(text: str, pause: float) -> None:
    error = BusyError()
    error.headers = {"Retry-After": text}  # type: ignore[misc]
    assert Attempts(Policy("memory://x", retries=1), "read", "a").pause(error) == pause


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_bounds_requests_of_all_threads(
    concurrency: int, web: Callable[..., Remote], server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("/x/a", CONTENT)
    running, most, lock = 0, 0, threading.Lock()
    original = type(server).take_fault

    def count(self: WebServer, path: str) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    monkeypatch.setattr(type(server), "take_fault", count)
    remotes = [web("x", concurrency=concurrency) for _ in range(2)]
    threads = [
        threading.Thread(target=remote.read, args=([Range("a", i, i + 1) for i in range(8)],))
        for remote in remotes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(type(server), "take_fault", original)
    assert most == concurrency


def test_concurrency_bounds_requests_to_a_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()
    remotes = [Remote("memory://bounded/x", concurrency=2) for _ in range(2)]
    remotes[0].write("a", [CONTENT])
    original = MemoryFileSystem.cat_file

    def count(self: Any, path: str, start: int, end: int) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return original(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", count)
    ranges = [Range("a", i, i + 1) for i in range(8)]
    threads = [threading.Thread(target=remote.read, args=(ranges,)) for remote in remotes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


class RefusedError(Exception):
    """An error of a library with the status of an answer."""

    def __init__(self, status: int) -> None:
        super().__init__("refused")
        self.status = status


@pytest.mark.parametrize(
    ("status", "operation", "error", "message"),
    [
        (
            401,
            "read",
            PermissionError,
            "the server asks for credentials: set those of the environment, or pass",
        ),
        (
            403,
            "read",
            PermissionError,
            "the credentials do not allow it: set others in the environment, or pass",
        ),
        (
            301,
            "read",
            OSError,
            "the bucket is in another region: pass its region or endpoint in storage_options",
        ),
        (404, "read", FileNotFoundError, "there is no object 'a'"),
        (412, "read", FormatError, "the object 'a' was replaced since it was opened"),
        (412, "write", FileExistsError, "the object 'a' exists"),
        (409, "write", FileExistsError, "the object 'a' exists"),
        (400, "read", OSError, "cannot read the object 'a': RefusedError: refused"),
    ],
)
def test_refused_request_is_not_repeated_and_says_what_to_do(
    status: int, operation: str, error: type[Exception], message: str
) -> None:
    attempts = Attempts(Policy("s3://bucket/x"), operation, "a")
    with pytest.raises(error, match=f"^s3://bucket/x: .*{message}") as caught:
        attempts.pause(RefusedError(status))
    assert isinstance(caught.value.__cause__, RefusedError)
