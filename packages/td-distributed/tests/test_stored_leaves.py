"""Collections with stored leaves: what is sent is read once, and what is received is written to the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td_core import TensorDict
from td_core.errors import StructureError
from td_distributed._p2p import WIRES
from td_store import StoredTensor
from td_store.testing import LoggedSource, MemorySource


def make_plain(factor: int) -> TensorDict:
    leaves = {"a": [[0.0, factor], [2.5, 3.0]], "n": {"b": [factor, 2]}}
    return TensorDict(leaves, batch_size=[2])


def make_stored(factor: int, log: list[Any]) -> TensorDict:
    def store(key: Any, leaf: Any) -> StoredTensor:
        return StoredTensor(LoggedSource(MemorySource(leaf), str(key), log))

    return make_plain(factor).named_apply(store)


def exchange(rank: int, wire: str, consolidated: bool) -> list[tuple[str, str]]:
    log: list[Any] = []
    mine = make_stored(rank + 1, log)
    if rank == 0:
        mine.send(1, wire=wire, consolidated=consolidated)
    else:
        mine.recv(0, wire=wire, consolidated=consolidated)
    requests = [(request, name) for request, name, _ in log]
    assert (mine == make_plain(1)).all()
    assert all(isinstance(leaf, StoredTensor) for leaf in mine.values(True, True))
    return requests


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_send_recv_stored_leaves_reads_and_writes_once(two: Any, wire: str, consolidated: bool) -> None:
    sent, received = two.run(exchange, wire, consolidated)
    assert sorted(sent) == [("read", "a"), ("read", "b")]
    assert sorted(received) == [("write", "a"), ("write", "b")]


COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda td, rank: td.broadcast(0),
    "all_gather": lambda td, rank: td.all_gather()[0],
    "scatter": lambda td, rank: td.scatter(0, [td, td]) if rank == 0 else td.scatter(0),
}


def share(rank: int, name: str) -> int:
    log: list[Any] = []
    mine = make_stored(1, log) if rank == 0 or name == "all_gather" else make_plain(5)
    result = COLLECTIVES[name](mine, rank)
    requests = len(log)
    assert (result == make_plain(1)).all()
    return requests


@pytest.mark.parametrize("name", COLLECTIVES)
def test_share_stored_leaves_returns_their_elements(two: Any, name: str) -> None:
    first, _ = two.run(share, name)
    assert first in (2, 4)  # scatter() encodes two collections


def add_up(rank: int) -> None:
    with pytest.raises(StructureError, match=r"key 'a' is in a store; clone\(\) reads it into memory"):
        make_stored(1, []).all_reduce()


def test_reduce_stored_leaves_raises(two: Any) -> None:
    assert two.run(add_up) == [None, None]


@pytest.mark.parametrize("options", [{}, {"metadata": True}, {"filename": "file"}], ids=str)
def test_consolidate_stored_leaves_reads_each_once(options: Any, tmp_path: Path) -> None:
    log: list[Any] = []
    if "filename" in options:
        options = {"filename": tmp_path / "file"}
    whole = make_stored(1, log).consolidate(**options)
    assert sorted(name for _, name, _ in log) == ["a", "b"]
    assert (whole == make_plain(1)).all()
    if options.get("filename"):
        assert (TensorDict.from_consolidated(tmp_path / "file") == make_plain(1)).all()


def test_consolidate_stored_leaves_in_place_replaces_them() -> None:
    td = make_stored(1, [])
    td.consolidate(inplace=True)
    assert td.is_consolidated()
    assert (td == make_plain(1)).all()
