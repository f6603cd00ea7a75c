"""Import path that pickles of consolidated collections refer to; it must stay valid in every release.

>>> import pickle
>>> b"td_distributed.consolidated_pickles" in pickle.dumps(TensorDict({"a": torch.ones(2)}).consolidate())
True
"""

from ._consolidated_backend import rebuild_consolidated

__all__ = ["rebuild_consolidated"]
