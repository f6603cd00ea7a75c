"""Collections as tables: Arrow objects, and the programs that exchange them.

>>> import torch
>>> from td_core import TensorDict
>>> data = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> table = data.to_arrow()
>>> TensorDict.from_arrow(table.slice(1))["info", "step"]
tensor([1, 2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._files_by_suffix import append, inspect, load, save, verify
    from ._files_by_suffix import open_table as open  # noqa: A004, F401
    from ._from_arrow import from_arrow
    from ._write_columns import to_arrow

__all__ = ["append", "from_arrow", "inspect", "load", "save", "to_arrow", "verify"]

__version__ = _td_core.__version__

__getattr__ = _lazy_names(__name__, {"._from_arrow": ["from_arrow"], "._write_columns": ["to_arrow"]})[0]


def __dir__() -> list[str]:
    return sorted(__all__)
