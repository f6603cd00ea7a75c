"""Replay buffers of TorchRL on memory-mapped storage: writes, samples, slices of trajectories, dumps and loads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from episodes import rows
from report import report
from tensordict import tensorclass
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement, SliceSampler

torch.manual_seed(0)


@tensorclass
class Row:
    """A row as a tensorclass."""

    value: torch.Tensor
    weight: torch.Tensor


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for storage in (LazyTensorStorage(50), LazyMemmapStorage(50, scratch_dir=folder / "scratch")):
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        for start in range(0, 80, 20):
            report("positions", buffer.extend(rows(start, 20)))
        buffer.add(rows(80, 1)[0])
        batch = buffer.sample()
        report(type(storage).__name__, len(buffer), batch["episode"], batch["next", "reward"], batch["index"])
        report("range", buffer[10:14]["episode"], buffer[torch.tensor([0, 3])]["image"].sum((1, 2)))
        buffer.dumps(folder / "dump")
        again = TensorDictReplayBuffer(storage=type(storage)(50), batch_size=8)
        again.loads(folder / "dump")
        report("loaded", len(again), again[:]["episode"], again[:]["image"].float().mean())
    slices = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(100), sampler=SliceSampler(slice_len=4, traj_key="episode"), batch_size=16
    )
    slices.extend(rows(0, 100))
    batch = slices.sample()
    report(
        "slices",
        batch["episode"],
        batch["next", "reward"].squeeze(-1),
        sorted(map(str, batch.keys(True, True))),
    )
    every = ReplayBuffer(storage=LazyMemmapStorage(20), sampler=SamplerWithoutReplacement(), batch_size=5)
    every.extend(rows(0, 20))
    report("epoch", sorted(int(x) for batch in every for x in batch["next", "reward"]))
    classes = ReplayBuffer(storage=LazyMemmapStorage(20), batch_size=5)
    classes.extend(Row(torch.arange(20.0).view(10, 2), torch.ones(10), batch_size=[10]))
    batch = classes.sample()
    report("classes", type(batch).__name__, batch.value, batch.weight, list(batch.batch_size))
