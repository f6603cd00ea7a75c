"""PPO with TorchRL: collector, generalized advantage, clipped loss, two epochs of minibatches."""

from __future__ import annotations

import torch
from models import make_actor, make_value
from point_env import PointEnv
from report import report
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

torch.manual_seed(0)
actor, critic = make_actor(), make_value()
collector = Collector(PointEnv(), actor, frames_per_batch=160, total_frames=480)
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(160), sampler=SamplerWithoutReplacement(), batch_size=40
)
optim = torch.optim.Adam(loss_module.parameters(), 1e-2)

for number, data in enumerate(collector):
    for _ in range(2):
        with torch.no_grad():
            advantage(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for batch in buffer:
            losses = loss_module(batch)
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optim.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optim.step()
    report(f"batch {number}", data["next", "reward"].mean(), data["advantage"].std(), loss)
report("shape", list(data.batch_size), data.names)
report("keys", sorted(map(str, data.keys(True, True))))
report("parameters", *(parameter.norm() for parameter in loss_module.parameters()))
state = loss_module.state_dict()
report("state", sorted(state), loss_module.load_state_dict(state))
collector.shutdown()
