"""Batches: their order, shards, the position to go on from, workers, threads, and the memory that they need."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from td_arrow import iter_batches, save
from td_core import TensorDict
from td_core.testing import assert_same

ROWS = 23


def make() -> TensorDict:
    """Return a collection of 23 rows."""
    return TensorDict({"x": torch.arange(ROWS), "v": torch.arange(ROWS * 2.0).view(ROWS, 2)}, [ROWS])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file with row groups of five rows."""
    save(make(), tmp_path / "x.parquet", row_group_size=5)
    return tmp_path / "x.parquet"


def list_rows(source: Any, batch_size: int = 4, **options: Any) -> list[list[int]]:
    """Return the rows of each batch."""
    return [batch["x"].tolist() for batch in iter_batches(source, batch_size, **options)]


def test_every_kind_of_source_gives_the_same_batches(path: Path, tmp_path: Path) -> None:
    td = make()
    save(td, tmp_path / "x.arrow", batch_rows=4)
    save(td, tmp_path / "d", format="parquet", max_rows_per_file=9)
    wanted = [list(range(i, min(i + 4, ROWS))) for i in range(0, ROWS, 4)]
    sources = [
        path, str(path), tmp_path / "x.arrow", tmp_path / "d", td.to_arrow(), td.to_arrow().to_batches()[0],
        ds.dataset(path), pa.RecordBatchReader.from_stream(td),
    ]  # fmt: skip
    for source in sources:
        assert list_rows(source) == wanted, source
    assert list_rows([path, path], 23) == [list(range(ROWS))] * 2
    assert_same(torch.cat(list(iter_batches(path, 7))), td)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 10, 23, 50])
@pytest.mark.parametrize("drop_last", [False, True])
def test_length_is_the_number_of_batches(path: Path, batch_size: int, drop_last: bool) -> None:
    batches = iter_batches(path, batch_size, drop_last=drop_last)
    assert len(batches) == (ROWS // batch_size if drop_last else -(-ROWS // batch_size))
    assert len(list(batches)) == (ROWS // batch_size if drop_last else -(-ROWS // batch_size))


def test_shuffle_permutes_groups_and_rows_of_windows(path: Path) -> None:
    first = list_rows(path, shuffle=True, seed=1)
    assert sorted(itertools.chain(*first)) == list(range(ROWS))
    assert first == list_rows(path, shuffle=True, seed=1)
    others = [
        list_rows(path, shuffle=True, seed=1, epoch=1),
        list_rows(path, shuffle=True, seed=2),
        list_rows(path),
    ]
    assert first not in others
    rows = list(itertools.chain(*list_rows(path, shuffle=True, window=1)))
    groups = [{row // 5 for row in rows[i : i + 3]} for i in (0,)]
    assert all(len(group) == 1 for group in groups)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "window": 2, "seed": 3}, {"filter": [("x", ">", 3)]}]
)
def test_start_at_each_position_gives_the_same_rest(
    path: Path, prefetch: int, options: dict[str, Any]
) -> None:
    whole = list_rows(path, **options)
    for number in range(len(whole) + 1):
        assert list_rows(path, start=number, prefetch=prefetch, **options) == whole[number:]
        batches = iter_batches(path, 4, **options)
        for _ in range(number):
            next(batches)
        assert list_rows(path, start=batches.state, **options) == whole[number:]
        batches.close()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_are_equal_and_disjoint(path: Path, shards: int, shuffle: bool) -> None:
    parts = [
        list(itertools.chain(*list_rows(path, shuffle=shuffle, shard=(i, shards)))) for i in range(shards)
    ]
    assert sorted(itertools.chain(*parts)) == list(range(ROWS))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    counts = {
        len(list_rows(path, 3, shuffle=shuffle, shard=(i, shards), drop_last=True)) for i in range(shards)
    }
    assert counts == {ROWS // shards // 3}


class _Data(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Any:
        return iter_batches(self.path, 4, shuffle=True, seed=5)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "spawn"), (3, "fork")])
def test_loader_gives_the_same_order_for_any_number_of_workers(
    path: Path, workers: int, context: str | None
) -> None:
    loader = DataLoader(_Data(path), batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert [batch["x"].tolist() for batch in loader] == list_rows(path, shuffle=True, seed=5)


def test_closed_iterator_leaves_no_thread_and_gives_nothing(path: Path) -> None:
    before = threading.active_count()
    with iter_batches(path, 2, prefetch=2) as batches:
        next(batches)
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert list(batches) == []


def test_batches_of_a_replaced_file_are_of_the_old_one(path: Path) -> None:
    batches = iter_batches(path, 4, prefetch=0)
    first = next(batches)["x"].tolist()
    save(make() * 100, path)
    assert first + list(itertools.chain(*(batch["x"].tolist() for batch in batches))) == list(range(ROWS))


def test_memory_is_that_of_some_row_groups(tmp_path: Path) -> None:
    rows, width = 64, 16_384
    save(TensorDict({"v": torch.randn(rows, width)}, [rows]), tmp_path / "x.parquet", row_group_size=4)
    most = 0
    for batch in iter_batches(tmp_path / "x.parquet", 4):
        del batch
        most = max(most, pa.total_allocated_bytes())
    assert most < 6 * 4 * width * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is an int of at least 1; got 0"),
        ({"window": 0}, "window is an int of at least 1"),
        ({"prefetch": -1}, "prefetch is an int of at least 0"),
        ({"shard": (2, 2)}, r"shard is \(i, n\) with 0 <= i < n"),
        ({"start": -1}, "start is a number of batches"),
        (
            {"start": {"batch": 1, "batch_size": 5, "seed": 0, "epoch": 0}},
            "start is a state of other batches",
        ),
        ({"nulls": "other"}, "nulls is one of"),
        ({"lists": "other"}, "lists is one of"),
    ],
)
def test_wrong_argument_is_refused(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        iter_batches(path, **{"batch_size": 4, **options})


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shard": (0, 2)}])
def test_stream_cannot_be_shuffled_or_split(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a stream has no known number of rows"):
        iter_batches(pa.RecordBatchReader.from_stream(make()), 4, **options)
    with pytest.raises(TypeError, match="is not known"):
        len(iter_batches(pa.RecordBatchReader.from_stream(make()), 4))
