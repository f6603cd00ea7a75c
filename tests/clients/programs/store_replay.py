"""Replay buffers of TorchRL on a Redis server: rows, values and tensorclasses, and a buffer that another one continues.

Rows that are bare tensors are left out: with tensordict, what is written there does not reach the server.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import fakeredis
import redis
import torch
from episodes import rows
from report import report
from tensordict import TensorDict, tensorclass
from torchrl.data import ReplayBuffer, StoreStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement, SliceSampler


@contextlib.contextmanager
def serve() -> Iterator[int]:
    """Start a server in a thread, and return its port."""
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


@contextlib.contextmanager
def start() -> Iterator[int]:
    """Start the program of the distribution, and return its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(["redis-server", "--port", str(port), "--save", ""], stdout=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:
        for _ in range(200):
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                break
            time.sleep(0.05)
    yield port
    process.kill()
    process.wait()


@tensorclass
class Row:
    """A row as a tensorclass."""

    value: torch.Tensor
    weight: torch.Tensor


def run(port: int) -> None:
    """Fill buffers on a server, and sample."""
    torch.manual_seed(0)
    place = {"host": "localhost", "port": port}
    buffer = TensorDictReplayBuffer(storage=StoreStorage(50, **place), batch_size=8)
    for begin in range(0, 80, 20):
        report("positions", buffer.extend(rows(begin, 20)))
    buffer.add(rows(80, 1)[0])
    batch = buffer.sample()
    report("rows", len(buffer), batch["episode"], batch["next", "reward"], batch["index"])
    report("range", buffer[10:14]["episode"], buffer[torch.tensor([0, 3])]["image"].sum((1, 2)))
    again = TensorDictReplayBuffer(storage=StoreStorage(50, **place), batch_size=8)
    again.load_state_dict(buffer.state_dict())
    again.extend(rows(81, 3))
    report("continued", len(again), again[:]["episode"], again[:]["image"].float().mean())
    report("seen by the other", buffer[30:36]["episode"])
    buffer.empty()
    report("emptied", len(buffer))
    slices = TensorDictReplayBuffer(
        storage=StoreStorage(100, **place),
        sampler=SliceSampler(slice_len=4, traj_key="episode"),
        batch_size=16,
    )
    slices.extend(rows(0, 100))
    batch = slices.sample()
    report("slices", batch["episode"], batch["next", "reward"].squeeze(-1))
    every = ReplayBuffer(
        storage=StoreStorage(20, **place), sampler=SamplerWithoutReplacement(), batch_size=5, prefetch=2
    )
    every.extend(rows(0, 20))
    report("epoch", sorted(int(x) for batch in every for x in batch["next", "reward"]))
    classes = ReplayBuffer(storage=StoreStorage(20, **place), batch_size=5)
    classes.extend(Row(torch.arange(20.0).view(10, 2), torch.ones(10), batch_size=[10]))
    batch = classes.sample()
    report("classes", type(batch).__name__, batch.value, batch.weight, list(batch.batch_size))
    texts = ReplayBuffer(storage=StoreStorage(6, **place), batch_size=4)
    for number in range(4):
        texts.add(TensorDict({"number": torch.tensor(number), "text": f"prompt {number}"}))
    report("texts", [(int(texts[i]["number"]), texts[i]["text"]) for i in range(4)])
    texts.extend(TensorDict({"number": torch.arange(4, 6), "text": ["a", "b"]}, [2]))
    report(
        "more texts", [texts[i]["text"] for i in range(6)], texts[1:3]["text"], list(texts.sample()["text"])
    )


with serve() as port:
    run(port)
if shutil.which("redis-server"):
    with start() as port:
        run(port)
