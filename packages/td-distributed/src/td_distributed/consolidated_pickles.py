"""The name that pickles of consolidated collections hold: it stays importable from here in every release.

>>> import pickle
>>> b"td_distributed.consolidated_pickles" in pickle.dumps(TensorDict({"a": torch.ones(2)}).consolidate())
True
"""

from ._consolidated_backend import rebuild_consolidated

__all__ = ["rebuild_consolidated"]
