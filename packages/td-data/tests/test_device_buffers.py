"""Copies to a device through buffers that are kept: rules P1 to P5, with a stream that stands for one of CUDA."""

from __future__ import annotations

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from order_samples import ROWS, make_data, take_rows

from td_core import TensorDict, lazy_stack
from td_data import BlockSampler, Loader, prefetch
from td_data._device_buffers import DeviceCopies


class Copied(list[int]):
    """The buffers that were copied from, by the address of their memory; at most one copy is not yet given out."""

    most = ahead = 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Copied:
    """Make copies to the CPU take the way of CUDA, without pinned memory; count them."""
    event = SimpleNamespace(synchronize=lambda: None)
    found = Copied()

    def move(batch: Any, device: torch.device, **options: bool) -> Any:
        found.ahead += 1
        found.most = max(found.most, found.ahead)
        found.append(batch._leaves()[0].data_ptr())
        return batch.clone()

    def wait(event: Any) -> None:
        found.ahead -= 1

    def begin(self: DeviceCopies, device: torch.device, make: Any = DeviceCopies.__init__) -> None:
        make(self, device)
        self.stream = SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(DeviceCopies, "__init__", begin)
    monkeypatch.setattr("td_data._device_buffers.move", move)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=wait))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    monkeypatch.setattr("td_data._device_buffers._CANNOT_PIN", threading.Event())
    return found


def double(batch: TensorDict) -> TensorDict:
    return batch.set("row", batch["row"] * 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 0},
        {"num_threads": 3},
        {"transform": double},
        {"sampler": BlockSampler(9, shuffle=False)},
    ],
    ids=["plain", "no prefetch", "threads", "transform", "blocks"],
)
def test_p1_batches_come_through_buffers_that_are_kept(stream: Copied, options: dict[str, Any]) -> None:
    loader = Loader(make_data(), 10, device="cpu", **options)
    factor = 2 if "transform" in options else 1
    for _ in range(2):
        batches = list(loader)
        assert torch.cat(take_rows(batches)).equal(torch.arange(ROWS) * factor)
        assert batches[-1]["n", "x"].equal(make_data()["n", "x"][-3:])
    assert len(stream) == 22
    assert len(set(stream)) <= options.get("prefetch", 2) + options.get("num_threads", 1)


def test_p1_buffers_of_an_iteration_that_was_broken_off_are_replaced(stream: Copied) -> None:
    loader = Loader(make_data(), 10, device="cpu")
    for _ in range(5):
        next(iter(loader))
    assert torch.cat(take_rows(loader)).equal(torch.arange(ROWS))


def test_p2_one_batch_more_is_on_the_device(stream: Copied) -> None:
    list(Loader(make_data(), 5, device="cpu", prefetch=6, num_threads=3))
    assert stream.most == 2


def test_p3_batches_without_flat_buffers_are_moved_by_themselves(stream: Copied) -> None:
    lazy = lazy_stack([TensorDict({"row": torch.full((n,), n)}) for n in range(1, 7)])
    for batch, sizes in zip(Loader(lazy, 4, device="cpu"), ([1, 2, 3, 4], [5, 6])):
        assert [each["row"].tolist() for each in batch.unbind(0)] == [[size] * size for size in sizes]


def test_p3_buffers_are_not_memory_of_a_transform(stream: Copied) -> None:
    kept = make_data(10)
    list(
        Loader(
            make_data(40), 10, device="cpu", transform=lambda batch: kept if batch["row"][0] == 0 else batch
        )
    )
    assert kept["row"].equal(torch.arange(10))


def test_p4_memory_that_cannot_be_pinned_is_one_warning(
    stream: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("limit of the container")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    loader = Loader(make_data(), 10, device="cpu")
    with pytest.warns(UserWarning, match="copied from pageable memory, .*: limit of the container"):
        rows = take_rows(loader)
    again = take_rows(prefetch(make_data().split(10), device="cpu"))  # a second warning would be an error
    assert torch.cat(rows).equal(torch.arange(ROWS))
    assert torch.cat(again).equal(torch.arange(ROWS))


@pytest.mark.skipif(
    not hasattr(torch, "accelerator"), reason="this torch asks CUDA whether it can pin memory"
)
def test_p5_batches_of_workers_are_pinned_by_a_thread_of_the_parent(
    stream: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, bool]] = []

    def pin(self: torch.Tensor, device: object = None) -> torch.Tensor:
        pinned.append((os.getpid(), threading.current_thread() is threading.main_thread()))
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for name in ("current_device_index", "set_device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda *index: 0)
    loader = Loader(make_data(), 10, device="cpu", num_workers=1)
    assert torch.cat(take_rows(loader)).equal(torch.arange(ROWS))
    assert (os.getpid(), False) in pinned


def test_p5_batches_of_workers_come_to_the_device(device: torch.device) -> None:
    loader = Loader(make_data(40), 10, device=device, num_workers=2)
    batches = list(loader)
    assert {batch.device.type for batch in batches} == {device.type}
    assert torch.cat(take_rows(batches)).cpu().equal(torch.arange(40))
