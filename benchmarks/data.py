"""The speed of td-data: each row compares two ways in one process, in turns, and prints the medians and their ratio.

    python benchmarks/data.py             all rows, in five minutes: 15 repetitions, fewer for ways that take long
    python benchmarks/data.py --quick     3 repetitions, for a look at whether the rows run
    python benchmarks/data.py --only windows

The column `bar` has the ratio that the row should reach, on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from td_core import TensorDict, collate
from td_data import (
    BlockSampler,
    Loader,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SequentialSampler,
    SliceSampler,
    prefetch,
)

Way = Callable[[], object]
#: By name of the row: a function that takes a folder, and returns the bar and the two ways. The time of the first is divided by
#: that of the second, and multiplied by a fourth result, how many times as much the second one reads.
ROWS: dict[str, Callable[[Path], Any]] = {}
#: Seconds after which a row is not repeated further, if it has 3 repetitions.
PATIENCE = 7.0


def row(name: str) -> Callable[[Any], Any]:
    """Register a row."""

    def register(make: Callable[[Path], Any]) -> Any:
        ROWS[name] = make
        return make

    return register


def make_images(folder: Path, rows: int = 20_000) -> Any:
    """Return memory-mapped pictures, in the page cache."""
    if not (folder / "images").exists():
        one = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": torch.tensor(0)})
        one.expand(rows).memmap_like(folder / "images")
    data = TensorDict.load_memmap(folder / "images")
    data["image"].sum()
    return data


def take(batches: Any, count: int, pause: float = 0.0) -> None:
    """Use some batches."""
    for number, _ in enumerate(batches):
        time.sleep(pause)
        if number + 1 == count:
            break


def loop(data: Any, count: int, pause: float = 0.0) -> None:
    """Read batches with the loop of a user."""
    order = RandomSampler(data, seed=1).order(0)
    for number in range(count):
        data[order(number * 256, number * 256 + 256)]
        time.sleep(pause)


@row("loader without threads / loop")
def compare_loop(folder: Path) -> tuple[str, Way, Way]:
    data = make_images(folder)
    loader = Loader(data, 256, shuffle=True, seed=1, prefetch=0)
    return "<= 1.10", lambda: take(loader, 60), lambda: loop(data, 60)


@row("loader beside a consumer of 5 ms / consumer")
def compare_consumer(folder: Path) -> tuple[str, Way, Way]:
    loader = Loader(make_images(folder), 256, shuffle=True)
    return "<= 1.05", lambda: take(loader, 40, 0.005), lambda: take(range(100), 40, 0.005)


@row("DataLoader with 2 workers / loader, consumer of 5 ms")
def compare_workers(folder: Path) -> tuple[str, Way, Way]:
    data = make_images(folder)
    loader = Loader(data, 256, shuffle=True)
    torch_loader = torch.utils.data.DataLoader(data, 256, shuffle=True, num_workers=2, collate_fn=collate)
    return ">= 5", lambda: take(torch_loader, 40, 0.005), lambda: take(loader, 40, 0.005)


def sort_much(batch: Any) -> Any:
    """Use one core for about 4 ms without the GIL."""
    torch.rand(60_000).sort()
    return batch


@row("one thread / two threads, transform without the GIL")
def compare_threads(folder: Path) -> tuple[str, Way, Way]:
    data = make_images(folder)
    one, two = (Loader(data, 16, num_threads=n, prefetch=4, transform=sort_much) for n in (1, 2))
    return ">= 1.6", lambda: take(one, 60), lambda: take(two, 60)


def make_chunks(folder: Path) -> Any:
    """Return a Zarr group of compressed chunks, or None without td-zarr."""
    try:
        import zarr

        from td_core import open, save  # noqa: A004
    except ImportError:
        return None
    path = folder / "chunks.zarr"
    if not path.exists():
        image = torch.randint(4, (8000, 3, 64, 64), dtype=torch.uint8)
        codec = zarr.codecs.ZstdCodec()
        save(TensorDict({"image": image}, [8000]), path, format="zarr", chunks=500, compressors=codec)
    return open(path)


@row("sequential / windows of blocks, compressed chunks")
def compare_chunks(folder: Path) -> tuple[str, Way, Way]:
    data = make_chunks(folder)
    sequential = Loader(data, 256, sampler=SequentialSampler(len(data)), prefetch=0)
    windows = Loader(data, 256, sampler=BlockSampler(data, window=4), prefetch=0)
    return ">= 0.4", lambda: take(sequential, 99), lambda: take(windows, 99)


@row("random rows / windows of blocks, compressed chunks")
def compare_random_chunks(folder: Path) -> tuple[str, Way, Way, float]:
    data = make_chunks(folder)
    random = Loader(data, 256, shuffle=True, prefetch=0)
    windows = Loader(data, 256, sampler=BlockSampler(data, window=4), prefetch=0)
    return ">= 20", lambda: take(random, 2), lambda: take(windows, 31), 31 / 2


def drop_cache(folder: Path) -> None:
    """Remove the pictures from the page cache."""
    for path in (folder / "images").rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def read_cold(folder: Path, make: Callable[[Any], Loader]) -> None:
    """Read pictures that are not in the page cache."""
    make_images(folder)
    drop_cache(folder)
    take(make(TensorDict.load_memmap(folder / "images")), 24)


@row("sequential / windows of blocks, cold mapped file")
def compare_cold(folder: Path) -> tuple[str, Way, Way]:
    def read_in_order(data: Any) -> Loader:
        return Loader(data, 256, prefetch=0)

    def read_windows(data: Any) -> Loader:
        return Loader(data, 256, sampler=BlockSampler(64, window=32), prefetch=0)

    return ">= 0.6", lambda: read_cold(folder, read_in_order), lambda: read_cold(folder, read_windows)


@row("random rows / windows of blocks, cold mapped file")
def compare_random_cold(folder: Path) -> tuple[str, Way, Way]:
    def read_random(data: Any) -> Loader:
        return Loader(data, 256, shuffle=True, prefetch=0)

    def read_windows(data: Any) -> Loader:
        return Loader(data, 256, sampler=BlockSampler(64, window=32), prefetch=0)

    return ">= 2", lambda: read_cold(folder, read_random), lambda: read_cold(folder, read_windows)


class Remote:
    """Rows behind requests of 20 ms."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, positions: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return positions


