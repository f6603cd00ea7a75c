"""Switches of modules: context managers that change a setting of the current thread and restore it.

A module reads the settings in each call, so for speed they are plain attributes of one ``Switch.Settings``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from td_core import TensorCollection
from td_core.spi import RULES, Switch

from ._module_keys import SINK, Key, as_keys

FnT = TypeVar("FnT", bound=Callable[..., object])


class _State(Switch.Settings):
    def __init__(self) -> None:
        self.skip_existing: bool | list[Key] = False
        self.dispatches: bool = DISPATCHES
        self.interaction_type: Any = None
        super().__init__()


def _is_on(name: str, default: bool) -> bool:
    """Read an environment variable as a bool."""
    word = os.environ.get(name, str(default)).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"the environment variable {name} is 1 or 0, true or false; got {word!r}")


DISPATCHES = _is_on("DISPATCH_TDNN_MODULES", True)
STATE = _State()


class ModuleSwitch(Switch):
    """A switch of modules. A block changes the current thread only, even with ``thread_local=False``.

    In a program of tensordict, ``thread_local=False`` changes all threads, as programs with worker threads expect.
    """

    _settings = STATE

    def __init__(self, value: Any, thread_local: bool = False) -> None:
        super().__init__(value)
        self._reaches_threads = not thread_local


class set_skip_existing(ModuleSwitch):  # noqa: N801  tensordict's spelling
    """Skip modules whose outputs exist already: they return their input unchanged.

    A context manager for all modules that are called in the block, or a decorator of one ``forward(self, tensordict)``. A
    module is never skipped if it overwrites a key that it reads, writes nothing, or writes to ``"_"``.

    Args:
        mode: True, False, or a list of keys: then a module is skipped only if it writes no other keys. In a decorator,
            None uses the mode of the block around the call.
        in_key_attr: name of the attribute that lists the keys which the decorated module reads.
        out_key_attr: name of the attribute that lists the keys which it writes.
        thread_local: has no effect: a block never changes another thread, except in programs of tensordict.

    Raises:
        RuntimeError: the mode of a block is None.
        TypeError: the mode has another type, or the decorated function has no argument ``tensordict``.

    >>> from td_nn import TensorDictModule
    >>> double = TensorDictModule(lambda x: x * 2, ["x"], ["y"])
    >>> with set_skip_existing(True):
    ...     double(TensorDict(x=torch.ones(1), y=torch.zeros(1)))["y"]
    tensor([0.])
    """

    _name = "skip_existing"

    def __init__(
        self,
        mode: bool | MutableSequence[Any] | str | tuple[Any, ...] | None = True,
        in_key_attr: str = "in_keys",
        out_key_attr: str = "out_keys",
        *,
        thread_local: bool = False,
    ) -> None:
        if isinstance(mode, (str, tuple, MutableSequence)):
            mode = list(as_keys(mode, "mode"))
        elif not (mode is None or isinstance(mode, bool)):
            raise TypeError(f"set_skip_existing() takes True, False, keys or None; got {mode!r}")
        super().__init__(mode, thread_local)
        self.in_key_attr = in_key_attr
        self.out_key_attr = out_key_attr

    def clone(self) -> set_skip_existing:
        """Return a new switch with the same mode.

        >>> set_skip_existing(False).clone() is None
        False
        """
        local = not self._reaches_threads
        return type(self)(self._value, self.in_key_attr, self.out_key_attr, thread_local=local)

    def __enter__(self) -> None:
        if self._value is None:
            raise RuntimeError(
                "set_skip_existing(None) is for decorators, which take the mode of the enclosing block; a block needs "
                "True, False or keys"
            )
        super().__enter__()

    def __call__(self, fn: FnT) -> FnT:
        """Wrap ``fn``, a ``forward(self, tensordict)``, so that it is skipped if its outputs exist."""
        parameters = [name for name in inspect.signature(fn).parameters if name != "self"]
        if parameters[:1] != ["tensordict"]:
            raise TypeError(
                f"set_skip_existing() decorates functions whose first argument is named tensordict; "
                f"{getattr(fn, '__qualname__', fn)} takes {parameters}"
            )

        @functools.wraps(fn)
        def wrapper(module: nn.Module, *args: object, **kwargs: object) -> Any:
            provided = args[0] if args else kwargs.get("tensordict")
            mode = STATE.skip_existing if self._value is None else self._value
            if mode is not False and isinstance(provided, TensorCollection):
                in_keys, out_keys = getattr(module, self.in_key_attr), getattr(module, self.out_key_attr)
                if has_outputs(mode, provided, in_keys, out_keys):
                    return provided
            if self._value is None:
                return fn(module, *args, **kwargs)
            return self._wrap_function(fn, module, *args, **kwargs)

        return cast("FnT", wrapper)


def skip_existing() -> bool | list[Key]:
    """Return the mode of :class:`set_skip_existing` in the current thread.

    >>> skip_existing()
    False
    """
    return STATE.skip_existing


def has_outputs(
    mode: bool | list[Key], tensordict: TensorCollection, in_keys: Sequence[Key], out_keys: Sequence[Key]
) -> bool:
    """Return True if a module can be skipped because the collection has all keys that it writes.

    A module that writes nothing is skipped in programs of tensordict only.
    """
    if mode is False or not (out_keys or RULES.follows_tensordict):
        return False
    present = tensordict.keys(True)
    for key in out_keys:
        if key == SINK or key in in_keys or (mode is not True and key not in mode) or key not in present:
            return False
    return True


def skip_as_block_says() -> set_skip_existing:
    """Return the decorator that skips a ``forward`` by the mode of the block around the call."""
    return set_skip_existing(None)


class set_dispatch(ModuleSwitch):  # noqa: N801  named like set_skip_existing
    """Enable or disable ``dispatch``: if it is disabled, arguments are passed to decorated functions unchanged.

    The environment variable ``DISPATCH_TDNN_MODULES=0`` disables it at import.
    """

    _name = "dispatches"
