"""The errors of modules, and the path of the sequence member that raised an error.

An error of a wrapped callable keeps its type and gets a note about the module. Each sequence that the error passes through
prepends the index of its member to the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from td_core import KeyPathError, TensorDictError
from td_core.typing import NestedKey

__all__ = ["MissingKeyError", "ModuleKeysError", "OutputError", "SelectionError"]


class ModuleKeysError(KeyPathError, ValueError):
    """An argument of a module is not a key or a list of keys."""


class SelectionError(TensorDictError, ValueError, RuntimeError):
    """A selected key is not written by the module."""


class OutputError(TensorDictError, RuntimeError):
    """The results of a callable do not match the output keys of its module."""


class MissingKeyError(KeyPathError):
    """A collection lacks keys that a module reads, or that its result is read from.

    Attributes:
        missing: the keys.
        path: the position of the module in sequences, such as ``'seq["dec"]'``; empty outside of sequences.

    >>> from td_nn import TensorDictModule
    >>> layer = TensorDictModule(torch.nn.Linear(2, 1), "x", "y", strict=True)
    >>> layer(TensorDict(z=torch.ones(2)))
    Traceback (most recent call last):
    td_nn.module_errors.MissingKeyError: TensorDictModule(Linear) misses its input 'x': existing keys: ['z']
    """

    def __init__(self, subject: str, problem: str, missing: Iterable[NestedKey] = ()) -> None:
        super().__init__(f"{subject} {problem}")
        self.subject = subject
        self.problem = problem
        self.missing = list(missing)
        self.steps: tuple[str, ...] = ()
        #: The missing keys that later members write, each with the steps to that member.
        self.writers: list[tuple[object, tuple[str, ...]]] = []

    @property
    def path(self) -> str:
        """Position of the module in sequences, such as ``seq["dec"]``."""
        return show_steps(self.steps)

    def __str__(self) -> str:
        where = f"{self.path}, a {self.subject}," if self.steps else self.subject
        later = [f"{key!r} is written later, by {show_steps(steps)}" for key, steps in self.writers]
        return "; ".join([f"{where} {self.problem}", *later])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.subject, self.problem, self.missing), self.__dict__


def show_step(name: object) -> str:
    """Format the index of a member: ``["dec"]`` or ``[0]``."""
    return f'["{name}"]' if isinstance(name, str) else f"[{name}]"


def show_steps(steps: Sequence[str]) -> str:
    """Format the path of a module in nested sequences."""
    return f"seq{''.join(steps)}" if steps else ""


class _Place:
    """The note on an error: the module whose callable raised it, and its path in sequences."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: tuple[str, ...] = ()
        self.note = ""

    def __str__(self) -> str:
        path = show_steps(self.steps)
        return f"raised in {path}, {self.text}" if path else f"raised in {self.text}"


def note_place(error: BaseException, text: str) -> None:
    """Add a note about the module to an error, unless an inner module already added one."""
    if not isinstance(error, MissingKeyError) and _place_of(error) is None:
        place = _Place(text)
        error.__dict__["_td_place"] = place
        _write_note(error, place)


def step_out(error: BaseException, step: str) -> None:
    """Prepend a step to the path of the module that raised an error."""
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
    """Add or replace the note of an error; Python 3.10 has no notes, so append it to the message there."""
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
