"""TensorDictModule: a callable that reads its arguments from a collection and stores its results there."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from td_core import KeyPathError, KeyThroughLeafError, TensorCollection, TensorDict

from ._dispatch import dispatch
from ._module_base import ResultT, TensorDictModuleBase, show_module
from ._module_keys import SINK, FollowedKeys, Key, read_outputs, store_outputs
from ._switches import STATE, has_outputs
from .module_errors import MissingKeyError, ModuleKeysError, OutputError, note_place

Inplace = bool | Literal["empty"] | None


class TensorDictModule(TensorDictModuleBase[ResultT]):
    """A module or another callable that reads its arguments from a collection and stores its results there.

    A call with a collection returns the collection with the results. A call with tensors, by position or by keyword (see
    :class:`dispatch`), returns tensors.

    Args:
        module: the callable; with ``method``, the object that has the method.
        in_keys: the keys of the positional arguments, or a dict from argument names to keys.
        out_keys: the keys of the results; a result at ``"_"`` is not stored. A list that the callable returns is one
            result, a tuple is several. A dict or collection that has all ``out_keys``, nested ones below its nested
            collections, is read by key. If one result does not fit the collection, none is stored.
        out_to_in_map: False if a dict of ``in_keys`` maps keys to argument names.
        inplace: True stores the results in the input collection, False in a new one, ``"empty"`` in a new one of the same
            kind, batch size and device.
        method: the method of ``module`` to call instead of ``module`` itself.
        method_kwargs: keyword arguments of every call.
        strict: True raises before the call if a key is missing, False passes None for it.
        get_kwargs: arguments of the ``get`` calls that read the inputs, such as ``{"as_padded_tensor": True}``.

    Raises:
        ModuleKeysError: a key has a wrong type.
        ValueError: ``module`` cannot be called, or ``inplace`` is not one of the three values.
        TypeError: an argument name is not a string, or ``get_kwargs`` has a default.

    A call raises:
        MissingKeyError: an input is missing, and the callable raises an error if it gets None.
        OutputError: the number of results differs from the number of ``out_keys``.

    >>> layer = TensorDictModule(torch.nn.Linear(3, 2), ["x"], [("out", "y")])
    >>> layer(TensorDict(x=torch.ones(5, 3), batch_size=[5]))["out", "y"].shape
    torch.Size([5, 2])
    >>> layer(x=torch.ones(3)).shape
    torch.Size([2])
    """

    _functions = ("module",)
    _all_in_keys: tuple[Key, ...]
    _all_out_keys: tuple[Key, ...]
    _argument_names: tuple[str, ...] | None = None

    @overload
    def __init__(
        self: TensorDictModule[Tensor],
        module: Callable[..., Any] | Any,
        in_keys: Any,
        out_keys: str | tuple[Any, ...],
        *,
        out_to_in_map: bool | None = None,
        inplace: Inplace = True,
        method: str | None = None,
        method_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        get_kwargs: Mapping[str, Any] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        module: Callable[..., Any] | Any,
        in_keys: Any,
        out_keys: Any,
        *,
        out_to_in_map: bool | None = None,
        inplace: Inplace = True,
        method: str | None = None,
        method_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        get_kwargs: Mapping[str, Any] | None = None,
    ) -> None: ...
    def __init__(
        self,
        module: Callable[..., Any] | Any,
        in_keys: Any,
        out_keys: Any,
        *,
        out_to_in_map: bool | None = None,
        inplace: Inplace = True,
        method: str | None = None,
        method_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        get_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if inplace not in (True, False, None, "empty"):
            raise ValueError(f"inplace is True, False, None or 'empty'; got {inplace!r}")
        if method is not None:
            if not callable(getattr(module, method, None)):
                raise ValueError(f"{module!r} has no method {method!r}")
        elif isinstance(module, type) or not callable(module):
            raise ValueError(
                f"the module of a {type(self).__name__} is called, so it is a function, an nn.Module or another callable "
                f"instance; got {module!r}. To call one of its methods, give method="
            )
        if get_kwargs and "default" in get_kwargs:
            raise TypeError(
                "get_kwargs takes no default: a missing input is None, or an error with strict=True"
            )
        argument_names, keys = _parse_arguments(in_keys, out_to_in_map)
        self.in_keys = keys
        self.out_keys = out_keys
        self._argument_names = argument_names
        if SINK in self.in_keys:
            warnings.warn(
                f"the key {SINK!r} is where outputs go that are not kept; as an input it is read like any other",
                stacklevel=2,
            )
        self.module = module
        self.inplace = inplace
        self.method = method
        self.method_kwargs = dict(method_kwargs or {})
        self.strict = strict
        self._get_kwargs = dict(get_kwargs or {})

    def _take_keys(self, name: str) -> None:
        names = self._argument_names
        if name == "in_keys" and names is not None and len(names) != len(self._all_in_keys):
            raise ModuleKeysError(
                f"{show_module(self)} has the arguments {list(names)}; got {len(self._all_in_keys)} in_keys for them: "
                f"{list(self._all_in_keys)}"
            )

    @property
    def _inner_module(self) -> Any:
        modules = self.__dict__.get("_modules", {})
        return modules["module"] if "module" in modules else self.__dict__.get("module")

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorCollection,
        args: object = None,
        *more: object,
        tensordict_out: TensorCollection | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the module with entries of a collection, and return the collection that has the results.

        Args:
            tensordict: collection with the inputs.
            args: must be empty: the positional arguments of the module are its ``in_keys``.
            *more: must be empty, too.
            tensordict_out: collection that receives the results, instead of the one that ``inplace`` selects.
            **kwargs: further arguments of the module.
        """
        if args is not None or more:
            raise ValueError(
                f"{show_module(self)} takes no positional arguments but the collection, or its inputs {self.in_keys}"
            )
        in_keys, out_keys = self._all_in_keys, self._all_out_keys
        if not self._keeps_keys:
            in_keys, out_keys = tuple(self.in_keys), tuple(self.out_keys_source)
        selected = self._selected_out_keys  # read at each call, so that a compiled graph is guarded on it
        if STATE.skip_existing is not False:
            wanted = out_keys if selected is None else selected
            if has_outputs(STATE.skip_existing, tensordict, in_keys, wanted):
                return tensordict
        get, get_kwargs = tensordict.get, self._get_kwargs
        values, lacks = [], False
        for key in in_keys:
            value = get(key, None, **get_kwargs) if get_kwargs else get(key, None)
            if not isinstance(value, Tensor):
                if value is None:
                    lacks = True
                elif not get_kwargs:
                    value = tensordict[key]  # [] returns a value, get() its node
            values.append(value)
        if lacks:
            self._check_inputs(tensordict, in_keys)
        modules = self._modules
        call: Any = modules["module"] if "module" in modules else self.__dict__["module"]
        if self.method is not None:
            call = getattr(call, self.method)
        if self.method_kwargs:
            kwargs = self._with_method_kwargs(kwargs)
        names = self._argument_names
        try:
            if names is None:
                result = call(*values, **kwargs)
            else:
                result = call(**dict(zip(names, values)), **kwargs)
        except Exception as error:
            self._explain(error, tensordict, in_keys, values)
            raise
        if isinstance(result, Tensor) and len(out_keys) == 1:
            if tensordict_out is None and self.inplace is True and out_keys[0] != SINK:
                tensordict.set(out_keys[0], result)  # hot path: one result, stored in the input
                return tensordict
            results: Sequence[Any] = (result,)
        else:
            results = self._outputs(result, out_keys)
        return self._write_to_tensordict(tensordict, results, tensordict_out, out_keys)

    def _write_to_tensordict(
        self,
        tensordict: TensorCollection,
        tensors: Sequence[Tensor],
        tensordict_out: TensorCollection | None = None,
        out_keys: Sequence[Key] | None = None,
    ) -> TensorCollection:
        """Store results and return the collection that has them. Subclasses in other packages call this method."""
        if tensordict_out is None:
            inplace = self.inplace
            tensordict_out = (
                tensordict if inplace is True else tensordict.empty() if inplace else TensorDict()
            )
        store_outputs(tensordict_out, self._all_out_keys if out_keys is None else out_keys, tensors)
        return tensordict_out

    def _with_method_kwargs(self, kwargs: dict[str, object]) -> dict[str, object]:
        twice = sorted(self.method_kwargs.keys() & kwargs.keys())
        if twice:
            raise TypeError(
                f"{', '.join(twice)} is given in the call and in the method_kwargs of {show_module(self)}"
            )
        return {**kwargs, **self.method_kwargs}

    def _outputs(self, result: object, out_keys: tuple[Key, ...]) -> Sequence[object]:
        """Convert what the callable returned to one result per key."""
        if isinstance(result, (dict, TensorCollection)) and out_keys:
            wanted = [key for key in out_keys if key != SINK]
            found = read_outputs(result, wanted)
            absent = [key for key in wanted if key not in found]
            if wanted and not absent:
                return [found.get(key) for key in out_keys]
            if len(out_keys) > 1:
                raise OutputError(
                    f"{show_module(self)} returned a {type(result).__name__} without {', '.join(map(repr, absent))}: it has "
                    f"{list(result.keys())}, and its out_keys are {list(out_keys)}"
                )
        if not isinstance(result, tuple):
            result = () if result is None else (result,)
        if len(result) != len(out_keys):
            raise OutputError(
                f"{show_module(self)} returned too {'few' if len(result) < len(out_keys) else 'many'} values: "
                f"{len(result)} for the {len(out_keys)} out_keys {list(out_keys)}"
            )
        return result

    def _check_inputs(self, tensordict: TensorCollection, in_keys: tuple[Key, ...]) -> None:
        """Raise if the module is strict and an input is missing, or if a key path leads through a leaf."""
        missing = missing_keys(tensordict, in_keys)
        if missing and self.strict:
            raise MissingKeyError(show_module(self), show_missing(tensordict, missing), missing)

    def _explain(
        self, error: Exception, tensordict: TensorCollection, in_keys: tuple[Key, ...], values: list[object]
    ) -> None:
        """Add the module to an error of the callable as a note; raise MissingKeyError if an input was missing."""
        missing = missing_keys(tensordict, in_keys)
        if missing:
            pronoun = "it" if len(missing) == 1 else "them"
            raised = f"; it was called with None for {pronoun}, and raised {type(error).__name__}: {error}"
            problem = show_missing(tensordict, missing) + raised
            raise MissingKeyError(show_module(self), problem, missing) from error
        provided = ", ".join(f"{key!r}: {_describe_value(value)}" for key, value in zip(in_keys, values))
        text = f"{show_module(self)}, which reads {{{provided}}} and writes {list(self._all_out_keys)}"
        note_place(error, text + self._likely_swap(error))

    def _likely_swap(self, error: Exception) -> str:
        """Return a hint if a dict of ``in_keys`` seems to map in the wrong direction."""
        names = self._argument_names
        if names is None or not isinstance(error, TypeError):
            return ""
        called = self._inner_module if self.method is None else getattr(self._inner_module, self.method)
        try:
            parameters = inspect.signature(getattr(called, "forward", called)).parameters
        except (TypeError, ValueError):
            return ""
        if parameters.keys() & set(names) or not parameters.keys() >= set(self._all_in_keys):
            return ""
        return (
            f"; {', '.join(names)} is not an argument of it, {', '.join(map(str, self._all_in_keys))} is: in_keys leads from "
            "arguments to keys, and from keys to arguments with out_to_in_map=False"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or self._inner_module is None:
                raise
        return getattr(self._inner_module, name)

    def __repr__(self) -> str:
        return self._show(
            f"module={self._inner_module!r},\nin_keys={self.in_keys},\nout_keys={self.out_keys}", ["module"]
        )


class TensorDictModuleWrapper(TensorDictModuleBase[ResultT]):
    """A wrapper with the keys and attributes of a module, as a base for subclasses with another ``forward``.

    Args:
        td_module: the wrapped module. It is called as a module, so that its hooks run.

    >>> class Halve(TensorDictModuleWrapper):
    ...     def forward(self, *args, **kwargs):
    ...         return super().forward(*args, **kwargs) / 2
    >>> inner = TensorDictModule(lambda x: x + 1, ["x"], ["y"])
    >>> Halve(inner)(torch.ones(1)), Halve(inner).out_keys
    (tensor([1.]), ['y'])
    """

    in_keys = FollowedKeys("in_keys")
    out_keys = FollowedKeys("out_keys")

    def __init__(self, td_module: TensorDictModuleBase) -> None:
        super().__init__()
        self.td_module = td_module

    @property
    def _inner_module(self) -> Any:
        return self._modules.get("td_module")

    @property
    def out_keys_source(self) -> list[Key]:
        """All keys that the module writes, selected or not."""
        if self._all_out_keys is not None:
            return list(self._all_out_keys)
        return list(getattr(self.td_module, "out_keys_source", self.td_module.out_keys))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: object, *args: object, **kwargs: object) -> Any:
        """Call the wrapped module."""
        return self.td_module(tensordict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name == "td_module":
                raise
        return getattr(self.td_module, name)

    def __repr__(self) -> str:
        fields = f"td_module={self.td_module!r},\nin_keys={self.in_keys},\nout_keys={self.out_keys}"
        return self._show(fields, ["td_module"])


def missing_keys(tensordict: TensorCollection, keys: tuple[Key, ...]) -> list[Key]:
    """Return the keys that a collection lacks; KeyThroughLeafError if a path leads through a tensor."""
    missing = []
    for key in keys:
        try:
            tensordict[key]
        except KeyThroughLeafError:
            raise
        except KeyPathError:
            missing.append(key)
    return missing


def show_missing(tensordict: TensorCollection, missing: list[Key]) -> str:
    """Format the part of a message that names missing inputs, and similar or existing keys."""
    present = list(tensordict.keys(True, True))
    shown = ", ".join(map(repr, missing))
    last = missing[0] if isinstance(missing[0], str) else missing[0][-1]
    by_name: dict[str, Key] = {}
    for key in present:
        by_name.setdefault(key if isinstance(key, str) else key[-1], key)
    near = difflib.get_close_matches(last, by_name, n=3)
    if near:
        hint = f"did you mean {' or '.join(repr(by_name[name]) for name in near)}?"
    else:
        hint = f"existing keys: {present[:20]}"
    return f"misses its input{'s' if len(missing) > 1 else ''} {shown}: {hint}"


def _parse_arguments(in_keys: object, out_to_in_map: bool | None) -> tuple[tuple[str, ...] | None, object]:
    """Return the argument names of a dict of ``in_keys``, None for a list, and the keys."""
    if not isinstance(in_keys, Mapping):
        if out_to_in_map is not None:
            warnings.warn(
                "out_to_in_map says how a dict of in_keys is read, and changes nothing for a list",
                stacklevel=3,
            )
        return None, in_keys
    names, keys = list(in_keys), list(in_keys.values())
    if out_to_in_map is False:
        names, keys = keys, names
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(
            f"in_keys leads from {'keys to argument names' if out_to_in_map is False else 'argument names to keys'}, and an "
            f"argument name is a string; got {', '.join(map(repr, wrong))}"
        )
    return tuple(names), keys


def _describe_value(value: object) -> str:
    if isinstance(value, (Tensor, TensorCollection)):
        return f"{type(value).__name__} of shape {list(value.shape)}"
    return type(value).__name__
