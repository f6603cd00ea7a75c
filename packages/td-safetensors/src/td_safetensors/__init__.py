"""Collections in safetensors files, which other programs read, and the files of other programs as collections.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> _ = data.to_safetensors("data.safetensors")
>>> TensorDict.load("data.safetensors")["info", "step"]
tensor([0, 1, 2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from td_store.arrays import MappedTensor

    from ._open import open_collection as open  # noqa: A004, F401
    from ._read_save import load
    from ._tree_and_checks import inspect, verify
    from ._write_save import save

    from_safetensors, to_safetensors = load, save

__all__ = ["MappedTensor", "from_safetensors", "inspect", "load", "save", "to_safetensors", "verify"]

__version__ = _td_core.__version__

__getattr__ = _lazy_names(
    __name__,
    {
        "td_store.arrays": ["MappedTensor"],
        "._open": {"open": "open_collection"},
        "._read_save": {"from_safetensors": "load", "load": "load"},
        "._tree_and_checks": ["inspect", "verify"],
        "._write_save": {"save": "save", "to_safetensors": "save"},
    },
)[0]


def __dir__() -> list[str]:
    # ``open`` is public too, but ``from td_safetensors import *`` must not hide the builtin function.
    return sorted([*__all__, "__version__"])
