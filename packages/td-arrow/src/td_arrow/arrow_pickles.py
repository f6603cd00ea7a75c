"""Names in pickles of opened tables, importable from here in every release.

>>> from td_arrow import save
>>> import pickle
>>> _ = save(TensorDict({"x": torch.arange(6)}, [6]), "data.parquet")
>>> b"td_arrow.arrow_pickles" in pickle.dumps(TensorDict.open("data.parquet")["x"])
True
"""

from ._group_sources import GroupSource, ObjectGroupSource
from ._open_tables import MappedColumn, rebuild_column

__all__ = ["GroupSource", "MappedColumn", "ObjectGroupSource", "rebuild_column"]
