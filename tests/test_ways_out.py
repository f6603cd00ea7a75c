"""Errors that newcomers meet name the way out, and what they name works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import StructureError, TensorDict, lazy_stack, load, pad_sequence, save

memmap = pytest.importorskip("td_memmap")


def make_data() -> Any:
    return TensorDict({"obs": torch.zeros(3, 2), "info": {"step": torch.arange(3)}}, [3])


def make_jagged(*lengths: int) -> Any:
    rows = torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
    return TensorDict({"x": rows}, [len(lengths)])


def make_steps() -> list[Any]:
    return [TensorDict({"label": torch.tensor(n), "tokens": torch.ones(n)}) for n in (2, 3)]


def write_bytes() -> str:
    Path("plain.bin").write_bytes(bytes(12))
    return "plain.bin"


def save_data(format: str = "memmap") -> str:
    save(make_data(), "saved", format=format)
    return "saved"


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
    "load some keys": (lambda: load(save_data(), keys=["obs"]), TypeError, "open() has it"),
    "pad a scalar": (lambda: pad_sequence(make_steps()), StructureError, "unsqueeze() it, or exclude() it"),
    "stack jagged": (
        lambda: torch.stack([make_jagged(1, 2), make_jagged(2, 2)]),
        StructureError,
        "use lazy_stack() to keep both; stack() needs rows of equal lengths, cat() does not",
    ),
    "read ragged": (lambda: lazy_stack(make_steps())["tokens"], StructureError, "to_padded_tensor()"),
    "map to a file": (lambda: make_data().memmap(write_bytes()), OSError, "which is a file: remove it"),
    "map a file": (lambda: TensorDict.load_memmap(write_bytes()), ValueError, "from_filename() maps"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ERRORS)
def test_error_names_the_way_out(name: str) -> None:
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=re.escape(words)):
        call()


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
    assert pad_sequence([step.exclude("label") for step in steps])["tokens"].shape == (2, 3)
    assert memmap.MemoryMappedTensor.from_filename(write_bytes(), torch.float32, [3]).tolist() == [0, 0, 0]
