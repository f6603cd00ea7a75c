"""The table of dtypes: names, predicates, and promotion with 0-d tensors as in torch."""

from __future__ import annotations

import pytest
import torch

from td_core import (
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
)
from td_core._torch.dtypes import dtype_beside


class TestPredicates:
    @pytest.mark.parametrize(
        ("dtype", "inexact", "floating", "integer", "boolean"),
        [
            (torch.float32, True, True, False, False),
            (torch.bfloat16, True, True, False, False),
            (torch.complex64, True, False, False, False),
            (torch.int8, False, False, True, False),
            (torch.bool, False, False, False, True),
        ],
    )
    def test_dtype_predicates_return_expected(
        self, dtype: torch.dtype, inexact: bool, floating: bool, integer: bool, boolean: bool
    ) -> None:
        for args in ((dtype,), (torch.zeros(1, dtype=dtype),), ("key", torch.zeros(1, dtype=dtype))):
            answers = (is_inexact(*args), is_floating(*args), is_integer(*args), is_bool(*args))
            assert answers == (inexact, floating, integer, boolean)

    def test_dtype_predicate_of_string_raises(self) -> None:
        with pytest.raises(TypeError, match="a tensor or a dtype; got \\('x',\\)"):
            is_bool("x")


DTYPES = [torch.uint8, torch.int64, torch.float32, torch.float64, torch.complex64]


ALL_DTYPES = [*DTYPES, torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex128]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtype_beside_equals_torch_result_type(dtype: torch.dtype) -> None:
    for other in ALL_DTYPES:
        expected = torch.result_type(torch.zeros(1, dtype=dtype), torch.zeros((), dtype=other))
        assert dtype_beside(dtype, other) == expected, other
