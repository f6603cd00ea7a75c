"""The class of locations: its arguments, what it shows, what its pickles have, and the errors that it translates."""

from __future__ import annotations

import base64
import copy
import io
import pickle
import sys
import uuid
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from servers import WebServer

import td_core
from td_core import FormatError, MissingPluginError, TensorDict
from td_core.typing import Range
from td_remote import Remote, plugin
from td_store import StoredTensor
from td_store.arrays import ObjectReader, RangeSource

SECRET = f"secret-{uuid.uuid4().hex}"


def make(contents: dict[str, bytes], **options: Any) -> Remote:
    """Return a location in memory with some objects."""
    remote = Remote(f"memory://{uuid.uuid4().hex}", **options)
    for name, content in contents.items():
        fsspec.filesystem("memory").pipe_file(f"{remote.url.removeprefix('memory:/')}/{name}", content)
    return remote


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("bucket/x", {}, "a remote location is a URL"),
        (3, {}, "a remote location is a URL"),
        ("s3://x", {"engine": "opendal"}, "the engine is 'auto', 'fsspec' or 'obstore'; got 'opendal'"),
        ("s3://x", {"concurrency": 0}, "concurrency is an integer of at least 1; got 0"),
        ("s3://x", {"retries": -1}, "retries is an integer of at least 0; got -1"),
        ("s3://x", {"retries": 1.5}, "retries is an integer of at least 0; got 1.5"),
        ("s3://x", {"timeout": 0}, "timeout is a positive number of seconds; got 0"),
        (
            "s3://x",
            {"cache": "c", "cache_size": "10 apples"},
            "a size is a number of bytes or a text such as '10GB'",
        ),
        (
            "memory://x",
            {"store": fsspec.filesystem("memory"), "engine": "obstore"},
            "one for the engine 'fsspec'",
        ),
        ("memory://x", {"store": fsspec.filesystem("memory"), "key": 1}, "the store has its options already"),
    ],
)
def test_wrong_argument_raises(url: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Remote(url, **options)


def test_name_below_is_joined_before_the_query() -> None:
    remote = Remote("https://host/a/?token=1") / "b" / "c d"
    assert (remote.url, remote.where) == ("https://host/a/b/c d?token=1", "https://host/a/b/c d")
    assert remote.parent.url == "https://host/a/b?token=1"
    for name in ("", "../x", "a/../b", 3):
        with pytest.raises(ValueError, match="below https://host/a/b/c d has no '..'"):
            remote / name  # type: ignore[operator]


@pytest.mark.parametrize(
    ("url", "options", "is_installed", "expected"),
    [
        ("s3://b/x", {}, True, "obstore"),
        ("s3://b/x", {}, False, "fsspec"),
        ("s3://b/x", {"key": "x"}, True, "fsspec"),
        ("s3://key:secret@b/x", {}, True, "fsspec"),
        ("https://host/x", {}, True, "obstore"),
        ("https://host/x?token=1", {}, True, "fsspec"),
        ("filecache::s3://b/x", {}, True, "fsspec"),
        ("memory://b/x", {}, True, "fsspec"),
        ("s3://b/x", {"engine": "fsspec"}, True, "fsspec"),
        ("s3://b/x", {"engine": "obstore", "region": "x"}, True, "obstore"),
        ("s3://b/x", {"store": object()}, True, "obstore"),
    ],
)
def test_engine_is_chosen_by_scheme_and_options(
    url: str, options: Any, is_installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remotes = sys.modules[Remote.__init__.__globals__["__name__"]]
    monkeypatch.setattr(remotes, "find_spec", lambda name: is_installed or None)
    assert repr(Remote(url, **options)).endswith(f", engine={expected!r})")


@pytest.mark.parametrize(
    ("url", "stripped", "options"),
    [
        ("s3://user:hunter%2F22@b/x", "s3://b/x", {"key": "user", "secret": "hunter/22"}),
        ("ftp://user:hunter22@h/x", "ftp://h/x", {"username": "user", "password": "hunter22"}),
        (
            "https://user:hunter22@h/x?v=1",
            "https://h/x?v=1",
            {"headers": {"Authorization": "Basic dXNlcjpodW50ZXIyMg=="}},
        ),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs://container@account.dfs.core.windows.net/x",
            {},
        ),
        ("github://org:repo@sha/x", "github://org:repo@sha/x", {}),
    ],
)
def test_user_and_password_become_options(url: str, stripped: str, options: Any) -> None:
    remote = Remote(url)
    assert (remote.url, remote._secrets) == (stripped, options)
    assert b"hunter" not in pickle.dumps(remote) and "hunter" not in repr(remote) + remote.where


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://user:hunter22@b/x", {"access_key_id": "user", "secret_access_key": "hunter22"}),
        (
            "https://user:hunter22@h/x",
            {"client_options": {"default_headers": {"Authorization": "Basic dXNlcjpodW50ZXIyMg=="}}},
        ),
    ],
)
def test_user_and_password_become_options_of_obstore(url: str, options: Any) -> None:
    assert Remote(url, engine="obstore")._secrets == options


