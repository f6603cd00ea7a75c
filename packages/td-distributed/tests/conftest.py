"""Shared fixtures: tensorclasses that files refer to, and groups of processes over gloo or nccl."""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# Test files, here and in the processes of a group, import the helper modules next to this file.
sys.path.append(str(Path(__file__).parent))
import worker

pytest.register_assert_rewrite("collective_trees", "consolidation_trees", "loopback", "message_trees")

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


@pytest.fixture(scope="session")
def fixture_classes() -> Any:
    """Define the tensorclasses that the tensordict files refer to, in a module of the same name."""
    if not HAS_TENSORCLASS:
        pytest.skip("needs td-tensorclass")
    if "fixture_classes" in sys.modules:
        return sys.modules["fixture_classes"]
    from td_tensorclass import tensorclass

    module: Any = types.ModuleType("fixture_classes")
    sys.modules["fixture_classes"] = module
    point = {"__module__": "fixture_classes", "__annotations__": {"x": Tensor, "y": Any, "tag": str}}
    module.Point = tensorclass(type("Point", (), {**point, "y": None, "tag": "none"}))
    fields = {"start": module.Point, "end": module.Point, "weight": Tensor, "meta": Any}
    segment = {"__module__": "fixture_classes", "__annotations__": fields, "weight": None, "meta": None}
    module.Segment = tensorclass(type("Segment", (), segment))
    return module


class RankError(Exception):
    """An error that a rank raised; ``kind`` is the name of its class."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Ranks:
    """Processes that form one group and run functions of test files, which are passed by name.

    A function that exceeds its time limit fails, and new processes are started for the next one.
    """

    def __init__(self, world: int, folder: Path, backend: str = "gloo") -> None:
        self.world, self.folder, self.backend = world, folder, backend
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        store = tempfile.mktemp(dir=self.folder)
        # The processes are forks of one that has imported torch, which takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "td_core", "td_distributed"])
        for rank in range(self.world):
            connection, theirs = context.Pipe()
            process = context.Process(
                target=worker.main, args=(rank, self.world, store, self.backend, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process closes the connection
            self.processes.append(process)
            self.connections.append(connection)
        self.replies(range(self.world), 120)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.processes, self.connections = [], []

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: Any = None, limit: float = 60
    ) -> list[Any]:
        """Return the results of ``function(rank, *args)`` on all ranks; an error is returned as a ``RankError``."""
        if not self.processes:
            self.start()
        ranks = range(self.world) if ranks is None else ranks
        path = function.__code__.co_filename
        for rank in ranks:
            self.connections[rank].send((path, function.__name__, limit, (rank, *args)))
        results = self.replies(ranks, limit)
        if any(isinstance(result, RankError) for result in results):
            # Messages that a rank did not receive are still in transit, so start new processes for the next function.
            self.stop()
        return results

    def replies(self, ranks: Any, limit: float) -> list[Any]:
        deadline = time.monotonic() + limit
        return [self.reply(rank, deadline) for rank in ranks]

    def reply(self, rank: int, deadline: float) -> Any:
        connection = self.connections[rank]
        if not connection.poll(max(0, deadline - time.monotonic())):
            self.stop()
            pytest.fail(f"rank {rank} hangs")
        try:
            status, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return RankError(rank, "Exit", "the process ended", "")
        return RankError(rank, *value) if status == "error" else value


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return a group of two processes."""
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return a group of four processes."""
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return a group over nccl, of as many processes as there are GPUs."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    ranks = Ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("gpus"), "nccl")
    yield ranks
    ranks.stop()


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[Ranks]:
    """Return a group of two processes for one test that breaks it."""
    ranks = Ranks(2, tmp_path)
    yield ranks
    ranks.stop()
