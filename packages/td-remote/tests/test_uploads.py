"""Uploads to S3 in parts, and processes that are forked after a read."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import WebServer

from td_core.typing import Range
from td_remote import Remote, _engines, _obstore_engine

PART = 5 << 20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload parts of 5 MB, the smallest that S3 takes."""
    monkeypatch.setattr(_engines.split_parts, "__defaults__", (PART,))
    monkeypatch.setattr(_obstore_engine, "PART", PART)


def list_uploads(bucket: Any) -> list[Any]:
    client, name = bucket
    return list(client.list_multipart_uploads(Bucket=name).get("Uploads", []))


@pytest.mark.parametrize("size", [0, PART - 1, PART, PART + 1, 3 * PART + 7])
@pytest.mark.parametrize("create", [False, True])
def test_object_of_several_parts_is_complete(
    size: int, create: bool, small_parts: None, s3: Callable[..., Remote], bucket: Any
) -> None:
    content = random.Random(size).randbytes(size)
    remote = s3()
    info = remote.write("a", [content[:100], content[100:]], create=create)
    assert info.size == size
    assert bytes(remote.read([Range("a", 0, None, info.stamp)])[0]) == content
    assert list_uploads(bucket) == []
    if create:
        with pytest.raises(FileExistsError, match="the object 'a' exists"):
            remote.write("a", [content], create=True)


def test_upload_whose_content_fails_leaves_nothing(
    small_parts: None, s3: Callable[..., Remote], bucket: Any
) -> None:
    remote = s3()
    remote.write("a", [b"old"])

    def produce() -> Iterator[bytes]:
        for _ in range(4):
            yield bytes(PART)
        raise ZeroDivisionError("the content cannot be made")

    with pytest.raises(ZeroDivisionError, match="cannot be made"):
        remote.write("a", produce())
    assert bytes(remote.read([Range("a", 0)])[0]) == b"old"
    assert list_uploads(bucket) == []


def test_parts_are_made_when_they_are_sent(small_parts: None, s3: Callable[..., Remote], bucket: Any) -> None:
    client, name = bucket
    leads = []

    def produce() -> Iterator[bytes]:
        for made in range(20):
            (upload,) = list_uploads(bucket) or [None]
            if upload is not None:
                sent = client.list_parts(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
                leads.append(made - len(sent.get("Parts", [])))
            yield bytes(PART)

    s3().write("a", produce())
    assert len(leads) > 10 and max(leads) <= 8


@pytest.mark.parametrize("sizes", [[], [0], [3], [10], [11], [4, 4, 4, 4], [25, 1], [10, 10]])
def test_split_parts_have_one_size(sizes: list[int]) -> None:
    content = [random.Random(size).randbytes(size) for size in sizes]
    parts = list(_engines.split_parts(content, 10))
    assert b"".join(parts) == b"".join(content)
    assert all(len(part) == 10 for part in parts[:-1]) and len(parts) == max(1, -(-sum(sizes) // 10))


def read_in_child(remote: Remote, pipe: Any) -> None:
    try:
        pipe.send(bytes(remote.read([Range("a", 0, 3)])[0]))
    except OSError as error:
        pipe.send(f"{isinstance(error, RuntimeError)} {error}")


@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_process_reads_after_its_parent_has_read(engine: str, method: str, server: WebServer) -> None:
    pytest.importorskip("aiohttp" if engine == "fsspec" else "obstore")
    server.put("/x/a", b"0123")
    remote = Remote(f"{server.url}/x", engine=engine)  # type: ignore[arg-type]
    remote.read([Range("a", 0, 3)])
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=read_in_child, args=(remote, theirs))
    child.start()
    assert ours.poll(60)
    found = ours.recv()
    child.join(60)
    assert child.exitcode == 0
    if (engine, method) == ("obstore", "fork"):
        assert found.startswith("True ") and "start workers with multiprocessing_context='spawn'" in found
    else:
        assert found == b"012"


@pytest.mark.once
def test_new_location_after_fork_of_used_engine_raises_and_does_not_hang(server: WebServer) -> None:
    pytest.importorskip("obstore")
    server.put("/x/a", b"0123")
    code = f"""
import os, sys
from td_core.typing import Range
from td_remote import Remote
if sys.argv[1] == "used":
    Remote("{server.url}/x", engine="obstore").read([Range("a", 0, 3)])
else:
    Remote("{server.url}/x", engine="obstore")
if os.fork() == 0:
    try:
        print(bytes(Remote("{server.url}/x", engine="obstore").read([Range("a", 0, 3)])[0]), flush=True)
    except RuntimeError as error:
        print("obstore was in use when this process was forked" in str(error), flush=True)
    os._exit(0)
os.wait()
"""
    for use, expected in (("used", "True"), ("unused", "b'012'")):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, use],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=os.environ,
        )
        assert run.stdout.strip() == expected
