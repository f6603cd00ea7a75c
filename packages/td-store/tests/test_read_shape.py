"""Shapes in headers: those of tensors, and impossible ones, which are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_store.arrays import read_shape

HUGE = 1 << 62


@pytest.mark.parametrize(
    ("sizes", "itemsize"),
    [
        ([], 1),
        ([3, 2], 4),
        ([0], 8),
        ([HUGE], 1),
        ([HUGE >> 2], 4),
        ([0, HUGE], 8),
        ([1] * 64, 1),
    ],
)
def test_read_shape_returns_shapes_of_tensors(sizes: list[int], itemsize: int) -> None:
    shape = read_shape(sizes, itemsize)
    assert (type(shape), list(shape)) == (torch.Size, sizes)


@pytest.mark.parametrize(
    ("sizes", "itemsize", "message"),
    [
        ([3, -1], 1, "-1 is not a size"),
        ([True], 1, "True is not a size"),
        ([1.0], 1, "1.0 is not a size"),
        (["3"], 1, "'3' is not a size"),
        ([1 << 63], 1, "9223372036854775808 is not a size"),
        (["x" * 200], 1, f"'{'x' * 99} is not a size"),
        ([1] * 65, 1, "a shape of 65 dims"),
        ([HUGE, 2], 1, f"no tensor has the shape {[HUGE, 2]}"),
        ([0, HUGE, HUGE], 1, f"no tensor has the shape {[0, HUGE, HUGE]}"),
        ([HUGE >> 2], 8, f"no file holds the shape {[HUGE >> 2]}"),
    ],
)
def test_read_shape_impossible_raises(sizes: list[Any], itemsize: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_shape(sizes, itemsize)
    assert str(caught.value) == message
