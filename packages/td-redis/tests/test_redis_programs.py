"""Random programs on a collection on a server, compared with the same in memory after each step.

Another process sees what memory has, and tensordict the leaves and values for which it has keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from td_core import LockedError, TensorDict, lazy_stack
from td_core.testing import assert_same
from td_redis import from_store

KEYS = st.sampled_from(["a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "c"), "n", "a.b"])
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64])
INDICES = st.sampled_from([0, -1, slice(1, None), slice(None, None, 2), [0], [2, 0], [1, 1], ..., 9])


@st.composite
def values(draw: Any) -> Any:
    """Draw a leaf, a level with two of them, a lazy stack, or a value that is not a tensor."""

    def leaf() -> torch.Tensor:
        shape = (3, *draw(st.sampled_from([(), (2,), (1, 2), (0,)])))
        return (
            (torch.arange(torch.Size(shape).numel()) + draw(st.integers(0, 5))).view(shape).to(draw(DTYPES))
        )

    kind = draw(st.sampled_from(["leaf", "leaf", "leaf", "level", "level", "stack", "value"]))
    if kind == "level":
        return TensorDict({"a": leaf(), "m": {"c": leaf()}}, [3])
    if kind == "stack":
        return lazy_stack([TensorDict({"a": torch.full((i,), i)}) for i in range(3)])
    return leaf() if kind == "leaf" else draw(st.sampled_from(["text", ["p", "q", "r"], (1, None), None]))


def write_rows(td: Any, index: Any, source: Any) -> None:
    td[index] = td[source].clone()


def copy(td: Any, key: Any, source: Any) -> None:
    """Set a copy of an entry; a store makes its own of a leaf."""
    value = td.get(source)
    td.set(key, value if hasattr(value, "source") else value.clone())


STEPS: dict[str, tuple[Any, ...]] = {
    "set": (lambda td, key, value: td.set(key, value), KEYS, values()),
    "delete": (lambda td, key: td.del_(key), KEYS),
    "pop": (lambda td, key: td.pop(key, None), KEYS),
    "rename": (lambda td, key, new: td.rename_key_(key, new), KEYS, KEYS),
    "copy": (copy, KEYS, KEYS),
    "update": (
        lambda td, key, value: td.update({key: value, "c": torch.ones(3), "n": {"b": torch.zeros(3)}}),
        KEYS,
        values(),
    ),
    "exclude": (lambda td, key, other: td.exclude(key, other, inplace=True), KEYS, KEYS),
    "write_rows": (write_rows, INDICES, INDICES),
    "write_new": (
        lambda td, index, key, number: td.__setitem__(index, {key: torch.tensor(float(number))}),
        st.sampled_from([0, 2]),
        st.sampled_from(["a", "n", "z"]),
        st.integers(0, 9),
    ),
    "fill": (lambda td, key, number: td.get(key).fill_(number), KEYS, st.integers(0, 9)),
    "zero": (lambda td, key: td.get(key).zero_(), KEYS),
    "add": (lambda td: td.add_(1),),
    "names": (lambda td, name: setattr(td, "names", [name]), st.sampled_from(["time", None])),
    "clear": (lambda td, key: td.get(key).clear(), KEYS),
}


@st.composite
def programs(draw: Any) -> Any:
    """Draw a list of steps with their arguments."""
    names = draw(st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=12))
    return [(name, [draw(item) for item in STEPS[name][1:]]) for name in names]


def list_visible(td: Any, escape: Callable[[str], str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names by which tensordict sees leaves and values, with their elements."""
    for key in td.keys():
        value, name = td.get(key), above + escape(key)
        if isinstance(value, torch.Tensor):
            yield name, (value.dtype, value.tolist())
        elif type(value) is TensorDict:
            yield from list_visible(value, escape, f"{name}.")
        elif "NonTensor" in type(value).__name__ and not isinstance(td[key], tuple):
            yield name, td[key]


def check(store: Any, memory: TensorDict, location: dict[str, Any]) -> None:
    """Compare with memory what the store has, what another process opens, and what tensordict sees."""
    assert_same(store.to_local(), memory)
    assert_same(from_store(td_id=store.td_id, **location).to_local(), memory)
    connection = store._store.connection
    header = connection.run(lambda client: client.get(connection.key("td")))
    connection.run(lambda client: client.delete(connection.key("td")))
    seen = from_store(td_id=store.td_id, **location).to_local()
    connection.run(lambda client: client.set(connection.key("td"), header))
    escaped = dict(list_visible(memory, lambda key: key.replace(".", "%2E")))
    assert dict(list_visible(seen, str)) == escaped


def run_program(program: Any, location: dict[str, Any]) -> None:
    """Run a program in memory and on a server. What memory refuses, the server refuses, too, and then has what it had."""
    memory = TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}}, [3])
    with memory.to_store(ttl=None, **location) as store:
        for name, arguments in program:
            trial = memory.clone()
            copies = [each.clone() if hasattr(each, "clone") else each for each in arguments]
            try:
                STEPS[name][0](trial, *copies)
            except Exception:
                with pytest.raises(Exception):  # noqa: B017  any error
                    STEPS[name][0](store, *arguments)
            else:
                try:
                    STEPS[name][0](store, *arguments)
                    memory = trial
                except LockedError as error:  # values and lazy stacks are replaced as a whole alone
                    assert "the TensorDictStore is locked" not in str(error)
            check(store, memory, location)


@pytest.mark.once
def test_program_on_a_server_does_what_it_does_in_memory(location: dict[str, Any]) -> None:
    pytest.importorskip("td_tensorclass")

    @settings(deadline=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    @given(programs())
    def run(program: Any) -> None:
        run_program(program, location)

    run()
