"""The names that pickles refer to: each is importable, and those of stored tensors only when they are used."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import StoredTensor, TensorDict, TensorDictParams, lazy_stack, pickles
from td_core._encode import pickling
from td_core.testing import RawFile


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


def test_pickle_of_stored_tensor_names_this_module(tmp_path: Path) -> None:
    leaf = StoredTensor(RawFile.create(tmp_path / "a.bin", torch.arange(3.0)))
    content = pickle.dumps(leaf)
    assert "td_core.pickles.rebuild_stored_tensor" in list_names(content)
    assert pickle.loads(content)[:].tolist() == [0, 1, 2]


@pytest.mark.once
def test_import_loads_no_stored_tensors() -> None:
    code = (
        "import sys; import td_core.pickles as p; assert 'td_core._stored' not in sys.modules; "
        "p.rebuild_stored_tensor; assert 'td_core._stored' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_state_of_another_library_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_foreign", None)  # restores the converter that is registered now
    pickles.set_foreign_state(lambda cls, state: cls({"a": state["x"]}, [2]))
    td = TensorDict.__new__(TensorDict)
    td.__setstate__({"x": torch.ones(2, 3)})
    assert (td.batch_size, td["a"].shape) == ((2,), (2, 3))
