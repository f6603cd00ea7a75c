"""The names that pickles refer to: each is importable."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack, pickles
from td_core._encode import pickling


def list_names(content: bytes) -> set[str]:
    """Return the names in td_core that a pickle refers to."""
    strings: list[str] = []
    names = set()
    for code, argument, _ in pickletools.genops(content):
        if code.name == "STACK_GLOBAL":
            names.add(".".join(strings[-2:]))
        elif code.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
        elif isinstance(argument, str):
            strings.append(argument)
    return {name for name in names if name.startswith("td_core")}


@pytest.mark.parametrize("name", sorted({*pickles.__all__} - {"set_foreign_state"}))
def test_name_is_pickled_as_one_of_this_module(name: str) -> None:
    value = getattr(pickles, name)
    content = pickle.dumps(value)
    assert list_names(content) == {f"td_core.pickles.{name}"}
    assert pickle.loads(content) is value


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pickles.nothing  # noqa: B018


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}),
        lambda: lazy_stack([TensorDict({"a": 1}), TensorDict({"b": 1})]),
        lambda: TensorDictParams(TensorDict({"w": torch.ones(2)})),
    ],
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_of_collection_names_this_module_only(make: Any, protocol: int) -> None:
    td = make()
    content = pickle.dumps(td, protocol)
    assert {name.rpartition(".")[0] for name in list_names(content)} <= {"td_core.pickles", "td_core"}
    again = pickle.loads(content)
    assert type(again) is type(td)
    assert all(map(torch.equal, again._leaves(), td._leaves()))


def test_state_of_another_library_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_foreign", None)  # restores the converter that is registered now
    pickles.set_foreign_state(lambda cls, state: cls({"a": state["x"]}, [2]))
    td = TensorDict.__new__(TensorDict)
    td.__setstate__({"x": torch.ones(2, 3)})
    assert (td.batch_size, td["a"].shape) == ((2,), (2, 3))
