"""Modules that convert the output of a network to the location and scale of a distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._mappings import mappings


class NormalParamExtractor(nn.Module):
    """Split the last dim of a tensor into a location and a positive scale.

    Args:
        scale_mapping: name of the mapping of the scale, see :func:`mappings`.
        scale_lb: lower bound of the scale.

    Raises:
        NotImplementedError: the mapping does not exist.

    >>> loc, scale = NormalParamExtractor()(torch.zeros(5, 4))
    >>> loc.shape, scale[0]
    (torch.Size([5, 2]), tensor([1., 1.]))
    """

    def __init__(
        self, scale_mapping: str | float = "biased_softplus_1.0", scale_lb: float | Tensor = 1e-4
    ) -> None:
        super().__init__()
        self.scale_mapping = mappings(str(scale_mapping))
        self.scale_lb = scale_lb

    def forward(self, tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Split the first tensor, and return location, scale and the other tensors unchanged.

        Args:
            tensor: a tensor of shape (..., n). If n is odd, the location gets the larger part.
            *others: other tensors.

        Raises:
            RuntimeError: the first tensor has no dims.
        """
        if not tensor.ndim:
            raise RuntimeError(
                "NormalParamExtractor splits the last dim of its input into location and scale; got a tensor without dims"
            )
        halves = tensor.chunk(2, -1)
        loc, scale = halves if len(halves) == 2 else tensor.tensor_split([1], -1)
        # A submodule read as an attribute is found by __getattr__, which is slow.
        mapping = self._modules.get("scale_mapping") or self.scale_mapping
        return (loc, mapping(scale).clamp_min(self.scale_lb), *others)


class AddStateIndependentNormalScale(nn.Module):
    """Add a scale that does not depend on the input to a location.

    Args:
        scale_shape: shape of the scale, equal to the trailing dims of the location; a scalar by default.
        scale_mapping: name of the mapping of the parameter to a positive scale, see :func:`mappings`.
        scale_lb: lower bound of the scale.
        device: device of the parameter.
        make_param: False makes a buffer, which is not trained.
        init_value: initial value, before the mapping.

    Attributes:
        state_independent_scale: the parameter or buffer.

    Raises:
        NotImplementedError: the mapping does not exist.

    >>> loc, scale = AddStateIndependentNormalScale(2)(torch.zeros(5, 2))
    >>> scale[0]
    tensor([1., 1.], grad_fn=<SelectBackward0>)
    """

    state_independent_scale: Tensor

    def __init__(
        self,
        scale_shape: torch.Size | int | tuple[int, ...] | None = None,
        *,
        scale_mapping: str = "exp",
        scale_lb: float | Tensor = 1e-4,
        device: torch.device | str | int | None = None,
        make_param: bool = True,
        init_value: float = 0.0,
    ) -> None:
        super().__init__()
        shape = (scale_shape,) if isinstance(scale_shape, int) else tuple(scale_shape or ())
        self.scale_mapping = mappings(scale_mapping)
        self.scale_lb = scale_lb
        value = torch.full(shape, float(init_value), device=device)
        if make_param:
            self.state_independent_scale = nn.Parameter(value)
        else:
            self.register_buffer("state_independent_scale", value)

    def forward(self, loc: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the location, a scale of the same shape, and the other tensors.

        Args:
            loc: location of shape (..., *scale_shape).
            *others: tensors that are returned unchanged.

        Raises:
            RuntimeError: the trailing dims of the location differ from the shape of the scale.
        """
        raw = self.state_independent_scale
        if loc.shape[loc.ndim - raw.ndim :] != raw.shape:
            raise RuntimeError(
                f"the scale has shape {list(raw.shape)}, so these are the last dims of the location; "
                f"got a location of shape {list(loc.shape)}"
            )
        scale = self.scale_mapping(raw).clamp_min(self.scale_lb)
        return (loc, scale.expand(loc.shape), *others)
