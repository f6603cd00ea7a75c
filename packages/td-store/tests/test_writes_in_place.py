"""Operations that write a part of a stored tensor: they equal those on memory, write that part alone, and exclude others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core.typing import SourceIndex
from td_store import StoredTensor
from td_store.testing import MemorySource

POSITIONS = {
    "rows": (0, torch.tensor([5, 0])),
    "negative": (0, torch.tensor([-1, 2])),
    "last dim": (-1, torch.tensor([2])),
    "repeated": (0, torch.tensor([1, 1])),
    "one": (0, torch.tensor(3)),
    "none": (0, torch.zeros(0, dtype=torch.int64)),
    "outside": (0, torch.tensor([6])),
    "dim outside": (2, torch.tensor([0])),
    "of int32": (0, torch.tensor([1], dtype=torch.int32)),
    "mask": (0, torch.tensor([True] * 6)),
    "of two dims": (0, torch.tensor([[1]])),
}
MASKS = {
    "all dims": torch.arange(18).view(6, 3) % 4 == 0,
    "rows": (torch.arange(6) > 3)[:, None],
    "columns": torch.tensor([True, False, True]),
    "nothing": torch.zeros(6, 1, dtype=torch.bool),
    "number": torch.tensor(True),
    "other size": torch.ones(6, dtype=torch.bool),
    "more dims": torch.ones(1, 6, 3, dtype=torch.bool),
    "positions": torch.tensor([0, 1, 2]),
}
VALUES = [
    7,
    -1,
    2.5,
    True,
    1 + 1j,
    300,
    torch.tensor(3),
    torch.tensor(2.5),
    torch.tensor([1.0]),
    torch.tensor(1j),
]
DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.bfloat16]
WRITES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **{
        f"index_fill_ {name}": lambda x, value, at=at: x.index_fill_(*at, value)
        for name, at in POSITIONS.items()
    },
    **{
        f"masked_fill_ {name}": lambda x, value, at=at: x.masked_fill_(at, value)
        for name, at in MASKS.items()
    },
}


def run(write: Callable[[Tensor, Any], Tensor], x: Tensor, value: Any) -> Any:
    """Return the class of the error of a write, or None."""
    try:
        assert write(x, value) is x
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("name", WRITES)
def test_write_of_a_number_equals_that_on_memory(name: str) -> None:
    for dtype in DTYPES:
        for value in VALUES:
            for view in (lambda x: x, lambda x: x.T.contiguous().T, lambda x: x[:, ::1]):
                memory = (torch.arange(18).view(6, 3) % 5).to(dtype)
                stored = StoredTensor(MemorySource(memory))
                found, expected = (run(WRITES[name], view(x), value) for x in (stored, memory))
                assert found == expected, (dtype, value)
                assert torch.equal(stored.clone(), memory), (dtype, value)


class Held(MemorySource):
    """A source that logs its requests, and whether its lock is held."""

    def __init__(self, array: Tensor, name: str, log: list[str]) -> None:
        super().__init__(array)
        self.name, self.log, self._lock = name, log, threading.Lock()

    def __repr__(self) -> str:
        return self.name

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            self.log.append(f"hold {self.name}")
            yield
            self.log.append(f"release {self.name}")

    def read(self, index: SourceIndex) -> Tensor:
        self.log.append(f"read {self.name}")
        return super().read(index)

    def write(self, index: SourceIndex, value: Tensor) -> None:
        self.log.append(f"write {self.name}")
        super().write(index, value)


@pytest.mark.parametrize("write", [lambda x, at: x.index_fill_(0, at, 1), lambda x, at: x.__setitem__(at, 1)])
@pytest.mark.parametrize("positions", [[1, 4], [4, 1], [2]])
def test_write_of_a_number_at_positions_reads_nothing(write: Any, positions: list[int]) -> None:
    log: list[str] = []
    write(StoredTensor(Held(torch.zeros(6, 3), "a", log)), torch.tensor(positions))
    assert log == ["write a"]


OF_ONE = ["read b", "hold a", "read a", "write a", "release a"]
OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], object], list[str]]] = {
    "add_": (lambda a, b: a.add_(b), OF_ONE),
    "index_add_": (lambda a, b: a.index_add_(0, torch.tensor([1, 1]), b[:2]), OF_ONE),
    "index_copy_": (lambda a, b: a.index_copy_(0, torch.tensor([1, 2]), b[:2]), OF_ONE),
    "scatter_": (lambda a, b: a.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), b), OF_ONE),
    "masked_scatter_": (lambda a, b: a.masked_scatter_(torch.arange(3) > 1, b), OF_ONE),
    "view": (lambda a, b: a[1:].mul_(b[1:]), OF_ONE),
    "several": (
        lambda a, b: torch._foreach_add_([b, a], 1.0),
        ["hold a", "hold b", "read b", "read a", "write b", "write a", "release b", "release a"],
    ),
    "itself": (lambda a, b: a.add_(a), ["hold a", "read a", "write a", "release a"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_in_place_holds_the_lock_of_what_it_writes(name: str) -> None:
    operation, expected = OPERATIONS[name]
    log: list[str] = []
    arrays = [torch.rand(6, 3), torch.rand(6, 3)]
    sources = [Held(array, each, log) for array, each in zip(arrays, "ab")]
    operation(*map(StoredTensor, sources))
    operation(*arrays)
    assert log == expected
    assert all(torch.equal(source.array, array) for source, array in zip(sources, arrays))


def test_threads_that_write_two_sources_in_either_order_end() -> None:
    first, second = (StoredTensor(Held(torch.zeros(6, 3), name, [])) for name in "ab")

    def work(a: Tensor, b: Tensor) -> None:
        for _ in range(200):
            torch._foreach_add_([a, b], 1.0)
            a.add_(b, alpha=0.0)

    threads = [threading.Thread(target=work, args=pair) for pair in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert first.clone().eq(400).all() and second.clone().eq(400).all()


def test_threads_that_write_rows_of_a_private_copy_keep_all_rows() -> None:
    stored = StoredTensor(MemorySource(torch.zeros(64, 3)), mode="c")

    def work(worker: int) -> None:
        for row in range(worker, 64, 8):
            stored[[row, (row + 8) % 64]] = worker + 1.0
            stored.index_add_(0, torch.tensor([row]), torch.ones(1, 3))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored[8:, 0].tolist() == [worker + 2.0 for worker in range(8)] * 7
