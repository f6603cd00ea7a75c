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
    from ._data_frames import from_pandas, to_pandas
    from ._files_by_suffix import append, inspect, load, save, verify
    from ._files_by_suffix import open_table as open  # noqa: A004, F401
    from ._from_arrow import from_arrow
    from ._json import to_json
    from ._read_mds import from_mds
    from ._sized_tables import from_csv, from_json, from_parquet
    from ._table_writer import TableWriter, arrow_schema
    from ._write_columns import to_arrow
    from ._write_csv import to_csv
    from ._write_mds import to_mds

__all__ = [
    "BatchIterator", "TableWriter", "append", "arrow_schema", "from_arrow", "from_csv", "from_json", "from_mds",
    "from_pandas", "from_parquet", "inspect", "iter_batches", "load", "save", "to_arrow", "to_csv", "to_json",
    "to_mds", "to_pandas", "verify",
]  # fmt: skip

__version__ = _td_core.__version__

__getattr__ = _lazy_names(
    __name__,
    {
        "._batches": ["BatchIterator", "iter_batches"],
        "._data_frames": ["from_pandas", "to_pandas"],
        "._files_by_suffix": {
            "append": "append",
            "inspect": "inspect",
            "load": "load",
            "open": "open_table",
            "save": "save",
            "verify": "verify",
        },
        "._from_arrow": ["from_arrow"],
        "._json": ["to_json"],
        "._read_mds": ["from_mds"],
        "._sized_tables": ["from_csv", "from_json", "from_parquet"],
        "._table_writer": ["TableWriter", "arrow_schema"],
        "._write_columns": ["to_arrow"],
        "._write_csv": ["to_csv"],
        "._write_mds": ["to_mds"],
    },
)[0]


def __dir__() -> list[str]:
    return sorted(__all__)
