"""Gather the results of several processes in one process."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict

RANKS = 2
ROWS = 4


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rollout(rank: int) -> TensorDict:
    """Build the results of one process."""
    generator = torch.Generator().manual_seed(rank)
    return TensorDict(
        {
            "observation": torch.rand(ROWS, 3, generator=generator),
            "info": {"step": torch.arange(ROWS) + 100 * rank, "done": torch.arange(ROWS) == ROWS - 1},
        },
        batch_size=[ROWS],
    )


def worker(rank: int, port: int) -> None:
    """Run one process; only rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mine = rollout(rank)

    # Stack the collections of the other processes into a preallocated one.
    if rank == 0:
        others = mine.clone().zero_().expand(RANKS - 1, ROWS).clone()
        others.gather_and_stack(0)
        everything = torch.cat([mine.unsqueeze(0), others])
        print("gathered:", everything.batch_size, everything["info", "step"].tolist())
        last = everything[everything["info", "done"]]
        print("last rows:", last.batch_size, round(last["observation"].sum().item(), 5))
    else:
        mine.gather_and_stack(0)

    # Sum over all processes, on all of them.
    total = mine.select("observation").clone()
    total.all_reduce()
    if rank == 0:
        print("reduced:", round(total["observation"].sum().item(), 5))

    # Send the parameters in one message from rank 0 to rank 1, which sends their sum back.
    params = TensorDict(
        {"weight": torch.eye(2) * (1 - rank), "bias": torch.ones(2) * (1 - rank)}
    ).consolidate()
    answer = TensorDict({"sum": torch.zeros(1)})
    if rank == 0:
        params.send(1)
        answer.recv(1)
        print("answer:", answer["sum"].item())
    else:
        params.recv(0)
        answer["sum"] = params.sum(reduce=True).reshape(1)
        answer.send(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(free_port(),), nprocs=RANKS)
