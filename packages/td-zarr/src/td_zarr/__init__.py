"""Collections in Zarr groups, which other programs read, and the groups of other programs as collections.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> _ = data.to_zarr("data.zarr")
>>> TensorDict.load("data.zarr")["info", "step"]
tensor([0, 1, 2])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core

if TYPE_CHECKING:
    from ._append_rows import append
    from ._chunk_access import MappedTensor
    from ._group_checks import inspect, verify
    from ._read_collections import from_zarr, load
    from ._read_collections import open_collection as open  # noqa: A004, F401
    from ._write_groups import save, to_zarr

__all__ = ["MappedTensor", "append", "from_zarr", "inspect", "load", "save", "to_zarr", "verify"]

__version__ = _td_core.__version__

_HOMES = {
    "MappedTensor": ("_chunk_access", "MappedTensor"),
    "append": ("_append_rows", "append"),
    "from_zarr": ("_read_collections", "from_zarr"),
    "inspect": ("_group_checks", "inspect"),
    "load": ("_read_collections", "load"),
    "open": ("_read_collections", "open_collection"),
    "save": ("_write_groups", "save"),
    "to_zarr": ("_write_groups", "to_zarr"),
    "verify": ("_group_checks", "verify"),
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
    # ``open`` is public too, but ``from td_zarr import *`` must not hide the builtin function.
    return sorted([*__all__, "__version__"])
