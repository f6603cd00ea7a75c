"""Collections in Zarr groups, which other programs read, and the groups of other programs as collections.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> _ = data.to_zarr("data.zarr")
>>> TensorDict.load("data.zarr")["info", "step"]
tensor([0, 1, 2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from td_store.arrays import MappedTensor

    from ._append_rows import append
    from ._group_checks import inspect, verify
    from ._live_groups import ZarrTensorDict, from_zarr, to_zarr
    from ._read_collections import load
    from ._read_collections import open_collection as open  # noqa: A004, F401
    from ._write_groups import save

__all__ = [
    "MappedTensor",
    "ZarrTensorDict",
    "append",
    "from_zarr",
    "inspect",
    "load",
    "save",
    "to_zarr",
    "verify",
]

__version__ = _td_core.__version__

__getattr__ = _lazy_names(
    __name__,
    {
        "td_store.arrays": ["MappedTensor"],
        "._append_rows": ["append"],
        "._live_groups": ["ZarrTensorDict", "from_zarr", "to_zarr"],
        "._read_collections": {"load": "load", "open": "open_collection"},
        "._group_checks": ["inspect", "verify"],
        "._write_groups": ["save"],
    },
)[0]


def __dir__() -> list[str]:
    # ``open`` is public too, but ``from td_zarr import *`` must not hide the builtin function.
    return sorted([*__all__, "__version__"])
