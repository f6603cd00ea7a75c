"""Modules that take and return tensorclasses, and the wrapper that makes them read and write collections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from torch import nn

from td_core import TensorCollection, TensorDict

from ._dispatch import dispatch
from ._module_base import TensorDictModuleBase
from ._module_keys import Key, store_outputs

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


class TensorClassModuleBase(ABC, nn.Module, Generic[InputT, OutputT]):
    """Base of modules that take and return tensorclasses or tensors.

    A subclass states both types, ``TensorClassModuleBase[In, Out]``, and has a ``forward`` that takes an ``In`` and
    returns an ``Out``.

    Attributes:
        input_type: type of the argument.
        output_type: type of the result.

    >>> class Double(TensorClassModuleBase[torch.Tensor, torch.Tensor]):
    ...     def forward(self, x):
    ...         return x * 2
    >>> Double()(torch.ones(1)), Double.input_type
    (tensor([2.]), <class 'torch.Tensor'>)
    """

    input_type: ClassVar[Any]
    output_type: ClassVar[object]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            types = get_args(base)
            if get_origin(base) is TensorClassModuleBase and not any(
                isinstance(type_, TypeVar) for type_ in types
            ):
                cls.input_type, cls.output_type = types

    @abstractmethod
    def forward(self, x: InputT) -> OutputT:
        """Compute the output of an input; a subclass implements it."""

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Wrap the module so that it reads the input fields from a collection and writes the output fields.

        Raises:
            ValueError: a type is missing or is not a tensorclass.

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


class TensorClassModuleWrapper(TensorDictModuleBase):
    """A wrapper that calls a module of tensorclasses with collections. Its keys are the fields of the classes.

    A call returns a new TensorDict of the output fields. Input fields that the collection lacks are None.

    Args:
        module: the wrapped module, whose ``input_type`` and ``output_type`` are tensorclasses.

    Raises:
        ValueError: one of the types is not a tensorclass.
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
    def _inner_module(self) -> object:
        return self._modules.get("tc_module")

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorCollection, *, tensordict_out: TensorCollection | None = None
    ) -> TensorCollection:
        """Call the wrapped module with the fields in a collection, and return the collection of output fields.

        Args:
            tensordict: a collection with the fields, or an instance of the input type.
            tensordict_out: the collection that receives the output, instead of a new TensorDict.
        """
        module = self.tc_module
        if not isinstance(tensordict, module.input_type):
            known = tensordict.select(*_fields(module.input_type) or (), strict=False)
            tensordict = module.input_type.from_tensordict(
                TensorDict(known, tensordict.batch_size, tensordict.device)
            )
        result = module(tensordict)
        if tensordict_out is None:
            tensordict_out = TensorDict({}, result.batch_size, result.device)
        present = result.keys(True)
        kept = [key for key in self.out_keys_source if key in present and result.get(key) is not None]
        store_outputs(tensordict_out, kept, map(result.get, kept))
        return tensordict_out

    def __repr__(self) -> str:
        fields = f"tc_module={self.tc_module!r},\nin_keys={self.in_keys},\nout_keys={self.out_keys}"
        return self._show(fields, ["tc_module"])


def _fields(provided: object) -> dict[str, Any] | None:
    """Return the declared fields of a collection class; None for other types and classes without fields."""
    if isinstance(provided, type) and issubclass(provided, TensorCollection):
        return provided.declared_fields()
    return None


def _leaf_keys(declaring: object) -> list[Key]:
    """List the keys of the fields of a class, and recursively of fields that are tensorclasses."""
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
