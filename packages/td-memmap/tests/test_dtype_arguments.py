"""Classes of numbers given as dtypes of mapped tensors, as torch takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from td_core import TensorDict
from td_memmap import MemoryMappedTensor

MADE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@pytest.mark.parametrize("number", MADE_OF)
def test_create_with_python_number_type_sets_dtype(number: type, tmp_path: Path) -> None:
    cls = MemoryMappedTensor
    file = cls.ones(2, dtype=number, filename=tmp_path / "a")
    anonymous = cls.zeros(2, dtype=number)
    made = [
        file,
        anonymous,
        cls.empty(2, dtype=number),
        cls.full((2,), 1, dtype=number),
        cls([0, 1], dtype=number),
        cls.from_filename(tmp_path / "a", number, (2,)),
        cls.from_storage(file.untyped_storage(), dtype=number),
        cls.from_handler(anonymous.handler, number, (2,)),
        TensorDict().memmap().make_memmap("a", (2,), dtype=number),
        TensorDict().memmap().make_memmap_from_storage("a", file.untyped_storage(), (2,), dtype=number),
    ]
    assert [tensor.dtype for tensor in made] == [MADE_OF[number]] * len(made)
    assert [tuple(tensor.shape) for tensor in made] == [(2,)] * len(made)
