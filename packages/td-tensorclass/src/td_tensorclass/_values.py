"""When two Python values are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from td_core._values import same_value


def equal_values(a: Any, b: Any) -> bool:
    """Tell whether two values are equal in the sense of ``==``; arrays where all of their elements are.

    Where ``==`` raises, or gives something without a truth, they are not.

    >>> equal_values(1, True), equal_values("a", "b")
    (True, False)
    """
    if same_value(a, b):
        return True
    try:
        equal = a == b
        if isinstance(equal, (bool, np.bool_)):
            return bool(equal)
        # Arrays of different shapes are compared as repeated.
        return np.shape(a) == np.shape(b) and bool(np.asarray(equal).all())
    except Exception:  # the ``==`` of any class runs here
        return False
