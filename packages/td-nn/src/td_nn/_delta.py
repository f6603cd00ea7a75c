"""The Delta distribution: all its probability is at one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributions as dist
from torch.distributions import constraints

from td_core.spi import RULES


class Delta(dist.Distribution):
    """A distribution whose samples all equal ``param``.

    Args:
        param: the value, of shape (*batch_shape, *event_shape).
        atol: absolute tolerance within which a value equals ``param``, a number or a tensor that broadcasts.
        rtol: relative tolerance.
        batch_shape: leading dims of ``param``; by default those before ``event_shape``.
        event_shape: trailing dims of ``param``. By default the dims after ``batch_shape``, or the last dim if both
            shapes are left out.

    Raises:
        ValueError: ``batch_shape + event_shape`` is not the shape of ``param``.

    >>> at = Delta(torch.tensor([1.0, 2.0]))
    >>> at.sample(), at.log_prob(torch.tensor([1.0, 2.0])), at.log_prob(torch.zeros(2))
    (tensor([1., 2.]), tensor(inf), tensor(-inf))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  torch declares it as a dict
    support = constraints.real

    def __init__(
        self,
        param: Tensor,
        atol: float | Tensor = 1e-6,
        rtol: float | Tensor = 1e-6,
        batch_shape: Sequence[int] | None = None,
        event_shape: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(param, Tensor):
            raise TypeError(f"the value of a Delta is a tensor; got {param!r}")
        shape = param.shape
        if batch_shape is None and event_shape is None:
            batch, event = shape[:-1], shape[-1:]
        elif batch_shape is None:
            event = torch.Size(event_shape)  # type: ignore[arg-type]
            batch = shape[: len(shape) - len(event)]
        else:
            batch, event = torch.Size(batch_shape), torch.Size(event_shape or ())
        if batch + event != shape and not RULES.follows_tensordict:
            raise ValueError(
                f"the shape of a Delta is batch_shape and then event_shape; got a value of shape {list(shape)} with "
                f"batch_shape {None if batch_shape is None else list(batch_shape)} and event_shape "
                f"{None if event_shape is None else list(event_shape)}"
            )
        super().__init__(batch, event, validate_args=False)
        self.param = param
        self.atol = atol
        self.rtol = rtol

    def update(self, param: Tensor) -> None:
        """Replace the value by one with the same number of event dims.

        >>> at = Delta(torch.zeros(3, 2))
        >>> at.update(torch.ones(5, 2))
        >>> at.batch_shape, at.event_shape
        (torch.Size([5]), torch.Size([2]))
        """
        events = len(self._event_shape)
        if param.ndim < events:
            raise ValueError(
                f"the value of this Delta has {events} event dims; got a value of shape {list(param.shape)}"
            )
        self.param = param
        self._batch_shape = param.shape[: param.ndim - events]
        self._event_shape = param.shape[param.ndim - events :]

    def expand(self, batch_shape: Sequence[int], _instance: Delta | None = None) -> Delta:
        """Return the distribution with its batch dims expanded."""
        batch, event = torch.Size(batch_shape), self._event_shape
        return Delta(self.param.expand(batch + event), self.atol, self.rtol, batch, event)

    def sample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Return the value, expanded to ``(*sample_shape, *batch_shape, *event_shape)``; gradients flow to ``param``."""
        return self.param.expand(torch.Size(sample_shape or ()) + self.param.shape)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Return the value, expanded to ``(*sample_shape, *batch_shape, *event_shape)``; gradients flow to ``param``."""
        return self.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return infinity for each event that equals the value, and minus infinity for the others.

        Raises:
            ValueError: the last dims of ``value`` are not of the event shape.
        """
        events = len(self._event_shape)
        if value.shape[value.ndim - events :] != self._event_shape and not RULES.follows_tensordict:
            raise ValueError(
                f"the last dims of a value of this Delta are {list(self._event_shape)}; "
                f"got a value of shape {list(value.shape)}"
            )
        param = self.param
        if value.dtype is not param.dtype:
            dtype = torch.promote_types(value.dtype, param.dtype)
            value, param = value.to(dtype), param.to(dtype)
        is_equal = _are_close(value, param, self.rtol, self.atol)
        if events:
            is_equal = is_equal.flatten(-events).all(-1) if events > 1 else is_equal.all(-1)
        found = torch.where(is_equal, torch.inf, -torch.inf)
        return found.to(value.dtype) if value.is_floating_point() else found

    @property
    def mean(self) -> Tensor:
        """``param``."""
        return self.param

    @property
    def mode(self) -> Tensor:
        """``param``."""
        return self.param

    @property
    def deterministic_sample(self) -> Tensor:
        """``param``."""
        return self.param

    def __repr__(self) -> str:
        return f"Delta(param: {self.param.shape}, event_shape={self._event_shape})"


def _are_close(value: Tensor, param: Tensor, rtol: float | Tensor, atol: float | Tensor) -> Tensor:
    """Do as ``torch.isclose``, also with tensors as tolerances."""
    if not (isinstance(rtol, Tensor) or isinstance(atol, Tensor)):
        return torch.isclose(value, param, rtol=rtol, atol=atol)
    difference = (value - param).abs()
    return (value == param) | (difference.isfinite() & (difference <= atol + rtol * param.abs()))
