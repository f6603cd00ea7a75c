"""Modules from tensorclass to tensorclass, and how one takes and gives other collections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from torch import nn

from td_core import TensorCollection, TensorDict

from ._dispatch import dispatch
from ._module_base import TensorDictModuleBase
from ._module_keys import Key

__all__ = ["TensorClassModuleBase", "TensorClassModuleWrapper"]

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


class TensorClassModuleBase(ABC, nn.Module, Generic[InputT, OutputT]):
    """Base of the modules that take and return tensorclasses, or tensors.

    A subclass says the two types, ``TensorClassModuleBase[In, Out]``, and has a ``forward`` from the one to the other.

    Attributes:
        input_type: the type it takes.
        output_type: the type it returns.

    >>> class Double(TensorClassModuleBase[torch.Tensor, torch.Tensor]):
    ...     def forward(self, x):
    ...         return x * 2
    >>> Double()(torch.ones(1)), Double.input_type
    (tensor([2.]), <class 'torch.Tensor'>)
    """

    input_type: ClassVar[Any]
    output_type: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            types = get_args(base)
            if get_origin(base) is TensorClassModuleBase and not any(
                isinstance(type_, TypeVar) for type_ in types
            ):
                cls.input_type, cls.output_type = types

    @abstractmethod
    def forward(self, x: InputT) -> OutputT:
        """Return the output for an input."""

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Return a module that reads the fields of the input type from a collection and writes those of the output.

        Raises:
            ValueError: the types are not said, or are not both tensorclasses.

        >>> from td_tensorclass import TensorClass
        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> class Length(TensorClass):
        ...     length: torch.Tensor
        >>> class Measure(TensorClassModuleBase[Point, Length]):
        ...     def forward(self, x):
        ...         return Length(x.xy.norm(dim=-1), batch_size=x.batch_size)
        >>> Measure().as_td_module()(xy=torch.tensor([3.0, 4.0]))
        tensor(5.)
        """
        return TensorClassModuleWrapper(self)


class TensorClassModuleWrapper(TensorDictModuleBase[Any]):
    """A module from tensorclass to tensorclass as one from collection to collection, whose keys are the fields.

    It returns a new TensorDict of the output's fields. Fields that the input lacks are None.

    Args:
        module: the module inside, whose ``input_type`` and ``output_type`` are tensorclasses.

    Raises:
        ValueError: they are not.
    """

    def __init__(self, module: TensorClassModuleBase[Any, Any]) -> None:
        super().__init__()
        name = type(module).__name__
        if not hasattr(module, "input_type"):
            raise ValueError(
                f"{name} does not say what it takes and returns; subclass TensorClassModuleBase[In, Out] with two tensorclasses"
            )
        for provided in (module.input_type, module.output_type):
            if _fields(provided) is None:
                raise ValueError(
                    f"{name} is from and to tensorclasses in order to read collections; {provided!r} is not one"
                )
        self.in_keys = _leaf_keys(module.input_type)
        self.out_keys = _leaf_keys(module.output_type)
        self.tc_module = module

    @property
    def _inner_module(self) -> Any:
        return self._modules.get("tc_module")

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorCollection, *, tensordict_out: TensorCollection | None = None
    ) -> TensorCollection:
        """Return what the module inside makes of the fields in a collection.

        Args:
            tensordict: where the fields are, or an instance of the input type.
            tensordict_out: where the output goes, instead of a new TensorDict.
        """
        module: Any = self.tc_module
        if not isinstance(tensordict, module.input_type):
            known = tensordict.select(*_fields(module.input_type) or (), strict=False)
            tensordict = module.input_type.from_tensordict(
                TensorDict(known, tensordict.batch_size, tensordict.device)
            )
        result = module(tensordict)
        if tensordict_out is None:
            tensordict_out = TensorDict({}, result.batch_size, result.device)
        present = result.keys(True)
        for key in self.out_keys_source:
            if key in present and result.get(key) is not None:
                tensordict_out.set(key, result.get(key))
        return tensordict_out

    def __repr__(self) -> str:
        return self._show(f"tc_module={self.tc_module!r},\nin_keys={self.in_keys},\nout_keys={self.out_keys}")


def _fields(provided: Any) -> dict[str, Any] | None:
    """Return the fields that a type declares, None where it is no collection that declares any."""
    if isinstance(provided, type) and issubclass(provided, TensorCollection):
        return provided.declared_fields()
    return None


def _leaf_keys(declaring: Any) -> list[Key]:
    """Return the keys of the fields of a class, and of those of the fields that are such classes."""
    results: list[Key] = []
    for name, hint in (_fields(declaring) or {}).items():
        below = None if hint is declaring else _fields(hint)
        inside = (
            [name]
            if below is None
            else [(name, *(key if isinstance(key, tuple) else (key,))) for key in _leaf_keys(hint)]
        )
        results += inside
    return results
