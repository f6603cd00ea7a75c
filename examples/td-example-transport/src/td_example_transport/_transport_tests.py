"""Tests that a transport of collections must pass."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.testing import assert_same

#: Collections by what is special about them.
COLLECTIONS: dict[str, Any] = {
    "plain": TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}}, [3], names=["time"]),
    "other_shape": TensorDict({"a": torch.arange(8).view(4, 2), "n": {"b": torch.ones(4)}}, [4]),
    "other_dtypes": TensorDict({"a": torch.ones(3).bfloat16(), "c": torch.ones(2, dtype=torch.complex64)}),
    "zero_size": TensorDict({"a": torch.zeros(0, 3), "b": torch.ones(2), "c": torch.zeros(2, 0)}),
    "no_leaves": TensorDict({"n": TensorDict(batch_size=[2])}, [2]),
    "uneven": lazy_stack([TensorDict({"a": torch.arange(i)}) for i in range(3)]),
    "large": TensorDict({"a": torch.arange(1 << 20)}),
}


class TransportTests:
    """Tests of a transport. A subclass defines two functions, which another process can import.

    Each takes a folder and a number of seconds, and returns one end of a connection, whose operations wait so long. An end
    has the methods ``send(data)``, ``recv()`` and ``close()``.
    """

    listen: ClassVar[Callable[[Path, float], Any]]
    join: ClassVar[Callable[[Path, float], Any]]

    @pytest.fixture
    def timeout(self) -> float:
        """Return how many seconds an end waits."""
        return 60.0

    @pytest.fixture
    def ends(self, tmp_path: Path, timeout: float) -> Iterator[list[Any]]:
        """Return both ends of a connection."""
        with ThreadPoolExecutor() as pool:
            ends = [*pool.map(lambda connect: connect(tmp_path, timeout), [self.listen, self.join])]
        yield ends
        for end in ends:
            end.close()

    def check(self, ends: Any, data: Any) -> None:
        """Send a collection, and compare what arrives."""
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(ends[0].send, data)
            received = ends[1].recv()
            sending.result()
        assert_same(received, data)

    @pytest.mark.parametrize("name", COLLECTIONS)
    def test_recv_returns_what_was_sent(self, name: str, ends: Any) -> None:
        self.check(ends, COLLECTIONS[name])

    def test_structure_changes_between_messages(self, ends: Any) -> None:
        for data in (*COLLECTIONS.values(), *reversed(COLLECTIONS.values())):
            self.check(ends, data)
            self.check(ends, data.clone().zero_())

    def test_both_ends_send_and_receive(self, ends: Any) -> None:
        for pair in (ends, ends[::-1], ends):
            self.check(pair, COLLECTIONS["plain"])

    def test_recv_from_closed_end_raises(self, ends: Any) -> None:
        self.check(ends, COLLECTIONS["plain"])
        ends[0].close()
        with pytest.raises(ConnectionError):
            ends[1].recv()

    def test_recv_from_killed_process_raises(self, tmp_path: Path) -> None:
        child = multiprocessing.get_context("spawn").Process(
            target=_send_for_ever, args=(self.join, tmp_path)
        )
        child.start()
        end = self.listen(tmp_path, 60.0)
        assert_same(end.recv(), COLLECTIONS["large"])
        child.kill()
        child.join()
        with pytest.raises(ConnectionError):
            [end.recv() for _ in range(1000)]
        end.close()

    @pytest.mark.parametrize("timeout", [0.2])
    def test_recv_without_message_times_out(self, ends: Any) -> None:
        with pytest.raises(TimeoutError):
            ends[1].recv()

    def test_more_than_two_gigabytes_arrive(self, ends: Any) -> None:
        if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 16 << 30:
            pytest.skip("needs 16 GB of free memory")
        self.check(ends, TensorDict({"a": torch.arange((1 << 28) + 5), "b": torch.ones(3)}))


def _send_for_ever(join: Callable[[Path, float], Any], folder: Path) -> None:
    """Send messages until the process is killed."""
    end = join(folder, 60.0)
    while True:
        end.send(COLLECTIONS["large"])
