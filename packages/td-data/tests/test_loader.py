"""Reading ahead in threads: rules L1 to L6 and E1 to E7, and wrong arguments."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from order_samples import make_data, take_rows
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from td_core import TensorDict, lazy_stack, stack
from td_data import (
    BlockSampler,
    Concat,
    Loader,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    prefetch,
)


def list_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("td-data")]


class Counted:
    """A view that counts its reads, takes some time, and fails at some rows."""

    def __init__(
        self, rows: int = 100, seconds: float = 0.0, fails: Callable[[int], bool] = lambda row: False
    ) -> None:
        self.data, self.seconds, self.fails, self.reads = make_data(rows), seconds, fails, 0
        self.active = self.most = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, positions: torch.Tensor) -> TensorDict:
        with self._lock:
            self.reads += 1
            self.active += 1
            self.most = max(self.most, self.active)
        try:
            time.sleep(self.seconds)
            for row in positions.tolist():
                if self.fails(row):
                    raise OSError(f"row {row} cannot be read")
            return self.data[positions]
        finally:
            with self._lock:
                self.active -= 1


@pytest.mark.parametrize("how", ["exhaust", "break", "close", "collect", "error", "context"])
@pytest.mark.parametrize("blocks", [False, True])
def test_l1_no_thread_is_left(how: str, blocks: bool) -> None:
    view = Counted(fails=lambda row: how == "error" and row == 50)
    loader = Loader(view, 10, num_threads=2, sampler=BlockSampler(5) if blocks else None)
    if how == "exhaust":
        assert len(list(loader)) == 10
    elif how == "break":
        for _ in loader:
            break
    elif how == "close":
        batches = iter(loader)
        next(batches)
        loader.close()
    elif how == "collect":
        batches = iter(loader)
        next(batches)
        found = weakref.ref(loader)
        del loader, batches
        gc.collect()
        assert found() is None
    elif how == "context":
        with loader:
            batches = iter(loader)
            next(batches)
    else:
        with pytest.raises(OSError):
            list(loader)
    assert list_threads() == []


def test_l1_loader_under_way_does_not_delay_the_end_of_python() -> None:
    program = """
import torch, time
from td_core import TensorDict
from td_data import Loader
class Slow:
    def __len__(self): return 100
    def __getitem__(self, positions):
        time.sleep(0.05 if positions[0] == 0 else 60)
        return positions
batches = iter(Loader(Slow(), 4, num_threads=2))
next(batches)
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert time.monotonic() - start < 30


def test_l2_second_iteration_ends_the_first() -> None:
    loader = Loader(make_data(), 10)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(
        RuntimeError, match="this iteration is over: another iteration of this loader has begun"
    ):
        next(first)
    assert len(list(second)) == 10


def test_l3_results_come_in_order_and_few_are_kept() -> None:
    view = Counted()
    view_read = Counted.__getitem__

    class Slow(Counted):
        def __getitem__(self, positions: torch.Tensor) -> TensorDict:
            time.sleep(0.1 if positions[0] == 10 else 0)
            return view_read(self, positions)

    view = Slow()
    batches = iter(Loader(view, 10, prefetch=3, num_threads=2))
    assert next(batches)["row"][0] == 0
    time.sleep(0.05)
    assert view.reads <= 1 + 3 + 2
    assert [batch["row"][0].item() for batch in batches] == list(range(10, 100, 10))


def test_l3_threads_read_at_the_same_time() -> None:
    view = Counted(seconds=0.02)
    assert len(list(Loader(view, 5, num_threads=4, prefetch=4))) == 20
    assert view.most > 1


def test_l4_batches_share_no_memory() -> None:
    batches = list(Loader(make_data(), 10, sampler=BlockSampler(20)))
    for batch in batches[1:]:
        batch.zero_()
    assert batches[0]["row"].sum() > 0
    assert len({batch["row"].data_ptr() for batch in batches}) == len(batches)


def test_l5_kinds_come_as_index_gives_them() -> None:
    lazy = lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in range(1, 7)])
    for batch, positions in zip(Loader(lazy, 4), ([0, 1, 2, 3], [4, 5])):
        assert type(batch) is type(lazy)
        assert [len(each["a"]) for each in batch.unbind(0)] == [position + 1 for position in positions]


def test_l6_locked_data_is_not_written() -> None:
    data = make_data().lock_()
    before = data.clone()
    for batch in Loader(data, 10, transform=lambda batch: batch.zero_()):
        assert batch["row"].sum() == 0
    assert bool((data == before).all())


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"num_threads": 3, "prefetch": 3}, {"num_workers": 1}])
@pytest.mark.parametrize("where", ["view", "transform"])
def test_e1_error_comes_at_its_batch_with_a_note(options: dict[str, int], where: str) -> None:
    fail = FailingTransform() if where == "transform" else None
    view = FailingView() if where == "view" else make_data(40)
    loader = Loader(view, 10, transform=fail, **options)
    found = []
    with pytest.raises(OSError, match="row 20 cannot be read") as caught:
        found.extend(batch["row"][0].item() for batch in loader)
    assert found == [0, 10]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["in epoch 0, batch 2, with the positions 20, 21, 22, 23, ..."]
    assert (loader.epoch, loader.rows) == (0, 20)


