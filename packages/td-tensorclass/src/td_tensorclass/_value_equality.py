"""When two Python values are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from td_core._value_codec import is_same_value


def is_equal_value(a: Any, b: Any) -> bool:
    """Tell whether two values are equal in the sense of ``==``; arrays where all of their elements are.

    Where ``==`` raises, or gives something without a truth, they are not.

    >>> is_equal_value(1, True), is_equal_value("a", "b")
    (True, False)
    """
    if is_same_value(a, b):
        return True
    try:
        equal = a == b
        if isinstance(equal, (bool, np.bool_)):
            return bool(equal)
        # Arrays of different shapes are compared as repeated.
        return np.shape(a) == np.shape(b) and bool(np.asarray(equal).all())
    except Exception:  # the ``==`` of any class runs here
        return False
