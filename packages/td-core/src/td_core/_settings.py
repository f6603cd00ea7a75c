"""Switches, kept for each thread on its own.

A switch is read where a value enters or is shown, never per leaf. They are ``threading.local`` rather than context
variables, which ``torch.compile`` cannot trace.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

__all__ = [
    "get_defaults_to_none", "get_printoptions", "lazy_legacy", "set_get_defaults_to_none",
    "set_lazy_legacy", "set_printoptions",
]  # fmt: skip

FnT = TypeVar("FnT", bound=Callable[..., Any])

_PRINT_OPTIONS: dict[str, Any] = {
    "show_batch_size": True,
    "show_device": True,
    "show_is_shared": True,
    "show_shape": True,
    "show_field_device": True,
    "show_dtype": True,
    "show_field_is_shared": True,
    "show_grad": False,
    "show_is_contiguous": False,
    "show_is_view": False,
    "show_storage_size": False,
    "plain": False,
    "sort_keys": "alphabetical",
    "compact": True,
    "html": True,
}

# The compact form has no room for these: asking for one asks for the long form.
_LONG_ONLY = {
    "show_is_shared", "show_shape", "show_field_device", "show_field_is_shared", "show_grad", "show_is_contiguous",
    "show_is_view", "show_storage_size", "plain",
}  # fmt: skip
_TERSE = dict.fromkeys(
    ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared"), False
)


class Settings(threading.local):
    """What a module keeps for each thread.

    Attributes:
        entered: the switches that are entered, each with what it found.
    """

    def __init__(self) -> None:
        self.entered: list[tuple[Any, Any]] = []


class _Settings(Settings):
    def __init__(self) -> None:
        super().__init__()
        self.print_options: dict[str, Any] = dict(_PRINT_OPTIONS)
        self.get_defaults_to_none = True


SETTINGS = _Settings()


class Switch:
    """A context manager and decorator that changes one setting of this thread; a sibling keeps its own in ``_settings``.

    What a generator or a coroutine does is changed too, and nothing that runs while it is suspended.

    >>> with set_printoptions(sort_keys=None):
    ...     get_printoptions()["sort_keys"] is None
    True
    """

    _settings: Any = SETTINGS
    _name: str

    def __init__(self, value: Any) -> None:
        self._value = value

    def set(self) -> None:
        """Change the setting until it is changed again."""
        setattr(self._settings, self._name, self._value)

    def __enter__(self) -> None:
        self._settings.entered.append((self, getattr(self._settings, self._name)))
        self.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        entered = self._settings.entered
        position = len(entered) - 1
        while entered[position][0] is not self:
            position -= 1
        setattr(self._settings, self._name, entered.pop(position)[1])

    def __call__(self, fn: FnT) -> FnT:
        """Return ``fn`` with the setting changed while it runs.

        Raises:
            TypeError: it makes asynchronous generators.
        """
        if inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{type(self).__name__} cannot decorate {fn.__qualname__}(), which makes asynchronous generators; use it "
                "inside, in a with block that neither awaits nor yields"
            )
        wrapper: Any
        if inspect.isgeneratorfunction(fn):

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (yield from self._run_steps(fn(*args, **kwargs)))

        elif inspect.iscoroutinefunction(fn):
            awaitable: Any = types.coroutine(self._run_steps)

            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await awaitable(fn(*args, **kwargs))

        else:

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return self._wrap_function(fn, *args, **kwargs)

        made: FnT = functools.wraps(fn)(wrapper)  # type: ignore[assignment]
        return made

    def _wrap_function(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Not ``with self``, which torch.compile takes in a graph only where the switch is made in it.
        before = getattr(self._settings, self._name)
        self.set()
        try:
            return fn(*args, **kwargs)
        finally:
            setattr(self._settings, self._name, before)

    def _run_steps(self, running: Any) -> Any:
        """Run a generator or coroutine with the setting changed in each of its steps."""
        step, provided = running.send, None
        while True:
            try:
                result = self._wrap_function(step, provided)
            except StopIteration as end:
                return end.value
            try:
                step, provided = running.send, (yield result)
            except BaseException as error:  # GeneratorExit too: what it does then is a step
                step, provided = running.throw, error


class set_printoptions(Switch):  # noqa: N801  the reference implementation's spelling
    """Change how collections are printed; a context manager, a decorator, or ``.set()`` for good.

    Args:
        verbose: False turns the device, dtype and sharing details off, unless they are given.
        **kwargs: options of :func:`get_printoptions`; one that only the long form shows selects it, unless ``compact``
            is given.

    Raises:
        TypeError: there is no such option.

    >>> with set_printoptions(compact=False, show_is_shared=False):
    ...     print(TensorDict())
    TensorDict(
        fields={
        },
        batch_size=torch.Size([]),
        device=None)
    """

    _name = "print_options"

    def __init__(self, *, verbose: bool = True, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - set(_PRINT_OPTIONS))
        if unknown:
            raise TypeError(f"set_printoptions() has no option {unknown}; there are {sorted(_PRINT_OPTIONS)}")
        changes = dict(kwargs) if verbose else {**_TERSE, **kwargs}
        if "compact" not in kwargs and not _LONG_ONLY.isdisjoint(kwargs):
            changes["compact"] = False
        super().__init__(changes)

    def set(self) -> None:
        """Change the options until they are changed again."""
        SETTINGS.print_options = {**SETTINGS.print_options, **self._value}


def get_printoptions() -> dict[str, Any]:
    """Return the options that this thread prints with.

    >>> get_printoptions()["compact"]
    True
    """
    return dict(SETTINGS.print_options)


class set_get_defaults_to_none(Switch):  # noqa: N801  the reference implementation's spelling
    """Choose what ``td.get(key)`` does where the key is missing and no default is given.

    Takes effect at once; as a context manager or decorator, for the time of the block or call.

    Args:
        set_to_none: True gives None (how a thread starts), False raises ``KeyPathError``.

    >>> with set_get_defaults_to_none(False):
    ...     TensorDict().get("a")
    Traceback (most recent call last):
    td_core.errors.KeyPathError: key 'a' not found in TensorDict: existing keys: []
    """

    _name = "get_defaults_to_none"

    def __init__(self, set_to_none: bool = True) -> None:
        super().__init__(set_to_none)
        #: What was set before the call, and in which thread: each has a list of its own.
        self._at_call: Any = (SETTINGS.entered, SETTINGS.get_defaults_to_none)
        self.set()

    def __enter__(self) -> None:
        self._undo_call()
        super().__enter__()

    def _undo_call(self) -> None:
        """Restore what was before the call of the class, which took effect already in the thread that made it."""
        if self._at_call is not None and self._at_call[0] is SETTINGS.entered:
            SETTINGS.get_defaults_to_none = self._at_call[1]
            self._at_call = None

    def __call__(self, fn: FnT) -> FnT:
        """Return ``fn`` with the setting changed while it runs, and only then."""
        self._undo_call()
        return super().__call__(fn)


def get_defaults_to_none() -> bool:
    """Tell whether ``td.get(key)`` gives None where the key is missing and no default is given.

    The argument ``set_to_none`` of the reference is left out: it changes nothing there.

    >>> get_defaults_to_none()
    True
    """
    return SETTINGS.get_defaults_to_none


class set_lazy_legacy(nullcontext[None]):  # noqa: N801  the reference implementation's spelling
    """Accept the switch to the lazy views of early releases, which do not exist here.

    Raises:
        NotImplementedError: ``mode`` is True: shape operations return collections whose leaves are views.

    >>> with set_lazy_legacy(False):
    ...     lazy_legacy()
    False
    """

    def __init__(self, mode: bool) -> None:
        super().__init__()
        if mode:
            raise NotImplementedError(
                "lazy views do not exist here: shape operations return collections whose leaves are views; "
                "use lazy_stack() for a stack that keeps its members (set_lazy_legacy was given True)"
            )

    def set(self) -> None:
        """Keep things as they are."""

    def __call__(self, fn: FnT) -> FnT:
        """Return ``fn``."""
        return fn


def lazy_legacy(allow_none: bool = False) -> bool | None:
    """Tell whether shape operations give lazy views: never.

    Args:
        allow_none: return None for "never chosen" instead of False.

    >>> lazy_legacy()
    False
    """
    return None if allow_none else False
