"""Ranges of objects: any of them, in any order, are the right bytes, and are read with few calls and bounded memory."""

from __future__ import annotations

import random

import pytest

from td_store.arrays import byte_ranges, read_objects
from td_store.testing import MemoryStore

CONTENTS = {name: random.Random(name).randbytes(5000) for name in "ab"}


@pytest.fixture(params=[1, 4])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what is large small: joined ranges, parts, copies in threads, and what one call returns."""
    scale = request.param
    for name, size in {"_LARGEST": 400, "_PART": 200, "_GAP": 30, "_AT_ONCE": 1000}.items():
        monkeypatch.setattr(byte_ranges, name, size * scale)
    monkeypatch.setattr(byte_ranges.plan_ranges, "__defaults__", (400 * scale, 200 * scale))


@pytest.mark.parametrize("seed", range(8))
def test_ranges_in_any_order_are_the_bytes(seed: int, small: None) -> None:
    draw = random.Random(seed)
    store = MemoryStore(CONTENTS)
    store.gap = draw.choice([0, 16, 300])  # type: ignore[attr-defined]
    wanted = {
        name: [
            (begin, min(begin + draw.choice([0, 1, 40, 1500]), 5000))
            for begin in draw.sample(range(5000), 12)
        ]
        for name in CONTENTS
    }
    found = read_objects(store, [(name, None, ranges) for name, ranges in wanted.items()])
    for (name, ranges), contents in zip(wanted.items(), found, strict=True):
        assert [bytes(part) for part in contents] == [CONTENTS[name][begin:end] for begin, end in ranges]


@pytest.mark.parametrize(("size", "calls"), [(0, 0), (999, 1), (1000, 1), (1001, 2), (5000, 5)])
def test_call_returns_a_bounded_number_of_bytes(
    size: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_ranges, "_AT_ONCE", 1000)
    monkeypatch.setattr(byte_ranges.plan_ranges, "__defaults__", (400, 200))
    store = MemoryStore(CONTENTS)
    ((found,),) = read_objects(store, [("a", None, [(0, size)])])
    assert bytes(found) == CONTENTS["a"][:size]
    assert [operation for operation, _ in store.log] == ["read"] * calls
