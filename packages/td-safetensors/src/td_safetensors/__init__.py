"""Collections in safetensors files, which other programs read, and the files of other programs as collections.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> _ = data.to_safetensors("data.safetensors")
>>> TensorDict.load("data.safetensors")["info", "step"]
tensor([0, 1, 2])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core

if TYPE_CHECKING:
    from ._load import load
    from ._save import save

    from_safetensors, to_safetensors = load, save

__all__ = ["from_safetensors", "load", "save", "to_safetensors"]

__version__ = _td_core.__version__

_HOMES = {
    "from_safetensors": ("_load", "load"),
    "load": ("_load", "load"),
    "save": ("_save", "save"),
    "to_safetensors": ("_save", "save"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _HOMES[name]
    value = getattr(importlib.import_module(f".{module}", __name__), original)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
