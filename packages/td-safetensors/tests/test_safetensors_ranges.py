"""Reading ranges of bytes: some rows of a local file without mapping it, and files at URLs."""

from __future__ import annotations

import importlib
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import (
    FormatError,
    KeyPathError,
    LazyStackedTensorDict,
    MissingPluginError,
    TensorDict,
    UnsupportedOperationError,
    load,
)
from td_safetensors import _byte_ranges, save
from td_store import StoredTensor, arrays

fsspec = pytest.importorskip("fsspec")

ROWS = [
    3,
    -1,
    slice(2, 90, 7),
    slice(5, 9),
    slice(4, 4),
    slice(None),
    [99, 0, 3, 3],
    [],
    torch.arange(100) % 3 == 0,
    torch.tensor([[1, 2], [98, 0]]),
]


@pytest.fixture
def mixed() -> TensorDict:
    """Return a collection with leaves that are stored in each of the ways that the format has."""
    members = [TensorDict({"q": torch.full((100, 2), i)}, [100]) for i in range(3)]
    return TensorDict(
        {
            "a": torch.arange(500.0).view(100, 5),
            "n": {"b": torch.arange(100), "c": torch.randn(100, 2, dtype=torch.complex128)},
            "f8": torch.arange(300.0).view(100, 3).to(torch.float8_e4m3fn),
            "s": LazyStackedTensorDict(*members, stack_dim=1),
            "first": LazyStackedTensorDict(*(member[0] for member in members * 33 + members[:1])),
            "e": torch.ones(1, 500).expand(100, 500),
            "none": torch.zeros(100, 0),
            "tied": (tied := torch.arange(100)),
            "again": tied,
        },
        [100],
    )


