"""MemoryMappedTensor accepts Python types such as float as dtypes, as torch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from td_core import TensorDict
from td_memmap import MemoryMappedTensor

DTYPES_OF_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@pytest.mark.parametrize("number", DTYPES_OF_TYPES)
def test_create_with_python_type_as_dtype_sets_dtype(number: type, tmp_path: Path) -> None:
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
    assert [tensor.dtype for tensor in made] == [DTYPES_OF_TYPES[number]] * len(made)
    assert [tuple(tensor.shape) for tensor in made] == [(2,)] * len(made)
