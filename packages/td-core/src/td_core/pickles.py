"""The names that pickles and files of :func:`torch.save` refer to: they stay importable from here in every release.

>>> import pickle, pickletools
>>> from td_core import pickles
>>> b"td_core.pickles" in pickle.dumps(TensorDict({"a": torch.ones(2)}))
True
"""

from ._buffers import Leaves, unpack_leaves
from ._pickling import rebuild_collection

__all__ = ["Leaves", "rebuild_collection", "unpack_leaves"]
