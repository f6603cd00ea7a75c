"""The two public base classes: what every collection can do, and what mapping kinds are."""

from __future__ import annotations

from types import FunctionType, GenericAlias
from typing import Any

from ._collection import Core
from ._convert import Converting
from ._ops.casting import Casting
from ._ops.elements import Elements
from ._ops.joining import Joining
from ._ops.locking import Locking
from ._ops.mapping import LeafMapping
from ._ops.metadata import Metadata
from ._ops.modules import Modules
from ._ops.packing import Packing
from ._ops.parallel import Parallel
from ._ops.pointwise import Pointwise
from ._ops.reductions import Reductions
from ._ops.select import Selecting
from ._ops.state import State
from ._ops.structure import Structure
from ._ops.torch_function import TorchFunctions
from ._pickling import Pickling
from ._pytree import register_as_its_base
from ._repr import Printing
from ._serializers import Saving
from .plugins.siblings import SiblingMethods


class TensorCollection(
    # torch looks for its protocol without the cache of the interpreter: class by class, at each call.
    TorchFunctions,
    Structure,
    LeafMapping,
    Parallel,
    Printing,
    Converting,
    Metadata,
    Pointwise,
    Casting,
    Reductions,
    Elements,
    Joining,
    Selecting,
    Packing,
    State,
    Modules,
    Locking,
    Pickling,
    Saving,
    SiblingMethods,
    Core,
):
    """Base of every collection: tensors under keys that share their leading dims.

    >>> issubclass(TensorDict, TensorCollection)
    True
    """

    __slots__ = ()

    __class_getitem__: Any = classmethod(GenericAlias)  # annotations such as TensorDict["obs"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_as_its_base(cls)

    def __hash__(self) -> int:
        """Return the hash of the object's identity, as tensors do: ``==`` compares leaf by leaf."""
        return id(self)


def _claim_methods() -> None:
    """Let errors, tracebacks and pickles find a method where users do, wherever it is written."""
    for base in TensorCollection.__mro__[1:-2]:
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and function.__name__ == name:
                function.__module__, function.__qualname__ = __name__, f"{TensorCollection.__name__}.{name}"


_claim_methods()


class TensorDictBase(TensorCollection):
    """Base of the mapping kinds: dense, lazy stack, parameters.

    >>> isinstance(TensorDict(), TensorDictBase)
    True
    """

    __slots__ = ()