class FailingTransform:
    def __call__(self, batch: TensorDict) -> TensorDict:
        if batch["row"][0] == 20:
            raise OSError("row 20 cannot be read")
        return batch


class FailingView:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, positions: torch.Tensor) -> TensorDict:
        return FailingTransform()(make_data(40)[positions])


@pytest.mark.parametrize("blocks", [False, True])
def test_e2_iteration_after_an_error_tries_that_batch_again(blocks: bool) -> None:
    broken = [True]
    view = Counted(100, fails=lambda row: row == 55 and broken[0])
    loader = Loader(
        view, 10, num_threads=2, sampler=BlockSampler(20, window=1, shuffle=False) if blocks else None
    )
    found = []
    with pytest.raises(OSError):
        found += take_rows_until_error(loader)
    given_out = loader.rows
    assert 40 <= given_out <= 50
    with pytest.raises(OSError):
        list(loader)
    assert (loader.epoch, loader.rows) == (0, given_out)
    broken[0] = False
    rest = torch.cat(take_rows(loader))
    assert rest.tolist() == list(range(given_out, 100))


def take_rows_until_error(loader: Loader) -> list[Any]:
    return [batch["row"] for batch in loader]


def test_e2_error_of_a_progress_function_keeps_the_batch() -> None:
    broken = [True]

    def report(rows: int, total: int) -> None:
        if broken[0] and rows == 20:
            raise OSError("no terminal")

    loader = Loader(make_data(30), 10, progress=report)
    with pytest.raises(OSError, match="no terminal"):
        list(loader)
    broken[0] = False
    assert torch.cat(take_rows(loader)).tolist() == list(range(10, 30))


def test_e2_iteration_that_cannot_begin_keeps_a_loaded_position() -> None:
    class Parts(Counted):
        broken = True

        def at_epoch(self, epoch: int) -> Any:
            if self.broken:
                raise OSError("no connection")
            return self

    view = Parts(30)
    loader = Loader(view, 10, sampler=BlockSampler(5, shuffle=False))
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "rows": 20})
    with pytest.raises(OSError, match="no connection"):
        iter(loader)
    view.broken = False
    assert torch.cat(take_rows(loader)).tolist() == list(range(20, 30))
    assert loader.epoch == 3


def test_e2_broken_row_can_be_skipped() -> None:
    loader = Loader(Counted(100, fails=lambda row: row == 55), 10)
    with pytest.raises(OSError):
        list(loader)
    loader.load_state_dict({**loader.state_dict(), "rows": loader.rows + 10})
    assert torch.cat(take_rows(loader)).tolist() == list(range(60, 100))


def test_e1_stop_iteration_is_no_end_of_the_epoch() -> None:
    def stop(batch: object) -> object:
        raise StopIteration

    with pytest.raises(RuntimeError, match="reading a batch raised StopIteration"):
        list(Loader(make_data(), 10, transform=stop))


def test_e1_error_of_a_sampler_comes_after_earlier_batches() -> None:
    class Broken(Sampler):
        def __len__(self) -> int:
            return 40

        def order(self, epoch: int) -> Any:
            def find(start: int, stop: int) -> torch.Tensor:
                if start >= 30:
                    raise LookupError("no order from here")
                return torch.arange(start, stop)

            return find

    found: list[Any] = []
    with pytest.raises(LookupError, match="no order from here"):
        found.extend(Loader(make_data(40), 10, sampler=Broken(), prefetch=4))
    assert len(found) == 3


def test_e3_timeout_names_the_batch() -> None:
    loader = Loader(Counted(seconds=1.0), 10, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"no batch for 0.05 seconds: a thread still reads it") as caught:
        next(iter(loader))
    if sys.version_info >= (3, 11):
        assert "batch 0" in caught.value.__notes__[0]
    assert loader.rows == 0


def test_e5_result_of_a_transform_is_passed_on() -> None:
    done: list[tuple[int, int]] = []
    loader = Loader(
        make_data(25),
        10,
        transform=lambda batch: None,
        progress=lambda rows, total: done.append((rows, total)),
    )
    assert list(loader) == [None, None, None]
    assert done == [(10, 25), (20, 25), (25, 25)]


def test_e5_progress_of_a_resumed_epoch_begins_there() -> None:
    done: list[int] = []
    loader = Loader(make_data(25), 10, progress=lambda rows, total: done.append(rows))
    loader.load_state_dict({**loader.state_dict(), "rows": 10})
    list(loader)
    assert done == [10, 20, 25]


