"""Loss modules of TorchRL under vmap, for an ensemble of parameters; double Q-learning, DQN, TD3 and DDPG."""

from __future__ import annotations

import torch
from models import make_actor, make_qvalue, make_value
from report import report
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, Actor, QValueActor
from torchrl.objectives import A2CLoss, DDPGLoss, DQNLoss, IQLLoss, ReinforceLoss, SACLoss, TD3Loss
from torchrl.objectives.value import GAE, TD0Estimator, TDLambdaEstimator

torch.manual_seed(0)


def make_batch(number: int = 6) -> TensorDict:
    """Build a batch of transitions."""
    return TensorDict(
        {
            "observation": torch.randn(number, 5, 2),
            "action": torch.rand(number, 5, 1) * 2 - 1,
            "sample_log_prob": -torch.rand(number, 5),
            "action_log_prob": -torch.rand(number, 5),
            "next": {
                "observation": torch.randn(number, 5, 2),
                "reward": torch.randn(number, 5, 1),
                "done": torch.zeros(number, 5, 1, dtype=torch.bool),
                "terminated": torch.zeros(number, 5, 1, dtype=torch.bool),
            },
        },
        batch_size=[number, 5],
        names=[None, "time"],
    )


def run(name: str, loss_module: torch.nn.Module, batch: TensorDict) -> None:
    """Compute the losses and the gradients of a module."""
    losses = loss_module(batch)
    total = sum(value for key, value in losses.items() if key.startswith("loss"))
    total.backward()
    grads = [p.grad.norm() for p in loss_module.parameters() if p.grad is not None]
    report(name, sorted(losses.keys()), total, len(grads), torch.stack(grads))


batch = make_batch()
policy = Actor(MLP(2, 1, num_cells=[8]), in_keys=["observation"])
run("td3", TD3Loss(policy, make_qvalue(), bounds=(-1, 1), num_qvalue_nets=3), batch.clone())
run("ddpg", DDPGLoss(policy, make_qvalue()), batch.clone())
run("iql", IQLLoss(make_actor(), make_qvalue(), make_value()), batch.clone())
run(
    "sac",
    SACLoss(make_actor(), make_qvalue(), make_value(), num_qvalue_nets=2, target_entropy=-1.0),
    batch.clone(),
)
critic = make_value()
run("a2c", A2CLoss(make_actor(), critic), GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch.clone()))
critic = make_value()
reinforce = ReinforceLoss(make_actor(), critic)
run("reinforce", reinforce, batch.clone())
discrete = batch.clone()
discrete["action"] = torch.nn.functional.one_hot(torch.randint(3, (6, 5)), 3)
q_actor = QValueActor(MLP(2, 3, num_cells=[8]), in_keys=["observation"], spec=None, action_space="one-hot")
run("dqn", DQNLoss(q_actor, action_space="one-hot", delay_value=True), discrete)

critic = make_value()
for estimator in (
    TD0Estimator(gamma=0.9, value_network=critic),
    TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=critic),
):
    report(type(estimator).__name__, estimator(batch.clone())["advantage"].sum())

networks = [TensorDictModule(torch.nn.Linear(2, 1), ["observation"], ["value"]) for _ in range(4)]
params = TensorDict.from_modules(*networks, as_module=True)


def call(weights: TensorDict, data: TensorDict) -> TensorDict:
    """Call the first network with other weights."""
    with weights.to_module(networks[0]):
        return networks[0](data)


many = torch.vmap(call, (0, None))(params, batch.select("observation"))
report("vmap", list(many.batch_size), many["value"].sum((1, 2, 3)))
