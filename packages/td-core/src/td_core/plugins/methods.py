"""The methods that packages of the project provide: placeholders, which the methods of a registered package hide.

Type checkers and editors read ``methods.pyi``, which ``tools/generate_stub.py`` writes from the functions of the packages.
"""

from __future__ import annotations

from .placeholders import METHODS, Placeholder

__all__ = ["DeclaredMethods"]


class DeclaredMethods:
    """The methods that packages of the project provide."""

    __slots__ = ()


for _name, _distribution in METHODS.items():
    setattr(DeclaredMethods, _name, Placeholder(DeclaredMethods, _name, _distribution))
