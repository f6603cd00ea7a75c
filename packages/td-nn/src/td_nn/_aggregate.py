"""The switch that sums the log-probabilities and entropies of the components of a distribution."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from td_core.spi import Switch

from ._switches import ModuleSwitch, _is_on

FnT = TypeVar("FnT", bound=Callable[..., object])


class _Aggregation(Switch.Settings):
    """Mode of the current thread; None outside of blocks, where the default of the process applies."""

    default: ClassVar[bool] = _is_on("COMPOSITE_LP_AGGREGATE", False)

    def __init__(self) -> None:
        self.composite_lp_aggregate: bool | None = None
        super().__init__()


AGGREGATION = _Aggregation()


class _AggregateBlock(ModuleSwitch):
    _settings: Any = AGGREGATION
    _name = "composite_lp_aggregate"


class set_composite_lp_aggregate:  # noqa: N801  tensordict's spelling
    """Choose whether log-probabilities and entropies of several components are summed.

    A context manager and a decorator, both for the current thread. ``set()`` changes the default of the process, which applies
    outside of blocks. Modules read the mode when they are built.

    Args:
        mode: True sums over the components and their event dims; False, and None, keeps one entry per component.
        thread_local: has no effect: a block never changes another thread, except in programs of tensordict.

    >>> with set_composite_lp_aggregate(True):
    ...     composite_lp_aggregate()
    True
    """

    def __init__(self, mode: bool | None = True, *, thread_local: bool = False) -> None:
        self._mode = bool(mode)
        self._thread_local = thread_local
        self._block = _AggregateBlock(self._mode, thread_local)
        self._before_set: bool | None = None

    def set(self) -> None:
        """Change the default of the process.

        >>> chosen = set_composite_lp_aggregate(True)
        >>> chosen.set()
        >>> composite_lp_aggregate()
        True
        >>> chosen.unset()
        """
        self._before_set = _Aggregation.default
        _Aggregation.default = self._mode

    def unset(self) -> None:
        """Restore the default of the process that ``set()`` replaced; a no-op before ``set()``.

        >>> set_composite_lp_aggregate(True).unset()
        >>> composite_lp_aggregate()
        False
        """
        if self._before_set is not None:
            _Aggregation.default, self._before_set = self._before_set, None

    def clone(self) -> set_composite_lp_aggregate:
        """Return a new switch with the same mode.

        >>> with set_composite_lp_aggregate(True).clone():
        ...     composite_lp_aggregate()
        True
        """
        return set_composite_lp_aggregate(self._mode, thread_local=self._thread_local)

    def __enter__(self) -> None:
        self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)

    def __call__(self, fn: FnT) -> FnT:
        """Wrap ``fn`` so that the mode is set while it runs."""
        return self._block(fn)


def composite_lp_aggregate(nowarn: bool = False) -> bool:
    """Return the mode of :class:`set_composite_lp_aggregate`.

    The environment variable ``COMPOSITE_LP_AGGREGATE`` sets the default of the process.

    Args:
        nowarn: has no effect: this function does not warn.

    >>> composite_lp_aggregate()
    False
    """
    mode = AGGREGATION.composite_lp_aggregate
    return _Aggregation.default if mode is None else mode
