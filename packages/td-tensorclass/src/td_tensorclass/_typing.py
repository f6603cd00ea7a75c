"""What only type checkers look at."""

from __future__ import annotations

import dataclasses
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from td_core.typing import BatchSize, DeviceType

__all__ = ["BatchSizeArgument", "DeviceArgument", "FieldsMeta", "NamesArgument", "dataclass_transform"]

Given = TypeVar("Given")
Read = TypeVar("Read")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(field_specifiers=(dataclasses.field,))
    class FieldsMeta(ABCMeta):
        """Makes constructors of annotations, frozen ones or not, as the subclass says; a decorated base could not."""
else:
    FieldsMeta = ABCMeta

    def dataclass_transform(**kwargs: Any) -> Callable[[Any], Any]:
        """Mark nothing at run time."""
        return lambda decorated: decorated


class Argument(Generic[Given, Read]):
    """What is given in one form, and read in another."""

    def __get__(self, instance: Any, owner: Any = None) -> Read:
        """Read it."""
        raise NotImplementedError

    def __set__(self, instance: Any, value: Given) -> None:
        """Write it."""


BatchSizeArgument = Argument[BatchSize | None, torch.Size]
DeviceArgument = Argument[DeviceType | None, torch.device | None]
NamesArgument = Argument[Sequence[str | None] | None, list[str | None]]
