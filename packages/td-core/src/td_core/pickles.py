"""The names that pickles and files of :func:`torch.save` refer to: they stay importable from here in every release.

A package that reads pickles of another library registers a converter of their states with :func:`set_foreign_state`.

>>> import pickle, pickletools
>>> from td_core import pickles
>>> b"td_core.pickles" in pickle.dumps(TensorDict({"a": torch.ones(2)}))
True
"""

from ._encode.pickling import rebuild_collection, set_foreign_state
from ._python.public_names import lazy_names
from ._tree.buffers import Leaves, unpack_leaves

__all__ = [
    "Leaves",
    "rebuild_collection",
    "set_foreign_state",
    "unpack_leaves",
]

# Pickles of stored tensors had these names before the package td-store.
__getattr__ = lazy_names(
    __name__, {"td_store.store_pickles": ["PrivateSource", "ReadOnlySource", "rebuild_stored_tensor"]}
)[0]
