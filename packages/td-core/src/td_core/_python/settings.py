"""Settings per thread, and the context managers that change them.

A setting is read once per call, never per leaf. Settings are in a ``threading.local`` and not in context variables,
which ``torch.compile`` cannot trace.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import torch

FnT = TypeVar("FnT", bound=Callable[..., object])

_PRINT_OPTIONS: dict[str, object] = {
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
    "sort_keys": "insertion",
    "max_entries": 50,
    "compact": True,
    "html": True,
}

# The compact form does not show these options, so setting one of them selects the long form.
_LONG_ONLY = {
    "show_is_shared", "show_shape", "show_field_device", "show_field_is_shared", "show_grad", "show_is_contiguous",
    "show_is_view", "show_storage_size", "plain",
}  # fmt: skip
#: The options that differ where collections are printed as tensordict prints them.
_PRINT_OPTIONS_OF_TENSORDICT = {"sort_keys": "alphabetical", "max_entries": None}
_TERSE = dict.fromkeys(
    ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared"), False
)


class Rules:
    """What the whole process does as tensordict does, because a program was written for it."""

    def __init__(self) -> None:
        #: Whether to read lists, compare columns and load parameters as tensordict does.
        self.follows_tensordict = False

    def begin(self, text: str) -> str:
        """Return the beginning of an error message, by which programs of tensordict recognise the error; else nothing."""
        return f"{text}: " if self.follows_tensordict else ""


RULES = Rules()


class ThreadSettings(threading.local):
    """Base of settings that each thread has for itself; :meth:`set_everywhere` changes one in all threads.

    A subclass sets its attributes in ``__init__``, and then calls that of this class.
    """

    #: The settings that were changed everywhere, and the attributes of each thread by its number.
    _everywhere: ClassVar[dict[str, Any]]
    _threads: ClassVar[dict[int, dict[str, Any]]]

    def __init_subclass__(cls) -> None:
        cls._everywhere, cls._threads = {}, {}

    def __init__(self) -> None:
        #: The active switches, each with the value to restore.
        self.entered: list[tuple[object, Any]] = []
        vars(self).update(self._everywhere)
        self._threads[threading.get_ident()] = vars(self)

    def set_everywhere(self, name: str, value: object) -> None:
        """Change a setting in all threads, and in those that start later."""
        self._everywhere[name] = value
        for settings in list(self._threads.values()):
            settings[name] = value


class _Settings(ThreadSettings):
    def __init__(self) -> None:
        self.print_options: dict[str, object] = dict(_PRINT_OPTIONS)
        if RULES.follows_tensordict:
            self.print_options.update(_PRINT_OPTIONS_OF_TENSORDICT)
        self.get_defaults_to_none = True
        #: Whether ``stack`` makes lazy stacks, as programs of tensordict ask for; None if that was never set.
        self.stacks_lazily: bool | None = None
        super().__init__()


SETTINGS = _Settings()


class Switch:
    """Base of context managers and decorators that change one setting of the current thread.

    In a program of tensordict, a switch whose ``_reaches_threads`` is True changes the setting of all threads.

    A decorated generator or coroutine runs with the changed setting; code that runs while it is suspended sees the
    previous one. A subclass in another package sets its own ``_settings``, of a subclass of ``Switch.Settings``
    with the attribute ``_name``.

    >>> with set_printoptions(sort_keys=None):
    ...     get_printoptions()["sort_keys"] is None
    True
    """

    Settings: TypeAlias = ThreadSettings

    _settings: Any = SETTINGS
    _name: str
    _reaches_threads = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def set(self) -> None:
        """Change the setting permanently."""
        self._write(self._value)

    def _write(self, value: object) -> None:
        if RULES.follows_tensordict and self._reaches_all():
            self._settings.set_everywhere(self._name, value)
        else:
            setattr(self._settings, self._name, value)

    def _reaches_all(self) -> bool:
        """Return True if a change reaches all threads: outside of blocks of this thread, and of graphs."""
        return (
            self._reaches_threads
            and not torch.compiler.is_compiling()
            and all(each._reaches_threads or each._name != self._name for each, _ in self._settings.entered)
        )

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
        self._write(entered.pop(position)[1])

    def __call__(self, fn: FnT) -> FnT:
        """Wrap ``fn`` so that the setting is changed while it runs.

        Raises:
            TypeError: ``fn`` is an asynchronous generator function.
        """
        if inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{type(self).__name__} cannot decorate {fn.__qualname__}(), which makes asynchronous generators; use it "
                "inside, in a with block that neither awaits nor yields"
            )
        wrapper: object
        if inspect.isgeneratorfunction(fn):

            def wrapper(*args: object, **kwargs: object) -> Any:
                return (yield from self._run_steps(fn(*args, **kwargs)))

        elif inspect.iscoroutinefunction(fn):
            awaitable: Any = types.coroutine(self._run_steps)

            async def wrapper(*args: object, **kwargs: object) -> object:
                return await awaitable(fn(*args, **kwargs))

        else:

            def wrapper(*args: object, **kwargs: object) -> Any:
                return self._wrap_function(fn, *args, **kwargs)

        return cast("FnT", functools.wraps(fn)(wrapper))

    def _wrap_function(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        # Not ``with self``: torch.compile traces it only if the switch is created inside the graph.
        before = getattr(self._settings, self._name)
        self.set()
        try:
            return fn(*args, **kwargs)
        finally:
            self._write(before)

    def _run_steps(self, running: Any) -> Any:
        """Run a generator or coroutine, and change the setting during each step."""
        step, provided = running.send, None
        while True:
            try:
                result = self._wrap_function(step, provided)
            except StopIteration as end:
                return end.value
            try:
                step, provided = running.send, (yield result)
            except BaseException as error:  # also GeneratorExit, since cleanup code is a step too
                step, provided = running.throw, error


class set_printoptions(Switch):  # noqa: N801  named as in tensordict
    """Change how collections are printed, as a context manager or decorator, or permanently with ``.set()``.

    Args:
        verbose: False turns off device, dtype and sharing details that ``kwargs`` does not set.
        **kwargs: options of :func:`get_printoptions`. An option that only the long form shows selects the long form,
            unless ``compact`` is given. ``max_entries`` is the number of entries of a level that are printed, half of
            them from its start and half from its end, None for all; ``sort_keys`` is "insertion" or "alphabetical".

    Raises:
        TypeError: an option does not exist.

    >>> with set_printoptions(compact=False, show_is_shared=False):
    ...     print(TensorDict())
    TensorDict(
        fields={
        },
        batch_size=torch.Size([]),
        device=None)
    """

    _name = "print_options"

    def __init__(self, *, verbose: bool = True, **kwargs: object) -> None:
        unknown = sorted(set(kwargs) - set(_PRINT_OPTIONS))
        if unknown:
            raise TypeError(f"set_printoptions() has no option {unknown}; there are {sorted(_PRINT_OPTIONS)}")
        changes = dict(kwargs) if verbose else {**_TERSE, **kwargs}
        if "compact" not in kwargs and not _LONG_ONLY.isdisjoint(kwargs):
            changes["compact"] = False
        super().__init__(changes)

    def set(self) -> None:
        """Change the options permanently."""
        SETTINGS.print_options = {**SETTINGS.print_options, **self._value}


def get_printoptions() -> dict[str, Any]:
    """Return a copy of the print options of this thread.

    >>> get_printoptions()["compact"]
    True
    """
    return dict(SETTINGS.print_options)


class set_get_defaults_to_none(Switch):  # noqa: N801  named as in tensordict
    """Choose whether ``td.get(key)`` returns None or raises for a missing key without a default.

    A plain call changes the setting permanently; a context manager or decorator changes it for the block or call.

    Args:
        set_to_none: True returns None (the initial setting of a thread), False raises ``KeyPathError``.

    >>> with set_get_defaults_to_none(False):
    ...     TensorDict().get("a")
    Traceback (most recent call last):
    td_core.errors.KeyPathError: key 'a' not found in TensorDict: existing keys: []
    """

    _name = "get_defaults_to_none"

    def __init__(self, set_to_none: bool = True) -> None:
        super().__init__(set_to_none)
        #: The previous setting, with the list ``entered`` of the current thread, which identifies the thread.
        self._at_call: Any = (SETTINGS.entered, SETTINGS.get_defaults_to_none)
        self.set()

    def __enter__(self) -> None:
        self._undo_call()
        super().__enter__()

    def _undo_call(self) -> None:
        """Restore the setting that the constructor replaced, if the current thread called the constructor."""
        if self._at_call is not None and self._at_call[0] is SETTINGS.entered:
            SETTINGS.get_defaults_to_none = self._at_call[1]
            self._at_call = None

    def __call__(self, fn: FnT) -> FnT:
        """Wrap ``fn`` so that the setting is changed only while it runs."""
        self._undo_call()
        return super().__call__(fn)


def get_defaults_to_none() -> bool:
    """Return True if ``td.get(key)`` returns None for a missing key without a default.

    tensordict's argument ``set_to_none`` is not supported: it has no effect there.

    >>> get_defaults_to_none()
    True
    """
    return SETTINGS.get_defaults_to_none
