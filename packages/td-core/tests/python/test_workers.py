"""Worker processes: results in order, seeds by position, and errors of functions, pipes and killed workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core._python.workers import RemoteTraceback, run, run_task
from td_core.errors import WorkerError


def run_forked(fn: Any, items: Any, workers: int = 2, **options: Any) -> Any:
    return run(
        fn, [(item, None) for item in items], num_workers=workers, seed=7, start_method="fork", **options
    )


def double(item: int) -> int:
    time.sleep(0.05 if item == 0 else 0)  # the first result comes last
    return 2 * item


def test_run_task_seeds_torch_and_writes_into_target() -> None:
    draw = lambda _: torch.rand(3)  # noqa: E731
    torch.manual_seed(11)
    expected = torch.rand(3)
    assert torch.equal(run_task(draw, 11, None, None), expected)
    target = TensorDict({"a": torch.zeros(2)})
    assert run_task(lambda item: {"a": torch.full((2,), item)}, 0, 4.0, target) is True
    assert target["a"].tolist() == [4, 4]
    assert run_task(lambda item: None, 0, 4.0, target) is None


def test_run_yields_results_in_order_and_ends_workers() -> None:
    assert list(run_forked(double, range(9))) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert list(run_forked(double, [])) == []
    assert not multiprocessing.active_children()


def test_run_seeds_each_task_by_its_position() -> None:
    found = list(run_forked(lambda _: torch.rand(2).tolist(), range(4)))
    expected = [torch.rand(2, generator=torch.Generator().manual_seed(7 + i)).tolist() for i in range(4)]
    assert found == expected
    assert list(run_forked(lambda _: torch.rand(2).tolist(), range(4), workers=1)) == expected


def test_run_sets_threads_of_workers() -> None:
    assert list(run_forked(lambda _: torch.get_num_threads(), [0], worker_threads=2)) == [2]


def test_run_takes_few_tasks_ahead_of_results() -> None:
    taken: list[int] = []
    tasks = ((taken.append(i) or i, None) for i in range(50))
    results = run(double, tasks, num_workers=2, seed=0, start_method="fork")
    next(results)
    assert len(taken) <= 5
    results.close()  # type: ignore[attr-defined]
    assert len(taken) <= 5 and not multiprocessing.active_children()


def test_run_replaces_worker_after_its_tasks() -> None:
    pids = list(run_forked(lambda _: os.getpid(), range(4), workers=1, max_tasks_per_child=2))
    assert pids[0] == pids[1] != pids[2] == pids[3] and os.getpid() not in pids


def test_run_error_of_function_has_traceback_of_worker() -> None:
    def fail(item: int) -> int:
        return {}[item]

    with pytest.raises(KeyError, match="3") as caught:
        list(run_forked(fail, [3]))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in the worker:" in str(caught.value.__cause__) and "return {}[item]" in str(
        caught.value.__cause__
    )
    assert not multiprocessing.active_children()


def test_run_result_that_cannot_be_sent_raises() -> None:
    with pytest.raises(WorkerError, match="a worker cannot send what it has: .*lambda"):
        list(run_forked(lambda item: lambda: item, [1]))


@pytest.mark.parametrize(
    ("end", "code"), [(lambda _: os.kill(os.getpid(), signal.SIGKILL), -9), (lambda _: os._exit(3), 3)]
)
def test_run_worker_that_dies_raises(end: Any, code: int) -> None:
    with pytest.raises(WorkerError, match=rf"\(pid \d+\) died with exit code {code} while it ran a task"):
        list(run_forked(end, [0, 1]))
    assert not multiprocessing.active_children()
