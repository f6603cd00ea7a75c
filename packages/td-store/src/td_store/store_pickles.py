"""Names in pickles of stored tensors, importable from here in every release.

>>> import pickle, td_store.testing
>>> from td_store import StoredTensor, store_pickles
>>> b"td_store.store_pickles" in pickle.dumps(StoredTensor(td_store.testing.MemorySource(torch.ones(2))))
True
"""

from ._fsspec_store import FsspecStore
from ._modes import PrivateSource, ReadOnlySource
from ._stored_tensor import rebuild_stored_tensor

__all__ = ["FsspecStore", "PrivateSource", "ReadOnlySource", "rebuild_stored_tensor"]
