"""Collections in object stores and on web servers.

An installed td-remote opens URLs for every format that reads objects. :class:`Remote` is a URL with settings.

>>> from td_remote import Remote
>>> Remote("memory://bucket/x")
Remote('memory://bucket/x', engine='fsspec')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._block_cache import cache_info
    from ._copy_objects import copy
    from ._remote_location import Remote

__all__ = ["Remote", "cache_info", "copy"]

__version__ = _td_core.__version__

__getattr__ = _lazy_names(
    __name__,
    {"._block_cache": ["cache_info"], "._copy_objects": ["copy"], "._remote_location": ["Remote"]},
)[0]


def __dir__() -> list[str]:
    return sorted(__all__)