@pytest.fixture
def url(mixed: TensorDict, path: Path, urls: None) -> Iterator[str]:
    """Return the URL of a save of ``mixed`` in memory."""
    save(mixed, path)
    folder = f"/{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    system.pipe_file(f"{folder}/data.safetensors", path.read_bytes())
    yield f"memory:/{folder}/data.safetensors"
    system.rm(folder, recursive=True)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list of the ranges that are requested from objects at URLs, without the headers."""
    found: list[tuple[int, int]] = []
    system = type(fsspec.filesystem("memory"))
    original = system.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        found.extend([(start, end)] * bool(start))
        return original(self, path, start, end)

    monkeypatch.setattr(system, "cat_file", cat_file)
    return found


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_load_rows_with_read_equals_index(
    rows: Any, num_threads: int, mixed: TensorDict, path: Path, same: Any
) -> None:
    save(mixed, path)
    result = load(path, rows=rows, strategy="read", num_threads=num_threads)
    same(result, mixed[rows])
    assert not any(isinstance(leaf, StoredTensor) for leaf in result.values(True, True))


@pytest.mark.parametrize(
    ("rows", "count"), [(3, 1), (slice(10, 30), 20), (slice(None, None, 5000), 2), ([9_999, 0, 5], 8)]
)
def test_load_rows_with_read_reads_few_bytes(
    rows: Any, count: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = TensorDict({"a": torch.randn(10_000, 64), "n": {"b": torch.randn(10_000, 2, 32)}}, [10_000])
    save(td, path)
    sizes: list[int] = []

    def read_into(fd: int, tensor: Any, position: int, report: Any) -> None:
        sizes.append(len(tensor))
        arrays.read_into(fd, tensor, position, report)

    monkeypatch.setattr(_byte_ranges, "read_into", read_into)
    result = load(path, rows=rows, strategy="read")
    assert torch.equal(result["n", "b"], td["n", "b"][rows])
    # Rows with a short gap are read together.
    assert sum(sizes) <= 2 * 256 * count


def test_load_rows_with_read_of_nested_tensor(path: Path, same: Any) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(i) for i in range(1, 5)], layout=torch.jagged)
    td = TensorDict({"j": jagged, "a": torch.arange(4)}, [4])
    save(td, path)
    result = load(path, rows=2, strategy="read")
    assert torch.equal(result["j"], torch.ones(3))
    assert result["a"] == 2


def test_load_url_equals_local_load(url: str, mixed: TensorDict, same: Any) -> None:
    for result in (load(url), TensorDict.from_safetensors(url), td_core.load(url, format="safetensors")):
        same(result, mixed)
        result["a"].zero_()
    same(load(url), mixed)
    assert load(url, device="meta")["a"].is_meta
    target = mixed.clone().zero_()
    same(target.load_(url), mixed)


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_load_rows_of_url_equals_index(rows: Any, url: str, mixed: TensorDict, same: Any) -> None:
    same(load(url, rows=rows), mixed[rows])


def test_load_keys_of_url_reads_only_these(url: str, ranges: list[Any], mixed: TensorDict) -> None:
    result = load(url, keys=[("n", "b")], rows=slice(10, 20))
    assert result["n", "b"].tolist() == list(range(10, 20))
    assert [end - begin for begin, end in ranges] == [80]
    with pytest.raises(KeyPathError, match=r"data.safetensors: the save has no key 'x'"):
        load(url, keys="x")


def test_load_url_merges_neighbours(url: str, ranges: list[Any]) -> None:
    load(url)
    assert len(ranges) == 1


def test_load_url_splits_distant_rows(urls: None, path: Path, ranges: list[Any]) -> None:
    td = TensorDict({"a": torch.arange(200_000).view(-1, 2)}, [100_000])
    save(td, path)
    fsspec.filesystem("memory").pipe_file("/distant.safetensors", path.read_bytes())
    assert torch.equal(
        load("memory://distant.safetensors", rows=[99_999, 3, 0])["a"], td["a"][[99_999, 3, 0]]
    )
    assert sorted(end - begin for begin, end in ranges) == [16, 64]


def test_open_url_reads_when_used(url: str, ranges: list[Any], mixed: TensorDict, same: Any) -> None:
    opened = td_core.open(url)
    assert opened.is_locked
    assert isinstance(opened["a"], StoredTensor)
    assert ranges == []
    same(opened[[5, 2]].clone(), mixed[[5, 2]])
    # One request for all leaves, and one for the chosen members of a stack along the rows, which are neighbours.
    assert len(ranges) == 2
    back = pickle.loads(pickle.dumps(opened["n"]))
    assert torch.equal(back["b"][3:5], torch.tensor([3, 4]))
    with pytest.raises(td_core.LockedError, match="mode='r'"):
        opened["a"].zero_()


def test_open_url_with_mode_c_keeps_writes_in_memory(url: str, mixed: TensorDict, same: Any) -> None:
    opened = td_core.open(url, mode="c")
    opened["a"][3] = 7.0
    assert opened["a"][3].tolist() == [7.0] * 5
    same(load(url), mixed)


def test_inspect_and_verify_url(url: str, mixed: TensorDict, path: Path) -> None:
    assert td_core.inspect(url).as_dict() == td_core.inspect(path).as_dict()
    assert td_core.verify(url).ok
    save(mixed, path, checksums=True)
    fsspec.filesystem("memory").pipe_file("/hashes.safetensors", path.read_bytes())
    assert td_core.verify("memory://hashes.safetensors").hashed > 5


def test_load_shards_at_url(urls: None, mixed: TensorDict, tmp_path: Path, same: Any) -> None:
    save(mixed, tmp_path, max_shard_size="2kB")
    system = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        system.pipe_file(f"/shards/{file.name}", file.read_bytes())
    same(load("memory://shards", format="safetensors"), mixed)
    same(load("memory://shards/model.safetensors.index.json", rows=[3, 1]), mixed[[3, 1]])
    system.rm_file(next(name for name in system.ls("/shards", detail=False) if name.endswith(".safetensors")))
    with pytest.raises(FormatError, match="a shard that it names is missing"):
        load("memory://shards", format="safetensors")


def test_read_of_replaced_object_raises(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("td_remote").Remote, "checked_for", 0.0)
    opened = td_core.open(url)
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), path.read_bytes())
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        opened["a"].clone()


@pytest.mark.parametrize("size", [4, 40, -1])
def test_load_truncated_url_raises(size: int, url: str, path: Path) -> None:
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), path.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"data.safetensors is (not a safetensors file|truncated)"):
        load(url, format="safetensors")


def test_load_short_answer_raises(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(system, "cat_file", lambda self, path, start, end: b"x")
    with pytest.raises(FormatError, match="is truncated"):
        load(url, storage_options={"retries": 0})


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "r+": (
        lambda url, path: td_core.open(url, mode="r+"),
        UnsupportedOperationError,
        "open it with mode='c'",
    ),
    "create": (
        lambda url, path: td_core.create(TensorDict(), url, format="safetensors"),
        UnsupportedOperationError,
        r"cannot create a file to fill at .*; save\(\) the collection",
    ),
    "mmap": (lambda url, path: load(url, strategy="mmap"), ValueError, "is a URL, which cannot be mapped"),
    "missing": (lambda url, path: load(f"{url}.safetensors"), FileNotFoundError, "data.safetensors"),
    "options": (
        lambda url, path: load(path, storage_options={}),
        ValueError,
        "storage_options are for URLs; .* is a local path",
    ),
    "unknown option": (lambda url, path: load(url, storage_options=3), TypeError, "must be a mapping"),
    "scheme": (
        lambda url, path: load("nowhere://x.safetensors"),
        MissingPluginError,
        "none provides the scheme 'nowhere'",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_use_of_url_raises(call: Any, error: Any, message: str, url: str, path: Path) -> None:
    with pytest.raises(error, match=message):
        call(url, path)


def test_storage_options_reach_the_file_system(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    engine = importlib.import_module("td_remote._file_systems")

    def url_to_fs(url: str, **options: Any) -> Any:
        seen.append(options)
        return fsspec.core.url_to_fs(url)

    monkeypatch.setattr(engine, "url_to_fs", url_to_fs)
    options = {"token": "secret"}
    load(url, storage_options=options)
    td_core.open(url, storage_options=options)["a"].clone()
    td_core.inspect(url, storage_options=options)
    td_core.verify(url, storage_options=options)
    assert len(seen) == 4  # each operation makes one file system, also where it looks for the format
    assert all({**item, **options} == item for item in seen)
