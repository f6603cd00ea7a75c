"""Object stores on file systems of fsspec: in memory, and on a web server with ranges."""

from __future__ import annotations

import copy
import http.server
import io
import pickle
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict
from td_core.typing import Range
from td_store import StoredTensor
from td_store.arrays import ObjectReader, RangeSource
from td_store.store_pickles import FsspecStore
from td_store.testing import ObjectStoreTests

fsspec = pytest.importorskip("fsspec")


def make_url(contents: Mapping[str, bytes]) -> str:
    """Return the URL of new objects in memory."""
    folder = f"/{uuid.uuid4().hex}"
    for name, content in contents.items():
        fsspec.filesystem("memory").pipe_file(f"{folder}/{name}".rstrip("/"), content)
    return f"memory:/{folder}"


class TestMemoryFileSystem(ObjectStoreTests):
    creates_atomically = False

    def make(self, contents: Mapping[str, bytes]) -> FsspecStore:
        return FsspecStore(make_url(contents), {})


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves objects from a dict, also ranges of them, and logs the requests."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server: Any = self.server
        part = self.headers.get("Range")
        server.log.append((self.command, self.path, part))
        content = server.contents.get(unquote(self.path.partition("?")[0]))
        if content is None:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", part or "")
        if match is not None:
            first, last = int(match[1]), min(int(match[2] or last), last)
            if first > last:
                self.send_error(416)
                return
        self.send_response(200 if match is None else 206)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(content)}"')
        if match is not None:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[first : last + 1])

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    """Return a web server without objects."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler) as serving:
        serving.contents, serving.log = {}, []  # type: ignore[attr-defined]
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


class TestWebServer(ObjectStoreTests):
    is_writable = False
    can_list = False
    servers: ClassVar[list[Any]] = []

    @pytest.fixture(autouse=True)
    def prepare(self, server: Any) -> None:
        pytest.importorskip("aiohttp")
        type(self).servers = [server]

    def make(self, contents: Mapping[str, bytes]) -> FsspecStore:
        (server,) = self.servers
        server.contents = {f"/x/{name}".rstrip("/"): content for name, content in contents.items()}
        return FsspecStore(f"http://127.0.0.1:{server.server_port}/x", {})


def test_read_from_server_sends_one_request_for_each_range(server: Any) -> None:
    pytest.importorskip("aiohttp")
    server.contents["/x/a b"] = bytes(range(100))
    store = FsspecStore(f"http://127.0.0.1:{server.server_port}/x?token=1", {})
    (info,) = store.stat(["a b"])
    assert info is not None
    server.log.clear()
    store.read([Range("a b", 3, 7, info.stamp), Range("a b", 90, 100, info.stamp)])
    assert sorted(server.log) == [
        ("GET", "/x/a%20b?token=1", "bytes=3-6"),
        ("GET", "/x/a%20b?token=1", "bytes=90-99"),
    ]


class OddError(Exception):
    """An error of a library that is not an OSError."""


def fail(*args: Any, **options: Any) -> Any:
    raise OddError("the connection was cut: key=abcdef token=inner1")


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("info", lambda store: store.stat(["a"])),
        ("cat_ranges", lambda store: store.read([Range("a", 0, 2)])),
        ("pipe_file", lambda store: store.write("a", [b"1"])),
        ("find", lambda store: list(store.list())),
        ("rm_file", lambda store: store.delete(["a"])),
    ],
)
def test_error_of_library_is_os_error_without_secrets(
    method: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(make_url({"a": b"0123"}), {})
    store.stat(["a"])
    store.options = {"key": "abcdef", "client": {"token": ["inner1"]}}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), method, fail)
    with pytest.raises(OSError, match=r"OddError: the connection was cut: key=\*\*\* token=\*\*\*") as caught:
        call(store)
    assert store.where in str(caught.value)
    assert isinstance(caught.value.__cause__, OddError)


def test_error_of_one_range_is_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(make_url({"a": b"0123"}), {})
    system = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(system, "cat_ranges", lambda *args, **options: [b"01", OddError("cut")])
    with pytest.raises(OSError, match="cannot read the object 'a': OddError: cut"):
        store.read([Range("a", 0, 2), Range("a", 2, 3)])


@pytest.fixture
def opened() -> TensorDict:
    """Return a collection in a store that was opened with secret options."""
    store = FsspecStore(
        make_url({"a": torch.arange(5).numpy().tobytes()}), {"key": "secret-1", "n": {"t": "secret-2"}}
    )
    (info,) = store.stat(["a"])
    assert info is not None
    leaf = StoredTensor(RangeSource(ObjectReader(store, info), torch.int64, (5,), 0, "a"), mode="r")
    return TensorDict({"a": leaf, "n": {"part": leaf[2:]}})


def dump_torch(data: TensorDict) -> bytes:
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


@pytest.mark.parametrize("dump", [pickle.dumps, dump_torch])
def test_pickle_has_no_secrets_and_reopen_gives_them_back(dump: Any, opened: TensorDict) -> None:
    content = dump(opened)
    assert b"secret" not in content
    assert b"key" in content
    again = (
        torch.load(io.BytesIO(content), weights_only=False) if dump is dump_torch else pickle.loads(content)
    )
    with pytest.raises(
        OSError, match=r"call td_core.reopen\(collection, storage_options=...\) with 'key', 'n'"
    ):
        again["a"].clone()
    assert pickle.dumps(again).count(b"key")  # which options are missing is not forgotten
    options = {"key": "secret-1", "n": {"t": "secret-2"}}
    assert td_core.reopen(again, storage_options=options) is again
    assert again["n", "part"].tolist() == [2, 3, 4]
    assert again["a"].tolist() == [0, 1, 2, 3, 4]
    assert copy.copy(opened["a"].source.source.reader.store).options == options


def test_repr_and_where_have_no_secrets() -> None:
    store = FsspecStore("https://ann:secret@host/x?token=secret", {"key": "secret"})
    assert repr(store) == "FsspecStore('https://***@host/x')"
    content = pickle.dumps(store)
    assert b"ann" not in content and b":secret@" not in content
    with pytest.raises(OSError, match="user and password of the URL"):
        pickle.loads(content).stat([""])


def test_worker_process_receives_options() -> None:
    # Processes are started, and queues are filled, with this class.
    again = pickle.loads(ForkingPickler.dumps(FsspecStore("s3://ann:secret@host/x", {"key": "secret"})))
    assert (again.url, again.options, again.missing) == ("s3://ann:secret@host/x", {"key": "secret"}, ())


def test_reopen_of_collection_in_memory_raises() -> None:
    with pytest.raises(ValueError, match="the collection has none that takes storage_options"):
        td_core.reopen(TensorDict({"a": torch.ones(2)}), storage_options={})
    with pytest.raises(TypeError, match=r"reopen\(\) takes a collection"):
        td_core.reopen({"a": torch.ones(2)}, storage_options={})  # type: ignore[type-var]


def test_stamp_is_looked_up_at_most_once_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    system = type(fsspec.filesystem("memory"))
    original = system.info
    monkeypatch.setattr(
        system, "info", lambda self, path, **kw: asked.append(path) or original(self, path, **kw)
    )
    url = make_url({"a": b"0123"})
    store = FsspecStore(url, {})
    (info,) = store.stat(["a"])
    assert info is not None
    for _ in range(3):
        store.read([Range("a", 0, 2, info.stamp), Range("a", 3, 4, info.stamp)])
    assert len(asked) == 1
    fsspec.filesystem("memory").pipe_file(f"{url.removeprefix('memory:/')}/a", b"4567")
    monkeypatch.setattr(store, "checked_for", 0.0)
    with pytest.raises(FormatError, match="'a' was replaced since it was opened: open it again"):
        store.read([Range("a", 0, 2, info.stamp)])
    assert len(asked) == 2
