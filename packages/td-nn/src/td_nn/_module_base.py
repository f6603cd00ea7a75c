"""TensorDictModuleBase: keys of modules, the selection of output keys, and what pickles and ``fully_shard`` need of a module.

Functions that have no importable name, such as lambdas, are pickled by their code with cloudpickle. ``fully_shard`` registers
hooks on the tensors that a module returns, to gather the parameters again before the backward pass; it finds tensors in tuples,
lists, dicts and dataclasses, but not in a collection.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Generic, overload

import torch
from torch import nn
from typing_extensions import TypeVar

from td_core import TensorCollection, TensorDict
from td_core.typing import NestedKey

from ._module_keys import DeclaredKeys, Key, as_keys, declare_keys, remove_keys
from .module_errors import SelectionError

if TYPE_CHECKING:
    from typing_extensions import Self

CollectionT = TypeVar("CollectionT", bound=TensorCollection)

#: Type that a call with tensors returns: one value, or a tuple of several.
ResultT = TypeVar("ResultT", default=Any)


class _Device:
    """Descriptor of ``device``; an attribute of this name that a subclass assigns hides it."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        for tensors in (instance.parameters(), instance.buffers()):
            for tensor in tensors:
                return tensor.device
        return getattr(instance._inner_module, "device", None)


