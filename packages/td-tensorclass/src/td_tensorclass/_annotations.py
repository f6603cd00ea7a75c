"""The annotations of a class, of which some may name what is not defined yet."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotations that a class itself has; one with an undefined name is a string or a ``ForwardRef``.

    Python 3.14 evaluates them when they are asked for (`PEP 649 <https://peps.python.org/pep-0649/>`_), and would raise for
    such a name.

    >>> annotations_of(type("Empty", (), {}))
    {}
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)
