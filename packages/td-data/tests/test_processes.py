"""Worker processes: rules W1 to W4."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from order_samples import make_data, take_rows

from td_core import TensorDict
from td_core.errors import WorkerError
from td_data import Concat, Loader


class Shifted:
    """A view that can be pickled."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, positions: torch.Tensor) -> TensorDict:
        return make_data(40)[positions]


def add_noise(batch: TensorDict, generator: torch.Generator) -> TensorDict:
    return batch.set("noise", torch.rand(len(batch), generator=generator))


class Killer:
    """A transform that ends its process at a row, with a signal or an exit code."""

    def __init__(self, how: int, path: str) -> None:
        self.how, self.path = how, path

    def __call__(self, batch: TensorDict) -> TensorDict:
        if batch["row"][0] == 20 and not os.path.exists(self.path):
            with open(self.path, "w"):
                pass
            if self.how > 0:
                os.kill(os.getpid(), self.how)
                time.sleep(60)
            os._exit(-self.how)
        return batch


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_w1_w2_workers_give_what_threads_give(context: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "transform": add_noise}
    wanted = list(Loader(Shifted(), 7, **options))
    count = 2 if context == "fork" else 1
    found = list(
        Loader(Shifted(), 7, num_workers=count, multiprocessing_context=context, prefetch=3, **options)
    )
    assert len(found) == len(wanted) == 6
    assert all(bool((a == b).all()) for a, b in zip(found, wanted))


def test_w2_object_that_cannot_be_sent_is_named() -> None:
    loader = Loader(
        make_data(), 7, transform=lambda batch: batch, num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(TypeError, match="transform cannot be sent to a worker process"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("how", "text"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGBUS, "/dev/shm"), (-3, "exit code 3")]
)
def test_w3_killed_worker_is_an_error_and_its_batch_is_read_again(how: int, text: str, tmp_path: Any) -> None:
    loader = Loader(make_data(60), 10, transform=Killer(int(how), str(tmp_path / "killed")), num_workers=1)
    found = []
    start = time.monotonic()
    with pytest.raises(WorkerError, match=text):
        found.extend(batch["row"] for batch in loader)
    assert time.monotonic() - start < 20  # torch looks after its workers every 5 seconds
    rows = loader.rows
    assert rows == 10 * len(found) <= 20
    assert torch.cat(found + take_rows(loader)).tolist() == list(range(60))


def test_w4_views_of_views_are_sent() -> None:
    data = Concat({"one": make_data(20), "two": make_data(30)})
    [batch] = Loader(data, 50, num_workers=1, multiprocessing_context="spawn")
    assert batch["source"].sum() == 30


def test_workers_end_with_the_iteration() -> None:
    batches = iter(Loader(make_data(), 5, num_workers=1))
    next(batches)
    [worker] = batches._engine._results._workers
    del batches
    worker.join(5)
    assert not worker.is_alive()


def test_e7_worker_that_is_at_work_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch waits as long for each worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 50.0)
    loader = Loader(make_data(), 10, num_workers=2, transform=time_out)
    batches = iter(loader)
    workers = batches._engine._results._workers
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 25
    assert not any(worker.is_alive() for worker in workers)


def test_timeout_of_a_worker_is_a_timeout_error() -> None:
    loader = Loader(make_data(), 10, num_workers=1, timeout=1.0, transform=time_out)
    with pytest.raises(TimeoutError, match="no batch from a worker process"):
        next(iter(loader))


def time_out(batch: TensorDict) -> TensorDict:
    time.sleep(30)
    return batch
