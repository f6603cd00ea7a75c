"""The categorical distribution of one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as dist
from torch.distributions import constraints


def rand_one_hot(values: Tensor, do_softmax: bool = True) -> Tensor:
    """Draw one-hot vectors with given probabilities.

    Args:
        values: logits of shape (..., n).
        do_softmax: False if ``values`` are probabilities that sum to 1 along the last dim.

    Returns:
        An int64 tensor of the same shape with a single 1 along the last dim.

    Raises:
        ValueError: ``values`` has no dims.

    >>> rand_one_hot(torch.tensor([[0.0, 100.0], [100.0, 0.0]]))
    tensor([[0, 1],
            [1, 0]])
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"rand_one_hot() takes a tensor; got {type(values).__name__}")
    if not values.ndim:
        raise ValueError("rand_one_hot() draws along the last dim of its input; got a tensor without dims")
    # softmax() is slow on a CPU if the last dim is short, so the draws are multiplied by the sum of the weights instead.
    weights = (values - values.amax(-1, keepdim=True)).exp() if do_softmax else values
    below = weights.cumsum(-1)
    total = below[..., -1:]
    drawn = torch.rand((*values.shape[:-1], 1), dtype=below.dtype, device=below.device) * total
    # A draw can be rounded up to the total; the second condition then selects the last index of positive probability.
    index = ((below <= drawn) & (below < total)).sum(-1, keepdim=True)
    return torch.zeros_like(values, dtype=torch.long).scatter(-1, index, 1)


def _make_one_hot(index: Tensor, size: int) -> Tensor:
    # torch.nn.functional.one_hot() copies the largest index to the CPU, which synchronizes with a GPU.
    return (torch.arange(size, device=index.device) == index.unsqueeze(-1)).long()


class OneHotCategorical(dist.Categorical):
    """A categorical distribution whose samples are one-hot vectors of dtype int64.

    ``rsample`` draws one-hot vectors of the dtype of the logits. Their gradients are those of a relaxed sample at
    temperature 1 (straight-through estimator).

    Args:
        logits: unnormalized log-probabilities of shape (..., n); a last dim of size 1 is removed.
        probs: unnormalized probabilities of shape (..., n), instead of the logits.
        **kwargs: arguments of ``torch.distributions.Categorical``.

    Raises:
        ValueError: neither ``logits`` nor ``probs`` is given, or both are.

    >>> choice = OneHotCategorical(logits=torch.tensor([0.0, 5.0, 1.0]))
    >>> choice.mode, choice.event_shape
    (tensor([0, 1, 0]), torch.Size([3]))
    >>> choice.log_prob(choice.mode) == choice.logits[1]
    tensor(True)
    """

    arg_constraints = {"probs": constraints.simplex, "logits": constraints.real_vector}  # noqa: RUF012
    support = constraints.one_hot
    has_rsample = False
    num_params = 1

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None, **kwargs: Any) -> None:
        if (logits is None) == (probs is None):
            raise ValueError(
                f"OneHotCategorical takes logits or probs; got {'both' if probs is not None else 'neither'}"
            )
        if logits is None:
            super().__init__(probs=_squeeze_last(probs), **kwargs)
        else:
            super().__init__(logits=_squeeze_last(logits), **kwargs)

    def expand(
        self, batch_shape: Sequence[int], _instance: OneHotCategorical | None = None
    ) -> OneHotCategorical:
        """Return a distribution with its batch dims expanded to ``batch_shape``."""
        made = self._get_checked_instance(OneHotCategorical, _instance)  # type: ignore[no-untyped-call]
        new: OneHotCategorical = super().expand(batch_shape, made)  # type: ignore[no-untyped-call]
        return new

    @property
    def event_shape(self) -> torch.Size:
        """Shape of a sample without batch dims."""
        # The attribute of the base class is empty, because its samples are category indices.
        return self._param.shape[-1:]

    @property
    def mode(self) -> Tensor:
        """The one-hot vector of the most probable category; of several, the first."""
        return _make_one_hot(self._param.argmax(-1), self._num_events)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode, see ``mode``."""
        return self.mode

    @property
    def mean(self) -> Tensor:
        """The mean of the one-hot vectors: the probabilities."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """The variance of each element of the one-hot vectors."""
        return self.probs * (1 - self.probs)

    def sample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw one-hot vectors of dtype int64."""
        drawn = super().sample(torch.Size(sample_shape or ()))  # type: ignore[no-untyped-call]
        return _make_one_hot(drawn, self._num_events)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw one-hot vectors with the gradients of a relaxed sample at temperature 1."""
        logits = self.logits.expand(torch.Size(sample_shape or ()) + self._param.shape)
        relaxed: Tensor = dist.RelaxedOneHotCategorical(logits.new_ones(()), logits=logits).rsample()
        hard = torch.zeros_like(relaxed).scatter(-1, relaxed.argmax(-1, keepdim=True), 1.0)
        return hard - relaxed.detach() + relaxed

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of vectors; the largest element of a vector is its category.

        Args:
            value: vectors of shape (..., n) and any dtype.
        """
        if value.ndim == 0 or value.shape[-1] != self._num_events:
            raise ValueError(
                f"the values of this OneHotCategorical have {self._num_events} components in their last dim; "
                f"got a value of shape {list(value.shape)}"
            )
        value = value.to(torch.int8) if value.dtype is torch.bool else value
        log_prob: Tensor = super().log_prob(value.argmax(-1))  # type: ignore[no-untyped-call]
        return log_prob

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all one-hot vectors, along a new first dim."""
        support = super().enumerate_support(expand)  # type: ignore[no-untyped-call]
        return _make_one_hot(support, self._num_events)

    def _validate_sample(self, value: Tensor) -> None:
        # The base class passes category indices here, not the one-hot vectors of the support.
        pass


def _squeeze_last(param: Any) -> Any:
    if not isinstance(param, Tensor):
        raise TypeError(
            f"the probs or logits of a OneHotCategorical are a tensor; got {type(param).__name__}"
        )
    return param.squeeze(-1) if param.ndim > 1 and param.shape[-1] == 1 else param
