"""MetaData: one object for the whole batch, compared by identity when it is stacked."""

from __future__ import annotations

import copyreg
import operator
from abc import ABCMeta
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from td_core.spi import Node, PrintedNode, set_module
from td_core.typing import BatchSize, DeviceType

from ._non_tensor import NonTensorDataBase

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class _MetaDataType(ABCMeta):
    """Metaclass of MetaData, so that copyreg can pickle ``MetaData[T]``, which has no importable name."""


@set_module("td_tensorclass")
class MetaData(NonTensorDataBase, Generic[T], metaclass=_MetaDataType):
    """One object for the whole batch. Stacking nodes of the same object (``is``) keeps one; else one per element.

    ``MetaData[T]`` is a subclass that accepts instances of ``T`` only.

    Args:
        data: the object.
        batch_size: batch size that the object applies to.
        device: a label only.
        names: a name or None per batch dim.

    Raises:
        TypeError: the object is not an instance of ``T``.

    >>> config = {"lr": 0.1}
    >>> torch.stack([MetaData(config), MetaData(config)])
    MetaData(data={'lr': 0.1}, batch_size=torch.Size([2]), device=None)
    >>> torch.stack([MetaData(config), MetaData({"lr": 0.2})]).tolist()
    [{'lr': 0.1}, {'lr': 0.2}]
    >>> MetaData[str](3)
    Traceback (most recent call last):
    TypeError: MetaData[str] takes a str; got 3 of type int
    """

    __slots__ = ()

    _expected_type: ClassVar[type] = object
    _typed_classes: ClassVar[dict[type, type]] = {}

    def __init__(
        self,
        data: T,
        _metadata: dict[str, Any] | None = None,
        _is_non_tensor: bool = True,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(data, _metadata, _is_non_tensor, batch_size=batch_size, device=device, names=names)
        self._check_type(self._value)

    def _check_type(self, value: object) -> None:
        if not isinstance(value, self._expected_type):
            raise TypeError(
                f"{type(self).__name__} takes a {self._expected_type.__name__}; got {value!r} of type {type(value).__name__}"
            )

    def __class_getitem__(cls, wanted: object) -> Any:
        """Return the cached subclass for objects of one class; a type variable gives a generic alias."""
        if not isinstance(wanted, type):
            return super().__class_getitem__(wanted)
        if wanted not in cls._typed_classes:
            name = f"{cls.__name__}[{wanted.__name__}]"
            namespace = {
                "__slots__": (),
                "__module__": __name__,  # file headers contain this module name
                "__qualname__": name,
                "_expected_type": wanted,
            }
            cls._typed_classes[wanted] = _MetaDataType(name, (cls,), namespace)
        return cls._typed_classes[wanted]

    def _print_node(self) -> PrintedNode:
        return super()._print_node()._replace(text=type(self).__name__)

    def _replace_value(self, value: object) -> Self:
        self._check_type(value)
        return super()._replace_value(value)

    def _is_single_after_join(self, items: Sequence[Node], stacks: bool) -> bool:
        return all(isinstance(item, MetaData) and item._value is self._value for item in items)


def _reduce_class(cls: Any) -> Any:
    made = MetaData._typed_classes.get(cls._expected_type) is cls
    return (operator.getitem, (MetaData, cls._expected_type)) if made else cls.__qualname__


copyreg.pickle(_MetaDataType, _reduce_class)
