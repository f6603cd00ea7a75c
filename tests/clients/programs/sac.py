"""SAC with TorchRL: off-policy, a memory-mapped replay buffer, target networks that follow."""

from __future__ import annotations

import tempfile

import torch
from models import make_actor, make_qvalue
from point_env import PointEnv
from report import report
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.objectives import SACLoss, SoftUpdate

torch.manual_seed(0)
actor, qvalue = make_actor(), make_qvalue()
loss_module = SACLoss(actor, qvalue, num_qvalue_nets=2, target_entropy=-1.0)
loss_module.make_value_estimator(gamma=0.99)
updater = SoftUpdate(loss_module, eps=0.95)
optim = torch.optim.Adam(loss_module.parameters(), 3e-3)
collector = Collector(PointEnv(), actor, frames_per_batch=80, total_frames=400)

with tempfile.TemporaryDirectory() as folder:
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=folder), batch_size=32)
    for number, data in enumerate(collector):
        buffer.extend(data.reshape(-1))
        for _ in range(4):
            batch = buffer.sample()
            losses = loss_module(batch)
            loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            optim.zero_grad()
            loss.backward()
            optim.step()
            updater.step()
        report(
            f"batch {number}",
            losses["loss_actor"],
            losses["loss_qvalue"],
            losses["loss_alpha"],
            losses["alpha"],
        )
    report("buffer", len(buffer), list(batch.batch_size), sorted(map(str, batch.keys(True, True))))
    report("priority", buffer[:3]["observation"])
report("targets", *(value.norm() for value in loss_module.target_qvalue_network_params.values(True, True)))
report(
    "batch size",
    list(loss_module.qvalue_network_params.batch_size),
    loss_module.qvalue_network_params.is_locked,
)
collector.shutdown()
