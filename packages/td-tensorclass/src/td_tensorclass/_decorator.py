"""The decorator form of TensorClass."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from ._tensorclass import TensorClass
from ._typing import dataclass_transform

T = TypeVar("T")

_DOCUMENTED = (types.FunctionType, classmethod, staticmethod, property)
#: What ``dataclass`` may have made for a plain class.
_GENERATED = ("__init__", "__repr__", "__eq__")


def make_class(plain: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return a subclass of a plain class that is a tensorclass with its fields."""
    if issubclass(plain, TensorClass) and not any(options.values()):
        return plain
    # Its methods as its own too: help(), doctest and documentation tools look for them there.
    namespace: dict[str, Any] = {
        key: value
        for key, value in plain.__dict__.items()
        if isinstance(value, _DOCUMENTED) and key not in _GENERATED
    }
    namespace.update(__module__=plain.__module__, __qualname__=name, __doc__=plain.__doc__)
    if name == plain.__name__:
        namespace["__qualname__"] = plain.__qualname__
    if "__dataclass_fields__" not in plain.__dict__:
        annotations = inspect.get_annotations(plain)
        namespace["__annotations__"] = dict(annotations)
        namespace.update({key: plain.__dict__[key] for key in annotations if key in plain.__dict__})
    bases = (plain,) if issubclass(plain, TensorClass) else (plain, TensorClass)
    # The plain class stays the first base, so that its methods' super() finds it.
    made = types.new_class(name, bases, dict(options), lambda body: body.update(namespace))
    made.__annotations__ = dict(inspect.get_annotations(plain))
    if hasattr(plain, "__parameters__"):
        made.__parameters__ = plain.__parameters__  # type: ignore[attr-defined]
    return made


@overload
def tensorclass(cls: type[T], /) -> type[T]: ...
@overload
def tensorclass(
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    skip_post_init_on_rebuild: bool = False,
    cast_filter: Callable[[Any, Any], bool] | None = None,
    kw_only: bool = False,
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(field_specifiers=(dataclasses.field,))
def tensorclass(
    cls: Any = None,
    /,
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    skip_post_init_on_rebuild: bool = False,
    cast_filter: Callable[[Any, Any], bool] | None = None,
    kw_only: bool = False,
) -> Any:
    """Make a tensorclass of a class with annotated fields; the decorator form of :class:`TensorClass`.

    Args:
        cls: the class, when the decorator stands without parentheses.
        autocast: convert what is written to the annotated type.
        frozen: refuse every write but those in place.
        nocast: keep numbers and arrays as they are, rather than as tensors.
        shadow: allow fields that hide members of a collection.
        tensor_only: accept tensors and collections only, and what ``torch.as_tensor`` makes one of.
        skip_post_init_on_rebuild: call ``__post_init__`` for constructed instances only, not for results of operations.
        cast_filter: ``(key, tensor) -> bool``: which tensors a change of dtype applies to.
        kw_only: take fields by keyword only.

    Raises:
        AttributeError: a field hides a member of a collection.
        TypeError: the options exclude each other.

    >>> @tensorclass
    ... class Point:
    ...     xy: torch.Tensor
    ...     label: str = "unnamed"
    >>> torch.stack([Point(torch.zeros(2)), Point(torch.ones(2))]).xy
    tensor([[0., 0.],
            [1., 1.]])
    """
    options = {name: given or None for name, given in locals().items() if name != "cls"}

    def decorate(plain: Any) -> Any:
        return make_class(plain, options, plain.__name__)

    return decorate if cls is None else decorate(cls)
