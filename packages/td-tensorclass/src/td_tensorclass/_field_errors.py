"""The error class that this package adds to the hierarchy of :mod:`td_core.errors`."""

from __future__ import annotations

from td_core.errors import TensorDictError
from td_core.spi import set_module

__all__ = ["UnknownFieldError"]


@set_module("td_tensorclass")
class UnknownFieldError(TensorDictError, AttributeError, TypeError, ValueError):
    """An attribute, argument or key of a tensorclass is not one of its fields.

    >>> all(issubclass(UnknownFieldError, each) for each in (AttributeError, TypeError, ValueError))
    True
    """
