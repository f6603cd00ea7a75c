"""Attributions with tdhook: integrated gradients of a small network."""

from __future__ import annotations

import torch
from report import report
from tdhook.attribution import IntegratedGradients
from tensordict import TensorDict
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
inputs = torch.randn(3, 4)


def select_score(outputs: TensorDict, _: object) -> TensorDict:
    """Select the first output."""
    return TensorDict(score=outputs["output"][..., 0], batch_size=outputs.batch_size)


data = TensorDict({"input": inputs, ("baseline", "input"): torch.zeros_like(inputs)}, batch_size=[3])
with IntegratedGradients(init_attr_targets=select_score).prepare(model) as hooked:
    result = hooked(data)
for key in sorted(result.keys(True, True), key=str):
    report(str(key), result[key])