class TensorDictModuleBase(nn.Module, Generic[ResultT]):
    """Base of modules whose ``forward`` takes a collection and returns one.

    A subclass declares the keys that it reads and writes: ``in_keys`` and ``out_keys`` are attributes of the class, are
    assigned in ``__init__``, or are properties of the subclass. Assigning keys replaces all of them. Reading them returns
    a new list; changing that list does not change the module.

    Attributes:
        device: the device of the first parameter, else of the first buffer; without both that of the wrapped callable, if
            it has one, or None.

    >>> from td_nn import dispatch
    >>> class Double(TensorDictModuleBase):
    ...     in_keys = ["x"]
    ...     out_keys = ["y"]
    ...     @dispatch
    ...     def forward(self, tensordict):
    ...         return tensordict.set("y", tensordict["x"] * 2)
    >>> Double()(TensorDict(x=torch.ones(1)))["y"], Double()(x=torch.ones(1))
    (tensor([2.]), tensor([2.]))
    """

    in_keys: Any = DeclaredKeys("in_keys")
    out_keys: Any = DeclaredKeys("out_keys")
    device: torch.device | None = _Device()  # type: ignore[assignment]

    #: The keys of the instance, or the declared keys of its class.
    _all_in_keys: tuple[Key, ...] | None = None
    _all_out_keys: tuple[Key, ...] | None = None

    #: The selected output keys; None selects all.
    _selected_out_keys: tuple[Key, ...] | None = None

    #: Names of attributes that can hold a function which pickle cannot import by name.
    _functions: tuple[str, ...] = ()

    #: The wrapped module or function, for messages.
    _inner_module: Any = None

    #: True if :class:`DeclaredKeys` stores assigned keys, False if a subclass has properties of these names.
    _keeps_keys = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declare_keys(cls, ("in_keys", "out_keys"))
        show_results(cls)
        cls._keeps_keys = all(type(_static(cls, name)) is DeclaredKeys for name in ("in_keys", "out_keys"))

    def _explain_missing(self, key: Key, result: TensorCollection) -> str:
        """Format why a key is missing in a result, for the end of a message."""
        return ""

    def _take_keys(self, name: str) -> None:
        """Update the module after ``in_keys`` or ``out_keys`` was assigned."""

    if TYPE_CHECKING:

        @overload
        def __call__(self, tensordict: CollectionT, *args: Any, **kwargs: Any) -> CollectionT: ...
        @overload
        def __call__(self, *args: Any, **kwargs: Any) -> ResultT: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def out_keys_source(self) -> list[Key]:
        """All keys that the module writes, selected or not."""
        keys = self._all_out_keys
        return self.out_keys if keys is None else list(keys)

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Select output keys, in this order. The other outputs are removed from the collection after each call.

        Args:
            *out_keys: the keys, each as an argument; without arguments, no output is kept.

        Raises:
            SelectionError: a key is not among ``out_keys``.

        >>> from td_nn import TensorDictModule
        >>> both = TensorDictModule(lambda x: (x + 1, x + 2), ["x"], ["one", "two"])
        >>> both.select_out_keys("two")(torch.zeros(1))
        tensor([2.])
        >>> both.reset_out_keys().out_keys
        ['one', 'two']
        """
        if any(isinstance(key, list) for key in out_keys):
            raise SelectionError(
                f"select_out_keys() takes each key as an argument, not a list; got {out_keys}"
            )
        selected = as_keys(list(out_keys), "select_out_keys(*keys)")
        self._check_selection(selected)
        self._store_selection(selected)
        return self

    def reset_out_keys(self) -> Self:
        """Select all output keys.

        >>> from td_nn import TensorDictModule
        >>> selected = TensorDictModule(abs, ["x"], ["y"]).select_out_keys()
        >>> selected.reset_out_keys().out_keys
        ['y']
        """
        self._store_selection(None)
        return self

    def _check_selection(self, selected: tuple[Key, ...]) -> None:
        known = self.out_keys
        unknown = [key for key in selected if key not in known]
        if unknown:
            raise SelectionError(
                f"cannot select {', '.join(map(repr, unknown))}: {show_module(self)} writes {known}"
            )

    def _store_selection(self, selected: tuple[Key, ...] | None) -> None:
        """Store a selection; if a subclass has a property ``out_keys``, also through its setter."""
        self._filter_results(selected is not None)
        own = _static(type(self), "out_keys")
        if not isinstance(own, DeclaredKeys) and (
            getattr(own, "fset", None) or not isinstance(own, property)
        ):
            every = self.out_keys_source
            self.out_keys = every if selected is None else list(selected)
            self.__dict__["_all_out_keys"] = tuple(every)
        if selected is None:
            self.__dict__.pop("_selected_out_keys", None)
        else:
            self.__dict__["_selected_out_keys"] = selected

    def _filter_results(self, does: bool) -> None:
        """Register or remove the hook that removes unselected outputs after a call."""
        hooks = self._forward_hooks
        if not does:
            for number in [number for number, hook in hooks.items() if hook is leave_out_unselected]:
                del hooks[number]
                self._forward_hooks_with_kwargs.pop(number, None)
        elif leave_out_unselected not in hooks.values():
            self.register_forward_hook(leave_out_unselected, prepend=True, with_kwargs=True)

    @staticmethod
    def is_tdmodule_compatible(module: object) -> bool:
        """Return True if an object has ``in_keys`` and ``out_keys``.

        >>> TensorDictModuleBase.is_tdmodule_compatible(torch.nn.Linear(1, 1))
        False
        """
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    def reset_parameters_recursive(self, parameters: TensorCollection | None = None) -> TensorDict | None:
        """Reset the parameters of this module and its submodules, or the given parameters instead.

        Args:
            parameters: a collection with the keys of ``TensorDict.from_module``, reset in place. The parameters of the
                module do not change then.

        Returns:
            The given parameters as tensors that require gradients and share their storage; None if no parameters were
            given.

        Raises:
            RuntimeError: ``parameters`` has a batch size.

        Warns:
            UserWarning: no submodule has a method ``reset_parameters``.

        >>> from td_nn import TensorDictModule
        >>> layer = TensorDictModule(torch.nn.Linear(2, 1), ["x"], ["y"])
        >>> params = TensorDict.from_module(layer).data.clone().zero_()
        >>> bool(layer.reset_parameters_recursive(params)["module", "weight"].any())
        True
        """
        if parameters is None:
            results = [module for module in self.modules() if hasattr(type(module), "reset_parameters")]
            if not results:
                warnings.warn(
                    f"reset_parameters_recursive() of {show_module(self)} found no submodule that has "
                    "reset_parameters(), so nothing was reset",
                    stacklevel=2,
                )
            for module in results:
                module.reset_parameters()  # type: ignore[operator]
            return None
        if parameters.batch_size:
            raise RuntimeError(
                "reset_parameters_recursive() resets the parameters of one module; "
                f"got parameters of batch size {list(parameters.batch_size)}"
            )
        values = parameters.data
        with values.to_module(self):
            self.reset_parameters_recursive()
        return detach_parameters(values)

    @property
    def __name__(self) -> str:
        """Name of the class, for tools that expect a function."""
        name: str = type.__dict__["__name__"].__get__(type(self))
        return name

    def __repr__(self) -> str:
        return self._show(f"in_keys={self.in_keys},\nout_keys={self.out_keys}")

    def _show(self, fields: str, shown: Sequence[str] = ()) -> str:
        """Format the module: the fields, what ``extra_repr`` returns, and the submodules that are not among the fields."""
        parts = [fields, self.extra_repr()] if self.extra_repr() else [fields]
        parts += [f"({name}): {child!r}" for name, child in self._modules.items() if name not in shown]
        indented = ",\n".join(parts).replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {indented})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in self._functions:
            if name in state:
                state[name] = make_portable(state[name])
        return state

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


def detach_parameters(values: TensorCollection) -> TensorDict:
    """Return tensors that share the storage of parameters and, if they can, require gradients."""
    fresh = TensorDict({key: value.detach() for key, value in values.items(True, True)}, values.batch_size)
    result: TensorDict = fresh.apply(lambda x: x.requires_grad_(x.is_floating_point() or x.is_complex()))
    return result


def leave_out_unselected(
    module: TensorDictModuleBase,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    result: TensorCollection,
) -> None:
    """Remove unselected outputs from the collection that a call returned: a forward hook."""
    selected = module._selected_out_keys
    if selected is None or not isinstance(result, TensorCollection):
        return
    if "tensordict" in kwargs or (args and isinstance(args[0], TensorCollection)):
        kept = {*selected, *module.in_keys}  # inputs stay in the collection
        remove_keys(result, [key for key in module.out_keys_source if key not in kept])


def _static(cls: type, name: str) -> object:
    """Return an attribute of a class or its bases without calling descriptors."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def show_module(module: object) -> str:
    """Format a module for messages: its class, and the class or name of the wrapped callable."""
    inner = getattr(module, "_inner_module", None)
    if inner is None or isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
        return type(module).__name__
    name = getattr(inner, "__name__", type(inner).__name__)
    return f"{type(module).__name__}({name})"


