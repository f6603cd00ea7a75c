"""Names in pickles of persistent collections, importable from here in every release.

>>> from td_hdf5 import h5_pickles
>>> import pickle
>>> stored = TensorDict({"a": torch.ones(2)}).to_h5("data.h5")
>>> b"td_hdf5.h5_pickles" in pickle.dumps(stored)
True
"""

from ._object_h5 import ObjectDataset, ObjectH5File
from ._persistent import rebuild_persistent

__all__ = ["ObjectDataset", "ObjectH5File", "rebuild_persistent"]
