"""Types and sentinels that the signatures of the packages share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, Union

import torch

__all__ = ["NO_DEFAULT", "DeviceType", "NestedKey", "NoDefault"]


class NoDefault(enum.Enum):
    """Mark an argument whose absence differs from None.

    >>> NO_DEFAULT
    NO_DEFAULT
    """

    NO_DEFAULT = "NO_DEFAULT"

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Final = NoDefault.NO_DEFAULT

NestedKey = Union[str, tuple[Any, ...]]  # noqa: UP007  evaluated, on Python 3.10 too
"""A key: a string, or a (nested) tuple of strings."""

DeviceType = Union[torch.device, str, int]  # noqa: UP007
"""What torch accepts as a device."""

BatchSize = Union[torch.Size, Sequence[int], int]  # noqa: UP007
