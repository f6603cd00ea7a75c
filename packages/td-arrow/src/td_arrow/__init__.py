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
    from ._batches import BatchIterator, iter_batches
    from ._files_by_suffix import append, inspect, load, save, verify
    from ._files_by_suffix import open_table as open  # noqa: A004, F401
    from ._save_tables import TableWriter, arrow_schema
    from .plugin import (
        from_arrow,
        from_csv,
        from_json,
        from_mds,
        from_pandas,
        from_parquet,
        to_arrow,
        to_csv,
        to_json,
        to_mds,
        to_pandas,
    )  # fmt: skip

__all__ = [
    "BatchIterator", "TableWriter", "append", "arrow_schema", "from_arrow", "from_csv", "from_json", "from_mds",
    "from_pandas", "from_parquet", "inspect", "iter_batches", "load", "save", "to_arrow", "to_csv", "to_json",
    "to_mds", "to_pandas", "verify",
]  # fmt: skip

__version__ = _td_core.__version__

_FILES = ("append", "inspect", "load", "save", "verify")
__getattr__ = _lazy_names(
    __name__,
    {
        ".plugin": [name for name in __all__ if name.startswith(("from_", "to_"))],
        "._batches": ["BatchIterator", "iter_batches"],
        "._files_by_suffix": {**{name: name for name in _FILES}, "open": "open_table"},
        "._save_tables": ["TableWriter", "arrow_schema"],
    },
)[0]


def __dir__() -> list[str]:
    return sorted(__all__)
