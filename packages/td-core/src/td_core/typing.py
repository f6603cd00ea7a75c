"""Type aliases and sentinels for the signatures of the packages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Union

import torch

__all__ = ["NO_DEFAULT", "DeviceType", "DtypeLike", "NestedKey", "NoDefault"]


class NoDefault(enum.Enum):
    """Type of the sentinel ``NO_DEFAULT``, the default of arguments for which None is a valid value.

    >>> NO_DEFAULT
    NO_DEFAULT
    """

    NO_DEFAULT = "NO_DEFAULT"

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Final = NoDefault.NO_DEFAULT

if TYPE_CHECKING:
    NestedKey = Union[str, tuple[Any, ...]]  # noqa: UP007  type checkers can narrow this form
else:

    class _Keys(type):
        """Metaclass that implements ``isinstance(key, NestedKey)``."""

        def __instancecheck__(cls, key: object) -> bool:
            parts = [key]
            for part in parts:
                if isinstance(part, tuple) and part:
                    parts += part
                elif not isinstance(part, str):
                    return False
            return True

        def __subclasscheck__(cls, other: type) -> bool:
            # torch.compile calls this method, not __instancecheck__, for a string or a tuple.
            return issubclass(other, (str, tuple)) or other is cls

    class NestedKey(metaclass=_Keys):
        """A key: a string, or a non-empty, possibly nested tuple of strings.

        For annotations and ``isinstance``; it cannot be instantiated.

        >>> isinstance("a", NestedKey), isinstance(("a", ("b",)), NestedKey), isinstance((), NestedKey)
        (True, True, False)
        """


DeviceType = Union[torch.device, str, int]  # noqa: UP007
"""Device arguments that torch accepts."""

DtypeLike = Union[torch.dtype, type[bool], type[int], type[float], type[complex]]  # noqa: UP007
"""Dtype arguments that torch accepts."""

BatchSize = Union[torch.Size, Sequence[int], int]  # noqa: UP007
