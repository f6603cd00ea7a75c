"""Collections in object stores and on web servers.

An installed td-remote opens URLs for every format that reads objects, with file systems of fsspec.

>>> from td_core.spi import Serializer
>>> Serializer.find_objects("memory://bucket/x").store
FsspecStore('memory://bucket/x')
"""

from __future__ import annotations

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core

__all__: list[str] = []

__version__ = _td_core.__version__