def test_headers_of_options_are_beside_that_of_the_password() -> None:
    remote = Remote("https://user:hunter22@h/x", headers={"X-Note": "1"})
    assert remote._secrets == {"headers": {"Authorization": "Basic dXNlcjpodW50ZXIyMg==", "X-Note": "1"}}


def test_password_of_chain_is_not_pickled() -> None:
    remote = Remote("filecache::s3://user:hunter22@b/x")
    content = pickle.dumps(remote)
    assert b"hunter" not in content and "hunter" not in remote._policy.hide(f"error in {remote.url}")
    with pytest.raises(OSError, match="user and password of the URL"):
        pickle.loads(content).stat([""])


def test_wrong_number_in_environment_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TD_REMOTE_CONCURRENCY", "many")
    with pytest.raises(ValueError, match="concurrency is an integer of at least 1"):
        Remote("memory://x")


class OddError(Exception):
    """An error of a library that is not an OSError."""


def fail(*args: Any, **options: Any) -> Any:
    raise OddError(f"the connection was cut: key={SECRET} token=inner1")


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("info", lambda store: store.stat(["a"])),
        ("cat_file", lambda store: store.read([Range("a", 0, 2)])),
        ("pipe_file", lambda store: store.write("a", [b"1"])),
        ("find", lambda store: list(store.list())),
        ("rm_file", lambda store: store.delete(["a"])),
    ],
)
def test_error_of_library_is_os_error_without_secrets(
    method: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make({"a": b"0123"}, key=SECRET, client={"token": ["inner1"]})
    monkeypatch.setattr(type(fsspec.filesystem("memory")), method, fail)
    with pytest.raises(OSError, match=r"OddError: the connection was cut: key=\*\*\* token=\*\*\*") as caught:
        call(store)
    assert store.where in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__) and caught.value.__cause__ is not None


def test_error_without_secrets_has_that_of_library_as_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make({"a": b"0123"})
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
    with pytest.raises(OSError, match="cannot read the object 'a'") as caught:
        store.read([Range("a", 0, 2)])
    assert isinstance(caught.value.__cause__, OddError)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs"), ("abfs", "az"), ("https", "http")])
def test_missing_library_names_the_extra(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: Any) -> Any:
        raise ImportError("Install the library")

    engines = __import__("td_remote._file_systems")._file_systems
    monkeypatch.setattr(engines, "url_to_fs", refuse)
    with pytest.raises(MissingPluginError, match=rf"Install the library: pip install td-remote\[{extra}\]"):
        Remote(f"{scheme}://bucket/x", engine="fsspec").stat(["a"])


def test_scheme_is_one_of_fsspec_or_names_the_extra() -> None:
    others = {scheme for scheme in plugin._SCHEMES if scheme not in fsspec.available_protocols()}
    assert others <= {"abfss"}  # adlfs registers it
    for scheme in others:
        with pytest.raises(
            MissingPluginError, match=r"no file system of the scheme: pip install td-remote\[az\]"
        ):
            Remote(f"{scheme}://box@account/x", engine="fsspec").stat(["a"])


