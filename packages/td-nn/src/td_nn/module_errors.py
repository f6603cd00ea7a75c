"""The errors of modules, and where in a sequence an error was raised.

An error of a wrapped callable keeps its type; what is known of the module is a note on it. Each sequence that the error
leaves puts its own step before the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from td_core import KeyPathError, TensorDictError

__all__ = ["MissingKeyError", "ModuleKeysError", "OutputError", "SelectionError"]


class ModuleKeysError(KeyPathError, ValueError):
    """A module was given something that is not a key or a list of keys."""


class SelectionError(TensorDictError, ValueError, RuntimeError):
    """A key was selected that a module does not write."""


class OutputError(TensorDictError, RuntimeError):
    """What a callable returned does not fit the keys that it is stored at."""


class MissingKeyError(KeyPathError):
    """A module did not find keys that it reads, or that its result is taken from.

    Attributes:
        missing: the keys.
        path: where the module stands, ``'seq["dec"]'``; empty outside of sequences.

    >>> from td_nn import TensorDictModule
    >>> TensorDictModule(torch.nn.Linear(2, 1), "x", "y", strict=True)(TensorDict(z=torch.ones(2)))
    Traceback (most recent call last):
    td_nn.module_errors.MissingKeyError: TensorDictModule(Linear) misses its input 'x': existing keys: ['z']
    """

    def __init__(self, subject: str, problem: str, missing: Iterable[Any] = ()) -> None:
        super().__init__(f"{subject} {problem}")
        self.subject = subject
        self.problem = problem
        self.missing = list(missing)
        self.steps: tuple[str, ...] = ()
        #: The later members that write a missing key, and the steps that lead to each.
        self.writers: list[tuple[Any, tuple[str, ...]]] = []

    @property
    def path(self) -> str:
        """Where the module stands."""
        return show_steps(self.steps)

    def __str__(self) -> str:
        where = f"{self.path}, a {self.subject}," if self.steps else self.subject
        later = [f"{key!r} is written later, by {show_steps(steps)}" for key, steps in self.writers]
        return "; ".join([f"{where} {self.problem}", *later])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.subject, self.problem, self.missing), self.__dict__


def show_step(name: Any) -> str:
    """Return the index that leads to a member of a sequence.

    >>> show_step("dec"), show_step(0)
    ('["dec"]', '[0]')
    """
    return f'["{name}"]' if isinstance(name, str) else f"[{name}]"


def show_steps(steps: Sequence[str]) -> str:
    """Return the path that leads through sequences to a module."""
    return f"seq{''.join(steps)}" if steps else ""


class _Place:
    """What a note says of the module whose callable raised."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: tuple[str, ...] = ()
        self.note = ""

    def __str__(self) -> str:
        path = show_steps(self.steps)
        return f"raised in {path}, {self.text}" if path else f"raised in {self.text}"


def note_place(error: BaseException, text: str) -> None:
    """Note on an error which module raised it, unless a module inside has done so."""
    if not isinstance(error, MissingKeyError) and _place_of(error) is None:
        place = _Place(text)
        error.__dict__["_td_place"] = place
        _write_note(error, place)


def step_out(error: BaseException, step: str) -> None:
    """Put a step before the path of the module that raised an error."""
    if isinstance(error, MissingKeyError):
        error.steps = (step, *error.steps)
        error.writers = [(key, (step, *steps)) for key, steps in error.writers]
        return
    place = _place_of(error)
    if place is not None:
        place.steps = (step, *place.steps)
        _write_note(error, place)


def _place_of(error: BaseException) -> _Place | None:
    return error.__dict__.get("_td_place")


def _write_note(error: BaseException, place: _Place) -> None:
    """Write the note of an error, or rewrite it; Python 3.10 has no notes, so there it ends the message."""
    old, place.note = place.note, str(place)
    if hasattr(error, "add_note"):
        notes = getattr(error, "__notes__", [])
        if old in notes:
            notes[notes.index(old)] = place.note
        else:
            error.add_note(place.note)
    elif error.args and isinstance(error.args[0], str):
        message = error.args[0].removesuffix(f"\n{old}") if old else error.args[0]
        error.args = (f"{message}\n{place.note}", *error.args[1:])
