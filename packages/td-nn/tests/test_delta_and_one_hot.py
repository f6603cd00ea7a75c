"""The distributions Delta and OneHotCategorical, and rand_one_hot()."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist

from td_core.spi import RULES
from td_nn import Delta, OneHotCategorical, rand_one_hot

INF = torch.inf


@pytest.mark.parametrize(
    ("options", "batch", "event"),
    [
        ({}, (3,), (2,)),
        ({"batch_shape": (3, 2)}, (3, 2), ()),
        ({"event_shape": (3, 2)}, (), (3, 2)),
        ({"event_shape": ()}, (3, 2), ()),
        ({"batch_shape": (3,), "event_shape": (2,)}, (3,), (2,)),
    ],
)
def test_delta_batch_and_event_shape_split_param(options, batch, event):
    made = Delta(torch.zeros(3, 2), **options)
    assert (made.batch_shape, made.event_shape) == (batch, event)
    value = torch.zeros(4, 3, 2)
    value[0, 1, 1] = 1
    expected = torch.full((4, 3, 2), INF)
    expected[0, 1, 1] = -INF
    if event:
        expected = expected.flatten(-len(event)).min(-1).values
    assert torch.equal(made.log_prob(value), expected)
    assert made.expand((5, *batch)).log_prob(torch.zeros(3, 2)).shape == (5, *batch)


@pytest.mark.parametrize(
    ("param", "options", "error", "message"),
    [
        (torch.zeros(3, 2), {"batch_shape": (2,)}, ValueError, r"value of shape \[3, 2\] with batch_shape \[2\]"),
        (torch.zeros(3, 2), {"event_shape": (3,)}, ValueError, r"event_shape \[3\]"),
        (torch.zeros(3), {"batch_shape": (3,), "event_shape": (1,)}, ValueError, "batch_shape and then event_shape"),
        (1.0, {}, TypeError, "the value of a Delta is a tensor; got 1.0"),
    ],
)  # fmt: skip
def test_delta_wrong_shape_raises(param, options, error, message):
    with pytest.raises(error, match=message):
        Delta(param, **options)


def test_delta_sample_returns_param_with_gradients():
    param = torch.ones(3, 2, requires_grad=True)
    made = Delta(param)
    assert made.has_rsample is False
    for drawn in (made.sample((4,)), made.rsample((4,))):
        assert drawn.shape == (4, 3, 2)
        assert drawn.requires_grad
    for name in ("mean", "mode", "deterministic_sample"):
        assert getattr(made, name) is param
    for name in ("variance", "stddev"):
        with pytest.raises(NotImplementedError):
            getattr(made, name)
    with pytest.raises(NotImplementedError):
        made.entropy()


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        ([1.0, 2.0 + 1e-7], {}, INF),
        ([1.0, 2.1], {}, -INF),
        ([1.0, 2.1], {"atol": 0.2}, INF),
        ([1.0, 2.1], {"rtol": 0.2}, INF),
    ],
)
def test_delta_log_prob_within_tolerance_is_infinite(value, options, expected):
    assert Delta(torch.tensor([1.0, 2.0]), **options).log_prob(torch.tensor(value)) == expected


def test_delta_log_prob_of_integers_is_infinite():
    assert Delta(torch.tensor([1, 2])).log_prob(torch.tensor([1, 2])) == INF


@pytest.mark.parametrize("value", [torch.zeros(5), torch.zeros(3, 1), torch.tensor(0.0)])
def test_delta_log_prob_wrong_event_shape_raises(value):
    with pytest.raises(ValueError, match=r"a value of this Delta are \[2\]; got a value of shape"):
        Delta(torch.zeros(3, 2)).log_prob(value)


def test_delta_update_keeps_number_of_event_dims():
    made = Delta(torch.zeros(3, 2))
    made.update(torch.ones(5, 4, 7))
    assert (made.batch_shape, made.event_shape) == ((5, 4), (7,))
    with pytest.raises(ValueError, match="this Delta has 1 event dims"):
        made.update(torch.tensor(1.0))


LOGITS = torch.tensor([[0.1, 2.0, 0.3], [1.0, 1.0, 0.0]])


@pytest.mark.parametrize("by", ["logits", "probs"])
def test_one_hot_statistics_equal_categorical(by):
    given = LOGITS if by == "logits" else LOGITS.softmax(-1)
    made, base = OneHotCategorical(**{by: given}), dist.Categorical(**{by: given})
    assert (made.batch_shape, made.event_shape) == ((2,), (3,))
    assert made.num_params == 1
    torch.testing.assert_close(made.entropy(), base.entropy())
    torch.testing.assert_close(made.mean, base.probs)
    torch.testing.assert_close(made.variance, base.probs * (1 - base.probs))
    assert made.mode.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert torch.equal(made.deterministic_sample, made.mode)
    assert made.enumerate_support().shape == (3, 2, 3)
    torch.testing.assert_close(made.log_prob(made.mode), base.log_prob(base.mode))
    wide = made.expand((4, 2))
    assert (wide.batch_shape, wide.event_shape, wide.sample().shape) == ((4, 2), (3,), (4, 2, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.uint8])
def test_one_hot_log_prob_accepts_any_dtype(dtype):
    made = OneHotCategorical(logits=LOGITS)
    value = torch.tensor([[0, 0, 1], [0, 1, 0]]).to(dtype)
    torch.testing.assert_close(made.log_prob(value), LOGITS.log_softmax(-1)[[0, 1], [2, 1]])
    assert made.log_prob(value.expand(5, 2, 3)).shape == (5, 2)


def test_one_hot_sample_returns_int64_one_hot_vectors():
    torch.manual_seed(0)
    made = OneHotCategorical(logits=LOGITS)
    for shape in ((), (4,), (2, 4)):
        drawn = made.sample(shape)
        assert drawn.shape == (*shape, 2, 3)
        assert drawn.dtype is torch.int64
        assert (drawn.sum(-1) == 1).all()


def test_one_hot_rsample_has_straight_through_gradients():
    logits = LOGITS.clone().requires_grad_()
    torch.manual_seed(0)
    made = OneHotCategorical(logits=logits)
    assert made.has_rsample is False
    drawn = made.rsample((5,))
    assert drawn.shape == (5, 2, 3)
    assert torch.equal(drawn.detach().unique(), torch.tensor([0.0, 1.0]))
    torch.manual_seed(0)
    relaxed = torch.distributions.RelaxedOneHotCategorical(torch.tensor(1.0), logits=LOGITS).rsample((5,))
    assert torch.equal(drawn.argmax(-1), relaxed.argmax(-1))
    (drawn * torch.arange(3.0)).sum().backward()
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "what"), [({}, "neither"), ({"logits": LOGITS, "probs": LOGITS.softmax(-1)}, "both")]
)
def test_one_hot_both_or_no_parameters_raises(options, what):
    with pytest.raises(ValueError, match=f"takes logits or probs; got {what}"):
        OneHotCategorical(**options)


def test_one_hot_removes_last_dim_of_size_one():
    made = OneHotCategorical(logits=LOGITS[0].unsqueeze(-1))
    assert (made.batch_shape, made.event_shape) == ((), (3,))


@pytest.mark.parametrize("value", [torch.zeros(2, 4), torch.tensor(1.0)])
def test_one_hot_log_prob_wrong_shape_raises(value):
    with pytest.raises(ValueError, match="have 3 components in their last dim"):
        OneHotCategorical(logits=LOGITS).log_prob(value)


@pytest.mark.parametrize("draw", ["sample", "rsample", "rand_one_hot", "probs"])
def test_one_hot_draws_match_probabilities(draw):
    torch.manual_seed(0)
    made = OneHotCategorical(logits=LOGITS)
    wide = LOGITS.expand(20000, 2, 3)
    drawn = {
        "sample": lambda: made.sample((20000,)),
        "rsample": lambda: made.rsample((20000,)),
        "rand_one_hot": lambda: rand_one_hot(wide),
        "probs": lambda: rand_one_hot(wide.softmax(-1), do_softmax=False),
    }[draw]()
    torch.testing.assert_close(drawn.float().mean(0), LOGITS.softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize("drawn", [0.0, 1.0])
@pytest.mark.parametrize("do_softmax", [True, False])
def test_rand_one_hot_extreme_draw_is_possible_value(monkeypatch, drawn, do_softmax):
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, drawn, **options))
    result = rand_one_hot(probs.log() if do_softmax else probs, do_softmax)
    assert result.tolist() == ([[0, 1, 0, 0]] if drawn == 0.0 else [[0, 0, 1, 0]])


def test_rand_one_hot_returns_int64_of_input_shape():
    drawn = rand_one_hot(torch.zeros(5, 4, 3))
    assert (drawn.shape, drawn.dtype) == ((5, 4, 3), torch.int64)
    assert (drawn.sum(-1) == 1).all()
    with pytest.raises(ValueError, match="a tensor without dims"):
        rand_one_hot(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["atol", "rtol"])
@pytest.mark.parametrize("shape", [(), (2,), (3, 1)])
def test_delta_takes_tensors_as_tolerances(name, shape):
    other = "rtol" if name == "atol" else "atol"
    at = Delta(torch.ones(3, 2), **{name: torch.full(shape, 0.1), other: 0.0})
    assert at.log_prob(torch.full((3, 2), 1.05)).tolist() == [torch.inf] * 3
    assert at.log_prob(torch.full((3, 2), 1.5)).tolist() == [-torch.inf] * 3
    assert at.log_prob(torch.full((3, 2), torch.inf)).tolist() == [-torch.inf] * 3


def test_delta_in_program_of_tensordict_broadcasts(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    assert Delta(torch.zeros(2, 1)).log_prob(torch.tensor([[0.0, 0.0], [0.0, 1.0]])).tolist() == [
        torch.inf,
        -torch.inf,
    ]
    assert Delta(torch.zeros(3), batch_shape=(5, 3), event_shape=()).sample().shape == (3,)
