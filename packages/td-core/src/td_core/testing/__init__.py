"""What a plugin is tested with: conformance suites for kinds and formats, and registration for one test.

Needs the extra ``testing`` (pytest, hypothesis). Subclass :class:`CollectionTests` and give ``make``, or
:class:`SerializerTests` and give ``serializer``, in a test module: pytest then runs every promise against it.
"""

from __future__ import annotations

from ..plugins.manager import installed
from ._collections import CollectionTests
from ._serializers import SerializerTests

__all__ = ["CollectionTests", "SerializerTests", "installed"]