class Longer(Sampler):
    """A sampler of a user, with positions that the test sets."""

    def __init__(self, positions: Any) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return 6

    def order(self, epoch: int) -> Any:
        return lambda start, stop: self.positions[start:stop]


@pytest.mark.parametrize(
    ("positions", "kind", "text"),
    [
        (
            torch.tensor([0, 1, 2, 99, 4, 5]),
            IndexError,
            "Longer.order returned position 99 for row 3; the data has 6 rows",
        ),
        (torch.tensor([0, -1, 2, 3, 4, 5]), IndexError, "returned position -1 for row 1"),
        (
            torch.zeros(6),
            TypeError,
            r"Longer.order returned \(6,\) of torch.float32 from row 0 on; .* 6 positions",
        ),
        (torch.arange(5), TypeError, r"returned \(5,\) of torch.int64 from row 0 on"),
    ],
)
def test_e6_positions_of_a_users_sampler_are_checked(
    positions: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        list(Loader(make_data(6), 6, sampler=Longer(positions)))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size is an integer of 1 or more; got 0"),
        ({"batch_size": 2.0}, ValueError, "batch_size is an integer"),
        ({"prefetch": -1}, ValueError, "prefetch is an integer of 0 or more; got -1"),
        ({"num_threads": 0}, ValueError, "num_threads is an integer of 1 or more; got 0"),
        ({"num_workers": -1}, ValueError, "num_workers is an integer of 0 or more"),
        ({"prefetch": 0, "num_threads": 2}, ValueError, "prefetch=0 reads in the thread of the consumer"),
        ({"prefetch": 0, "timeout": 1.0}, ValueError, "need prefetch >= 1"),
        ({"timeout": 0}, ValueError, "timeout is a number of seconds above 0; got 0"),
        ({"num_workers": 1, "num_threads": 2}, ValueError, "exclude each other"),
        ({"multiprocessing_context": "spawn"}, ValueError, "needs num_workers"),
        (
            {"shuffle": True, "sampler": RandomSampler(5)},
            ValueError,
            "sampler and shuffle exclude each other",
        ),
        ({"sampler": [1, 2]}, TypeError, "sampler is a td_data.Sampler; got list"),
        (
            {"sampler": SubsetRandomSampler([1])},
            TypeError,
            r"got SubsetRandomSampler of torch.utils.*: pass one, such as RandomSampler\(data\)",
        ),
        (
            {"sampler": RandomSampler(200)},
            ValueError,
            "the RandomSampler is for 200 rows, but the data has 103",
        ),
        (
            {"sampler": WeightedRandomSampler(torch.ones(104), 3)},
            ValueError,
            "is for 104 rows, but the data has 103",
        ),
        ({"sampler": BlockSampler([range(110)])}, ValueError, "the BlockSampler is for 110 rows"),
        (
            {"sampler": BlockSampler(9), "num_workers": 1},
            ValueError,
            "use num_threads= in place of num_workers=",
        ),
        ({"transform": 3}, TypeError, "transform is a function of a batch; got int"),
        ({"rank": 0}, ValueError, "rank and world_size are given together"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank is from 0 to world_size - 1; got 2 of 2"),
        ({"seed": None}, TypeError, "seed is an integer; got None"),
        ({"device": "meta"}, ValueError, "device 'meta' has no memory"),
    ],
)
def test_e6_wrong_argument_is_refused_at_construction(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Loader(make_data(), **{"batch_size": 10, **options})


def test_e6_object_that_is_no_view_is_refused() -> None:
    with pytest.raises(TypeError, match=r"generator cannot be indexed: prefetch\(\) runs an iterator"):
        Loader((i for i in range(3)), 2)


class Endless(IterableDataset[int]):
    """A data set of torch without positions."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class OneAtATime:
    """A data set of one row at a time, as those for a ``DataLoader``."""

    def __init__(self) -> None:
        self.items = [TensorDict({"a": torch.tensor(i)}) for i in range(7)]

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: Any) -> TensorDict:
        return self.items[index]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Concat([data, data])])
@pytest.mark.parametrize("make", [dict, lambda: {"num_workers": 1}, lambda: {"sampler": BlockSampler(3)}])
def test_e6_view_that_takes_one_position_says_what_to_do(make: Any, wrap: Any) -> None:
    with pytest.raises(TypeError, match="got the positions of a batch, .* is for a DataLoader of torch"):
        next(iter(Loader(wrap(OneAtATime()), 3, **make())))


def test_e6_view_that_takes_one_position_is_read_as_the_error_says() -> None:
    batches = DataLoader(OneAtATime(), batch_sampler=SequentialSampler(7).batches(3), collate_fn=stack)
    assert [batch["a"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_e6_ring_that_has_gone_round_says_what_to_read() -> None:
    buffer = ReplayBuffer(10)
    for _ in range(2):
        buffer.extend(TensorDict({"a": torch.arange(7)}, [7]))
    with pytest.raises(IndexError, match=r"row 0 was overwritten: .*, and buffer\[:\] gives their rows"):
        next(iter(Loader(buffer, 3)))
    assert torch.cat([batch["a"] for batch in Loader(buffer[:], 3)]).tolist() == [4, 5, 6, *range(7)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_e6_cuda_device_that_is_missing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device 'cuda:1' is not there: .* leave out device="):
        Loader(make_data(), 10, device="cuda:1")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([1, 2], "a view is indexed by positions; a list is not: make it a collection or a tensor"),
        ({"a": torch.zeros(3)}, "a dict is not"),
        (TensorDict({"a": 1}), "a collection without batch dims has no rows: give it a batch size first"),
        (range(3), "a range is not: make it a collection or a tensor"),
        ("rows.td", r"a str is not: td_core.open\(\) gives the collection of a path"),
        (Path("rows.td"), r"td_core.open\(\) gives the collection of a path"),
        (torch.tensor(1), r"a tensor without dims has no rows: unsqueeze\(0\) makes it one row"),
        (None, "NoneType cannot be indexed: .* a Loader takes a collection, a tensor or such a view"),
        (Endless(), r"Endless cannot be indexed: prefetch\(\) runs an iterator"),
    ],
)
def test_e6_data_without_rows_are_refused(data: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Loader(data, 2)


def test_e7_interrupt_ends_at_once_without_traces_of_threads() -> None:
    program = """
import os, signal, time
from td_data import Loader
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
class Slow:
    def __len__(self): return 100
    def __getitem__(self, positions):
        if positions[0] == 8:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01 if positions[0] < 8 else 30)
        return positions
