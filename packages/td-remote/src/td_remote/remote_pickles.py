"""Names in pickles of locations, importable from here in every release.

>>> import pickle
>>> from td_remote import Remote
>>> b"td_remote.remote_pickles" in pickle.dumps(Remote("memory://bucket/x"))
True
"""

from ._remote_location import rebuild_remote

__all__ = ["rebuild_remote"]
