"""Random programs on a collection on a server, compared with the same in memory after each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from td_core import TensorDict
from td_core.testing import assert_same
from td_redis import from_store

KEYS = st.sampled_from(["a", "b", "c", ("n", "a"), ("n", "b"), ("n", "m", "c"), "n", "a.b"])
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64])
INDICES = st.sampled_from([0, -1, slice(1, None), slice(None, None, 2), [0], [2, 0], [1, 1], ..., 9])


@st.composite
def values(draw: Any) -> Any:
    """Draw a leaf, or a level with two of them."""
    shape = (3, *draw(st.sampled_from([(), (2,), (1, 2), (0,)])))
    leaf = (torch.arange(torch.Size(shape).numel()) + draw(st.integers(0, 5))).view(shape).to(draw(DTYPES))
    return (
        TensorDict({"a": leaf, "m": {"c": leaf}}, [3])
        if draw(st.booleans()) and draw(st.booleans())
        else leaf
    )


def write_rows(td: Any, index: Any, source: Any) -> None:
    td[index] = td[source].clone()


STEPS: dict[str, tuple[Any, ...]] = {
    "set": (lambda td, key, value: td.set(key, value), KEYS, values()),
    "delete": (lambda td, key: td.del_(key), KEYS),
    "pop": (lambda td, key: td.pop(key, None), KEYS),
    "rename": (lambda td, key, new: td.rename_key_(key, new), KEYS, KEYS),
    "copy": (lambda td, key, source: td.set(key, td.get(source)), KEYS, KEYS),
    "update": (
        lambda td, key, value: td.update({"c": torch.ones(3), "n": {"b": torch.zeros(3)}}),
        KEYS,
        values(),
    ),
    "write_rows": (write_rows, INDICES, INDICES),
    "write_new": (
        lambda td, index, number: td.__setitem__(index, {"z": torch.tensor(float(number))}),
        st.sampled_from([0, 2]),
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


@pytest.mark.once
def test_program_on_a_server_does_what_it_does_in_memory(location: dict[str, Any]) -> None:
    @settings(deadline=None)
    @given(programs())
    def run(program: Any) -> None:
        memory = TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}}, [3])
        with memory.to_store(**location) as store:
            for name, arguments in program:
                before = memory.clone()
                copies = [each.clone() if hasattr(each, "clone") else each for each in arguments]
                try:
                    STEPS[name][0](memory, *arguments)
                except Exception:
                    memory = before
                    with pytest.raises(Exception):  # noqa: B017  the server refuses what memory does
                        STEPS[name][0](store, *copies)
                else:
                    STEPS[name][0](store, *copies)
                assert_same(store.to_local(), memory)
                assert_same(from_store(td_id=store.td_id, **location).to_local(), memory)

    run()
