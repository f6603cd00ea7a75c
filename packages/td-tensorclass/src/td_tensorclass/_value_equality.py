"""Equality of two Python values."""

from __future__ import annotations

from typing import Any

import numpy as np

from td_core.spi import is_same_value


def is_equal_value(a: object, b: object) -> bool:
    """Return True if two values are equal by ``==``, or are arrays of one shape with equal elements; False if ``==`` raises."""
    if is_same_value(a, b):
        return True
    try:
        equal = a == b
        if isinstance(equal, (bool, np.bool_)):
            return bool(equal)
        # == broadcasts arrays, so compare their shapes, too.
        return np.shape(a) == np.shape(b) and bool(np.asarray(equal).all())
    except Exception:  # a user-defined == may raise anything
        return False
