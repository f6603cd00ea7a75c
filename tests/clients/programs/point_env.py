"""A small environment of TorchRL: a point on a line that is pushed towards the origin."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

STEPS = 20


class PointEnv(EnvBase):
    """A point with a position and a velocity; the reward is minus the distance from the origin. All points are reset together."""

    def __init__(self, batch: int = 4, seed: int = 0) -> None:
        super().__init__(batch_size=[batch])
        self.observation_spec = Composite(
            observation=Unbounded((batch, 2)),
            step=Unbounded((batch, 1), dtype=torch.int64),
            shape=(batch,),
        )
        self.action_spec = Bounded(-1, 1, (batch, 1))
        self.reward_spec = Unbounded((batch, 1))
        self.set_seed(seed)

    def _reset(self, tensordict: TensorDict | None = None, **kwargs: object) -> TensorDict:
        state = torch.rand(*self.batch_size, 2, generator=self.generator) * 2 - 1
        return TensorDict(
            {"observation": state, "step": torch.zeros(*self.batch_size, 1, dtype=torch.int64)},
            batch_size=self.batch_size,
        )

    def _step(self, tensordict: TensorDict) -> TensorDict:
        position, velocity = tensordict["observation"].unbind(-1)
        velocity = velocity * 0.9 + tensordict["action"].squeeze(-1) * 0.2
        position = position + velocity * 0.2
        step = tensordict["step"] + 1
        return TensorDict(
            {
                "observation": torch.stack([position, velocity], -1),
                "step": step,
                "reward": -position.abs().unsqueeze(-1),
                "done": step >= STEPS,
                "terminated": torch.zeros_like(step, dtype=torch.bool),
            },
            batch_size=self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        self.generator = torch.Generator().manual_seed(seed or 0)


def make_env() -> PointEnv:
    """Build the environment, in the main process or in a worker."""
    return PointEnv()
