"""Ranges of bytes: neighbours are read as one, and long ones in parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from td_core.typing import ObjectStore, Range

#: Neighbouring ranges are read as one of up to this many bytes; a longer range is read in parts.
_LARGEST, _PART = 1 << 24, 1 << 23
#: The gap of a store that has no such attribute.
_GAP = 1 << 16

Bytes = tuple[int, int]


def plan_ranges(wanted: Sequence[Bytes], gap: int, largest: int = _LARGEST, part: int = _PART) -> list[Bytes]:
    """Return the ranges to read, in order, for some ranges that are wanted, each of them a first byte and an end.

    Args:
        wanted: the ranges, in any order.
        gap: ranges with at most this many bytes between them are read as one.
        largest: the size in bytes up to which ranges are joined; a longer one is split.
        part: the size in bytes of the parts of a range that is split.

    >>> plan_ranges([(100, 120), (0, 8), (8, 16), (18, 20)], gap=4)
    [(0, 20), (100, 120)]
    >>> plan_ranges([(0, 50)], gap=4, largest=30, part=20)
    [(0, 20), (20, 40), (40, 50)]
    """
    joined: list[list[int]] = []
    for begin, end in sorted(set(wanted)):
        if begin == end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif joined and begin - joined[-1][1] <= gap and end - joined[-1][0] <= largest:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    planned: list[Bytes] = []
    for begin, end in joined:
        size = end - begin if end - begin <= largest else part
        planned += [(start, min(start + size, end)) for start in range(begin, end, size)]
    return planned


def cut_ranges(
    wanted: Sequence[Bytes], planned: Sequence[Bytes], pieces: Sequence[memoryview]
) -> list[bytearray]:
    """Return the bytes of each range that is wanted, from those of the planned ranges."""
    starts = [begin for begin, _ in planned]
    results = []
    for begin, end in wanted:
        result = bytearray(end - begin)
        view, position = memoryview(result), begin
        i = bisect_right(starts, begin) - 1
        while position < end:
            stop = min(end, planned[i][1])
            view[position - begin : stop - begin] = pieces[i][position - starts[i] : stop - starts[i]]
            position, i = stop, i + 1
        results.append(result)
    return results


def read_objects(
    store: ObjectStore, requests: Sequence[tuple[str, str | None, Sequence[Bytes]]]
) -> list[list[bytearray]]:
    """Return the bytes of ranges of several objects, each with its name and stamp, with one call of the store.

    >>> from td_store.testing import MemoryStore
    >>> store = MemoryStore({"a": b"0123456789", "b": b"abc"})
    >>> read_objects(store, [("a", None, [(7, 9), (0, 2)]), ("b", None, [(1, 3)])])
    [[bytearray(b'78'), bytearray(b'01')], [bytearray(b'bc')]]
    >>> store.log
    [('read', ('a', 'b'))]
    """
    gap = getattr(store, "gap", _GAP)
    plans = [plan_ranges(wanted, gap) for _, _, wanted in requests]
    ranges = [
        Range(name, begin, end, stamp)
        for (name, stamp, _), planned in zip(requests, plans, strict=True)
        for begin, end in planned
    ]
    pieces = iter(store.read(ranges) if ranges else [])
    return [
        cut_ranges(wanted, planned, [next(pieces) for _ in planned])
        for (_, _, wanted), planned in zip(requests, plans, strict=True)
    ]
