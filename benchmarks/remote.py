"""Compare td-remote with raw calls of fsspec, s3fs and obstore for the same ranges, on servers of this machine.

A row has the time of td-remote, that of the raw calls with the same number of requests at the same time, the ratio and the bar.
Servers run in processes of their own: one that waits 20 ms before each answer, one that does not wait, and moto for uploads. It
needs aiohttp; s3fs, obstore and moto are used if they are there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import torch

import td_core
from td_core import TensorDict
from td_core.typing import Range
from td_data import Loader
from td_remote import Remote
from td_remote._block_cache import BLOCK
from td_store.arrays import plan_ranges

MB = 1 << 20
ROW = 12_000
CONCURRENCY = 64


def serve(port: Any, source: int | Path, latency: float) -> None:
    """Answer requests for ranges of one object, a file or zeros, on a free port that the parent receives."""
    from aiohttp import web

    content = bytes(source) if isinstance(source, int) else source.read_bytes()
    size = len(content)

    async def answer(request: Any) -> Any:
        await asyncio.sleep(latency)
        headers = {"ETag": '"1"', "Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT"}
        match = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if match is None:
            if request.method == "HEAD":
                return web.Response(headers={**headers, "Content-Length": str(size)})
            return web.Response(body=content, headers=headers)
        first, last = int(match[1]), min(int(match[2] or size), size - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return web.Response(status=206, body=memoryview(content)[first : last + 1], headers=headers)

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{name:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def server(source: int | Path, latency: float) -> Iterator[str]:
    """Run a server, and return its URL."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, source, latency), daemon=True
    )
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    process.terminate()


def measure(ours: Callable[[], object], raw: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the medians of the times of two functions, which are called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):  # the first round warms up
        for call, found in zip((ours, raw), times, strict=True):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def report(case: str, ours: float, raw: float, bar: str) -> None:
    print(f"{case:<58}{ours * 1e3:>9.1f} ms {raw * 1e3:>9.1f} ms {ours / raw:>6.2f}  bar {bar}", flush=True)


