"""A program with distributions for the type checkers, which must accept it and its asserted types."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from typing_extensions import assert_type

from td_core import TensorDict
from td_nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    Delta,
    InteractionType,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TruncatedNormal,
    composite_lp_aggregate,
    inv_softplus,
    mappings,
    rand_one_hot,
    set_composite_lp_aggregate,
    set_interaction_type,
)


def act(data: TensorDict) -> Tensor:
    """Call a policy with a collection and with tensors."""
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    head: ProbabilisticTensorDictModule[tuple[Tensor, Tensor]] = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=Normal,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
        aggregate=False,
    )
    assert_type(head(data), TensorDict)
    assert_type(head(torch.zeros(2), torch.ones(2)), tuple[Tensor, Tensor])
    policy = ProbabilisticTensorDictSequential(TensorDictModule(net, ["x"], ["loc", "scale"]), head)
    with set_interaction_type("mean"):
        assert_type(policy(data), TensorDict)
    assert_type(policy.dist_sample_keys, list[str | tuple[str, ...]])
    assert_type(policy.num_samples, torch.Size)
    score: Tensor = policy.log_prob(data)
    return score


def compose(params: TensorDict) -> TensorDict:
    """Draw from several distributions."""
    both = CompositeDistribution(params, {"move": Normal, "jump": Categorical}, aggregate=True)
    with set_composite_lp_aggregate(True):
        assert_type(composite_lp_aggregate(), bool)
    assert_type(both.rsample((4,)), TensorDict)
    assert_type(both.log_prob_composite(both.sample()).batch_size, torch.Size)
    return both.deterministic_sample


def make(logits: Tensor) -> list[Tensor]:
    """Use distributions and mappings without modules."""
    scale = AddStateIndependentNormalScale(3)
    assert_type(inv_softplus(1.0), float)
    return [
        Delta(logits).sample(),
        OneHotCategorical(logits=logits).mode,
        TruncatedNormal(logits, 1.0, -1.0, 1.0).rsample((2,)),
        rand_one_hot(logits),
        mappings("exp")(logits),
        *scale.forward(logits),
    ]
