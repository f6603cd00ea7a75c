"""When two Python values are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from td_core._values import same_value


def equal_values(a: Any, b: Any) -> bool:
    """Tell whether two values are equal in the sense of ``==``; arrays where all of their elements are.

    >>> equal_values(1, True), equal_values("a", "b")
    (True, False)
    """
    if same_value(a, b):
        return True
    equal = a == b
    return bool(equal.all() if isinstance(equal, (np.ndarray, torch.Tensor)) else equal)
