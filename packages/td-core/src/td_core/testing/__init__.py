"""What a plugin is tested with: conformance suites for kinds and formats, and registration for one test.

Needs the extra ``testing`` (pytest, hypothesis). Subclass :class:`CollectionTests` and give ``make``, or
:class:`SerializerTests` and give ``serializer``, in a test module: pytest then runs every promise against it.
"""

from __future__ import annotations

import pytest

from ..plugins.manager import installed

# For what asserts say to be shown, as in test modules.
pytest.register_assert_rewrite(f"{__name__}._collections", f"{__name__}._serializers")

from ._collections import CollectionTests  # noqa: E402
from ._serializers import SerializerTests  # noqa: E402

__all__ = ["CollectionTests", "SerializerTests", "installed"]
