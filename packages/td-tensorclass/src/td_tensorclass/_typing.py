"""Declarations for type checkers, and of signatures for readers."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import torch

from td_core.typing import BatchSize, DeviceType

F = TypeVar("F")
Given = TypeVar("Given")
P = ParamSpec("P")
Read = TypeVar("Read")
Result = TypeVar("Result")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform as dataclass_transform

    @dataclass_transform(field_specifiers=(dataclasses.field,))
    class FieldsMeta(ABCMeta):
        """Metaclass with dataclass_transform: unlike a decorated base, it lets each subclass choose ``frozen``."""
else:
    FieldsMeta = ABCMeta

    def dataclass_transform(**kwargs: object) -> Callable[[object], object]:
        """Return a decorator that does nothing, because typing_extensions may be missing at run time."""
        return lambda decorated: decorated


def takes_keywords(options: Callable[P, object]) -> Callable[[Callable[[], Result]], Callable[P, Result]]:
    """Return a decorator that gives a function the fields of a dataclass as keyword parameters."""
    return lambda function: lambda *args, **kwargs: function()


def shows(options: Callable[..., object]) -> Callable[[F], F]:
    """Return a decorator that shows the fields of a dataclass in the signature of a function with ``**options``."""

    def decorate(function: F) -> F:
        signature = inspect.signature(cast(Any, function))
        *own, _ = signature.parameters.values()
        parameters = [*own, *inspect.signature(options).parameters.values()]
        cast(Any, function).__signature__ = signature.replace(parameters=parameters)
        return function

    return decorate


class Argument(Generic[Given, Read]):
    """Descriptor of a constructor argument that is written as ``Given`` and read as ``Read``."""

    def __get__(self, instance: object, owner: object = None) -> Read:
        """Declare the type that reading the attribute returns."""
        raise NotImplementedError

    def __set__(self, instance: object, value: Given) -> None:
        """Declare the type that the attribute accepts."""


BatchSizeArgument = Argument[BatchSize | None, torch.Size]
DeviceArgument = Argument[DeviceType | None, torch.device | None]
NamesArgument = Argument[Sequence[str | None] | None, list[str | None]]