def make_raw(engine: str, url: str) -> Callable[[list[tuple[int, int]]], object]:
    """Return a function that reads ranges of an object with the calls of a library."""
    if engine == "fsspec":
        system = fsspec.filesystem("http", skip_instance_cache=True)
        return lambda ranges: system.cat_ranges(
            [url] * len(ranges),
            [a for a, _ in ranges],
            [b for _, b in ranges],
            batch_size=CONCURRENCY,
            on_error="raise",
        )
    from obstore.store import HTTPStore

    root, _, name = url.rpartition("/")
    store = HTTPStore(root, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    pool = ThreadPoolExecutor(CONCURRENCY)
    return lambda ranges: list(
        pool.map(lambda item: store.get(name, options={"range": item, "if_match": '"1"'}).bytes(), ranges)
    )


def compare_reads(engine: str, rounds: int) -> None:
    """Compare rows with latency, and a whole object without."""
    generator = torch.Generator().manual_seed(0)
    rows = (
        torch.randint(0, 245 * MB // ROW - 1, (4, 256), generator=generator)
        .mul(ROW)
        .sort()
        .values.flatten()
        .tolist()
    )
    parts = [(start, start + 8 * MB) for start in range(0, 512 * MB, 8 * MB)]
    for case, size, latency, ranges in (
        ("256 rows x 4 leaves, 20 ms", 245 * MB, 0.02, [(start, start + ROW) for start in rows]),
        ("whole object of 512 MB", 512 * MB, 0.0, parts),
    ):
        with server(size, latency) as url:
            remote, raw = (
                Remote(f"{url}/x", engine=engine, concurrency=CONCURRENCY),
                make_raw(engine, f"{url}/x"),
            )
            (info,) = remote.stat([""])
            assert info is not None
            wanted = [Range("", start, stop, info.stamp) for start, stop in ranges]
            report(
                f"{engine}: {case}",
                *measure(partial(remote.read, wanted), partial(raw, ranges), rounds),
                "<= 1.15",
            )


def compare_cache(rounds: int) -> None:
    """Compare a second pass through the cache with reads of the same blocks."""
    with server(64 * MB, 0.0) as url, tempfile.TemporaryDirectory() as folder:
        remote = Remote(f"{url}/x", engine="fsspec", cache=Path(folder) / "blocks")
        (info,) = remote.stat([""])
        assert info is not None
        ranges = [Range("", start, start + BLOCK, info.stamp) for start in range(0, 64 * MB, BLOCK)]
        remote.read(ranges)
        paths = [path for path in (Path(folder) / "blocks").iterdir() if path.stat().st_size >= BLOCK]

        def read(path: Path) -> bytes:
            fd = os.open(path, os.O_RDONLY)
            content = os.pread(fd, BLOCK, 0)
            os.close(fd)
            return content

        def raw() -> list[bytes]:
            return [read(path) for path in paths]

        report("second pass with cache, 64 MB", *measure(lambda: remote.read(ranges), raw, rounds), "<= 1.3")


def compare_loader(engine: str, rounds: int) -> None:
    """Compare a loader with eight threads and one with one, on batches of 32 rows behind 20 ms."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.safetensors"
        td_core.save(TensorDict({"a": torch.zeros(20_000, 256)}, [20_000]), path)
        with server(path, 0.02) as url:
            opened = td_core.open(Remote(f"{url}/x.safetensors", engine=engine))  # type: ignore[arg-type]

            def read(threads: int) -> None:
                loader = Loader(opened, 32, shuffle=True, num_threads=threads, prefetch=8)
                for _ in itertools.islice(loader, 30):
                    pass

            one, eight = measure(lambda: read(1), lambda: read(8), rounds)
            report(f"{engine}: 30 batches of 32 rows, one thread and eight", one, eight, ">= 1.5")


def upload(engine: str, which: str, endpoint: str, size: int) -> None:
    """Upload an object in this process, and print the time and the memory above that of the content."""
    content = [memoryview(bytearray(8 * MB))] * (size // (8 * MB))
    keys = {
        "key": "a",
        "secret": "b",
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
    }
    options: dict[str, Any] = {
        "access_key_id": "a",
        "secret_access_key": "b",
        "endpoint": endpoint,
        "region": "us-east-1",
    }
    options["client_options"] = {"allow_http": True, "timeout": "600s"}
    if which == "ours":
        remote = Remote("s3://bucket/x", engine=engine, **(keys if engine == "fsspec" else options))  # type: ignore[arg-type]
        remote.write("", [b"x"])  # imports the libraries
        call: Callable[[], object] = lambda: remote.write("", content)  # noqa: E731
    elif engine == "fsspec":
        system, whole = fsspec.filesystem("s3", **keys), b"".join(content)
        call = lambda: system.pipe_file("bucket/x", whole, chunksize=16 * MB)  # noqa: E731
    else:
        from obstore.store import S3Store

        store, whole = S3Store("bucket", **options), b"".join(content)
        call = lambda: store.put("x", whole, use_multipart=True, chunk_size=16 * MB)  # noqa: E731
    before, began = read_peak(), time.perf_counter()
    call()
    print(time.perf_counter() - began, read_peak() - before)


def read_peak() -> int:
    """Return the most memory that this process has used, in bytes."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def compare_uploads(rounds: int, size: int) -> None:
    """Compare uploads to moto, each in a process of its own."""
    code = (
        "import sys, moto.server; server = moto.server.ThreadedMotoServer('127.0.0.1', 0, verbose=False); server.start(); "
        "print(server.get_host_and_port()[1], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder:
        moto = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )
        assert moto.stdout is not None
        assert moto.stdin is not None
        endpoint = f"http://127.0.0.1:{moto.stdout.readline().strip()}"
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        for engine in ("fsspec", "obstore"):
            found: dict[str, list[list[float]]] = {"ours": [], "raw": []}
            for _ in range(rounds):
                for which, results in found.items():
                    line = [sys.executable, __file__, "--upload", engine, which, endpoint, str(size)]
                    results.append([*map(float, subprocess.check_output(line, text=True).split())])
                    client.delete_object(Bucket="bucket", Key="x")
            ours, raw = (statistics.median(item[0] for item in results) for results in found.values())
            report(f"{engine}: upload of {size // MB} MB", ours, raw, "<= 1.15")
            print(
                f"{engine}: memory above the content {max(item[1] for item in found['ours']) / MB:.0f} MB  bar <= 128"
            )
        moto.stdin.close()
        moto.wait()


def log_call(
    calls: list[str], depth: list[int], name: str, original: Callable[..., Any], *arguments: Any
) -> Any:
    """Call a method, and remember its name, but not those that it calls itself."""
    calls.extend([name] * (not depth))
    depth.append(1)
    try:
        return original(*arguments)
    finally:
        depth.pop()


def count_turns() -> None:
    """Print how many calls to a server open a save, and read rows, one after the other."""
    data = TensorDict({name: torch.zeros(300, 40) for name in "abcd"}, [300])
    bars = {"safetensors": 1, "zarr": 1, "tdz": 2, "memmap": 2, "hdf5": 2}
    for name, bar in bars.items():
        suffix = {"memmap": "", "hdf5": ".h5"}.get(name, f".{name}")
        remote = Remote(f"memory://bench/data{suffix}")
        td_core.save(data, remote)
        calls, depth = list[str](), list[int]()
        for method in ("stat", "read", "peek", "peek_ends", "list"):
            original = getattr(remote, method)
            setattr(remote, method, partial(log_call, calls, depth, method, original))
        opened = td_core.open(remote)
        count, asked = len(calls), [*calls]
        calls.clear()
        opened[[3, 290, 7]].clone()
        print(f"{name}: {count} turns to open (bar {bar}): {', '.join(asked)}; {len(calls)} for rows (bar 1)")


def print_amplification() -> None:
    """Print the bytes that are read for 256 random rows of 12 kB in 245 MB, by the gap of each engine."""
    rows = torch.randperm(245 * MB // ROW, generator=torch.Generator().manual_seed(0))[:256].tolist()
    for engine, bar in (("obstore", 1.4), ("fsspec", 4.2)):
        gap = Remote("memory://x", engine="fsspec").gap if engine == "fsspec" else 1 << 16
        planned = plan_ranges([(row * ROW, row * ROW + ROW) for row in rows], gap)
        print(
            f"{engine}: bytes read / bytes used {sum(b - a for a, b in planned) / (256 * ROW):.2f}  bar <= {bar}"
        )


def print_imports() -> None:
    """Print which modules of engines the import of td_core loads."""
    code = "import torch, sys; old = {*sys.modules}; import td_core; print(*({*sys.modules} - old))"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    print(
        f"import td_core: {sum(name.partition('.')[0] in ('fsspec', 'obstore') for name in names)} modules of engines  bar 0"
    )


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=512, help="size of an upload")
    parser.add_argument("--only", choices=("turns", "reads", "loader", "cache", "uploads"))
    parser.add_argument("--upload", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upload:
        engine, which, endpoint, size = options.upload
        upload(engine, which, endpoint, int(size))
        return
    print_imports()
    print_amplification()
    if options.only in (None, "turns"):
        count_turns()
    for engine in ("fsspec", "obstore"):
        if options.only in (None, "reads") and (engine == "fsspec" or find_spec("obstore")):
            compare_reads(engine, options.rounds)
        if options.only in (None, "loader") and (engine == "fsspec" or find_spec("obstore")):
            compare_loader(engine, options.rounds)
    if options.only in (None, "cache"):
        compare_cache(options.rounds)
    if options.only in (None, "uploads") and find_spec("moto") and find_spec("s3fs") and find_spec("obstore"):
        compare_uploads(max(1, options.rounds // 3), options.megabytes * MB)


if __name__ == "__main__":
    main()
