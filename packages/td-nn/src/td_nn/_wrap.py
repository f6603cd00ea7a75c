"""Convert functions to modules: functions of a collection (WrapModule) or of tensors (as_tensordict_module)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from td_core import TensorCollection
from td_core.typing import NestedKey

from ._module import TensorDictModule
from ._module_base import TensorDictModuleBase

FnT = TypeVar("FnT", bound=Callable[..., object])


class WrapModule(TensorDictModuleBase):
    """A module that calls a function of a collection.

    Args:
        func: a function that takes a collection and returns one.
        inplace: True updates the input with the result of the function and returns the input.
        in_keys: the keys that the function reads, for sequences that contain the module; none by default.
        out_keys: the keys that the function writes.

    Raises:
        TypeError: ``func`` cannot be called.

    >>> WrapModule(lambda td: td * 2)(TensorDict(x=torch.ones(1)))["x"]
    tensor([2.])
    """

    _functions = ("func",)

    def __init__(
        self,
        func: Callable[[Any], Any],
        *,
        inplace: bool = False,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(
                f"WrapModule wraps a function of a collection; got {func!r}, which cannot be called"
            )
        self.func = func
        self.inplace = inplace
        self.in_keys = [] if in_keys is None else in_keys
        self.out_keys = [] if out_keys is None else out_keys

    @property
    def _inner_module(self) -> Callable[[Any], Any]:
        return self.func

    def forward(self, data: TensorCollection) -> Any:
        """Call the function, and return its result or the updated input."""
        if not self.inplace:
            return self.func(data)
        result = self.func(data)
        if result is not None and result is not data:
            data.update(result)
        return data

    def __repr__(self) -> str:
        func = f"func={self.func!r},\n" if isinstance(self.func, nn.Module) else ""
        return self._show(f"{func}in_keys={self.in_keys},\nout_keys={self.out_keys}", ["func"])


def as_tensordict_module(
    *, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]
) -> Callable[[FnT], FnT]:
    """Decorate a function or method so that it reads its arguments from a collection and stores its results there.

    Args:
        in_keys: the keys of the arguments, or a dict from argument names to keys.
        out_keys: the keys of the results.

    >>> @as_tensordict_module(in_keys=["x"], out_keys=["y"])
    ... def double(x):
    ...     return x * 2
    >>> double(TensorDict(x=torch.ones(1)))["y"], double(torch.ones(1))
    (tensor([2.]), tensor([2.]))
    """

    def decorate(fn: FnT) -> FnT:
        wrapper: object
        if next(iter(_parameters(fn)), "") in ("self", "cls"):

            def call(*values: object, self_: object, **kwargs: object) -> Any:
                return fn(self_, *values, **kwargs)

            method = TensorDictModule(functools.wraps(fn)(call), in_keys, out_keys)

            def wrapper(self: object, *args: object, **kwargs: object) -> Any:
                return method(*args, self_=self, **kwargs)

        else:
            module = TensorDictModule(fn, in_keys, out_keys)

            def wrapper(*args: object, **kwargs: object) -> Any:
                return module(*args, **kwargs)

        return cast("FnT", functools.wraps(fn)(wrapper))

    return decorate


def _parameters(fn: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; an empty dict for a C function without a signature."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
