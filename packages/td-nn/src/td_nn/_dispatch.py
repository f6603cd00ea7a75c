"""The decorator ``dispatch``, with which a function of a collection also takes and returns tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor

from td_core import KeyPathError, TensorCollection, TensorDict
from td_core.spi import RULES
from td_core.typing import NestedKey

from ._module_base import TensorDictModuleBase, show_module
from ._module_keys import SINK, Key, as_keys, has_key, join_key
from ._switches import STATE
from .module_errors import MissingKeyError

FnT = TypeVar("FnT", bound=Callable[..., object])
NO_SIZE = torch.Size()


class dispatch:  # noqa: N801  a decorator
    """Decorate a function of a collection so that it can also be called with the tensors that it reads.

    Positional arguments are the values of the keys read, in their order. The keyword of a nested key is its parts, joined
    by the separator. Other arguments are passed to the function. A call with tensors returns the value of the key
    written, or a tuple of several values.

    Args:
        separator: the string that joins the parts of a nested key.
        source: the keys that are read, or the name of the attribute of ``self`` that lists them.
        dest: the keys that are written, or the name of the attribute of ``self`` that lists them.
        auto_batch_size: True gives the collection the leading dims that all inputs share as its batch size, False gives
            it no batch dims.

    Raises:
        RuntimeError: the first argument of the function, after ``self``, is not named ``tensordict``; in a call: an input
            is passed twice.
        MissingKeyError: in a call: the function did not write a key of ``dest``.

    >>> @dispatch(source=["a", ("b", "c")], dest=["sum"])
    ... def add(tensordict):
    ...     return tensordict.set("sum", tensordict["a"] + tensordict["b", "c"])
    >>> add(torch.ones(2), b_c=torch.ones(2))
    tensor([2., 2.])
    >>> add(TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}}))["sum"]
    tensor([2., 2.])
    """

    DEFAULT_SEPARATOR: ClassVar[str] = "_"
    DEFAULT_SOURCE: ClassVar[str] = "in_keys"
    DEFAULT_DEST: ClassVar[str] = "out_keys"

    separator: str
    source: str | tuple[Key, ...]
    dest: str | tuple[Key, ...]
    auto_batch_size: bool

    @overload
    def __new__(cls, separator: FnT) -> FnT: ...  # type: ignore[misc]
    @overload
    def __new__(
        cls,
        separator: str = "_",
        source: str | Sequence[NestedKey] = "in_keys",
        dest: str | Sequence[NestedKey] = "out_keys",
        auto_batch_size: bool = True,
    ) -> dispatch: ...
    def __new__(
        cls,
        separator: Any = "_",
        source: str | Sequence[NestedKey] = "in_keys",
        dest: str | Sequence[NestedKey] = "out_keys",
        auto_batch_size: bool = True,
    ) -> Any:
        """Return the decorator, or the decorated function if ``dispatch`` is used without parentheses."""
        self = super().__new__(cls)
        self.separator = cls.DEFAULT_SEPARATOR if callable(separator) else separator
        self.source = source if isinstance(source, str) else as_keys(list(source), "source")
        self.dest = dest if isinstance(dest, str) else as_keys(list(dest), "dest")
        self.auto_batch_size = auto_batch_size
        return self(separator) if callable(separator) else self

    def __call__(self, fn: FnT) -> FnT:
        """Wrap ``fn`` so that it also takes tensors."""
        signature = inspect.signature(fn)
        names = list(signature.parameters)
        is_method = names[:1] != ["tensordict"]
        if is_method and names[1:2] != ["tensordict"]:
            raise RuntimeError(
                f"dispatch decorates functions whose first argument, after self, is named tensordict; "
                f"{getattr(fn, '__qualname__', fn)} takes {names}"
            )
        read, source, dest = self._read, self.source, self.dest
        wrapper: object
        if is_method:

            def wrapper(_self: object, *args: object, **kwargs: object) -> Any:
                # Hot path: comparing the type is faster than isinstance() in the most frequent call.
                if args and (type(args[0]) is TensorDict or isinstance(args[0], TensorCollection)):
                    return fn(_self, *args, **kwargs) if kwargs or len(args) > 1 else fn(_self, args[0])
                in_keys = get_keys(_self, source)
                if not STATE.dispatches or ("tensordict" in kwargs and "tensordict" not in in_keys):
                    return fn(_self, *args, **kwargs)
                tensordict, args, kwargs = read(in_keys, args, kwargs)
                return unpack_outputs(
                    fn(_self, tensordict, *args, **kwargs), tensordict, get_keys(_self, dest), _self
                )

        elif isinstance(source, str) or isinstance(dest, str):
            raise RuntimeError(
                f"dispatch of the function {getattr(fn, '__qualname__', fn)} needs lists of keys as source and dest: it has "
                "no self whose attributes could say them"
            )
        else:

            def wrapper(*args: object, **kwargs: object) -> Any:
                if args and isinstance(args[0], TensorCollection):
                    return fn(*args, **kwargs)
                if not STATE.dispatches or ("tensordict" in kwargs and "tensordict" not in source):
                    return fn(*args, **kwargs)
                tensordict, args, kwargs = read(source, args, kwargs)
                return unpack_outputs(fn(tensordict, *args, **kwargs), tensordict, dest)

        made: Any = functools.wraps(fn)(wrapper)
        made.__signature__ = _make_optional(signature, names[: 2 if is_method else 1])
        return cast("FnT", made)

    def _read(
        self, in_keys: Sequence[Key], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[TensorDict, tuple[object, ...], dict[str, object]]:
        """Build a collection of the arguments that are values of keys, and return it with the other arguments."""
        values: dict[Any, Any] = {}
        taken: dict[str, Key] = {}
        provided = len(args)
        for place, key in enumerate(in_keys):
            name = key if type(key) is str else join_key(key, self.separator)
            if place < provided:
                if name in kwargs:
                    raise RuntimeError(
                        f"the input {key!r} is given twice: by position {place} and as {name}="
                    )
                values[key] = args[place]
            elif name in kwargs:
                values[key] = kwargs.pop(name)
                taken[name] = key
            elif taken.get(name, key) != key:
                raise RuntimeError(
                    f"the keyword {name} stands for two inputs, {taken[name]!r} and {key!r}; give a collection, or another "
                    "separator to dispatch"
                )
        size = NO_SIZE
        if self.auto_batch_size:
            if RULES.follows_tensordict and not all(isinstance(value, Tensor) for value in values.values()):
                size = (
                    TensorDict(values).auto_batch_size_().batch_size
                )  # that of the entries which values become
            else:
                size = share_dims([_size_of(value) for value in values.values()])
        return TensorDict(values, batch_size=size), args[len(in_keys) :], kwargs


def get_keys(owner: object, keys: str | Sequence[Key]) -> Sequence[Key]:
    """Return ``keys``, or the attribute with this name of the object whose method is called."""
    if not isinstance(keys, str):
        return keys
    if isinstance(owner, TensorDictModuleBase):
        if keys == "out_keys":
            if owner._selected_out_keys is not None:
                return owner._selected_out_keys
            if owner._keeps_keys:
                return owner._all_out_keys or owner.out_keys
        elif keys == "in_keys" and owner._keeps_keys:
            return owner._all_in_keys or owner.in_keys
    found: Sequence[Key] = getattr(owner, keys)
    return found


def unpack_outputs(
    result: object, tensordict: TensorDict, out_keys: Sequence[Key], owner: object = None
) -> Any:
    """Read the written keys from a result: the value of a single key, or a tuple of values."""
    if result is not tensordict and not isinstance(result, TensorCollection):
        raise TypeError(
            f"{'the function' if owner is None else show_module(owner)} was called with tensors, so it has to return a "
            f"collection to take its outputs from; it returned a {type(result).__name__}"
        )
    try:
        if len(out_keys) == 1 and out_keys[0] != SINK:
            return result[out_keys[0]]
        match = tuple([result[key] for key in out_keys if key != SINK])
    except KeyPathError:
        missing = [key for key in out_keys if key != SINK and not has_key(result, key)]
        why = ""
        if isinstance(owner, TensorDictModuleBase):
            why = "".join(owner._explain_missing(key, result) for key in missing)
        raise MissingKeyError(
            "the function" if owner is None else show_module(owner),
            f"did not write {', '.join(map(repr, missing))}{why}",
            missing,
        ) from None
    return match[0] if len(match) == 1 else match


def share_dims(sizes: Sequence[torch.Size]) -> torch.Size:
    """Return the leading dims that all sizes share."""
    if not sizes:
        return torch.Size()
    shortest = min(map(len, sizes))
    for dim in range(shortest):
        if any(size[dim] != sizes[0][dim] for size in sizes):
            return sizes[0][:dim]
    return sizes[0][:shortest]


def _size_of(value: object) -> torch.Size:
    """Return the size of a value; an object without a shape has no dims."""
    if not isinstance(value, (Tensor, TensorCollection)):
        return NO_SIZE
    if isinstance(value, Tensor) and value.is_nested and value.layout is torch.strided:
        return torch.Size([value.size(0)])  # a nested tensor has no shape
    return value.shape


class _Signature(inspect.Signature):
    """A signature that binds each keyword input to its name, as ``torch.export`` needs for dynamic shapes."""

    __slots__ = ()

    def bind(self, /, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """Bind arguments; a keyword that is not a parameter is bound to its name, not to ``kwargs``."""
        parameters = list(self.parameters.values())
        position = len(parameters) - any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        new = [name for name in kwargs if name not in self.parameters]
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in new]
        return inspect.Signature([*parameters[:position], *named, *parameters[position:]]).bind(
            *args, **kwargs
        )


def _make_optional(signature: inspect.Signature, names: Sequence[str]) -> inspect.Signature:
    """Make the first parameters of a signature optional: a call with tensors leaves them out."""
    parameters = [
        parameter.replace(default=None)
        if parameter.name in names
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty)
        else parameter
        for parameter in signature.parameters.values()
    ]
    return _Signature(parameters, return_annotation=signature.return_annotation)
