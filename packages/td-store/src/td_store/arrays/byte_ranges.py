"""Ranges of bytes: neighbours are read as one, and long ones in parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from td_core.spi import run_parallel
from td_core.typing import ObjectStore, Range

#: Neighbouring ranges are read as one of up to this many bytes; a longer range is read in parts.
_LARGEST, _PART = 1 << 24, 1 << 23
#: The most bytes that one call of a store returns.
_AT_ONCE = 1 << 29
#: Threads that copy large ranges.
_THREADS = 4
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


def read_objects(
    store: ObjectStore, requests: Sequence[tuple[str, str | None, Sequence[Bytes]]]
) -> list[list[bytearray | memoryview]]:
    """Return the bytes of ranges of several objects, each with its name and stamp, with one call of the store.

    What has more than 512 MB is read with several calls, so that no more than that is in memory beside the results.

    >>> from td_store.testing import MemoryStore
    >>> store = MemoryStore({"a": b"0123456789", "b": b"abc"})
    >>> read_objects(store, [("a", None, [(7, 9), (0, 2)]), ("b", None, [(1, 3)])])
    [[bytearray(b'78'), bytearray(b'01')], [bytearray(b'bc')]]
    >>> store.log
    [('read', ('a', 'b'))]
    """
    gap = getattr(store, "gap", _GAP)
    results = [[_allocate(end - begin) for begin, end in wanted] for _, _, wanted in requests]
    ranges: list[Range] = []
    copies: list[list[tuple[memoryview, int]]] = []
    for (name, stamp, wanted), contents in zip(requests, results, strict=True):
        planned = plan_ranges(wanted, gap)
        ranges += [Range(name, begin, end, stamp) for begin, end in planned]
        copies += _list_copies(wanted, planned, contents)
    for first, last in _split(ranges):
        pieces = store.read(ranges[first:last])
        work = [partial(_copy, *item) for item in zip(pieces, copies[first:last], strict=True)]
        run_parallel(work, _THREADS if sum(map(len, pieces)) > _LARGEST else 1)
        del pieces, work  # before the next ones are read
    return results


def _allocate(size: int) -> bytearray | memoryview:
    """Return memory for a range: zeros cost as much as a copy, where it is large."""
    return bytearray(size) if size < _PART else np.empty(size, np.uint8).data


def _list_copies(
    wanted: Sequence[Bytes], planned: Sequence[Bytes], contents: Sequence[bytearray | memoryview]
) -> list[list[tuple[memoryview, int]]]:
    """Return for each planned range which parts of the contents are in it, and where they begin there."""
    starts = [begin for begin, _ in planned]
    copies: list[list[tuple[memoryview, int]]] = [[] for _ in planned]
    for (begin, end), content in zip(wanted, contents, strict=True):
        view, position = memoryview(content), begin
        i = bisect_right(starts, begin) - 1
        while position < end:
            stop = min(end, planned[i][1])
            copies[i].append((view[position - begin : stop - begin], position - starts[i]))
            position, i = stop, i + 1
    return copies


def _split(ranges: Sequence[Range]) -> Iterator[Bytes]:
    """Yield the first and the last of the ranges that are read at the same time."""
    first = size = 0
    for i, item in enumerate(ranges):
        assert item.stop is not None
        size += item.stop - item.start
        if size > _AT_ONCE and i > first:
            yield first, i
            first, size = i, item.stop - item.start
    if ranges:
        yield first, len(ranges)


def _copy(piece: memoryview, copies: Sequence[tuple[memoryview, int]]) -> None:
    """Copy parts of a range; large ones without the lock of the interpreter."""
    for target, start in copies:
        source = piece[start : start + len(target)]
        if len(target) < _GAP:
            target[:] = source
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