def make_token() -> Any:
    return pytest.importorskip("google.oauth2.credentials").Credentials(token=SECRET)


KEY = base64.b64encode(SECRET.encode()).decode()
SIGNATURE = f"sv=2024-01-01&sig={SECRET}"
NOWHERE = "http://127.0.0.1:9"
CONNECTION = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey={KEY};BlobEndpoint={NOWHERE}/a"
#: URLs of other clouds with options of their libraries, and the file system, if it is one.
CLOUDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "gcsfs": ("gs://bucket/x", "GCSFileSystem", {"token": make_token, "endpoint_url": NOWHERE}),
    "gcsfs anonymous": ("gcs://bucket/x", "GCSFileSystem", {"token": "anon", "endpoint_url": NOWHERE}),
    "adlfs": (
        "abfs://box@account.dfs.core.windows.net/x",
        "AzureBlobFileSystem",
        {"connection_string": CONNECTION},
    ),
    "adlfs key": ("az://box/x", "AzureBlobFileSystem", {"connection_string": CONNECTION}),
    "obstore gs": ("gs://bucket/x", None, {"skip_signature": True, "service_account_path": SECRET}),
    "obstore key": ("az://box/x", None, {"account_name": "account", "account_key": KEY, "endpoint": NOWHERE}),
    "obstore sas": (
        "az://box/x",
        None,
        {"account_name": "account", "sas_token": SIGNATURE, "endpoint": NOWHERE},
    ),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_other_cloud_is_opened_by_its_library_and_shows_no_secret(name: str) -> None:
    pytest.importorskip(name.split()[0])
    url, system, given = CLOUDS[name]
    options = {key: value() if callable(value) else value for key, value in given.items()}
    engine = "obstore" if system is None else "fsspec"
    remote = Remote(url, engine=engine, retries=0, timeout=0.3, **options)  # type: ignore[arg-type]
    shown = [repr(remote), remote.where]
    with pytest.raises(OSError, match=f"{url.partition(':')[0]}://.*(find|open) the object 'a?'") as caught:
        remote.stat(["a"])
    if system is not None:
        assert system in {cls.__name__ for cls in type(remote._open().system).__mro__}  # type: ignore[attr-defined]
    error: BaseException | None = caught.value
    while error is not None:
        shown += [repr(error), str(error)]
        error = error.__cause__
    content = pickle.dumps(remote)
    for secret in (SECRET, KEY):
        assert secret.encode() not in content
        assert [text for text in shown if secret in text] == []


def test_url_of_scheme_without_provider_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = td_core.spi.Serializer.find_objects.__globals__["find_objects"].__globals__["STORES"]
    monkeypatch.setattr(stores, "_by_scheme", {})
    with pytest.raises(MissingPluginError, match="common ones are those of the package 'td-remote'"):
        td_core.spi.Serializer.find_objects("s3://bucket/x")


@pytest.fixture
def opened() -> TensorDict:
    """Return a collection in a store that was opened with secret options."""
    store = make({"a": torch.arange(5).numpy().tobytes()}, key=SECRET, n={"t": SECRET})
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
    assert SECRET.encode() not in content
    again = (
        torch.load(io.BytesIO(content), weights_only=False) if dump is dump_torch else pickle.loads(content)
    )
    with pytest.raises(
        OSError, match=r"call td_core.reopen\(collection, storage_options=...\) with 'key', 'n'"
    ):
        again["a"].clone()
    assert pickle.dumps(again).count(b"key")  # which options are missing is not forgotten
    assert td_core.reopen(again, storage_options={"key": SECRET, "n": {"t": SECRET}}) is again
    assert again["n", "part"].tolist() == [2, 3, 4]
    assert again["a"].tolist() == [0, 1, 2, 3, 4]
    assert copy.copy(opened["a"].source.source.reader.store)._secrets == {"key": SECRET, "n": {"t": SECRET}}


def test_settings_are_pickled_and_kept_by_reopen() -> None:
    remote = Remote("memory://x", retries=2, timeout=3.0, concurrency=7, engine="fsspec")
    again = pickle.loads(pickle.dumps(remote))
    assert again._settings == remote._settings
    again.reopen({"key": "x"})
    assert (again._settings, again._secrets) == (remote._settings, {"key": "x"})


