"""from_modules and lazy modules, whose parameters have no shape before the first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from td_core import StructureError, from_modules


def make() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    "modules", [[make(), make()], [make(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))]]
)
def test_from_modules_of_lazy_modules_raises_naming_the_ways(modules):
    with pytest.raises(StructureError) as caught:
        from_modules(*modules)
    assert str(caught.value) == (
        "cannot stack the modules: key ('0', 'weight') has no shape yet; call each module once before, or pass "
        "lazy_stack=True, which keeps the modules' own parameters"
    )


def test_from_modules_after_first_call_stacks_parameters():
    modules = [make(), make()]
    kept = from_modules(*modules, lazy_stack=True)
    for module in modules:
        module(torch.ones(2, 3))
    params = from_modules(*modules)
    assert params["0", "weight"].shape == kept["0", "weight"].shape == (2, 4, 3)
    assert torch.equal(params["0", "weight"][1], modules[1][0].weight)
