"""How a distribution gives its value: the types, and the switch that chooses one for a block."""

from __future__ import annotations

import enum
from typing import Any

from ._switches import STATE, ModuleSwitch

__all__ = ["InteractionType", "interaction_type", "set_interaction_type"]


class InteractionType(str, enum.Enum):
    """Which value of a distribution a probabilistic module takes. Any case is accepted.

    >>> InteractionType("Random"), str(InteractionType.MEAN), InteractionType.MODE == "mode"
    (<InteractionType.RANDOM: 'random'>, 'mean', True)
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    @classmethod
    def _missing_(cls, value: object) -> InteractionType:
        for member in cls:
            if isinstance(value, str) and value.lower() == member.value:
                return member
        raise ValueError(f"an interaction type is one of {[member.value for member in cls]}; got {value!r}")

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """Return the type of a name in any case.

        >>> InteractionType.from_str("MEAN").value
        'mean'
        """
        return cls(type_str)

    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)


class set_interaction_type(ModuleSwitch):  # noqa: N801  the reference implementation's spelling
    """Choose which value probabilistic modules take; a context manager or a decorator, for this thread.

    Args:
        type: an interaction type or its name in any case; None leaves the choice to each module.
        thread_local: accepted for either value: a block never changes another thread.

    Raises:
        ValueError: there is no such type.

    >>> with set_interaction_type("random"):
    ...     interaction_type()
    <InteractionType.RANDOM: 'random'>
    """

    _name = "interaction_type"

    def __init__(
        self,
        type: InteractionType | str | None = InteractionType.DETERMINISTIC,
        *,
        thread_local: bool = False,
    ) -> None:
        super().__init__(None if type is None else InteractionType(type))

    def clone(self) -> set_interaction_type:
        """Return another switch to the same type.

        >>> set_interaction_type("mean").clone() is None
        False
        """
        return set_interaction_type(self._value)


def interaction_type() -> InteractionType | None:
    """Return the type that :class:`set_interaction_type` chose in this thread, None where it chose none.

    >>> interaction_type() is None
    True
    """
    chosen: Any = STATE.interaction_type
    return None if chosen is None else InteractionType(chosen)
