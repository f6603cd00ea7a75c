"""The networks of the programs."""

from __future__ import annotations

from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator


def make_actor() -> ProbabilisticActor:
    """Build a policy with a squashed normal distribution."""
    net = nn.Sequential(MLP(2, 2, num_cells=[16, 16]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        return_log_prob=True,
    )


def make_value() -> ValueOperator:
    """Build the value of a state."""
    return ValueOperator(MLP(2, 1, num_cells=[16, 16]), in_keys=["observation"])


def make_qvalue() -> ValueOperator:
    """Build the value of a state and an action."""
    return ValueOperator(MLP(3, 1, num_cells=[16, 16]), in_keys=["observation", "action"])
