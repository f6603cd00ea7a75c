"""When two Python values are the same one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same_value(a: Any, b: Any) -> bool:
    """Tell whether two values are one object, or equal values of one type.

    >>> same_value("a", "a"), same_value(1, True), same_value([1.0], [1])
    (True, False, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    # A comparison may give anything; that of NaN gives False.
    return (a == b) is True or (isinstance(a, float) and a != a and b != b)


def equal_values(a: Any, b: Any) -> bool:
    """Tell whether two values are equal in the sense of ``==``; arrays where all of their elements are.

    >>> equal_values(1, True), equal_values("a", "b")
    (True, False)
    """
    if same_value(a, b):
        return True
    equal = a == b
    return bool(equal.all() if isinstance(equal, (np.ndarray, torch.Tensor)) else equal)
