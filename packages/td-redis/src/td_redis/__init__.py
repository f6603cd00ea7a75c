"""Collections on a Redis server, which several processes read and write.

>>> import fakeredis, torch
>>> from td_core import TensorDict
>>> server = fakeredis.FakeRedis()
>>> store = TensorDict({"obs": torch.zeros(8, 4)}, [8]).to_store(client=server)
>>> store[2:4] = TensorDict({"obs": torch.ones(2, 4)}, [2])
>>> TensorDictStore.from_store(td_id=store.td_id, client=server)[[3, 0]]["obs"].sum(1)
tensor([4., 0.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._redis_source import Connection, RedisSource
    from ._stores import STORE_BACKENDS, LazyStackedTensorDictStore, TensorDictStore, from_store
    from .plugin import to_store

__all__ = [
    "STORE_BACKENDS", "Connection", "LazyStackedTensorDictStore", "RedisSource", "TensorDictStore", "from_store",
    "to_store",
]  # fmt: skip

__version__ = _td_core.__version__

#: Names that only pickles use.
_OF_PICKLES = ["Store", "rebuild_stack", "rebuild_store"]
__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._redis_source": ["Connection", "RedisSource"],
        "._stores": [
            "STORE_BACKENDS", "LazyStackedTensorDictStore", "TensorDictStore", "from_store", *_OF_PICKLES,
        ],
        ".plugin": ["to_store"],
    },
    _OF_PICKLES,
)  # fmt: skip
