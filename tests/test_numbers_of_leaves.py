"""A leaf of one number acts as a number: conversions and formats as those of a plain tensor, for each class of leaves."""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

NUMBERS = {
    "float": torch.tensor(0.125),
    "int": torch.tensor(7),
    "bool": torch.tensor(True),
    "complex": torch.tensor(1.5 - 2j),
}

#: How to get each class of leaves: the module that it needs, and a function from a plain number and a folder.
LEAVES: dict[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "mapped": ("td_memmap", lambda number, path: TensorDict({"a": number}).memmap(path / "x")["a"]),
    "mapped index": ("td_memmap", lambda number, path: load_row(number, path, "memmap")),
    "anonymous": ("td_memmap", lambda number, path: TensorDict({"a": number}).memmap_()["a"]),
    "safetensors": ("td_safetensors", lambda number, path: open_number(number, path, "safetensors", "r")),
    "safetensors r+": ("td_safetensors", lambda number, path: open_number(number, path, "safetensors", "r+")),
    "hdf5": ("td_hdf5", lambda number, path: open_number(number, path, "hdf5", "r")),
    "zarr": ("td_zarr", lambda number, path: open_number(number, path, "zarr", "r+")),
    "unbatched": ("td_tensorclass", lambda number, path: wrap_unbatched(number)),
    "parameter": ("td_core", lambda number, path: td_core.Buffer(number)),
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "format .2f": lambda number: f"{number:.2f}",
    "format >9": lambda number: f"{number:>9}",
    "format": lambda number: f"{number}",
    "percent": lambda number: "%.2f" % number,  # noqa: UP031
    "int": int,
    "float": float,
    "complex": complex,
    "bool": bool,
    "index": operator.index,
    "item": lambda number: number.item(),
    "tolist": lambda number: number.tolist(),
    "iter": iter,
    "len": len,
    "round": round,
}


def load_row(number: Any, path: Path, form: str) -> Any:
    td_core.save(TensorDict({"a": torch.stack([number, number])}), path / "x", format=form)
    return TensorDict.load_memmap(path / "x")["a"][1]


def open_number(number: Any, path: Path, form: str, mode: str) -> Any:
    td_core.save(TensorDict({"a": number}), path / "x", format=form)
    return td_core.open(path / "x", mode=mode)["a"]


def wrap_unbatched(number: Any) -> Any:
    return importlib.import_module("td_tensorclass").UnbatchedTensor(number)


def call_or_error(call: Callable[[Any], Any], number: Any) -> Any:
    try:
        return call(number)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_convert_number_equals_plain_tensor(leaf: str, dtype: str, tmp_path: Path) -> None:
    module, make = LEAVES[leaf]
    pytest.importorskip(module)
    number = make(NUMBERS[dtype], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of the imaginary part
        for name, call in CALLS.items():
            assert call_or_error(call, number) == call_or_error(call, NUMBERS[dtype]), name


def test_format_mapped_vector_raises(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    mapped = TensorDict({"a": torch.ones(2)}).memmap(tmp_path)["a"]
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{mapped:.2f}"
    assert f"{mapped}" == "MemoryMappedTensor([1., 1.])"
