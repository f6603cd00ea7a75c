"""Tools to test plugins: conformance suites for kinds and formats, and temporary registration.

Needs the extra ``testing`` (pytest, hypothesis). In a test module, subclass :class:`CollectionTests` and define
``make``, or subclass :class:`SerializerTests` and define ``serializer``. pytest then runs all tests of the suite.
"""

from __future__ import annotations

import pytest

from ..plugins.manager import installed

# Enables pytest's detailed assertion messages, which it otherwise enables only in test modules.
pytest.register_assert_rewrite(f"{__name__}._collections", f"{__name__}._serializers")

from ._collections import CollectionTests  # noqa: E402
from ._serializers import SerializerTests  # noqa: E402

__all__ = ["CollectionTests", "SerializerTests", "installed"]
