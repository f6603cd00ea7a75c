"""Batches of rows of a table, one after the other, in the order of the table or a random one, for one process or several."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch
from torch.utils.data import get_worker_info

from td_core import NestedKey, TensorCollection
from td_core.typing import DeviceType

from ._from_arrow import Columns, as_table, is_dataset, read_collection
from ._load_tables import find_rows, make_condition, select_rows
from ._nulls import Nulls, Path
from ._read_columns import ColumnReader
from ._table_files import ArrowTable, JoinedTable, Table, find_format, open_tables
from ._table_locations import show_place
from ._table_options import check_count


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
    for name, value, bound in (
        ("batch_size", batch_size, 1),
        ("window", window, 1),
        ("prefetch", prefetch, 0),
        ("epoch", epoch, 0),
    ):
        check_count(name, value, bound, f"an int of at least {bound}")
    check_count("seed", seed, -math.inf, "an int")
    part, parts = shard if isinstance(shard, tuple) and len(shard) == 2 else (None, None)
    if not (type(part) is int and type(parts) is int and 0 <= part < parts):
        raise ValueError(f"shard is (i, n) with 0 <= i < n; got {shard!r:.100}")
    state = {"batch": _read_start(start, batch_size, seed, epoch), "seed": seed, "epoch": epoch}
    condition = make_condition(filter)
    choices: dict[str, Any] = {"lists": lists, "times": times, "categories": categories}
    ColumnReader(Nulls.of(nulls), **choices)  # checks the options
    options = {**choices, "nulls": nulls, "keys": keys, "mask_key": mask_key, "device": device}
    with contextlib.ExitStack() as stack:
        table = _open_source(source, stack)
        if isinstance(table, pa.RecordBatchReader):
            if shuffle or parts > 1:
                raise ValueError(
                    "a stream has no known number of rows, so it cannot be shuffled or split: pass a file or a table"
                )
            rows: _Stream | _Windows = _Stream(table, condition, options)
        else:
            order = seed * 1_000_003 + epoch if shuffle else None
            rows = _Windows(table, condition, options, window if shuffle else 1, order)
        return BatchIterator(rows, batch_size, (part, parts), drop_last, prefetch, state, stack.pop_all())


def _read_start(start: Any, batch_size: int, seed: int, epoch: int) -> int:
    """Return the number of the first batch."""
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
    """Return the table of a source, of files or in memory; or a stream."""
    if isinstance(source, pa.RecordBatchReader):
        return source
    if isinstance(source, ds.Dataset):
        source = source.files
    if isinstance(source, (list, tuple)):
        if not source:
            raise ValueError("there is no file to read")
        return JoinedTable([_open_source(item, stack) for item in source], show_place(source[0]))
    if isinstance(source, (pa.Table, pa.RecordBatch)) or is_dataset(source):
        whole = as_table(source)
        return ArrowTable(whole.to_batches(), whole.schema, "the table")
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    if not (isinstance(source, (str, os.PathLike)) or hasattr(source, "read")):
        raise TypeError(
            "iter_batches() takes locations of files, tables, streams of Arrow, or a data set of Hugging Face; got "
            f"{type(source).__module__}.{type(source).__qualname__}"
        )
    return stack.enter_context(open_tables(source, find_format(source)))


#: Reads a piece of a table.
Job = Callable[[], Any]


def _read_piece(
    table: Table,
    groups: list[int],
    chosen: npt.NDArray[np.int64] | None,
    condition: pc.Expression | None,
    options: Mapping[str, Any],
) -> Any:
    """Return the collection of some groups of a table: of all rows, or of the positions that are chosen."""
    if condition is not None:
        kept = find_rows(table, groups, condition)
        chosen = kept if chosen is None else chosen[np.isin(chosen, kept)]

    def fetch(paths: Iterable[Path]) -> Columns:
        return ((path, select_rows(array, chosen)) for path, array in table.read(paths, groups))

    rows = sum(table.groups[i] for i in groups) if chosen is None else len(chosen)
    return read_collection(table.schema, rows, fetch, table.where, strict=False, **options)


class _Stream:
    """The pieces of a stream: its record batches, which are read once."""

    rows = None

    def __init__(
        self, stream: pa.RecordBatchReader, condition: pc.Expression | None, options: Mapping[str, Any]
    ) -> None:
        self._stream, self.condition, self._options = stream, condition, options

    def list_jobs(self, begin: int, end: int) -> Iterator[Job]:
        """Yield a function for each record batch, which returns its rows."""
        for batch in self._stream:
            table = ArrowTable([batch], batch.schema, "the stream")
            yield partial(_read_piece, table, [0], None, self.condition, self._options)


class _Windows:
    """The pieces of a table in its order or a random one: windows of row groups, each with a permutation of its rows."""

    def __init__(
        self,
        table: Table,
        condition: pc.Expression | None,
        options: Mapping[str, Any],
        window: int,
        seed: int | None,
    ) -> None:
        self._table, self.condition, self._options, self._seed = table, condition, options, seed
        order = list(range(len(table.groups)))
        if seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
        self._windows = [order[i : i + window] for i in range(0, len(order), window)]
        self.rows = sum(table.groups)

    def list_jobs(self, begin: int, end: int) -> Iterator[Job]:
        """Yield a function for each window that has some of the rows, which returns these."""
        first = 0
        for number, groups in enumerate(self._windows):
            size = sum(self._table.groups[i] for i in groups)
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                yield partial(self._read, number, groups, size, low, high)
            first += size

    def _read(self, number: int, groups: list[int], size: int, low: int, high: int) -> Any:
        chosen = None
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number + 1)
            chosen = torch.randperm(size, generator=generator)[low:high].numpy()
        elif high - low < size:
            chosen = np.arange(low, high)
        return _read_piece(self._table, groups, chosen, self.condition, self._options)


class BatchIterator:
    """An iterator over batches, made by :func:`td_arrow.iter_batches`. It is a context that closes it.

    Its ``len()`` is the number of batches that remain, if the number of rows is known.

    Attributes:
        state: the position, from which ``start=`` goes on at the next batch.
    """

    def __init__(
        self,
        rows: _Stream | _Windows,
        batch_size: int,
        shard: tuple[int, int],
        drop_last: bool,
        prefetch: int,
        state: Mapping[str, int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._stack = stack  # __del__ closes it, also after an error in the lines below
        self._rows, self._size, self._drop_last = rows, batch_size, drop_last
        self._batch, self._state, self._prefetch = state["batch"], state, prefetch
        part, parts = shard
        each, more = divmod(rows.rows or 0, parts)
        self._range = part * each + min(part, more), (part + 1) * each + min(part + 1, more)
        #: The batches that all shards have.
        self._most = each // batch_size if drop_last and rows.rows is not None else None
        self._batches: Iterator[Any] | None = None

    @property
    def state(self) -> dict[str, int]:
        """The position, from which ``start=`` goes on at the next batch."""
        return {**self._state, "batch": self._batch, "batch_size": self._size}

    def __iter__(self) -> BatchIterator:
        return self

    def __len__(self) -> int:
        if self._rows.rows is None or self._rows.condition is not None:
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
        if self._rows.rows is not None and self._rows.condition is None:
            begin, position = min(begin + first * self._size, end), first
        for place, batch in enumerate(self._cut(self._decode_ahead(begin, end)), position):
            if self._most is not None and place >= self._most:
                return
            if place >= first and place % count == number:
                yield batch

    def _cut(self, pieces: Iterator[TensorCollection]) -> Iterator[Any]:
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
                yield job()
            return
        self._pool = pool = ThreadPoolExecutor(1, "td-arrow-batches")
        waiting: deque[Future[Any]] = deque()
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > self._prefetch:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
