"""What the engines share: the interface between them and :class:`~td_remote.Remote`, and pieces of uploads."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from td_core.errors import FormatError
from td_core.typing import ObjectInfo, Range

from ._retries import Policy, ShortAnswerError, make_missing_error, make_replaced_error, make_short_error

#: Objects above this size are uploaded in parts of this size.
PART = 1 << 24
#: An object of a server without ranges is read whole up to this size, and so many first bytes of it by themselves.
WHOLE, HEAD = 1 << 26, 1 << 16


#: The bounds on requests in threads, by host and number of requests.
_limits: dict[tuple[str, int], threading.BoundedSemaphore] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_limits.clear)


def share_limit(host: str, most: int) -> threading.BoundedSemaphore:
    """Return the bound on the requests of this process for a host, which all locations with this number share."""
    return _limits.setdefault((host, most), threading.BoundedSemaphore(most))


class Answer(NamedTuple):
    """The content of a range, and the object as the answer describes it, if it does."""

    content: Any
    info: ObjectInfo | None


class Engine(Protocol):
    """Sends requests for the objects below one location; its errors are those that users see.

    Attributes:
        name: ``"fsspec"`` or ``"obstore"``.
        describes: whether answers have the description of the object.
    """

    name: str
    describes: bool

    def find(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""

    def fetch(self, ranges: Sequence[Range]) -> list[Answer]:
        """Return what the server answers for each range that is not empty; the content may be shorter."""

    def put(self, name: str, content: Iterable[Any], create: bool) -> None:
        """Write an object from buffers, complete or not at all."""

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are missing."""


def check_answer(policy: Policy, item: Range, answer: Answer) -> memoryview:
    """Return the content of an answer; FormatError if the object is another one, or ends before the range."""
    content, info = answer
    if info is not None and item.stamp not in (None, info.stamp):
        raise make_replaced_error(policy.where, item.name)
    wanted = measure(item, None if info is None else info.size)
    if wanted is not None and len(content) != wanted:
        raise make_short_error(policy.where, item, len(content) if info is None else info.size)
    return memoryview(content).cast("B")


def measure(item: Range, size: int | None = None) -> int | None:
    """Return the number of bytes in a range; None if it depends on the size of the object, which is not given."""
    if item.start < 0 and item.stop is None:
        return -item.start
    if item.start >= 0 and item.stop is not None:
        return item.stop - item.start
    if size is None:
        return None
    return (size if item.stop is None else item.stop) - (item.start if item.start >= 0 else size + item.start)


def place_range(where: str, item: Range, info: ObjectInfo | None) -> Range:
    """Return a range with the positions that it has in an object; raise if that is missing or too short."""
    if info is None:
        raise make_missing_error(where, item.name)
    start = item.start if item.start >= 0 else info.size + item.start
    stop = info.size if item.stop is None else item.stop
    if not 0 <= start <= stop <= info.size:
        raise make_short_error(where, item, info.size)
    return item._replace(start=start, stop=stop)


def fit_range(item: Range, info: ObjectInfo) -> Range:
    """Return the part of a range that an object has, with its positions."""
    start = item.start if item.start >= 0 else max(0, info.size + item.start)
    stop = info.size if item.stop is None else min(item.stop, info.size)
    return Range(item.name, start, stop, info.stamp)


def refuse_short(item: Range, content: Any, info: ObjectInfo) -> None:
    """Raise an error that is worth another attempt for an answer with fewer bytes than the object has in a range."""
    wanted = measure(fit_range(item, info)) or 0
    if len(content) < wanted:
        raise ShortAnswerError(f"the answer has {len(content)} bytes, and {wanted} were asked for")


def format_range(item: Range) -> str:
    """Return the header ``Range`` for a range."""
    if item.start < 0:
        return f"bytes={item.start}"
    return f"bytes={item.start}-{'' if item.stop is None else item.stop - 1}"


def split_parts(content: Iterable[Any], size: int = PART) -> Iterator[bytearray]:
    """Yield the bytes of buffers in parts of one size, of which the last is shorter; at least one part, which may be empty."""
    parts = [bytearray()]  # a local name would keep a part while the caller sends it
    is_first = True
    for buffer in content:
        view = memoryview(buffer).cast("B")
        while len(view):
            taken = view[: size - len(parts[0])]
            parts[0] += taken
            view = view[len(taken) :]
            if len(parts[0]) == size:
                parts.append(bytearray())
                yield parts.pop(0)
                is_first = False
    if parts[0] or is_first:
        yield parts.pop()


class WholeObjects:
    """The objects of a server without ranges, each read once."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._found = policy, dict[str, tuple[memoryview, ObjectInfo]]()

    def has(self, name: str, stamp: str | None) -> bool:
        """Return True if an object with a stamp was read."""
        return name in self._found and self._found[name][1].stamp == stamp

    def check(self, name: str, size: int) -> None:
        """Raise FormatError if an object is too large to be read whole."""
        if size > WHOLE:
            raise FormatError(
                f"{self._policy.where}: the server does not answer requests for ranges, and the object {name!r} has more than "
                f"{WHOLE >> 20} MB: download it first"
            )

    def add(self, content: Any, info: ObjectInfo) -> None:
        """Keep an object that was read, with a warning."""
        warnings.warn(
            f"{self._policy.where}: the server does not answer requests for ranges: the object {info.name!r} is read whole",
            stacklevel=2,
        )
        self._found[info.name] = memoryview(content), info

    def cut(self, item: Range) -> Answer:
        """Return a range of an object that was read."""
        content, info = self._found[item.name]
        return Answer(content[item.start : info.size if item.stop is None else item.stop], info)