try:
    for batch in Loader(Slow(), 4, num_threads=2): pass
except KeyboardInterrupt:
    print(time.monotonic())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert time.monotonic() - float(done.stdout) < 20  # a read takes 30


def test_windows_are_read_once_and_freed() -> None:
    view = Counted(100)
    batches = list(Loader(view, 10, sampler=BlockSampler(10, window=2), prefetch=2))
    assert view.reads == 5
    assert sorted(torch.cat([batch["row"] for batch in batches]).tolist()) == list(range(100))


def test_windows_without_threads_are_read_when_they_are_needed() -> None:
    view = Counted(100)
    batches = iter(Loader(view, 10, sampler=BlockSampler(10, window=2), prefetch=0))
    next(batches)
    assert view.reads == 1


def test_as_dataloader_has_the_same_order_and_position() -> None:
    def make() -> Loader:
        return Loader(make_data(), 10, shuffle=True, seed=5, transform=lambda batch: batch["row"])

    wanted = make()
    loader = make()
    dataloader = loader.as_dataloader()
    for _ in range(2):
        assert torch.cat(list(dataloader)).equal(torch.cat(list(wanted)))
    assert loader.epoch == 2
    assert len(dataloader) == 11


def test_as_dataloader_passes_generators_that_depend_on_the_batch() -> None:
    def draw(batch: TensorDict, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(2, generator=generator)

    loader = Loader(make_data(), 10, seed=5, transform=draw)
    wanted = list(Loader(make_data(), 10, seed=5, transform=draw))
    assert torch.stack(list(loader.as_dataloader())).equal(torch.stack(wanted))


def test_device_of_the_cpu_keeps_batches() -> None:
    for batch in Loader(make_data(), 50, device="cpu"):
        assert batch.device == torch.device("cpu")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_runs_an_iterator_ahead(depth: int) -> None:
    made: list[int] = []

    def make() -> Any:
        for i in range(6):
            made.append(i)
            yield TensorDict({"a": torch.tensor(i)})

    batches = prefetch(make(), depth)
    assert next(batches)["a"] == 0
    time.sleep(0.1)
    assert len(made) == 1 + depth
    assert [batch["a"].item() for batch in batches] == [1, 2, 3, 4, 5]
    assert list_threads() == []


def test_prefetch_raises_an_error_after_earlier_batches() -> None:
    def make() -> Any:
        yield 1
        yield 2
        raise LookupError("the store is gone")

    found = []
    with pytest.raises(LookupError, match="the store is gone"):
        found.extend(prefetch(make(), 3))
    assert found == [1, 2]
    assert list_threads() == []
    with pytest.raises(ValueError, match="depth is an integer of 0 or more; got -1"):
        prefetch([], -1)


def test_prefetch_that_is_broken_off_leaves_no_thread() -> None:
    for _ in prefetch(iter(int, 1)):
        break
    assert list_threads() == []