@row("one thread / eight threads, requests of 20 ms")
def compare_remote(folder: Path) -> tuple[str, Way, Way]:
    one, eight = (Loader(Remote(), 32, num_threads=n, prefetch=8) for n in (1, 8))
    return ">= 1.5", lambda: take(one, 30), lambda: take(eight, 30)


class Positions:
    """A view without data."""

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


def begin(rows: int) -> None:
    """Read the first batch from a position."""
    loader = Loader(Positions(), 256, shuffle=True, prefetch=0)
    loader.load_state_dict({**loader.state_dict(), "rows": rows})
    next(iter(loader))


@row("first batch at 99% of 10^8 rows / at 0")
def compare_resume(folder: Path) -> tuple[str, Way, Way]:
    return "<= 1.2", lambda: begin(99 * 10**6), lambda: begin(0)


@row("first batch of 10^8 random rows / 20 ms")
def compare_first_batch(folder: Path) -> tuple[str, Way, Way]:
    return "<= 1", lambda: begin(0), lambda: time.sleep(0.02)


def make_priorities(count: int = 10**6) -> tuple[ReplayBuffer, torch.Tensor]:
    """Return a buffer with random priorities."""
    buffer = ReplayBuffer(count, sampler=PrioritizedSampler(alpha=1.0))
    buffer.extend(TensorDict({"a": torch.arange(count)}, [count]))
    priority = torch.rand(count, dtype=torch.float64)
    buffer.update_priority(torch.arange(count), priority)
    return buffer, priority


def draw_by_sums(priority: torch.Tensor) -> torch.Tensor:
    """Draw 1024 rows with a new cumulative sum."""
    sums = priority.cumsum(0)
    return torch.searchsorted(sums, torch.rand(1024, dtype=torch.float64) * sums[-1])


@row("1024 draws of 10^6 priorities / cumsum and searchsorted")
def compare_draws(folder: Path) -> tuple[str, Way, Way]:
    buffer, priority = make_priorities()
    generator, sampler = torch.Generator(), buffer._sampler
    return "<= 1.0", lambda: sampler.draw(0, 10**6, 1024, generator), lambda: draw_by_sums(priority)


@row("1024 updates of 10^6 priorities / cumsum and searchsorted")
def compare_updates(folder: Path) -> tuple[str, Way, Way]:
    buffer, priority = make_priorities()
    index, values = torch.randint(10**6, (1024,)), torch.rand(1024, dtype=torch.float64)
    return "<= 0.3", lambda: buffer.update_priority(index, values), lambda: draw_by_sums(priority)


