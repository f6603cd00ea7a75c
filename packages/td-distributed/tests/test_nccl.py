"""Collectives over nccl, with one process per GPU; with one GPU, a group of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from td_core import TensorDict
from td_distributed._group import Group


def make_tree(value: float) -> Any:
    leaves = {"a": torch.full((3,), value), "n": {"b": torch.full((2, 1 << 18), value, dtype=torch.float16)}}
    return TensorDict(leaves, device="cuda")


def assert_same(found: Any, value: float) -> None:
    assert found["a"].device.type == found["n", "b"].device.type == "cuda"
    assert found["a"].unique().tolist() == found["n", "b"].unique().tolist() == [value]


def call_collectives(rank: int) -> None:
    world = dist.get_world_size()
    total = world * (world + 1) / 2
    for make in (make_tree, lambda value: make_tree(value).consolidate()):
        mine = make(rank + 1.0)
        mine.all_reduce()
        assert_same(mine, total)
        mine = make(rank + 1.0)
        for work in mine.all_reduce(dist.ReduceOp.MAX, async_op=True, bucket_bytes=1):
            work.wait()
        assert_same(mine, world)
        mine = make(rank + 1.0)
        mine.reduce(0)
        assert_same(mine, total if rank == 0 else rank + 1.0)
        assert_same(make(rank).broadcast(world - 1), world - 1)
        assert_same(TensorDict().scatter(0, [make(i) for i in range(world)] if rank == 0 else None), rank)
        for i, item in enumerate(make(rank).all_gather()):
            assert_same(item, i)
    assert make_tree(1).cpu().broadcast(0, device="cpu")["a"].device.type == "cpu"
    on_the_host = make_tree(rank + 1.0).cpu()
    on_the_host.all_reduce()
    assert on_the_host["a"].tolist() == [total] * 3 and on_the_host["a"].device.type == "cpu"


def test_collectives_nccl_keep_content(gpus: Any) -> None:
    assert gpus.run(call_collectives) == [None] * gpus.world


def send_around_ring(rank: int) -> None:
    world = dist.get_world_size()
    following, previous = (rank + 1) % world, (rank - 1) % world
    for options in ({}, {"consolidated": True}, {"wire": "reference"}):
        target = make_tree(-1)
        steps = [
            lambda o=options: make_tree(rank).send(following, **o),
            lambda t=target, o=options: t.recv(previous, **o),
        ]
        for step in steps if rank % 2 == 0 else reversed(steps):
            step()
        assert_same(target, previous)


def test_send_recv_nccl_keeps_content(gpus: Any) -> None:
    if gpus.world % 2:
        pytest.skip("needs an even number of GPUs")
    assert gpus.run(send_around_ring) == [None] * gpus.world


def send_over_gloo(rank: int) -> None:
    for make in (make_tree, lambda value: make_tree(value).consolidate()):
        mine = make(rank + 1.0)
        mine.all_reduce()
        assert_same(mine, 3)
        for options in ({}, {"consolidated": True}, {"wire": "reference"}):
            if rank == 0:
                make(7).send(1, **options)
            else:
                target = make_tree(-1)
                target.recv(0, **options)
                assert_same(target, 7)
        # gloo messages are on the CPU, so the received collection is, too.
        found = [*make(rank).all_gather(), TensorDict().scatter(0, [make(0), make(1)] if rank == 0 else None)]
        found += [make(rank).broadcast(1)] if rank == 0 else [make(rank).broadcast(1).cpu()]
        if rank == 0:
            make(4).init_remote(1)
        else:
            found.append(TensorDict.from_remote_init(0))
        for item in found:
            assert item.device is not None and item.device.type == item["n"].device.type == "cpu"
            assert item["a"].device.type == item["n", "b"].device.type == "cpu"
        assert_same(make(rank).broadcast(1, device="cuda"), 1)


def test_send_cuda_leaves_over_gloo_keeps_content(two: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    assert two.run(send_over_gloo) == [None, None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl"])
def test_collectives_mixed_backends_keep_content_and_device(backend: str | None) -> None:
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mine = make_tree(3)
        assert Group(None).own_device() == mine["a"].device  # so leaves are not copied through the CPU
        mine.all_reduce()
        assert_same(mine, 3)
        mixed = TensorDict({"gpu": torch.ones(2, device="cuda"), "host": torch.ones(2)})
        mixed.reduce(0)
        assert [(leaf.device.type, leaf.tolist()) for leaf in mixed.values()] == [
            ("cuda", [1, 1]),
            ("cpu", [1, 1]),
        ]
        assert mine.all_gather()[0]["a"].tolist() == [3] * 3
        assert TensorDict().scatter(0, [mine])["a"].tolist() == [3] * 3
    finally:
        dist.destroy_process_group()
