"""Names in pickles of opened groups, importable from here in every release.

>>> from td_zarr import save, zarr_pickles
>>> import pickle
>>> _ = save(TensorDict({"a": torch.ones(2)}), "data.zarr")
>>> b"td_zarr.zarr_pickles" in pickle.dumps(TensorDict.open("data.zarr")["a"])
True
"""

from ._array_documents import ArrayInfo
from ._chunk_access import ChunkSource, RawSource, rebuild_mapped, rebuild_source
from ._live_groups import rebuild_live
from ._local_objects import LocalObjects
from ._read_collections import Reinterpreted, finish_place
from ._remote_objects import RemoteObjects
from ._zarr_objects import StoreObjects, ZipObjects, open_url, open_zip, return_store

__all__ = [
    "ArrayInfo", "ChunkSource", "LocalObjects", "RawSource", "Reinterpreted", "RemoteObjects", "StoreObjects", "ZipObjects",
    "finish_place", "open_url", "open_zip", "rebuild_live", "rebuild_mapped", "rebuild_source", "return_store",
]  # fmt: skip
