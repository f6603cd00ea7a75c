"""The error that this package adds to the tree of :mod:`td_core.errors`."""

from __future__ import annotations

from td_core.errors import TensorDictError

__all__ = ["UnknownFieldError"]


class UnknownFieldError(TensorDictError, AttributeError, ValueError):
    """A tensorclass was given a key that is none of its fields.

    >>> issubclass(UnknownFieldError, AttributeError) and issubclass(UnknownFieldError, ValueError)
    True
    """
