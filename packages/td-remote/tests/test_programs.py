"""Whole programs against servers: what a newcomer writes, a training through cut connections, and where secrets are not."""

from __future__ import annotations

import io
import itertools
import logging
import multiprocessing
import pickle
import resource
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CREDENTIALS
from servers import WebServer

import td_core
from td_core import TensorDict
from td_core.typing import Range
from td_remote import Remote, copy

#: The end of the location, and the package, of each format.
FORMATS = {
    "safetensors": (".safetensors", "safetensors"), "memmap": ("", "memmap"), "tdz": (".tdz", "memmap"),
    "zarr": (".zarr", "zarr"), "hdf5": (".h5", "hdf5"), "parquet": (".parquet", "arrow"), "arrow": (".arrow", "arrow"),
}  # fmt: skip


def require(name: str) -> str:
    """Return the end of the location of a format; skip the test without its package."""
    suffix, package = FORMATS[name]
    pytest.importorskip(f"td_{package}")
    return suffix


def make_data(rows: int = 40) -> TensorDict:
    return TensorDict(
        {"x": torch.arange(rows * 8.0).view(rows, 8), "n": {"y": torch.arange(rows)}}, batch_size=[rows]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_newcomer_saves_opens_and_trains(name: str, s3: Callable[..., Remote]) -> None:
    remote = s3(f"data{require(name)}")
    url, data = remote.url, make_data()
    td_core.save(data, url)
    assert td_core.open(url)[[30, 3]]["n", "y"].tolist() == [30, 3]
    assert (td_core.load(url) == data).all()
    loaders = pytest.importorskip("td_data")
    loader = loaders.Loader(td_core.open(url), batch_size=7, shuffle=True, seed=1)
    assert sorted(row for batch in loader for row in batch["n", "y"].tolist()) == list(range(40))


def test_training_goes_on_through_cut_connections(
    web: Callable[..., Remote], server: WebServer, tmp_path: Path
) -> None:
    pytest.importorskip("td_safetensors")
    loaders = pytest.importorskip("td_data")
    data = make_data(200)
    td_core.save(data, tmp_path / "data.safetensors")
    server.put("/data.safetensors", (tmp_path / "data.safetensors").read_bytes())
    loader = loaders.Loader(td_core.open(web("data.safetensors")), batch_size=10, shuffle=True, seed=3)
    server.fault, total = "cut", torch.zeros(8)
    for step, batch in enumerate(loader):
        server.count = 2 * (step % 5 == 0)
        assert torch.equal(batch["x"], data["x"][batch["n", "y"]])
        total += batch["x"].sum(0)
    assert torch.equal(total, data["x"].sum(0))


def read_all(location: Remote, pipe: Any) -> None:
    """Read all rows in a process, in random order, and send their numbers and the memory that it took, in bytes."""
    from td_data import BlockSampler, Loader

    loader = Loader(td_core.open(location), batch_size=16, sampler=BlockSampler(16, window=4), seed=1)
    rows, before = [], 0
    for batch in loader:
        before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert torch.equal(batch["x"][:, 7], batch["y"].float())
        rows += batch["y"].tolist()
    pipe.send((rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of the memory is that of Linux")
@pytest.mark.parametrize(
    ("name", "engine"), [("safetensors", "fsspec"), ("memmap", "obstore"), ("zarr", "fsspec")]
)
def test_data_larger_than_memory_is_read_through_cut_connections(
    name: str, engine: Any, server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = require(name)
    pytest.importorskip("aiohttp" if engine == "fsspec" else "obstore")
    pytest.importorskip("td_data")
    y = torch.arange(1536)
    data = TensorDict({"x": y.float().view(-1, 1).expand(len(y), 1 << 15).contiguous(), "y": y}, [len(y)])
    path, options = tmp_path / f"data{suffix}", {"chunks": 16} if name == "zarr" else {}
    td_core.save(data, path, format=name, **options)
    for file in [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]:
        server.put(f"/{file.relative_to(tmp_path).as_posix()}", file.read_bytes())
    requests = itertools.count()
    monkeypatch.setattr(server, "take_fault", lambda path: None if next(requests) % 7 else "cut")
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    remote = Remote(f"{server.url}/{path.name}", engine=engine)
    reader = context.Process(target=read_all, args=(remote, theirs))
    reader.start()
    while not ours.poll(0.1):
        assert reader.is_alive()
    rows, memory = ours.recv()
    reader.join()
    assert sorted(rows) == y.tolist() and rows != sorted(rows)
    assert memory < 100 << 20  # of 192 MB


#: The format that each of the other tools reads.
TOOLS = {"safetensors": "safetensors", "h5py": "hdf5", "zarr": "zarr", "xarray": "zarr"}


def read_with_other_tool(name: str, url: str) -> list[int]:
    """Return the leaf ``n.y`` of a save at a URL, as a program without td reads it."""
    import fsspec

    if name == "xarray":
        xarray = pytest.importorskip("xarray")
        return list(xarray.open_zarr(url, group="n", consolidated=False)["y"].values.tolist())
    if name == "zarr":
        zarr = pytest.importorskip("zarr")
        return list(zarr.open_group(url, mode="r")["n/y"][:].tolist())
    with fsspec.open(url) as file:
        if name == "h5py":
            return list(pytest.importorskip("h5py").File(file)["n/y"][:].tolist())
        tensors = pytest.importorskip("safetensors.torch").load(file.read())
        return list(tensors["n.y"].tolist())


@pytest.mark.parametrize("name", TOOLS)
def test_other_tool_reads_a_save(name: str, s3: Callable[..., Remote]) -> None:
    pytest.importorskip("s3fs")
    remote = s3(f"data{require(TOOLS[name])}")
    td_core.save(make_data(), remote)
    assert read_with_other_tool(name, remote.url) == list(range(40))


@pytest.mark.parametrize("name", ["safetensors", "hdf5"])
def test_file_of_other_tool_is_read(name: str, s3: Callable[..., Remote], tmp_path: Path) -> None:
    suffix = require(name)
    path, remote = tmp_path / f"x{suffix}", s3(f"x{suffix}")
    if name == "hdf5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["a"] = range(5)
    else:
        pytest.importorskip("safetensors.torch").save_file({"a": torch.arange(5)}, path)
    copy(path, remote)
    assert td_core.load(remote)["a"].tolist() == [0, 1, 2, 3, 4]
    assert td_core.open(remote)["a"][3:].tolist() == [3, 4]


def test_group_of_xarray_is_read(s3: Callable[..., Remote]) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("s3fs")
    remote = s3(f"x{require('zarr')}")
    xarray.Dataset({"a": ("time", range(5))}).to_zarr(remote.url, consolidated=False)
    assert td_core.load(remote)["a"].tolist() == [0, 1, 2, 3, 4]
    assert td_core.open(remote)["a"][3:].tolist() == [3, 4]


@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_of_loader_read_or_say_how_to_start_them(
    method: str, web: Callable[..., Remote], server: WebServer, tmp_path: Path
) -> None:
    pytest.importorskip("td_safetensors")
    loaders = pytest.importorskip("td_data")
    td_core.save(make_data(), tmp_path / "data.safetensors")
    server.put("/data.safetensors", (tmp_path / "data.safetensors").read_bytes())
    remote = web("data.safetensors")
    opened = td_core.open(remote)
    assert opened[[3]]["n", "y"].tolist() == [3]
    loader = loaders.Loader(opened, batch_size=8, num_workers=2, multiprocessing_context=method)
    if method == "fork" and "obstore" in repr(remote):
        with pytest.raises(RuntimeError, match="start workers with multiprocessing_context='spawn'"):
            next(iter(loader))
        return
    assert sorted(row for batch in loader for row in batch["n", "y"].tolist()) == list(range(40))


def collect_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_secret_is_nowhere(
    engine: str, s3_url: str, bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("s3fs" if engine == "fsspec" else "obstore")
    pytest.importorskip("td_safetensors")
    secret = uuid.uuid4().hex
    options: dict[str, Any] = {
        "fsspec": {
            "key": "user",
            "secret": secret,
            "client_kwargs": {"endpoint_url": s3_url, "region_name": "us-east-1"},
        },
        "obstore": {
            "access_key_id": "user",
            "secret_access_key": secret,
            "endpoint": s3_url,
            "region": "us-east-1",
            "client_options": {"allow_http": True, "default_headers": {"x-note": secret}},
        },
    }[engine]
    options |= {"engine": engine, "retries": 0}
    caplog.set_level(logging.INFO)
    url = f"s3://{bucket[1]}/data.safetensors"
    td_core.save(make_data(), url, storage_options=options)
    opened = td_core.open(url, storage_options={**options, "cache": str(tmp_path / "blocks")})
    rows = opened[[1, 2]]
    copy(Remote(url, **options), tmp_path / "copy.safetensors")
    messages = [repr(Remote(url, **options)), repr(opened), repr(rows), Remote(url, **options).where]
    failing: list[Callable[[], object]] = [
        lambda: td_core.load("s3://no-such-bucket/x", storage_options=options),
        lambda: Remote(url, **options).read([Range("none", 0, 1)]),
        lambda: Remote(url, **options).read([Range("", 0, 1, "other")]),
        lambda: Remote(url, **options).write("", [b"1"], create=True),
        lambda: Remote(url, **{**options, "no_such_option": secret}).stat([""]),
        lambda: Remote(f"http://user:{secret}@127.0.0.1:9/x", engine="fsspec", retries=0).stat([""]),
    ]
    for call in failing:
        try:
            call()
        except (OSError, td_core.TensorDictError, TypeError, ValueError) as error:
            chain: BaseException | None = error
            while chain is not None:
                messages.append(f"{chain!r} {chain}")
                chain = chain.__cause__
    file = io.BytesIO()
    torch.save(opened, file)
    content = pickle.dumps(opened) + file.getvalue() + collect_files(tmp_path)
    assert secret.encode() not in content
    assert [message for message in [*messages, caplog.text] if secret in message] == []
    assert len(messages) >= 4 + 5


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_credentials_of_environment_are_not_saved(
    key: str, s3: Callable[..., Remote], tmp_path: Path
) -> None:
    remote = s3("a", cache=tmp_path / "blocks")
    info = remote.write("", [b"0123"])
    remote.read([Range("", 0, 4, info.stamp)])
    assert CREDENTIALS[key].encode() not in pickle.dumps(remote) + collect_files(tmp_path)
