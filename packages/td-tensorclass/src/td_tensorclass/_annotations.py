"""Read the annotations of a class, some of which may contain undefined names."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a class without inherited ones; undefined names remain strings or ``ForwardRef``."""
    # Python 3.14 evaluates annotations on access (PEP 649), which raises NameError for undefined names.
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)
