"""Errors that newcomers meet name the way out, and what they name works."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import StructureError, TensorDict, lazy_stack, load, pad_sequence, save
from td_core._python.public_names import SIBLING_NAMES
from td_core.errors import FIRST_PARTY

distributed = pytest.importorskip("td_distributed")
memmap = pytest.importorskip("td_memmap")
tensorclass = pytest.importorskip("td_tensorclass")


def make_data() -> Any:
    return TensorDict({"obs": torch.zeros(3, 2), "info": {"step": torch.arange(3)}}, [3])


class Row(tensorclass.TensorClass):
    x: torch.Tensor


def make_jagged(*lengths: int) -> Any:
    rows = torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
    return TensorDict({"x": rows}, [len(lengths)])


def make_steps() -> list[Any]:
    return [TensorDict({"label": torch.tensor(n), "tokens": torch.ones(n)}) for n in (2, 3)]


def write_bytes() -> str:
    Path("plain.bin").write_bytes(bytes(12))
    return "plain.bin"


def save_data() -> str:
    save(make_data(), "saved", format="memmap")
    return "saved"


def save_safetensors() -> str:
    pytest.importorskip("td_safetensors")
    save(make_data(), "saved", format="safetensors")
    return "saved"


def import_from(package: str, name: str) -> None:
    exec(f"from {package} import {name}", {})


ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "dotted key": (lambda: make_data()["info.step"], KeyError, "did you mean ('info', 'step')?"),
    "key with a slash": (lambda: make_data()["info/step"], KeyError, "did you mean ('info', 'step')?"),
    "dotted key below a key": (
        lambda: TensorDict({"a": make_data()})["a", "info.step"],
        KeyError,
        "did you mean ('a', 'info', 'step')?",
    ),
    "dotted key of nothing": (lambda: make_data()["info.x"], KeyError, "did you mean 'info'"),
    "dotted key through a leaf": (lambda: make_data()["obs.x"], KeyError, "did you mean 'obs'"),
    "key that is a number": (lambda: TensorDict({"state": {0: torch.ones(1)}}), KeyError, "got 0: save() keeps"),
    "save a module": (lambda: save(torch.nn.Linear(1, 1), "m"), TypeError, "got Linear: save({'name': ...}, path)"),
    "save a tensor": (lambda: save(torch.ones(1), "m"), TypeError, "got Tensor: save({'name': ...}, path)"),
    "load in a mode": (lambda: load(save_safetensors(), mode="c"), TypeError, "open() has it"),
    "pad a scalar": (lambda: pad_sequence(make_steps()), StructureError, "unsqueeze() it, or exclude() it"),
    "stack jagged": (
        lambda: torch.stack([make_jagged(1, 2), make_jagged(2, 2)]),
        StructureError,
        "use lazy_stack() to keep both; stack() needs rows of equal lengths, cat() does not",
    ),
    "read ragged": (lambda: lazy_stack(make_steps())["tokens"], StructureError, "to_padded_tensor()"),
    "class of td-data": (lambda: import_from("td_core", "Loader"), ImportError, "'Loader' from 'td_core': it is in"),
    "sibling's name": (lambda: import_from("td_core", "tensorclass"), ImportError, "it is in td_tensorclass"),
    "core's name": (lambda: import_from("td_memmap", "TensorDict"), ImportError, "it is in td_core"),
    "attribute of a sibling": (lambda: td_core.TensorDictModule, AttributeError, "it is in"),
    "pad dicts": (
        lambda: pad_sequence([{"tok": torch.ones(2)}]),  # type: ignore[type-var]
        TypeError,
        "pad_sequence() takes a collection, such as a TensorDict; got dict; from_dict()",
    ),
    "modules in a list": (
        lambda: TensorDict.from_modules([torch.nn.Linear(1, 1)]),  # type: ignore[arg-type]
        TypeError,
        "from_modules() takes modules, one by one; got list; from_modules(*modules) takes several",
    ),
    "list for a module": (
        lambda: TensorDict.from_module([torch.nn.Linear(1, 1)]),  # type: ignore[arg-type]
        TypeError,
        "from_module() takes a module; got list; from_modules(*modules)",
    ),
    "collection for a module": (
        lambda: TensorDict.from_module(make_data()),  # type: ignore[arg-type]
        TypeError,
        "from_module() takes a module; got TensorDict",
    ),
    "write to a list": (lambda: make_data().to_module([]), TypeError, "to_module() takes a module; got list"),
    "masks of a tensorclass": (
        lambda: pad_sequence([Row(torch.ones(2)), Row(torch.ones(3))], return_mask=True),
        AttributeError,
        "no field 'masks': existing keys: ['x']; declare a field for the masks, or pad the result of to_tensordict()",
    ),
    "mask of a tensorclass": (
        lambda: Row(make_jagged(1, 2)["x"], batch_size=[2]).to_padded_tensor(mask_key="mask"),
        AttributeError,
        "no field 'mask': existing keys: ['x']; declare a field for the masks",
    ),
    "map to a file": (lambda: make_data().memmap(write_bytes()), OSError, "which is a file: remove it"),
    "map a file": (lambda: TensorDict.load_memmap(write_bytes()), ValueError, "from_filename() maps"),
}  # fmt: skip


#: Functions whose argument is a collection, and a call of each.
NO_COLLECTION: dict[Callable[..., object], Callable[[Any], object]] = {
    pad_sequence: lambda value: pad_sequence([value]),
    td_core.unpad_sequence: lambda value: td_core.unpad_sequence(value, torch.ones(2, 2)),
    td_core.pad: lambda value: td_core.pad(value, [0, 1]),
    td_core.group_by: lambda value: td_core.group_by(value, "a"),
    td_core.remove_duplicates: lambda value: td_core.remove_duplicates(value, "a"),
    td_core.isin: lambda value: td_core.isin(make_data(), value, "obs"),
    distributed.consolidate: lambda value: distributed.consolidate(value),
    distributed.is_consolidated: lambda value: distributed.is_consolidated(value),
    distributed.storage_of: lambda value: distributed.storage_of(value),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ERRORS)
def test_error_names_the_way_out(name: str) -> None:
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("position", range(len(FIRST_PARTY)), ids=list(FIRST_PARTY))
def test_table_of_names_has_those_of_each_sibling(position: int) -> None:
    packages = list(FIRST_PARTY)
    module = pytest.importorskip(packages[position].replace("-", "_"))
    assert list(SIBLING_NAMES) == packages
    above = {name for package in packages[:position] for name in SIBLING_NAMES[package].split()}
    wanted = {*module.__all__} - {*td_core.__all__, "__version__"} - above
    assert {*SIBLING_NAMES[packages[position]].split()} == wanted


def test_missing_sibling_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "td_nn", None)
    with pytest.raises(
        ImportError, match="it is in the package 'td-nn', which is not installed: pip install"
    ):
        import_from("td_core", "TensorDictModule")


def test_name_of_a_sibling_is_no_attribute() -> None:
    assert not hasattr(td_core, "tensorclass") and getattr(td_core, "Loader", None) is None


@pytest.mark.parametrize("value", [{}, [1], None, torch.ones(2), "x"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("call", NO_COLLECTION, ids=lambda call: call.__name__)
def test_value_that_is_no_collection_is_named_by_its_type(call: Callable[..., object], value: object) -> None:
    with pytest.raises(TypeError, match=f"a collection.*got {type(value).__name__}"):
        NO_COLLECTION[call](value)


def test_mask_that_is_no_tensor_is_named_by_its_type() -> None:
    with pytest.raises(TypeError, match="a mask that is a tensor or a collection; got list"):
        td_core.unpad_sequence(make_data(), [True])  # type: ignore[arg-type]


def test_load_of_unknown_option_does_not_name_open() -> None:
    with pytest.raises(TypeError, match=r"its options: [^;]*$"):
        load(save_data(), foo=1)


def test_ways_out_work() -> None:
    save({"model": torch.nn.Linear(2, 1), "x": torch.ones(1)}, "m")
    assert load("m")["x"].tolist() == [1.0]
    assert list(td_core.open(save_data(), keys=["obs"]).keys()) == ["obs"]
    assert torch.cat([make_jagged(1, 2), make_jagged(2, 2)])["x"].offsets().tolist() == [0, 1, 3, 5, 7]
    steps = make_steps()
    assert lazy_stack(steps).to_padded_tensor()["tokens"].tolist() == [[1, 1, 0], [1, 1, 1]]
    rows = [Row(torch.ones(n)).to_tensordict() for n in (1, 2)]
    assert pad_sequence(rows, return_mask=True)["masks", "x"].tolist() == [[True, False], [True, True]]
    assert pad_sequence([step.exclude("label") for step in steps])["tokens"].shape == (2, 3)
    assert memmap.MemoryMappedTensor.from_filename(write_bytes(), torch.float32, [3]).tolist() == [0, 0, 0]