class _Code:
    """A function as bytes that cloudpickle wrote; unpickling returns the function."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return pickle.loads, (self.data,)


def make_portable(function: Callable[..., object]) -> Any:
    """Convert a function without an importable name to an object that can be pickled; PicklingError without cloudpickle."""
    if isinstance(function, (nn.Module, type)) or not _is_nameless(function):
        return function
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ModuleNotFoundError:
        raise pickle.PicklingError(
            f"cannot pickle the function {function!r}, which no module has under its name; use a function of a module, "
            "or install what pickles its code: pip install cloudpickle"
        ) from None
    return _Code(cloudpickle.dumps(function))


def _is_nameless(function: Callable[..., object]) -> bool:
    """Return True if pickle cannot import a function by name: a lambda or a local function, for example."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return False
    result: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        result = getattr(result, part, None)
    return result is not function


def show_results(cls: Any) -> None:
    """Register the backward hooks of FSDP2 for returned collections, in a class that ``fully_shard`` created."""
    if not any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        return

    inherited = cls.forward

    def forward(self: Any, *args: object, **kwargs: object) -> Any:
        result = inherited(self, *args, **kwargs)
        # This name is private in torch, so a release without it must not fail here.
        register = getattr(self._get_fsdp_state(), "_register_pre_backward_hook", None)
        if register is not None and isinstance(result, TensorCollection):
            register(tuple(result.values(True, True)))
        return result

    cls.forward = forward
