"""An UnbatchedTensor of a save that is opened without reading: it reads, prints and is written as any other leaf."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

td_tensorclass = pytest.importorskip("td_tensorclass")
UnbatchedTensor = td_tensorclass.UnbatchedTensor
MODES = [
    (name, mode, options)
    for name, options in (("hdf5", {}), ("hdf5", {"chunks": 1}), ("zarr", {}), ("safetensors", {}))
    for mode in ("r", "r+", "c")
]


@pytest.fixture(params=MODES, ids=lambda case: f"{case[0]}-{case[1]}{'-chunks' * bool(case[2])}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str, str]:
    """Return an opened collection, its path and its mode."""
    name, mode, options = request.param
    pytest.importorskip(f"td_{name}")
    path = str(tmp_path / f"data.{name}")
    data = TensorDict(
        {
            "x": torch.arange(4.0),
            "scale": UnbatchedTensor(torch.tensor([5.0, 6.0])),
            "n": {"u": UnbatchedTensor(torch.tensor(3))},
        },
        [4],
    )
    td_core.save(data, path, format=name, **options)
    return td_core.open(path, mode=mode), path, mode


READS: dict[str, Callable[[Any], Any]] = {
    "entry": lambda td: td["scale"],
    "index": lambda td: td[1:]["scale"],
    "mask": lambda td: td[td["x"] > 1]["scale"],
    "row": lambda td: td[0]["scale"],
    "view": lambda td: td.view(2, 2)["scale"],
    "split": lambda td: td.split(2)[1]["scale"],
    "unbind": lambda td: td.unbind(0)[1]["scale"],
    "clone": lambda td: td.clone()["scale"],
    "to": lambda td: td.to("cpu")["scale"],
    "add": lambda td: (td + 1)["scale"] - 1,
    "stack": lambda td: torch.stack([td, td])["scale"],
    "cat": lambda td: torch.cat([td, td.clone()])["scale"],
    "select": lambda td: td.select("scale")["scale"],
    "flatten": lambda td: td.flatten_keys(".")["scale"],
    "pickle": lambda td: pickle.loads(pickle.dumps(td))["scale"],
    "pickle of the tensor": lambda td: pickle.loads(pickle.dumps(td["scale"])),
    "deepcopy": lambda td: copy.deepcopy(td)["scale"],
    "update": lambda td: TensorDict({"scale": UnbatchedTensor(torch.zeros(2))}, [4]).update(td)["scale"],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_read_unbatched_tensor_of_opened_save_gives_its_elements(
    read: Callable[[Any], Any], case: tuple[Any, str, str]
) -> None:
    found = read(case[0])
    assert found.shape == (2,)
    assert torch.as_tensor(found + 0).tolist() == [5.0, 6.0]


def test_opened_unbatched_tensor_prints_and_keeps_its_class(case: tuple[Any, str, str]) -> None:
    opened, path, _ = case
    assert "scale" in repr(opened)
    assert isinstance(opened["scale"], UnbatchedTensor)
    assert opened["scale"].batch_size == (4,)
    assert opened[0]["scale"].batch_size == ()
    assert opened["n", "u"].item() == 3
    assert (opened == td_core.load(path)).all()
    assert type(opened.clone()["scale"]) is UnbatchedTensor
    assert td_core.load(path)["scale"].tolist() == [5.0, 6.0]


def test_write_unbatched_tensor_of_opened_save_reaches_it(case: tuple[Any, str, str]) -> None:
    opened, path, mode = case
    if mode == "r":
        pytest.skip("the save is opened for reading")
    opened["scale"].fill_(9.0)
    opened["n", "u"].add_(1)
    opened.update_({"x": torch.ones(4)})
    assert opened["scale"].tolist() == [9.0, 9.0]
    assert opened["n", "u"].item() == 4
    kept = td_core.load(path)
    assert kept["scale"].tolist() == ([9.0, 9.0] if mode == "r+" else [5.0, 6.0])
    assert kept["n", "u"].item() == (4 if mode == "r+" else 3)


SETS: dict[str, Callable[[Any], Any]] = {
    "set": lambda value: TensorDict({}, [7]).set("k", value),
    "constructor": lambda value: TensorDict({"k": value}, [7]),
    "nested": lambda value: TensorDict({}, [7]).set(("n", "k"), value)["n"],
    "update": lambda value: TensorDict({}, [7]).update({"k": value}),
    "update_": lambda value: TensorDict({"k": UnbatchedTensor(torch.zeros(2))}, [7]).update_({"k": value}),
    "lazy stack": lambda value: td_core.lazy_stack([TensorDict({}, [7])] * 2).set("k", value),
    "same batch size": lambda value: TensorDict({"k": value}, [2]),
}


@pytest.mark.parametrize("name", SETS)
def test_set_stored_unbatched_tensor_into_other_collection_keeps_kind(name: str, case: Any) -> None:
    made = SETS[name](case[0]["scale"])
    assert isinstance(made["k"], UnbatchedTensor) and made["k"].tolist() == [5.0, 6.0]
    assert isinstance(made[0]["k"], UnbatchedTensor) and made[0]["k"].tolist() == [5.0, 6.0]
