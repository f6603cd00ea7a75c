"""PPO with rsl_rl: observations as collections, the rollout storage, minibatches, a recurrent policy, saving and loading."""

from __future__ import annotations

import contextlib
import io
import tempfile

import torch
from report import report
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Cart(VecEnv):
    """Carts on a line, which are pushed towards the origin."""

    num_envs, num_actions, max_episode_length, device, cfg = 8, 1, 10, "cpu", {}

    def __init__(self) -> None:
        self.state = torch.randn(self.num_envs, 2)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)

    def get_observations(self) -> TensorDict:
        return TensorDict(
            {"policy": self.state.clone(), "extra": self.state.norm(dim=-1, keepdim=True)},
            batch_size=[self.num_envs],
        )

    def step(
        self, actions: torch.Tensor
    ) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        position, speed = self.state.unbind(-1)
        speed = 0.9 * speed + 0.1 * actions[:, 0]
        self.state = torch.stack([position + 0.1 * speed, speed], -1)
        self.episode_length_buf += 1
        over = self.episode_length_buf >= self.max_episode_length
        self.state[over] = torch.randn(int(over.sum()), 2)
        self.episode_length_buf[over] = 0
        return self.get_observations(), -position.abs(), over.long(), {"time_outs": over}


def make_config(model: dict[str, object]) -> dict[str, object]:
    """Return the configuration of a runner."""
    network = {"hidden_dims": [16], "obs_normalization": True, **model}
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
    return {
        "num_steps_per_env": 12,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "extra"]},
        "actor": {**network, "distribution_cfg": noise},
        "critic": network,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 4},
    }


MODELS = {
    "mlp": {"class_name": "MLPModel"},
    "rnn": {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 8, "rnn_num_layers": 1},
}
for name, model in MODELS.items():
    torch.manual_seed(0)
    env = Cart()
    with contextlib.redirect_stdout(io.StringIO()):  # the runner prints times
        runner = OnPolicyRunner(env, make_config(model))
        runner.learn(2, init_at_random_ep_len=True)
    policy = runner.alg.get_policy()
    report(f"{name} parameters", *(parameter.norm() for parameter in policy.parameters()))
    report(f"{name} state", env.state)
    with tempfile.NamedTemporaryFile() as file, contextlib.redirect_stdout(io.StringIO()):
        torch.save(runner.alg.save(), file.name)
        saved = torch.load(file.name, weights_only=False)
    report(f"{name} saved", sorted(saved))
    with torch.inference_mode():
        report(f"{name} actions", runner.get_inference_policy()(env.get_observations()))
