"""Test map and map_iter: order, chunks, seeds, and errors of workers that raise or are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_core._python.settings import RULES
from td_core.errors import StructureError, WorkerError

FORK = {"num_workers": 2, "mp_start_method": "fork"}
WAYS = {"workers": FORK, "here": {"num_workers": 0}}


def make_td() -> TensorDict:
    return TensorDict({"a": torch.arange(10), "n": {"b": torch.arange(20.0).view(10, 2)}}, [10])


def add_one(td: TensorDict) -> TensorDict:
    return td + 1


def return_pid(td: TensorDict) -> TensorDict:
    return td.set("pid", torch.full(td.batch_size, os.getpid()))


def return_size(td: TensorDict) -> TensorDict:
    return td.select("a").set("size", torch.full(td.batch_size, td.batch_size.numel()))


def add_noise(td: TensorDict) -> TensorDict:
    return td.select("a").set("noise", torch.rand(td.batch_size))


def raise_error(td: TensorDict) -> TensorDict:
    if 7 in td["a"]:
        raise KeyError("no seven")
    return td


def kill_worker(td: TensorDict) -> TensorDict:
    if 7 in td["a"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return td


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


class TestMap:
    def test_map_concatenates_results_in_order(self, way: Any) -> None:
        td = make_td()
        result = td.map(add_one, chunksize=3, **way)
        assert type(result) is TensorDict
        torch.testing.assert_close(result["n", "b"], td["n", "b"] + 1)
        assert result["a"].tolist() == list(range(1, 11))
        assert not td["a"].is_shared()

    @pytest.mark.parametrize(
        ("kwargs", "sizes"),
        [
            ({}, [5] * 10),
            ({"chunksize": 3}, [3] * 9 + [1]),
            ({"num_chunks": 3}, [4] * 8 + [2] * 2),
            ({"chunksize": 0}, [1] * 10),
            ({"chunksize": 4, "index_with_generator": True}, [4] * 8 + [2] * 2),
        ],
    )
    def test_map_chunk_arguments_set_chunk_sizes(self, kwargs: Any, sizes: list[int]) -> None:
        assert make_td().map(return_size, **FORK, **kwargs)["size"].tolist() == sizes

    def test_map_dim_argument_splits_that_dim(self, way: Any) -> None:
        td = TensorDict({"a": torch.arange(12).view(3, 4)}, [3, 4])
        for dim in (1, -1):
            assert torch.equal(td.map(add_one, dim, chunksize=3, **way)["a"], td["a"] + 1)
            assert torch.equal(td.map(add_one, dim, chunksize=0, **way)["a"], td["a"] + 1)

    def test_map_function_returning_none_drops_results(self, way: Any) -> None:
        assert make_td().map(lambda td: td if td["a"][0] else None, chunksize=5, **way)["a"].tolist() == [
            5,
            6,
            7,
            8,
            9,
        ]
        assert make_td().map(lambda td: None, **way) is None

    def test_map_lazy_stack_equals_dense(self) -> None:
        stack = LazyStackedTensorDict(*make_td().unbind(0))
        assert stack.map(add_one, **FORK)["a"].tolist() == list(range(1, 11))

    def test_map_empty_batch_returns_empty(self) -> None:
        assert TensorDict({"a": torch.zeros(0)}, [0]).map(add_one, **FORK)["a"].shape == (0,)

    @pytest.mark.parametrize("shared", [True, False])
    def test_map_out_is_written_in_place(self, way: Any, shared: bool) -> None:
        out = make_td().zero_()
        if shared:
            out.share_memory_()
        leaf = out["a"]
        assert make_td().map(add_one, chunksize=4, out=out, **way) is out
        assert out["a"] is leaf
        assert leaf.tolist() == list(range(1, 11))

    def test_map_pool_argument_uses_its_processes(self) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert make_td().map(add_one, pool=pool)["a"].tolist() == list(range(1, 11))
            pids = make_td().map(return_pid, pool=pool)["pid"]
            assert os.getpid() not in pids.tolist()
            with pytest.raises(ValueError, match="give pool or num_workers, not both; got 2"):
                make_td().map(add_one, pool=pool, num_workers=2)

    def test_map_max_tasks_per_child_replaces_workers(self) -> None:
        result = make_td().map(
            return_pid,
            chunksize=2,
            max_tasks_per_child=1,
            **FORK,
        )
        assert len(set(result["pid"].tolist())) == 5

    def test_map_worker_threads_sets_torch_threads(self) -> None:
        result = make_td().map(
            lambda td: td.set("threads", torch.full(td.batch_size, torch.get_num_threads())),
            worker_threads=2,
            **FORK,
        )
        assert result["threads"].tolist() == [2] * 10

    @pytest.mark.once
    def test_map_spawned_workers_equals_torch(self) -> None:
        assert make_td().map(torch.neg, num_workers=1, mp_start_method="spawn")["a"].tolist() == list(
            range(0, -10, -1)
        )

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"dim": 1}, IndexError, r"dim 1 is not a batch dim of a collection of batch size \[10\]"),
            ({"chunksize": 1, "num_chunks": 1}, ValueError, "give chunksize or num_chunks, not both"),
            ({"num_workers": -1}, ValueError, "got -1"),
            ({"chunksize": -1}, ValueError, "got -1"),
            ({"num_chunks": 0}, ValueError, "got 0"),
        ],
    )
    def test_map_invalid_arguments_raise(self, kwargs: Any, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            make_td().map(add_one, **kwargs)

    def test_map_pbar_calls_tqdm_with_total(self, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        totals: list[int] = []

        def tqdm(results: Any, total: int) -> Any:
            totals.append(total)
            return results

        monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=tqdm))
        assert len(make_td().map(add_one, chunksize=2, pbar=True, **way)) == 10
        assert totals == [5]

    def test_map_pbar_without_tqdm_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        with pytest.raises(ImportError, match="pip install tqdm"):
            make_td().map(add_one, pbar=True, num_workers=0)


class TestSeeds:
    def test_map_same_generator_gives_same_results(self) -> None:
        results = [
            make_td()
            .map(add_noise, chunksize=2, generator=torch.Generator().manual_seed(0), **way)["noise"]
            .tolist()
            for way in (FORK, {**FORK, "num_workers": 3}, {"num_workers": 0})
        ]
        assert results[0] == results[1] == results[2]
        assert len(set(results[0])) == 10

    def test_map_advances_generator(self) -> None:
        generator = torch.Generator().manual_seed(0)
        first, second = (
            make_td().map(add_noise, num_workers=0, generator=generator)["noise"].tolist() for _ in range(2)
        )
        assert first != second

    def test_map_keeps_random_state_of_caller(self) -> None:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        make_td().map(add_noise, num_workers=0, generator=generator)
        assert torch.rand(1) == expected

    @pytest.mark.parametrize("follows", [False, True])
    def test_map_default_generator_is_kept_as_in_tensordict(
        self, follows: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RULES, "follows_tensordict", follows)
        torch.manual_seed(5)
        expected = torch.rand(1)
        for call in (make_td().map, lambda *args, **kwargs: list(make_td().map_iter(*args, **kwargs))):
            torch.manual_seed(5)
            call(add_noise, num_workers=0)
            assert (torch.rand(1) == expected) == follows

    def test_map_as_in_tensordict_seeds_all_calls_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RULES, "follows_tensordict", True)
        first, second = (make_td().map(add_noise, num_workers=0)["noise"] for _ in range(2))
        assert torch.equal(first, second)


class TestMapIter:
    def test_map_iter_yields_results_in_order(self, way: Any) -> None:
        parts = list(make_td().map_iter(add_one, chunksize=4, **way))
        assert [part["a"].tolist() for part in parts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]

    def test_map_iter_yields_none_results(self, way: Any) -> None:
        assert list(make_td().map_iter(lambda td: None, chunksize=5, **way)) == [None, None]

    def test_map_iter_shuffle_permutes_by_generator(self, way: Any) -> None:
        def order(seed: int) -> list[int]:
            generator = torch.Generator().manual_seed(seed)
            parts = make_td().map_iter(add_one, chunksize=3, shuffle=True, generator=generator, **way)
            return torch.cat([part["a"] for part in parts]).tolist()

        assert sorted(order(0)) == list(range(1, 11))
        assert order(0) == order(0) != order(1)

    def test_map_iter_shuffle_as_in_tensordict_uses_default_generator(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RULES, "follows_tensordict", True)
        torch.manual_seed(5)
        expected = torch.randperm(10) + 1
        torch.manual_seed(5)
        parts = make_td().map_iter(
            add_one, num_workers=0, chunksize=3, shuffle=True, generator=torch.Generator()
        )
        assert torch.equal(torch.cat([part["a"] for part in parts]), expected)

    def test_map_iter_keeps_random_state_between_results(self) -> None:
        torch.manual_seed(5)
        parts = make_td().map_iter(add_noise, num_workers=0, chunksize=2, generator=torch.Generator())
        drawn = [torch.rand(()) for _ in parts]
        torch.manual_seed(5)
        assert drawn == [torch.rand(()) for _ in drawn]

    def test_map_iter_close_ends_workers(self) -> None:
        iterator = make_td().map_iter(add_one, chunksize=1, **FORK)
        assert next(iterator)["a"].tolist() == [1]
        iterator.close()  # type: ignore[attr-defined]
        assert not multiprocessing.active_children()


class TestFailures:
    def test_map_worker_exception_keeps_traceback(self) -> None:
        with pytest.raises(KeyError, match="no seven") as caught:
            make_td().map(raise_error, chunksize=2, **FORK)
        assert "in raise_error" in str(caught.value.__cause__)
        assert 'raise KeyError("no seven")' in str(caught.value.__cause__)
        assert not multiprocessing.active_children()

    @pytest.mark.parametrize("size", [1, 10**6], ids=["waiting", "sending"])
    def test_map_iter_killed_parent_ends_workers(self, size: int) -> None:
        source = f"""
