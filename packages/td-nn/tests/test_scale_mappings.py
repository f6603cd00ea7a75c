"""NormalParamExtractor, AddStateIndependentNormalScale, and the mappings to positive scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from td_nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    add_custom_mapping,
    biased_softplus,
    expln,
    inv_softplus,
    mappings,
)

X = torch.tensor([-2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softplus", nn.functional.softplus(X)),
        ("exp", X.exp()),
        ("relu", X.relu()),
        ("none", X),
        ("expln", torch.tensor([math.exp(-2), 1.0, math.log(4) + 1])),
        ("biased_softplus", nn.functional.softplus(X + math.log(math.expm1(0.99))) + 0.01),
        ("biased_softplus_2.0", nn.functional.softplus(X + math.log(math.expm1(1.99))) + 0.01),
        ("biased_softplus_2_0.5", nn.functional.softplus(X + math.log(math.expm1(1.5))) + 0.5),
    ],
)
def test_mapping_by_name_computes_function(name, expected):
    torch.testing.assert_close(mappings(name)(X), expected)


@pytest.mark.parametrize(
    "name", ["biased_softplus_", "biased_softplus_x", "biased_softplus_1_2_3", "biased_softplus_1_x"]
)
def test_mapping_malformed_number_in_name_raises_value_error(name):
    with pytest.raises(ValueError, match=f"takes one or two numbers, .*; got '{name}'"):
        mappings(name)


@pytest.mark.parametrize(
    "make", [mappings, NormalParamExtractor, lambda name: AddStateIndependentNormalScale(scale_mapping=name)]
)
def test_mapping_unknown_name_raises_not_implemented(make):
    with pytest.raises(
        NotImplementedError, match="no mapping is named 'cube'; there are .*add_custom_mapping"
    ):
        make("cube")


def test_add_custom_mapping_existing_name_replaces_mapping():
    add_custom_mapping("twice", lambda x: x * 3)
    add_custom_mapping("twice", lambda x: x * 2)
    assert torch.equal(mappings("twice")(X), X * 2)
    assert torch.equal(NormalParamExtractor("twice")(torch.ones(2))[1], torch.tensor([2.0]))
    with pytest.raises(TypeError, match="is a function of a tensor; got 'three', 3"):
        add_custom_mapping("three", 3)


def test_biased_softplus_of_zero_returns_bias():
    made = biased_softplus(1.5, min_val=0.1)
    assert made(torch.zeros(())) == pytest.approx(1.5)
    assert made.bias == pytest.approx(math.log(math.expm1(1.4)))
    assert made.min_val == 0.1
    assert made(torch.tensor(-100.0)) == pytest.approx(0.1)


@pytest.mark.parametrize(("bias", "expected"), [(1.0, 0.54132485), (0.0, math.log(1e-6)), (1, 0.54132485)])
def test_inv_softplus_number_returns_number(bias, expected):
    assert inv_softplus(bias) == pytest.approx(expected)
    assert isinstance(inv_softplus(bias), float)
    torch.testing.assert_close(inv_softplus(torch.tensor(float(bias))), torch.tensor(expected))


def test_expln_extreme_input_has_finite_gradient():
    x = torch.tensor([-1000.0, 0.0, 1000.0], requires_grad=True)
    expln(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("size", "sizes"), [(4, (2, 2)), (5, (3, 2)), (1, (1, 0))])
def test_extract_normal_params_splits_last_dim(size, sizes):
    x, other = torch.randn(7, size), torch.ones(1)
    loc, scale, passed = NormalParamExtractor("exp")(x, other)
    assert (loc.shape, scale.shape) == ((7, sizes[0]), (7, sizes[1]))
    assert torch.equal(loc, x[:, : sizes[0]])
    torch.testing.assert_close(scale, x[:, sizes[0] :].exp())
    assert passed is other


def test_extract_normal_params_clamps_scale_to_lower_bound():
    made = NormalParamExtractor("relu", scale_lb=0.5)
    assert made(torch.full((2,), -1.0))[1] == 0.5
    assert len(made.state_dict()) == 0
    with pytest.raises(RuntimeError, match="got a tensor without dims"):
        made(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("shape", "loc"), [((3,), (2, 3)), (3, (3,)), (None, (2, 3)), ((2, 3), (5, 2, 3)), ((), ())]
)
def test_add_scale_expands_it_to_shape_of_location(shape, loc):
    made = AddStateIndependentNormalScale(shape, scale_mapping="biased_softplus_2.0")
    given, other = torch.zeros(loc), torch.ones(1)
    found, scale, passed = made(given, other)
    assert found is given
    assert passed is other
    assert scale.shape == loc
    torch.testing.assert_close(scale.detach(), torch.full(loc, 2.0))


@pytest.mark.parametrize("loc", [(4,), (2, 1), ()])
def test_add_scale_wrong_location_shape_raises(loc):
    with pytest.raises(RuntimeError, match=r"the scale has shape \[3\], .* got a location of shape"):
        AddStateIndependentNormalScale(3)(torch.zeros(loc))


def test_add_scale_make_param_chooses_parameter_or_buffer():
    made = AddStateIndependentNormalScale(3, init_value=2.0, scale_lb=9.0)
    assert [name for name, _ in made.named_parameters()] == ["state_independent_scale"]
    assert (made(torch.zeros(3))[1] == 9.0).all()
    fixed = AddStateIndependentNormalScale(3, make_param=False, init_value=2.0, device="cpu")
    assert list(fixed.parameters()) == []
    assert fixed.state_dict()["state_independent_scale"].tolist() == [2.0, 2.0, 2.0]
