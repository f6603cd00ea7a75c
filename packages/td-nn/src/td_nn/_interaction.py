"""Interaction types, which choose a value of a distribution, and the switch that sets one for a block."""

from __future__ import annotations

import enum

from ._switches import STATE, ModuleSwitch


class InteractionType(str, enum.Enum):
    """The value of a distribution that a probabilistic module stores. Names are accepted in any case.

    >>> InteractionType("Random"), InteractionType.MODE == "mode"
    (<InteractionType.RANDOM: 'random'>, True)
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
        """Convert a name in any case to a type.

        >>> InteractionType.from_str("MEAN").value
        'mean'
        """
        return cls(type_str)

    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)


class set_interaction_type(ModuleSwitch):  # noqa: N801  tensordict's spelling
    """Choose the value that probabilistic modules store: a context manager or decorator for the current thread.

    Args:
        type: an interaction type or its name in any case; None leaves the choice to each module.
        thread_local: has no effect: a block never changes another thread, except in programs of tensordict.

    Raises:
        ValueError: the type does not exist.

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
        super().__init__(None if type is None else InteractionType(type), thread_local)

    def clone(self) -> set_interaction_type:
        """Return a new switch with the same type.

        >>> set_interaction_type("mean").clone() is None
        False
        """
        return set_interaction_type(self._value, thread_local=not self._reaches_threads)


def interaction_type() -> InteractionType | None:
    """Return the type that :class:`set_interaction_type` set in the current thread; None if it set none.

    >>> interaction_type() is None
    True
    """
    chosen = STATE.interaction_type
    return None if chosen is None else InteractionType(chosen)