import os, time, torch
from td_core import TensorDict

def slow(td):
    os.write(1, b"x")
    time.sleep(0.5)
    return TensorDict({{"a": torch.zeros(1, {size})}}, [1])

for _ in TensorDict({{"a": torch.zeros(2)}}, [2]).map_iter(slow, num_workers=2, chunksize=1, mp_start_method="fork"):
    time.sleep(60)
"""
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            parent.stdout.read(2)
            time.sleep(0 if size > 1 else 2)
            parent.kill()
            # communicate() returns only when the workers, which inherited stdout, have ended too.
            parent.communicate(timeout=30)

    def test_map_fork_during_import_does_not_deadlock(self) -> None:
        source = """
import sys, time
from importlib.machinery import PathFinder

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "hmac":  # by which processes that share a tensor know each other
            spec = PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (time.sleep(1), execute(module))
            return spec

import torch
sys.meta_path.insert(0, Slow())
from td_core import TensorDict
from td_core._python import workers

start = workers._Worker.__init__

def later(*args):
    time.sleep(0.3)  # the worker before this one asks for its tensor
    start(*args)

workers._Worker.__init__ = later
td = TensorDict({"a": torch.arange(4)}, [4])
print(td.map(lambda part: part + 1, num_workers=2, chunksize=1, mp_start_method="fork")["a"].tolist())
"""
        environment = {**os.environ, "TD_PLUGINS": "none"}  # td-memmap imports the module too
        done = subprocess.run(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, timeout=30, check=True, env=environment
        )
        assert done.stdout.strip() == b"[1, 2, 3, 4]"

    def test_map_killed_worker_raises(self) -> None:
        with pytest.raises(WorkerError, match=r"a worker process \(pid \d+\) died with exit code -9"):
            make_td().map(kill_worker, chunksize=2, **FORK)
        assert not multiprocessing.active_children()

    def test_map_iter_unpicklable_result_raises(self) -> None:
        with pytest.raises(WorkerError, match="cannot send what it has"):
            list(make_td().map_iter(lambda td: lambda: td, chunksize=5, **FORK))

    def test_map_out_wrong_shape_raises(self) -> None:
        out = make_td().share_memory_()
        with pytest.raises(StructureError, match="key 'a' in place"):
            make_td().map(lambda td: td.set("a", torch.zeros(5, 3)), out=out, **FORK)
