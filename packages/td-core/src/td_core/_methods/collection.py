"""The public base classes: ``TensorCollection`` of every kind, ``TensorDictBase`` of the mapping kinds."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import FunctionType, GenericAlias
from typing import Any

import torch

from .._functions.torch_function import KEYWORDS, TABLE, add_methods, suggest_line
from .._torch.private import is_caller, without_torch_function
from .._transforms.pytree import register_as_its_base
from .._tree.defaults import Defaults
from .._tree.node import Core
from ..plugins.siblings import SiblingMethods
from .along_dims import AlongMixin
from .apply import ApplyMixin
from .casting import CastingMixin, DtypeMixin
from .conversion import ConversionMixin, ReprMixin
from .device_moves import DeviceMixin
from .elements import ElementMixin
from .entries import EntryMixin
from .joining import JoinMixin
from .locking import LockMixin
from .metadata import MetadataMixin
from .modules import ModuleMixin
from .parallel import ParallelMixin
from .pointwise import PointwiseMixin
from .reductions import ReductionMixin
from .saving import PickleMixin, SaveMixin
from .select import SelectMixin
from .shape import ShapeMixin
from .structure import StructureMixin
from .update import UpdateMixin


class TensorCollection(
    StructureMixin,
    UpdateMixin,
    ApplyMixin,
    ParallelMixin,
    ReprMixin,
    ConversionMixin,
    MetadataMixin,
    PointwiseMixin,
    CastingMixin,
    DeviceMixin,
    DtypeMixin,
    ReductionMixin,
    AlongMixin,
    ElementMixin,
    JoinMixin,
    SelectMixin,
    ShapeMixin,
    EntryMixin,
    ModuleMixin,
    LockMixin,
    PickleMixin,
    SaveMixin,
    SiblingMethods,
    Defaults,
):
    """Base of every collection: tensors under keys that share their leading dims.

    >>> issubclass(TensorDict, TensorCollection)
    True
    """

    __slots__ = ()

    __class_getitem__: Any = classmethod(GenericAlias)  # allow annotations such as TensorDict["obs"]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_as_its_base(cls)

    def __hash__(self) -> int:
        """Return the id of the object, as tensors do, because ``==`` compares leaf by leaf."""
        return id(self)

    # It is not in a mixin, since torch looks it up through the bases at each call, without a cache.
    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Call the implementation of a torch function for collections.

        Raises:
            TypeError: the function is not supported on collections.

        >>> torch.exp(TensorDict({"a": torch.zeros(2)}))["a"]
        tensor([1., 1.])
        """
        handler = TABLE.get(func)
        if handler is None:
            if is_caller(func):  # only torch.compile dispatches such functions here, eager mode never does
                with without_torch_function():
                    return func(*args, **(kwargs or {}))
            name = torch.overrides.resolve_name(func) or repr(func)
            line = suggest_line(name, args, kwargs or {})
            raise TypeError(
                f"{name} takes no collections; call it on the leaves that it is for, or on each: {line}"
            )
        if not kwargs:
            return handler(*args)
        names = KEYWORDS.get(func, {})
        return handler(*args, **{names.get(key, key): value for key, value in kwargs.items()})


def _claim_methods() -> None:
    """Set the module and qualified name of mixin methods to those of ``TensorCollection``."""
    # Without it, a pickled method names a private module, which may move, 37 methods made by factories cannot be pickled,
    # and a TypeError names ``CastingMixin.to()`` instead of ``TensorCollection.to()``. It takes 0.13 ms of the import.
    for base in TensorCollection.__mro__[1:-2]:
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and function.__name__ == name:
                function.__module__, function.__qualname__ = __name__, f"{TensorCollection.__name__}.{name}"


_claim_methods()
add_methods(TensorCollection)


class TensorDictBase(TensorCollection):
    """Base of the mapping kinds: dense, lazy stack, parameters.

    >>> isinstance(TensorDict(), TensorDictBase)
    True
    """

    __slots__ = ()


def is_tensor_collection(datatype: object) -> bool:
    """Return True if an object or a class is a collection.

    >>> is_tensor_collection(TensorDict), is_tensor_collection(TensorDict())
    (True, True)
    >>> is_tensor_collection(torch.zeros(1))
    False
    """
    return issubclass(datatype if isinstance(datatype, type) else type(datatype), Core)


def count_as_mapping() -> None:
    r"""Register the kinds below ``TensorDictBase`` as ``collections.abc.MutableMapping``, for the rest of the process.

    Libraries that search a batch for tensors enter mappings, but no other collections. Importing td_core registers nothing,
    because ``torch.utils.data.default_convert`` and ``DataLoader(batch_size=None)`` take a mapping apart.

    >>> import subprocess, sys
    >>> program = "import td_core, collections.abc as abc; td_core.count_as_mapping(); "
    >>> program += "print(isinstance(td_core.TensorDict(), abc.Mapping))"
    >>> subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    'True\n'
    """
    MutableMapping.register(TensorDictBase)
