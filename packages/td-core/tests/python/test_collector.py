"""Pausing the cyclic garbage collector: it is off inside the block, and as before behind it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from td_core._python.collector import pause_collector


@pytest.fixture(autouse=True)
def keep_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_pause_collector_restores_state_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pause_collector():
        assert not gc.isenabled()
        with pause_collector():
            pass
        assert not gc.isenabled(), "an inner block does not end the pause"
    assert gc.isenabled() is enabled


def test_pause_collector_error_in_block_ends_pause() -> None:
    gc.enable()
    with pytest.raises(ZeroDivisionError), pause_collector():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_pause_collector_keeps_cycles_until_collected() -> None:
    class Node:
        pass

    with pause_collector():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        reference = weakref.ref(node)
        del node
        kept: list[list[int]] = [
            [] for _ in range(100_000)
        ]  # enough for a collection of the youngest objects
        assert reference() is not None and len(kept) == 100_000
    gc.collect()
    assert reference() is None
