"""Print results, one line of JSON for each, for comparison with another run."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch


def report(name: str, *values: Any) -> None:
    """Print a name and values; tensors are printed as numbers."""
    line = json.dumps([name, *map(_encode, values)])
    sys.stdout.write(f"RESULT {line}\n")  # in one piece, since several processes print
    sys.stdout.flush()


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)
