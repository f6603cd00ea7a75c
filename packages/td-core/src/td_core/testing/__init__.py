"""Tools to test plugins: conformance suites for kinds and formats, and temporary registration.

Needs the extra ``testing`` (pytest, hypothesis). In a test module, subclass :class:`CollectionTests` and define
``make``, or subclass :class:`SerializerTests` and define ``serializer``. pytest then runs all tests of the suite.
The suites for sources of stored tensors and for opened collections are in ``td_store.testing``. The other functions compare
collections, and kill processes in the middle of a save.
"""

from __future__ import annotations

import pytest

from .._python.public_names import lazy_names
from ..plugins.manager import installed

# Enables pytest's detailed assertion messages, which it otherwise enables only in test modules.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in ("_collections", "_serializers")))

from ._collection_samples import assert_same  # noqa: E402
from ._collections import CollectionTests  # noqa: E402
from ._killed_processes import WatchedOs, copy_at_os_calls, kill_after, kill_at_os_call, watch_os  # noqa: E402
from ._serializers import SerializerTests  # noqa: E402

__all__ = [
    "CollectionTests", "SerializerTests", "WatchedOs",
    "assert_same", "copy_at_os_calls", "installed", "kill_after", "kill_at_os_call", "watch_os",
]  # fmt: skip

# Pickles had these names before the package td-store.
__getattr__ = lazy_names(__name__, {"td_store.testing": ["LoggedSource", "MemorySource", "RawFile"]})[0]
