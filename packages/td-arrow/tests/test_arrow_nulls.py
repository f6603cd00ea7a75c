"""Nulls of every type, by every policy, at every level, compared with ``is_valid`` of Arrow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from td_arrow import from_arrow, to_arrow
from td_core import TensorDict
from td_core.errors import KeyPathError

NUMBERS = [
    pa.int8(), pa.int64(), pa.uint16(), pa.uint64(), pa.bool_(), pa.float16(), pa.float32(), pa.float64(),
]  # fmt: skip


def make_array(kind: Any) -> Any:
    """Return an array of four numbers, of which the second one is null."""
    values: list[Any] = [True, None, False, True] if kind == pa.bool_() else [1, None, 3, 2]
    if kind == pa.float16():
        values = [None if value is None else np.float16(value) for value in values]
    return pa.array(values, kind)


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
@pytest.mark.parametrize("policy", ["auto", "raise", "fill", "mask", 1])
def test_null_number_is_what_the_policy_says(kind: Any, policy: Any) -> None:
    table = pa.table({"x": make_array(kind)})
    is_float = pa.types.is_floating(kind)
    if policy == "raise" or (policy == "auto" and not is_float):
        with pytest.raises(
            ValueError, match=r"column 'x': 1 of 4 values are null, the first in row 1: pass nulls=\"fill\""
        ):
            from_arrow(table, nulls=policy)
        return
    found = from_arrow(table, nulls=policy)
    value = found["x"][1].item()
    assert math.isnan(value) if is_float and policy != 1 else value == (1 if policy == 1 else 0), policy
    assert found["x"][[0, 2, 3]].tolist() == [v for v in table["x"].to_pylist() if v is not None]
    if policy == "mask":
        assert found["_mask", "x"].tolist() == table["x"].is_valid().to_pylist()


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), (3,)),
        (pa.array([[1, None], [5, 6], [3, 4]], pa.list_(pa.int64(), 2)), (3, 2)),
        (pa.array([[[1], [2]], None, [[3], None]], pa.list_(pa.list_(pa.int64(), 1), 2)), (3, 2, 1)),
    ],
)
def test_mask_of_cells_has_the_shape_of_what_is_missing(array: Any, shape: tuple[int, ...]) -> None:
    found = from_arrow(pa.table({"x": array}), nulls="mask", mask_key="m")
    mask = found["m", "x"]
    assert mask.shape == shape
    assert found["x"][~mask].eq(0).all()
    flat = [item for row in array.to_pylist() for item in (row or [None])]
    assert mask.all() == (None not in flat)


def test_null_struct_makes_its_fields_null() -> None:
    array = pa.array([{"a": 1, "s": "x"}, None], pa.struct([("a", pa.int64()), ("s", pa.string())]))
    with pytest.raises(ValueError, match=r"column \('n', 'a'\): 1 of 2 values are null"):
        from_arrow(pa.table({"n": array.field("a"), "m": array}).select(["m"]).rename_columns(["n"]))
    pytest.importorskip("td_tensorclass")
    found = from_arrow(pa.table({"n": array}), nulls="mask")
    assert found["_mask", "n", "a"].tolist() == found["_mask", "n", "s"].tolist() == [True, False]
    assert found["n", "s"] == ["x", None]


@pytest.mark.parametrize("lists", ["jagged", "padded"])
def test_mask_of_null_lists_or_of_null_elements_but_not_of_both(lists: str) -> None:
    def read(rows: list[Any], nulls: Any) -> TensorDict:
        return from_arrow(pa.table({"x": pa.array(rows, pa.list_(pa.int64()))}), nulls=nulls, lists=lists)

    with pytest.raises(ValueError, match="column 'x': 1 of 3 values are null, the first in row 1"):
        read([[1], None, [3]], "auto")
    assert read([[1], [], None], "mask")["_mask", "x"].tolist() == [True, True, False]
    mask = read([[1, None], [], [3]], "mask")["_mask", "x"]
    expected = [[True, False], [], [True]]
    padded = [row + [False] * (2 - len(row)) for row in expected]
    assert [part.tolist() for part in mask.unbind()] == (expected if lists == "jagged" else padded)
    message = r"""'x' has lists that are null, the first in row 2, and nulls in lists, .* lists="values", or nulls="fill\""""
    with pytest.raises(ValueError, match=message):
        read([[1, None], [], None], "mask")
    found = read([[1, None], [], None], "fill")["x"]
    assert [part.tolist() for part in found.unbind()] == (
        [[1, 0], [], []] if lists == "jagged" else [[1, 0], [0, 0], [0, 0]]
    )


def test_integers_beyond_floats_stay_exact() -> None:
    found = from_arrow(pa.table({"x": pa.array([2**53 + 1, None])}), nulls="fill")
    assert found["x"].tolist() == [2**53 + 1, 0]


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_masks_become_nulls_and_come_back(shape: tuple[int, ...]) -> None:
    leaf = torch.arange(6).view(3, 2)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1] = False
    td = TensorDict({"x": leaf * mask.view(3, -1), "_mask": {"x": mask}}, [3])
    table = to_arrow(td, mask_key="_mask")
    assert table.column_names == ["x"]
    found = from_arrow(table, nulls="mask")
    assert torch.equal(found["x"], td["x"])
    assert torch.equal(found["_mask", "x"], mask)


def test_policies_by_key_path_and_default() -> None:
    array = pa.array([1, None])
    table = pa.table({"a": array, "b": array, "n": pa.StructArray.from_arrays([array], ["c"])})
    found = from_arrow(table, nulls={"a": 7, ("n", "c"): 8, None: "fill"})
    assert (found["a"].tolist(), found["b"].tolist(), found["n", "c"].tolist()) == ([1, 7], [1, 0], [1, 8])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_arrow(pa.table({"a": [1]}), nulls="other"), ValueError, "nulls is one of"),
        (lambda: from_arrow(pa.table({"a": [1]}), nulls=[1]), TypeError, "nulls is a string"),
        (
            lambda: from_arrow(pa.table({"_mask": [1, 2], "a": pa.array([1, None])}), nulls="mask"),
            ValueError,
            "key '_mask' is taken: pass another mask_key",
        ),
        (
            lambda: from_arrow(pa.table({"a": pa.array([1, None])}), nulls=1.5),
            TypeError,
            "has the dtype torch.int64",
        ),
        (
            lambda: to_arrow(
                TensorDict({"_mask": {"y": torch.ones(2) > 0}, "x": torch.ones(2)}, [2]), mask_key="_mask"
            ),
            KeyPathError,
            "the mask of key 'y'",
        ),
        (
            lambda: to_arrow(
                TensorDict({"_mask": {"x": torch.ones(2)}, "x": torch.ones(2)}, [2]), mask_key="_mask"
            ),
            ValueError,
            "the mask of key 'x' has the dtype torch.float32",
        ),
    ],
)
def test_wrong_argument_is_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
