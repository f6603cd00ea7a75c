"""Convert plain classes to tensorclasses: the decorator, and the conversion of dataclasses and their instances."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from td_core import TensorCollection, TensorDict
from td_core.typing import BatchSize, DeviceType

from ._non_tensor import NonTensorDataBase
from ._schema import Options, annotations_of
from ._tensorclass import TensorClass
from ._typing import dataclass_transform, shows, takes_keywords

T = TypeVar("T")

_DOCUMENTED = (types.FunctionType, classmethod, staticmethod, property)
#: Methods that ``dataclass`` may have generated for a plain class.
_GENERATED = ("__init__", "__repr__", "__eq__")

_made: dict[tuple[object, ...], type] = {}


def make_class(plain: Any, options: Mapping[str, object], name: str) -> Any:
    """Derive a tensorclass named ``name`` from a plain class and its fields."""
    if issubclass(plain, TensorClass) and not any(options.values()):
        return plain
    generated = _GENERATED if "__dataclass_fields__" in plain.__dict__ else ()
    # Copy the methods, because help(), doctest and documentation tools only list those in the class's own __dict__.
    namespace: dict[str, object] = {
        key: value
        for key, value in plain.__dict__.items()
        if isinstance(value, _DOCUMENTED) and key not in generated
    }
    namespace.update(__module__=plain.__module__, __qualname__=name, __doc__=plain.__doc__)
    if name == plain.__name__:
        namespace["__qualname__"] = plain.__qualname__
    if not generated:
        annotations = annotations_of(plain)
        namespace["__annotations__"] = dict(annotations)
        namespace.update({key: plain.__dict__[key] for key in annotations if key in plain.__dict__})
    bases = (plain,) if issubclass(plain, TensorClass) else (plain, TensorClass)
    # The plain class must be a base, because super() in its methods refers to it.
    made = types.new_class(name, bases, dict(options), lambda body: body.update(namespace))
    made.__annotations__ = dict(annotations_of(plain))
    if hasattr(plain, "__parameters__"):
        made.__parameters__ = plain.__parameters__  # type: ignore[attr-defined]
    return made


@overload
def tensorclass(cls: type[T], /) -> type[T]: ...
@overload
@takes_keywords(Options)
def tensorclass() -> Callable[[type[T]], type[T]]: ...


@shows(Options)
@dataclass_transform(field_specifiers=(dataclasses.field,))
def tensorclass(cls: object = None, /, **options: Any) -> Any:  # noqa: D417  it describes the fields of Options
    """Convert a class with annotated fields to a tensorclass; the decorator form of :class:`TensorClass`.

    ``__post_init__`` is called for constructed instances and for results of operations: for a lazy stack once per new
    member, and not for results without entries, such as those of :meth:`TensorCollection.empty`.

    Args:
        cls: the class, if the decorator is used without parentheses.
        autocast: convert written values to the annotated type.
        frozen: forbid all writes except in-place writes to leaves.
        nocast: store numbers and arrays unchanged instead of converting them to tensors.
        shadow: allow fields that hide members of a collection.
        tensor_only: accept only tensors, collections, and values that ``torch.as_tensor`` can convert.
        skip_post_init_on_rebuild: call ``__post_init__`` for constructed instances only, not for results of operations.
        cast_filter: ``(key, tensor) -> bool``; a change of dtype applies only to tensors for which it returns True.
        kw_only: accept fields by keyword only.

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
    Options(**options)  # raises TypeError for an unknown option

    def decorate(plain: Any) -> object:
        return make_class(plain, options, plain.__name__)

    return decorate if cls is None else decorate(cls)


def is_tensorclass(obj: object) -> bool:
    """Return True if an instance or a class is a tensorclass.

    NonTensorData and its subclasses count as tensorclasses with the field ``data``, as in tensordict.

    >>> is_tensorclass(TensorClass), is_tensorclass({})
    (True, False)
    """
    cls = obj if isinstance(obj, type) else type(obj)
    return issubclass(cls, (TensorClass, NonTensorDataBase))


def from_dataclass(
    obj: object,
    *,
    dest_cls: type | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: BatchSize | None = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    inplace: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    device: DeviceType | None = None,
) -> Any:
    """Convert a dataclass to a tensorclass, or an instance of a dataclass to an instance of a tensorclass.

    Args:
        obj: the dataclass, or an instance; dataclass instances in its fields are converted too.
        dest_cls: tensorclass of the result, for an instance; by default it is derived from the class of ``obj``.
        auto_batch_size: use the longest batch size that all leaves share.
        batch_dims: maximum number of dims of that batch size.
        batch_size: batch size of the result.
        frozen: option of the new class, like those below; see :func:`tensorclass`.
        autocast: convert written values to the annotated type.
        nocast: store numbers and arrays unchanged instead of converting them to tensors.
        inplace: must be False; a class cannot be converted in place.
        shadow: allow fields that hide members of a collection.
        tensor_only: accept tensors and collections only.
        device: device of the result.

    Raises:
        TypeError: ``obj`` is neither a dataclass nor an instance of one.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     xy: torch.Tensor
    ...     label: str
    >>> from_dataclass(Point(torch.zeros(3, 2), "a"), batch_size=[3])
    Point_tc(batch_size=[3], fields={xy: f32[2], label: str})
    """
    options = {
        "frozen": frozen, "autocast": autocast, "nocast": nocast, "shadow": shadow, "tensor_only": tensor_only,
    }  # fmt: skip
    if not dataclasses.is_dataclass(obj):
        raise TypeError(f"from_dataclass takes a dataclass or an instance of one; got {obj!r}")
    if inplace:
        raise ValueError(
            "a dataclass cannot become a tensorclass in place: use the class that from_dataclass returns"
        )
    if isinstance(obj, type):
        return _class_for(obj, options)
    return convert_dataclass(obj, dest_cls, options, auto_batch_size, batch_dims, batch_size, device)


def convert_dataclass(
    obj: object,
    dest_cls: type | None,
    options: dict[str, bool] | None,
    auto_batch_size: bool,
    batch_dims: int | None,
    batch_size: BatchSize | None,
    device: DeviceType | None,
) -> TensorCollection:
    """Convert a dataclass instance to a tensorclass instance, or to a TensorDict if ``options`` is None."""
    if auto_batch_size and batch_size is not None:
        raise TypeError(f"give a batch size or auto_batch_size=True, not both; got {batch_size!r}")
    if options is None:
        result: TensorCollection = TensorDict(_as_mapping(obj), batch_size=batch_size, device=device)
    else:
        result = _instance_for(obj, dest_cls, options, batch_size=batch_size, device=device)
    return result.auto_batch_size_(batch_dims) if auto_batch_size else result


def _class_for(cls: type, options: dict[str, bool]) -> type:
    """Derive a tensorclass from a dataclass, cached per class and options."""
    if issubclass(cls, TensorClass):
        return cls
    key = (cls, *options.items())
    if key not in _made:
        _made[key] = make_class(cls, options, f"{cls.__name__}_tc")
    return _made[key]


def _instance_for(obj: object, cls: Any, options: dict[str, bool], **labels: object) -> TensorCollection:
    values = _values(obj, lambda value: _instance_for(value, None, options, **labels))
    made: TensorCollection = (cls or _class_for(type(obj), options))(**values, **labels)
    return made


def _as_mapping(obj: object) -> dict[str, object]:
    return _values(obj, _as_mapping)


def _values(obj: Any, convert: Callable[[object], object]) -> dict[str, object]:
    """Return the field values of a dataclass instance by name; ``convert`` is applied to dataclass instances in them."""
    values = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorClass)):
            values[name] = convert(value)
    return values
