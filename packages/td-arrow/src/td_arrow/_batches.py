"""Batches of rows of a table, one after the other, in the order of the table or a random one, for one process or several."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch.utils.data import get_worker_info

from td_core import NestedKey
from td_core.errors import FormatError
from td_core.typing import DeviceType

from ._from_arrow import as_table, get_columns, is_dataset, make_reader, read_collection
from ._load_tables import Chosen, make_condition
from ._nulls import Path
from ._table_files import Parts, open_tables
from ._table_locations import is_directory, list_parts, open_input, show_place


class _Stream:
    """A stream of record batches, which are read once."""

    groups = None

    def __init__(self, reader: Any) -> None:
        self.where, self.schema, self.batches = "the stream", reader.schema, iter(reader)


class _InMemory:
    """A table in memory, in groups as its chunks."""

    def __init__(self, table: Any) -> None:
        self.where, self.schema, self._batches = "the table", table.schema, table.to_batches()
        self.groups = [batch.num_rows for batch in self._batches]

    def read(self, paths: Iterable[Path], groups: Sequence[int]) -> Iterator[tuple[Path, Any]]:
        """Yield the array of each column path of some groups."""
        return get_columns(pa.Table.from_batches([self._batches[i] for i in groups], self.schema), paths)


def iter_batches(
    source: Any,
    batch_size: int,
    *,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    filter: Any = None,
    device: DeviceType | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    window: int = 4,
    shard: tuple[int, int] = (0, 1),
    drop_last: bool = False,
    start: int | Mapping[str, int] = 0,
    prefetch: int = 1,
    nulls: Any = "auto",
    mask_key: NestedKey | None = None,
    lists: str = "jagged",
    times: str = "values",
    categories: str = "values",
) -> BatchIterator:
    """Iterate over the rows of a table as collections of ``batch_size`` rows.

    The memory is that of ``prefetch + 1`` row groups (with ``shuffle``, of as many windows) and one batch. In a worker of a
    ``DataLoader`` with ``batch_size=None``, each worker gives every so many-th batch, so that the loader gives the batches in
    the same order for any number of workers.

    Args:
        source: the location of a file or directory, or several; a table, a stream or a data set of Arrow; or an object with
            ``__arrow_c_stream__``.
        batch_size: rows of a batch.
        keys: keys or key paths to read.
        filter: a condition that rows meet, as for :func:`td_arrow.load`. Shards are those of the rows before it.
        device: where the leaves go.
        shuffle: permute the row groups, and the rows of each ``window`` of them.
        seed: decides the order, with ``epoch``.
        epoch: number of the pass over the data.
        window: how many consecutive row groups share a permutation of rows.
        shard: ``(i, n)`` gives part ``i`` of ``n`` parts, whose numbers of rows differ by one at most.
        drop_last: leave out a last batch that is not full; then all shards have the same number of batches.
        start: the first batch, or the ``state`` of another iterator, after which this one goes on.
        prefetch: how many row groups are decoded ahead, in a thread.
        nulls: as for :func:`td_arrow.from_arrow`.
        mask_key: key of the level with masks.
        lists: what lists of numbers become.
        times: what times become.
        categories: what dictionary columns become.

    Raises:
        ValueError: a stream cannot be shuffled or split, or an argument is out of range.

    >>> from td_arrow import save
    >>> _ = save(TensorDict({"x": torch.arange(7)}, [7]), "data.parquet", row_group_size=3)
    >>> [batch["x"].tolist() for batch in iter_batches("data.parquet", 3, start=1)]
    [[3, 4, 5], [6]]
    """
    least = {
        "batch_size": (batch_size, 1),
        "window": (window, 1),
        "prefetch": (prefetch, 0),
        "epoch": (epoch, 0),
        "seed": (seed, -math.inf),
    }
    for name, (value, bound) in least.items():
        if type(value) is not int or value < bound:
            least_text = "" if bound == -math.inf else f" of at least {bound}"
            raise ValueError(f"{name} is an int{least_text}; got {value!r:.100}")
    part, parts = shard if isinstance(shard, tuple) and len(shard) == 2 else (None, None)
    if not (type(part) is int and type(parts) is int and 0 <= part < parts):
        raise ValueError(f"shard is (i, n) with 0 <= i < n; got {shard!r:.100}")
    begin = _read_start(start, batch_size, seed, epoch)
    condition = make_condition(filter)
    with contextlib.ExitStack() as stack:
        table = _open_source(source, stack)
        if table.groups is None and (shuffle or parts > 1):
            raise ValueError(
                "a stream has no known number of rows, so it cannot be shuffled or split: pass a file or a table"
            )
        order = _Order(table.groups, window if shuffle else 1, seed * 1_000_003 + epoch if shuffle else None)

        def decode(rows: int, fetch: Any) -> Any:
            reader = make_reader(nulls, "auto", lists, times, categories, None, table.schema)
            return read_collection(
                table.schema,
                rows,
                fetch,
                reader,
                table.where,
                keys=keys,
                mask_key=mask_key,
                device=device,
                strict=False,
            )

        make_reader(nulls, "auto", lists, times, categories, None, table.schema)  # checks the options
        rows = _Rows(table, order, decode, condition)
        return BatchIterator(
            rows, batch_size, shard, drop_last, begin, prefetch, (seed, epoch), stack.pop_all()
        )


def _read_start(start: Any, batch_size: int, seed: int, epoch: int) -> int:
    if isinstance(start, Mapping):
        found = {name: start.get(name) for name in ("batch_size", "seed", "epoch")}
        wanted = {"batch_size": batch_size, "seed": seed, "epoch": epoch}
        if found != wanted:
            raise ValueError(
                f"start is a state of other batches: it has {found}, and the arguments are {wanted}"
            )
        start = start.get("batch")
    if type(start) is not int or start < 0:
        raise ValueError(f"start is a number of batches, or a state; got {start!r:.100}")
    return start


def _open_source(source: Any, stack: contextlib.ExitStack) -> Any:
    """Return the table of a source: of files, in memory, or a stream."""
    if isinstance(source, pa.RecordBatchReader):
        return _Stream(source)
    if isinstance(source, ds.Dataset):
        source = source.files
    if isinstance(source, (list, tuple)):
        if not source:
            raise ValueError("there is no file to read")
        tables = [_open_source(item, stack) for item in source]
        return Parts(tables, [{} for _ in tables], show_place(source[0]), True)
    if isinstance(source, (pa.Table, pa.RecordBatch)) or is_dataset(source):
        return _InMemory(as_table(source))
    if hasattr(source, "__arrow_c_stream__"):
        return _Stream(pa.RecordBatchReader.from_stream(source))
    if not (isinstance(source, (str, os.PathLike)) or hasattr(source, "read")):
        raise TypeError(
            "iter_batches() takes locations of files, tables, streams of Arrow, or a data set of Hugging Face; got "
            f"{type(source).__module__}.{type(source).__qualname__}"
        )
    return stack.enter_context(open_tables(source, find_format(source)))


def find_format(location: Any) -> str:
    """Return the format of a file or directory of tables; raise FormatError for another one."""
    first = list_parts(location)[0][0] if is_directory(location) else location
    with open_input(first) as file:
        head = bytes(file.read(6))
    if head[:4] == b"PAR1":
        return "parquet"
    if head == b"ARROW1":
        return "arrow"
    raise FormatError(f"{show_place(location)}: neither a Parquet file nor one of Arrow")


class _Order:
    """The order of rows: windows of row groups, each with a permutation of its rows, or None."""

    def __init__(self, groups: list[int] | None, window: int, seed: int | None) -> None:
        order = list(range(len(groups or ())))
        if seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
        self.seed = seed
        self.windows = [order[i : i + window] for i in range(0, len(order), window)]
        self.sizes = [sum(groups[i] for i in item) for item in self.windows] if groups is not None else []
        self.rows = None if groups is None else sum(self.sizes)

    def permute(self, number: int) -> Any:
        """Return the permutation of the rows of a window, or None."""
        if self.seed is None:
            return None
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number + 1)
        return torch.randperm(self.sizes[number], generator=generator)


class _Rows:
    """The rows of a source as collections, one for each window or record batch."""

    def __init__(self, table: Any, order: _Order, decode: Any, condition: Any) -> None:
        self.table, self.order, self._decode, self.condition = table, order, decode, condition

    def list_jobs(self, begin: int, end: int) -> Iterator[tuple[Any, int, int]]:
        """Yield what to decode: a window or a record batch, and which of its rows."""
        if self.order.rows is None:
            for batch in self.table.batches:
                yield batch, 0, batch.num_rows
            return
        first = 0
        for number, size in enumerate(self.order.sizes):
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                yield number, low, high
            first += size

    def read(self, job: Any, low: int, high: int) -> Any:
        """Return rows of a window, or of a record batch of a stream."""
        source, groups, positions = self.table, [0], None
        if isinstance(job, int):
            groups, positions = self.order.windows[job], self.order.permute(job)
        else:
            source = _InMemory(pa.Table.from_batches([job]))
        total = sum(source.groups[i] for i in groups)
        chosen = (torch.arange(total) if positions is None else positions)[low:high]
        if self.condition is not None:
            kept = torch.zeros(total, dtype=torch.bool)
            kept[torch.from_numpy(Chosen.find(source, groups, self.condition).copy())] = True
            chosen = chosen[kept[chosen]]
        in_order = positions is None and self.condition is None
        index = pa.array(chosen.numpy())

        def fetch(paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
            for path, array in source.read(paths, groups):
                yield path, array.slice(low, high - low) if in_order else array.take(index)

        return self._decode(len(chosen), fetch)


class BatchIterator:
    """An iterator over batches, made by :func:`td_arrow.iter_batches`. It is a context that closes it.

    Its ``len()`` is the number of batches that remain, if the number of rows is known.

    Attributes:
        state: the position, from which ``start=`` goes on at the next batch.
    """

    def __init__(
        self,
        rows: _Rows,
        batch_size: int,
        shard: tuple[int, int],
        drop_last: bool,
        start: int,
        prefetch: int,
        order: tuple[int, int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._rows, self._size, self._drop_last, self._batch = rows, batch_size, drop_last, start
        self._order, self._prefetch, self._stack = order, prefetch, stack
        part, parts = shard
        each, more = divmod(rows.order.rows or 0, parts)
        self._range = part * each + min(part, more), (part + 1) * each + min(part + 1, more)
        #: The batches that all shards have.
        self._most = each // batch_size if drop_last and rows.order.rows is not None else None
        self._pool: ThreadPoolExecutor | None = None
        self._batches: Iterator[Any] | None = None

    @property
    def state(self) -> dict[str, int]:
        """The position, from which ``start=`` goes on at the next batch."""
        seed, epoch = self._order
        return {"batch": self._batch, "batch_size": self._size, "seed": seed, "epoch": epoch}

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        if self._rows.order.rows is None or self._rows.condition is not None:
            raise TypeError("the number of batches of a stream, or of rows that meet a filter, is not known")
        begin, end = self._range
        count = math.ceil((end - begin) / self._size) if self._most is None else self._most
        return max(count - self._batch, 0)

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._iterate()
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._batch += 1
        return batch

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and end the thread that decodes ahead."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()
        self._batches = iter(())

    def __del__(self) -> None:
        self.close()

    def _iterate(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first, (begin, end) = self._batch, self._range
        position = 0
        if self._rows.order.rows is not None and self._rows.condition is None:
            begin, position = min(begin + first * self._size, end), first
        for place, batch in enumerate(self._cut(self._decode_ahead(begin, end)), position):
            if self._most is not None and place >= self._most:
                return
            if place >= first and place % count == number:
                yield batch

    def _cut(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Yield batches of pieces; one that is within a piece is a view."""
        held: list[Any] = []
        rows = 0
        for piece in pieces:
            if not piece.batch_size:
                piece = piece.unsqueeze(0)  # a table of one row
            position, length = 0, piece.batch_size[0]
            while position < length:
                step = min(self._size - rows, length - position)
                held.append(piece[position : position + step])
                position, rows = position + step, rows + step
                if rows == self._size:
                    yield held[0] if len(held) == 1 else torch.cat(held)
                    held, rows = [], 0
        if held and not self._drop_last:
            yield held[0] if len(held) == 1 else torch.cat(held)

    def _decode_ahead(self, begin: int, end: int) -> Iterator[Any]:
        jobs = self._rows.list_jobs(begin, end)
        if not self._prefetch:
            for job in jobs:
                yield self._rows.read(*job)
            return
        self._pool = pool = ThreadPoolExecutor(1, "td-arrow-batches")
        waiting: deque[Future[Any]] = deque()
        for job in jobs:
            waiting.append(pool.submit(self._rows.read, *job))
            if len(waiting) > self._prefetch:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
