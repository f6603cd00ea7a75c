"""Collections in HDF5 files, which other programs read, and the files of other programs as collections.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> with data.to_h5("data.h5") as stored:
...     stored["info", "step"] = torch.arange(3) * 2
>>> TensorDict.load("data.h5")["info", "step"]
tensor([0, 2, 4])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._check_h5 import inspect, verify
    from ._dataset_source import DatasetSource
    from ._persistent import PersistentTensorDict, from_h5, to_h5
    from ._read_h5 import load
    from ._read_h5 import open_collection as open  # noqa: A004, F401
    from ._write_h5 import save

__all__ = ["DatasetSource", "PersistentTensorDict", "from_h5", "inspect", "load", "save", "to_h5", "verify"]

__version__ = _td_core.__version__

__getattr__ = _lazy_names(
    __name__,
    {
        "._dataset_source": ["DatasetSource"],
        "._persistent": ["PersistentTensorDict", "from_h5", "to_h5"],
        "._check_h5": ["inspect", "verify"],
        "._read_h5": {"load": "load", "open": "open_collection"},
        "._write_h5": ["save"],
    },
)[0]


def __dir__() -> list[str]:
    return sorted(__all__)
