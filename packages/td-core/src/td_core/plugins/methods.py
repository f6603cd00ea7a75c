"""The class that has the methods that packages of the project provide; ``siblings.py`` gives it a placeholder for each.

Type checkers and editors read ``methods.pyi``, which ``tools/generate_stub.py`` writes from the functions of the packages.
"""

__all__ = ["DeclaredMethods"]


class DeclaredMethods:
    """The methods that packages of the project provide."""

    __slots__ = ()
