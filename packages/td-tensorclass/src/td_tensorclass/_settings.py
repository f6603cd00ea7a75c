"""The two switches of non-tensor data: thread-local, read where a value enters a collection or is stacked.

A switch is a context manager, a decorator and, through ``set()``, a setting for the rest of the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _State(threading.local):
    list_to_stack: bool | None = None
    capture_non_tensor_stack: bool | None = None


_state = _State()


class _Switch:
    """A boolean setting: ``with switch(True):``, ``@switch(True)``, ``switch(True).set()``."""

    _name: ClassVar[str]

    def __init__(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"{type(self).__name__} takes True or False; got {mode!r}")
        self.mode = mode
        self._before: list[bool | None] = []

    def set(self) -> None:
        """Keep this value for the rest of the thread."""
        setattr(_state, self._name, self.mode)

    def __enter__(self) -> None:
        self._before.append(getattr(_state, self._name))
        self.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(_state, self._name, self._before.pop())

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.mode):
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


class set_list_to_stack(_Switch):  # noqa: N801  (a context manager is called like a function)
    """Decide whether a list of non-numbers set into a collection gives one value for each batch element.

    Args:
        mode: True, the default of the process: ``td["k"] = ["a", "b"]`` stores a ``NonTensorStack``. False: the list is
            one value for the whole batch.

    >>> with set_list_to_stack(False):
    ...     td = TensorDict({"k": ["a", "b"]}, batch_size=[3])
    >>> td["k"]
    ['a', 'b']
    """

    _name = "list_to_stack"


class set_capture_non_tensor_stack(_Switch):  # noqa: N801
    """Decide whether stacking equal non-tensor values gives one value for the whole batch.

    Args:
        mode: False, the default of the process: always one value for each element. True: equal values are kept once.

    >>> from td_tensorclass import NonTensorData
    >>> with set_capture_non_tensor_stack(True):
    ...     torch.stack([NonTensorData("a"), NonTensorData("a")])
    NonTensorData(data=a, batch_size=torch.Size([2]), device=None)
    """

    _name = "capture_non_tensor_stack"


def list_to_stack(allow_none: bool = False) -> bool | None:
    """Return the setting of :class:`set_list_to_stack`.

    Args:
        allow_none: return None where nothing was set, rather than the default.

    >>> list_to_stack(), list_to_stack(allow_none=True)
    (True, None)
    """
    value = _state.list_to_stack
    return True if value is None and not allow_none else value


def capture_non_tensor_stack(allow_none: bool = False) -> bool | None:
    """Return the setting of :class:`set_capture_non_tensor_stack`.

    Args:
        allow_none: return None where nothing was set, rather than the default.

    >>> capture_non_tensor_stack(), capture_non_tensor_stack(allow_none=True)
    (False, None)
    """
    value = _state.capture_non_tensor_stack
    return False if value is None and not allow_none else value
