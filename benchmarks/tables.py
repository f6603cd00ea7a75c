"""Compare td-arrow with raw calls of pyarrow, polars and tensordict, on the same bytes, in CPU time of one thread.

    python benchmarks/tables.py [name ...]

A row has the time of td-arrow, that of the fastest raw call, the ratio, the bar, and the time of tensordict where it can do it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq
import torch

import td_arrow
from td_arrow import from_arrow, load, save, to_arrow
from td_core import TensorDict
from td_core import open as open_save

try:
    import tensordict
except ImportError:
    tensordict = None  # type: ignore[assignment]

Row = tuple[str, Callable[[], Any], Callable[[], Any] | None, str, Callable[[], Any] | None]


def measure(call: Callable[[], Any], seconds: float = 0.5) -> float:
    """Return the least CPU time of a call in milliseconds."""
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start = time.process_time()
        call()
        took = time.process_time() - start
        best, spent = min(best, took), spent + max(took, 1e-4)
    return best * 1000


def make_table(rows: int = 1_000_000) -> dict[str, np.ndarray[Any, Any]]:
    """Return ten columns of numbers, and one of sixteen floats."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {f"f{i}": random.random(rows, np.float32) for i in range(4)}
    columns |= {f"i{i}": random.integers(0, 1000, rows) for i in range(3)}
    columns |= {
        "d": random.random(rows),
        "b": random.random(rows) > 0.5,
        "s": random.integers(0, 9, rows, np.int16),
    }
    return columns


