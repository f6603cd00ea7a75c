"""The two thread-local settings of non-tensor data, read when a value is set into a collection or stacked.

A setting is used as a context manager, as a decorator or, with ``set()``, for the remaining life of the thread.
"""

from __future__ import annotations

from td_core.spi import Switch


class _State(Switch.Settings):
    def __init__(self) -> None:
        self.list_to_stack: bool | None = None
        self.capture_non_tensor_stack: bool | None = None
        super().__init__()


_state = _State()


class _Switch(Switch):
    _settings = _state
    _reaches_threads = True

    def __init__(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"{type(self).__name__} takes True or False; got {mode!r}")
        super().__init__(mode)


class set_list_to_stack(_Switch):  # noqa: N801  (a context manager is called like a function)
    """Set whether a list that is set into a collection becomes one value per batch element; lists of numbers never do.

    Args:
        mode: True (the default): ``td["k"] = ["a", "b"]`` stores a ``NonTensorStack``. False: the list is one value
            for the whole batch.

    >>> with set_list_to_stack(False):
    ...     td = TensorDict({"k": ["a", "b"]}, batch_size=[3])
    >>> td["k"]
    ['a', 'b']
    """

    _name = "list_to_stack"


class set_capture_non_tensor_stack(_Switch):  # noqa: N801
    """Set whether stacking equal non-tensor values gives one value for the whole batch.

    Args:
        mode: False (the default): stacking gives one value per element. True: equal values are kept as one value.

    >>> from td_tensorclass import NonTensorData
    >>> with set_capture_non_tensor_stack(True):
    ...     torch.stack([NonTensorData("a"), NonTensorData("a")])
    NonTensorData(data=a, batch_size=torch.Size([2]), device=None)
    """

    _name = "capture_non_tensor_stack"


def list_to_stack(allow_none: bool = False) -> bool | None:
    """Return the setting of :class:`set_list_to_stack`.

    Args:
        allow_none: return None if nothing was set, rather than the default.

    >>> list_to_stack(), list_to_stack(allow_none=True)
    (True, None)
    """
    value = _state.list_to_stack
    return True if value is None and not allow_none else value


def capture_non_tensor_stack(allow_none: bool = False) -> bool | None:
    """Return the setting of :class:`set_capture_non_tensor_stack`.

    Args:
        allow_none: return None if nothing was set, rather than the default.

    >>> capture_non_tensor_stack(), capture_non_tensor_stack(allow_none=True)
    (False, None)
    """
    value = _state.capture_non_tensor_stack
    return False if value is None and not allow_none else value