def test_worker_process_receives_options() -> None:
    # Processes are started, and queues are filled, with this class.
    again = pickle.loads(
        ForkingPickler.dumps(Remote("s3://ann:secret@host/x", region="there", engine="fsspec"))
    )
    assert (again.url, again._missing) == ("s3://host/x", ())
    assert again._secrets == {"key": "ann", "secret": "secret", "region": "there"}


def test_store_of_user_is_used_and_not_pickled() -> None:
    system = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
    system.pipe_file("/shelf/a", b"0123")
    remote = Remote("memory://shelf", store=system)
    assert [(info.name, info.size) for info in remote.list()] == [("a", 4)]
    with pytest.raises(OSError, match="with 'store'"):
        pickle.loads(pickle.dumps(remote)).stat(["a"])


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
    store = make({"a": b"0123"})
    (info,) = store.stat(["a"])
    assert info is not None
    for _ in range(3):
        store.read([Range("a", 0, 2, info.stamp), Range("a", 3, 4, info.stamp)])
    assert len(asked) == 1
    fsspec.filesystem("memory").pipe_file(f"{store.url.removeprefix('memory:/')}/a", b"4567")
    monkeypatch.setattr(store, "checked_for", 0.0)
    with pytest.raises(FormatError, match="'a' was replaced since it was opened: open it again"):
        store.read([Range("a", 0, 2, info.stamp)])
    assert len(asked) == 2


def test_write_without_encryption_needs_permission(web: Callable[..., Remote], server: WebServer) -> None:
    for change in (lambda: web().write("a", [b"1"]), lambda: web().delete(["a"])):
        with pytest.raises(PermissionError, match="writing without encryption needs allow_http=True"):
            change()
    assert server.log == []


def test_reads_from_web_server_send_one_request_for_each_range(
    web: Callable[..., Remote], server: WebServer
) -> None:
    server.put("/x/a b", bytes(range(100)))
    store = web("x")
    (info,) = store.stat(["a b"])
    assert info is not None
    server.log.clear()
    store.read([Range("a b", 3, 7, info.stamp), Range("a b", 90, 100, info.stamp)])
    assert sorted(server.log) == [("GET", "/x/a%20b", "bytes=3-6"), ("GET", "/x/a%20b", "bytes=90-99")]
    server.log.clear()
    assert store.peek("a b", 10) == (info, bytes(range(10)))
    assert server.log == [("GET", "/x/a%20b", "bytes=0-9")]
    server.log.clear()
    assert store.peek_ends("a b", 10) == (info, bytes(range(10)), bytes(range(90, 100)))
    assert sorted(server.log) == [("GET", "/x/a%20b", "bytes=-10"), ("GET", "/x/a%20b", "bytes=0-9")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its blocks are not closed
def test_block_cache_of_fsspec_reads_through_web_server(server: WebServer, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    content = bytes(range(256)) * 64
    server.put("/x.bin", content)
    remote = Remote(f"blockcache::{server.url}/x.bin", blockcache={"cache_storage": str(tmp_path / "blocks")})
    (info,) = remote.stat([""])
    assert info is not None and info.size == len(content)
    found = remote.read([Range("", 10, 300), Range("", 9000, 9010), Range("", -3)])
    assert [bytes(part) for part in found] == [content[10:300], content[9000:9010], content[-3:]]


def test_query_of_url_is_sent_and_hidden(server: WebServer) -> None:
    pytest.importorskip("aiohttp")
    server.put("/x/a", b"0123")
    remote = Remote(f"{server.url}/x?token={SECRET}")
    assert bytes(remote.read([Range("a", 0)])[0]) == b"0123"
    assert {path for _, path, _ in server.log} == {f"/x/a?token={SECRET}"}
    with pytest.raises(FileNotFoundError) as caught:
        remote.read([Range("b", 0, 1)])
    assert SECRET not in f"{caught.value} {caught.value.__cause__!r} {remote!r}"
