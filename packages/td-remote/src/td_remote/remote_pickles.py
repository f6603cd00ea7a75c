"""Names in pickles of stores, importable from here in every release.

>>> from td_remote import remote_pickles
>>> remote_pickles.FsspecStore("https://ann:secret@host/x", {})
FsspecStore('https://***@host/x')
"""

from ._fsspec_store import FsspecStore

__all__ = ["FsspecStore"]
