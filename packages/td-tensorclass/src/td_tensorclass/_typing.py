"""What only type checkers look at."""

from __future__ import annotations

import dataclasses
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from td_core.typing import BatchSize, DeviceType

__all__ = [
    "BatchSizeArgument",
    "DeviceArgument",
    "FieldsMeta",
    "NamesArgument",
    "dataclass_transform",
]

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**kwargs: Any) -> Callable[[Any], Any]:
        """Mark nothing at run time."""
        return lambda decorated: decorated


if TYPE_CHECKING:

    @dataclass_transform(field_specifiers=(dataclasses.field,))
    class FieldsMeta(ABCMeta):
        """Makes constructors of annotations, frozen ones or not, as the subclass says; a decorated base could not."""
else:
    FieldsMeta = ABCMeta


class BatchSizeArgument:
    """A batch size: given in any form, read as ``torch.Size``."""

    def __get__(self, instance: Any, owner: Any = None) -> torch.Size:
        """Read it."""
        raise NotImplementedError

    def __set__(self, instance: Any, value: BatchSize | None) -> None:
        """Write it."""


class DeviceArgument:
    """A device: given in any form, read as ``torch.device``."""

    def __get__(self, instance: Any, owner: Any = None) -> torch.device | None:
        """Read it."""
        raise NotImplementedError

    def __set__(self, instance: Any, value: DeviceType | None) -> None:
        """Write it."""


class NamesArgument:
    """Dim names: given as any sequence, read as a list."""

    def __get__(self, instance: Any, owner: Any = None) -> list[str | None]:
        """Read them."""
        raise NotImplementedError

    def __set__(self, instance: Any, value: Sequence[str | None] | None) -> None:
        """Write them."""