@row("256 slices of a ring of 10^7 rows / index of their rows")
def compare_slices(folder: Path) -> tuple[str, Way, Way]:
    count = 10**7
    rows = TensorDict({"episode": torch.arange(count) // 500, "x": torch.zeros(count)}, [count])
    buffer = ReplayBuffer(rows, sampler=SliceSampler(16, traj_key="episode"), batch_size=256)
    buffer.extend(rows)
    # Other rows each time, as the buffer has: those of the last call would be in the cache of the processor.
    places = cycle([buffer.sample()["index"].flatten() for _ in range(1000)])
    return "<= 2", buffer.sample, lambda: rows[next(places)]


class Ring:
    """The ring of the cookbook."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.size, self.written = rows, len(rows), 0

    def add(self, batch: Any) -> None:
        places = (torch.arange(len(batch)) + self.written) % self.size
        self.rows[places] = batch
        self.written += len(batch)

    def sample(self, count: int) -> Any:
        places = torch.randint(self.size, (count,))
        return self.rows[places].set("place", places)


def make_rings() -> tuple[ReplayBuffer, Ring, TensorDict]:
    """Return both rings, full, and rows for them."""
    row = TensorDict({"obs": torch.zeros(8), "action": torch.tensor(0), "next": {"obs": torch.zeros(8)}})
    rows = row.expand(32).clone()
    buffer, ring = ReplayBuffer(row.expand(10_000).clone()), Ring(row.expand(10_000).clone())
    for _ in range(320):
        buffer.extend(rows), ring.add(rows)
    return buffer, ring, rows


@row("extend by 32 rows / ring of four lines")
def compare_extend(folder: Path) -> tuple[str, Way, Way]:
    buffer, ring, rows = make_rings()
    return "<= 1.5", lambda: buffer.extend(rows), lambda: ring.add(rows)


@row("sample of 256 rows / ring of four lines")
def compare_sample(folder: Path) -> tuple[str, Way, Way]:
    buffer, ring, _ = make_rings()
    return "<= 1.2", lambda: buffer.sample(256), lambda: ring.sample(256)


@row("prefetch of samples beside a consumer of 5 ms / consumer")
def compare_prefetch(folder: Path) -> tuple[str, Way, Way]:
    buffer, _, _ = make_rings()
    return (
        "<= 1.1",
        lambda: take(prefetch(iter(lambda: buffer.sample(256), None)), 40, 0.005),
        lambda: take(range(100), 40, 0.005),
    )


@row("pinned copy of a user / loader, batches of 59 MB on CUDA")
def compare_cuda(folder: Path) -> tuple[str, Way, Way]:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA device")
    data = TensorDict({"x": torch.zeros(40_000, 12_288, dtype=torch.uint8)}, [40_000])
    order = RandomSampler(data).order(0)
    loader = Loader(data, 4800, shuffle=True, device="cuda")

    def copy() -> None:
        for number in range(8):
            data[order(number * 4800, number * 4800 + 4800)].pin_memory().to("cuda")
        torch.cuda.synchronize()

    def load() -> None:
        take(loader, 8)
        torch.cuda.synchronize()

    return ">= 4", copy, load


@row("loader beside a step of 10 ms on CUDA / step")
def compare_cuda_step(folder: Path) -> tuple[str, Way, Way]:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA device")
    data = TensorDict({"x": torch.zeros(40_000, 12_288, dtype=torch.uint8)}, [40_000])
    loader = Loader(data, 4800, shuffle=True, device="cuda", num_threads=4, prefetch=4)

    def run(batches: Any) -> None:
        for number, _ in enumerate(batches):
            torch.cuda._sleep(20_000_000)
            torch.cuda.synchronize()
            if number == 7:
                break

    return "<= 1.1", lambda: run(loader), lambda: run(range(99))


def import_time(names: str) -> None:
    """Import packages in a new interpreter."""
    subprocess.run([sys.executable, "-c", f"import {names}"], check=True)


@row("import of td_core and td_data / of td_core")
def compare_import(folder: Path) -> tuple[str, Way, Way]:
    return "5 ms more", lambda: import_time("td_core, td_data"), lambda: import_time("td_core")


def measure(way: Way) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def main() -> None:
    """Measure the rows, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="rows whose names contain this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| row | ms | ms | ratio | bar |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in ROWS.items():
            if arguments.only not in name:
                continue
            try:
                bar, first, second, *more = make(Path(folder))
                first(), second()
            except (RuntimeError, TypeError, ImportError) as error:
                print(f"| {name} | | | | not measured: {error} |")
                continue
            pairs, start = [], time.perf_counter()
            while len(pairs) < (3 if arguments.quick else 15):
                pairs.append((measure(first), measure(second)))
                if len(pairs) >= 3 and time.perf_counter() - start > PATIENCE:
                    break
            times = [statistics.median(each) for each in zip(*pairs)]
            ratio = statistics.median(a / b for a, b in pairs) * (more[0] if more else 1)
            print(
                f"| {name} | {times[0] * 1e3:.3f} | {times[1] * 1e3:.3f} | {ratio:.2f} | {bar} |", flush=True
            )


if __name__ == "__main__":
    main()
