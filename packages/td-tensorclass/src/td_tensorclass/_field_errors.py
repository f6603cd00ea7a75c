"""The error that this package adds to the tree of :mod:`td_core.errors`."""

from __future__ import annotations

from td_core._public_names import set_module
from td_core.errors import TensorDictError

__all__ = ["UnknownFieldError"]


@set_module("td_tensorclass")
class UnknownFieldError(TensorDictError, AttributeError, TypeError, ValueError):
    """A tensorclass was given an attribute, an argument or a key that is none of its fields.

    >>> all(issubclass(UnknownFieldError, each) for each in (AttributeError, TypeError, ValueError))
    True
    """