def list_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of the table."""
    columns = make_table()
    rows = len(columns["d"])
    cells = np.random.default_rng(1).random((rows, 16), np.float32)
    td = TensorDict(
        {**{k: torch.from_numpy(v) for k, v in columns.items()}, "v": torch.from_numpy(cells)}, [rows]
    )
    reference = None if tensordict is None else tensordict.TensorDict(dict(td.items()), [rows])
    inner = pa.field("item", pa.float32(), nullable=False)

    def raw_table() -> Any:
        flat = pa.array(cells.reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(inner, 16))
        return pa.Table.from_arrays([*(pa.array(v) for v in columns.values()), lists], [*columns, "v"])

    table, own = raw_table(), to_arrow(td)
    yield "table of 1M rows", lambda: to_arrow(td), raw_table, "1.3 + 0.2 ms", _of(reference, "to_arrow")

    def raw_tensors() -> Any:
        found = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            array = column.chunk(0)
            found[name] = torch.from_numpy(
                (array.flatten() if name == "v" else array).to_numpy(zero_copy_only=False)
            )
        return found

    yield "table to tensors", lambda: from_arrow(own), raw_tensors, "1.3 + 0.2 ms", None
    yield "table to tensors, copy", lambda: from_arrow(own, copy=True), lambda: td.clone(), "1.1", None

    flat_td = td.exclude("v")
    flat = to_arrow(flat_td)
    path = folder / "x.parquet"
    for name, options in {
        "snappy, dictionary": {"compression": "snappy", "use_dictionary": True},
        "snappy": {"compression": "snappy", "use_dictionary": False},
        "plain": {"compression": "none", "use_dictionary": False},
    }.items():
        yield (
            f"Parquet write, {name}",
            lambda options=options: save(flat_td, path, **options),  # type: ignore[misc]
            lambda options=options: pq.write_table(flat, path, **options),  # type: ignore[misc]
            "1.1",
            None,
        )
        save(flat_td, path, **options)
        yield f"Parquet read, {name}", lambda: load(path, num_threads=1), lambda: _read(path), "1.15", None
    for choice in ("list", "binary"):
        one = td.select("v")
        save(one, path, tensors=choice)
        content = to_arrow(one, tensors=choice)
        yield (
            f"Parquet write 1M x 16, {choice}",
            lambda choice=choice, one=one: save(one, path, tensors=choice, compression="none"),  # type: ignore[misc]
            lambda content=content: pq.write_table(content, path, compression="none", use_dictionary=False),  # type: ignore[misc]
            "1.15",
            None,
        )
        yield (
            f"Parquet read 1M x 16, {choice}",
            lambda: load(path, num_threads=1),
            lambda: _read(path),
            "1.15",
            None,
        )
    yield from _list_arrow_rows(folder, td, own)
    yield from _list_text_rows(folder)
    yield from _list_other_rows(folder)


def _read(path: Path) -> Any:
    table = pq.ParquetFile(path).read(use_threads=False)
    for column in table.columns:
        for chunk in column.chunks:
            chunk.buffers()
    return table


def _map(path: Path) -> Any:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return [
        column.chunk(0).to_numpy(zero_copy_only=False)
        for column in table.columns
        if not pa.types.is_nested(column.type)
    ]


def _of(reference: Any, name: str) -> Callable[[], Any] | None:
    return (
        None
        if reference is None or not hasattr(tensordict, name)
        else lambda: getattr(tensordict, name)(reference)
    )


def _list_arrow_rows(folder: Path, td: TensorDict, table: Any) -> Iterator[Row]:
    path = folder / "x.arrow"

    def write() -> None:
        """Write what a crash cannot leave half written: to another file, which then gets the name."""
        with (
            pa.OSFile(str(folder / "raw.tmp"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        (folder / "raw.tmp").replace(folder / "raw.arrow")

    yield "Arrow write", lambda: save(td, path), write, "1.1", None
    save(td, path)
    yield (
        "Arrow map",
        lambda: load(path),
        lambda: _map(path),
        "1.5",
        None,
    )
    wide = TensorDict({"v": torch.randn(100_000, 64)}, [100_000])
    save(wide, folder / "r.arrow")
    save(wide, folder / "r.parquet", row_group_size=10_000)
    positions = torch.randint(0, 100_000, (256,))
    for suffix in ("arrow", "parquet"):
        opened = open_save(folder / f"r.{suffix}")
        opened[positions]
        yield (
            f"256 random rows, {suffix}",
            lambda o=opened: o[positions],
            lambda: wide[positions],
            "1.5 / 2 ms",
            None,
        )  # type: ignore[misc]


def _list_text_rows(folder: Path) -> Iterator[Row]:
    columns = make_table(200_000)
    td = TensorDict({name: torch.from_numpy(column) for name, column in columns.items()}, [200_000])
    table, path = to_arrow(td), folder / "x.csv"
    yield "csv write", lambda: td.to_csv(path), lambda: pcsv.write_csv(table, path), "1.2", None
    yield "csv read", lambda: TensorDict.from_csv(path), lambda: pcsv.read_csv(path), "1.2", None
    lines = folder / "x.jsonl"
    yield "JSON write", lambda: td.to_json(lines, lines=True), None, "3 of polars", None
    yield "JSON read", lambda: TensorDict.from_json(lines), lambda: pjson.read_json(lines), "1.3", None


def _list_other_rows(folder: Path) -> Iterator[Row]:
    words = pa.table({"s": [f"word {i}" for i in range(200_000)]})
    yield "200,000 texts", lambda: from_arrow(words), lambda: words["s"].to_pylist(), "1.0 us a row", None
    many = TensorDict({f"c{i}": torch.randn(100) for i in range(2000)}, [100])
    table = to_arrow(many)
    path = folder / "m.parquet"
    yield "2,000 columns to Arrow", lambda: to_arrow(many), None, "20 us a column", None
    yield (
        "2,000 columns, Parquet write", lambda: save(many, path),
        lambda: pq.write_table(table, path, compression="none", use_dictionary=False), "1.3 + 20 us a column", None,
    )  # fmt: skip
    save(many, path)
    yield "2,000 columns, Parquet read", lambda: load(path), lambda: _read(path), "1.3 + 20 us a column", None
    save(many, folder / "m.arrow")
    # Arrow makes no tensors: it, 2,000 mapped leaves with pickles of their own, and a TensorDict of these take 23 ms.
    yield (
        "2,000 columns, Arrow open", lambda: open_save(folder / "m.arrow"),
        lambda: pa.ipc.open_file(pa.memory_map(str(folder / "m.arrow"))).read_all(), "1.3 + 20 us a column", None,
    )  # fmt: skip
    images = TensorDict({"i": (torch.rand(10_000, 3, 32, 32) * 255).to(torch.uint8)}, [10_000])
    save(images, folder / "i.parquet")
    yield (
        "10k images, Parquet read",
        lambda: load(folder / "i.parquet"),
        lambda: _read(folder / "i.parquet"),
        "1.15",
        None,
    )


def main() -> None:
    """Print the rows whose names have one of the arguments in them."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    print(f"td-arrow {td_arrow.__version__}, pyarrow {pa.__version__}, torch {torch.__version__}")
    print(f"{'row':32} {'td ms':>9} {'raw ms':>9} {'ratio':>6}  {'bar':22} {'tensordict ms':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for name, own, raw, bar, other in list_rows(Path(folder)):
            if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
                continue
            times = [
                measure(own),
                *(float("nan") if call is None else measure(call) for call in (raw, other)),
            ]
            print(
                f"{name:32} {times[0]:9.3f} {times[1]:9.3f} {times[0] / times[1]:6.2f}  {bar:22} {times[2]:13.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
