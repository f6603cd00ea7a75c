"""Types and sentinels that the signatures of the packages share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Union

import torch

__all__ = ["NO_DEFAULT", "DeviceType", "DtypeLike", "NestedKey", "NoDefault"]


class NoDefault(enum.Enum):
    """Mark an argument whose absence differs from None.

    >>> NO_DEFAULT
    NO_DEFAULT
    """

    NO_DEFAULT = "NO_DEFAULT"

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Final = NoDefault.NO_DEFAULT

if TYPE_CHECKING:
    NestedKey = Union[str, tuple[Any, ...]]  # noqa: UP007  what a checker can narrow
else:

    class _Keys(type):
        """Tells of an object whether it is a key."""

        def __instancecheck__(cls, key: object) -> bool:
            parts = [key]
            for part in parts:
                if isinstance(part, tuple) and part:
                    parts += part
                elif not isinstance(part, str):
                    return False
            return True

        def __subclasscheck__(cls, other: type) -> bool:
            # All that torch.compile asks about a string or a tuple.
            return issubclass(other, (str, tuple)) or other is cls

    class NestedKey(metaclass=_Keys):
        """A key: a string, or a non-empty, possibly nested tuple of strings.

        For annotations and ``isinstance``; there are no instances but strings and tuples.

        >>> isinstance("a", NestedKey), isinstance(("a", ("b",)), NestedKey), isinstance((), NestedKey)
        (True, True, False)
        """


DeviceType = Union[torch.device, str, int]  # noqa: UP007
"""What torch accepts as a device."""

DtypeLike = Union[torch.dtype, type[bool], type[int], type[float], type[complex]]  # noqa: UP007
"""What torch accepts as a dtype."""

BatchSize = Union[torch.Size, Sequence[int], int]  # noqa: UP007
