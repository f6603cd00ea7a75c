"""Columns and tables of Arrow, pandas, polars, xarray and Hugging Face that are set as entries."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch

from td_core import TensorDict, from_any
from td_core.errors import BatchSizeError, FormatError

ROWS = torch.arange(3)
TEXT = ["a", "b", None]
DAYS = [datetime.datetime(2020, 1, day) for day in (1, 2, 3)]


def load(name: str) -> Any:
    """Import an optional library, or skip the test."""
    return pytest.importorskip(name)


def make_series(values: Any, **options: Any) -> Any:
    return load("pandas").Series(values, **options)


#: A column of three rows, and its elements: a tensor, a list of tensors for jagged leaves, or a list of values.
COLUMNS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Arrow": (lambda: pa.array([0, 1, 2]), ROWS),
    "Arrow of floats with nulls": (lambda: pa.array([0.0, None, 2.0]), torch.tensor([0, float("nan"), 2]).double()),
    "Arrow in chunks": (lambda: pa.chunked_array([[0], [1, 2]]), ROWS),
    "slice of Arrow": (lambda: pa.array([7, 0, 1, 2, 7])[1:4], ROWS),
    "Arrow of text": (lambda: pa.array(TEXT), TEXT),
    "Arrow of bool": (lambda: pa.array([True, False, True]), torch.tensor([True, False, True])),
    "Arrow of fixed lists": (
        lambda: pa.FixedSizeListArray.from_arrays(pa.array([0, 1, 2, 3, 4, 5]), 2),
        torch.arange(6).view(3, 2),
    ),
    "Arrow of lists": (lambda: pa.array([[0], [], [1, 2]]), [[0], [], [1, 2]]),
    "Arrow tensor": (lambda: pa.Tensor.from_numpy(np.arange(3)), ROWS),
    "pandas": (lambda: make_series([0, 1, 2]), ROWS),
    "pandas of floats": (lambda: make_series([0, 1, 2], dtype="float32"), ROWS.float()),
    "pandas with NaN": (lambda: make_series([0, None, 2]), torch.tensor([0, float("nan"), 2]).double()),
    "pandas with another index": (lambda: make_series([0, 1, 2], index=[5, 3, 9], name="n"), ROWS),
    "pandas of nullable integers": (lambda: make_series([0, 1, 2], dtype="Int32"), ROWS.int()),
    "pandas of Arrow": (lambda: make_series([0, 1, 2], dtype="int8[pyarrow]"), ROWS.to(torch.int8)),
    "pandas of text": (lambda: make_series(TEXT), TEXT),
    "pandas of text as objects": (lambda: make_series(["a", "b", float("nan")], dtype=object), TEXT),
    "pandas of categories": (lambda: make_series(TEXT, dtype="category"), TEXT),
    "pandas of dates": (lambda: make_series(DAYS), DAYS),
    "pandas of mixed objects": (lambda: make_series([1, "a", None], dtype=object), [1, "a", None]),
    "pandas of arrays": (lambda: make_series([np.full(2, i) for i in range(3)]), ROWS[:, None].expand(3, 2)),
    "pandas of tensors": (lambda: make_series([torch.full((2,), i) for i in range(3)]), ROWS[:, None].expand(3, 2)),
    "pandas of uneven arrays": (lambda: make_series([np.arange(i) for i in range(3)]), [[], [0], [0, 1]]),
    "pandas of lists": (lambda: make_series([[0], [], [1, 2]]), [[0], [], [1, 2]]),
    "sparse pandas": (lambda: make_series(load("pandas").arrays.SparseArray([0, 0, 2])), torch.tensor([0, 0, 2])),
    "index of pandas": (lambda: load("pandas").RangeIndex(3), ROWS),
    "index of levels": (
        lambda: load("pandas").MultiIndex.from_tuples([(1, "a"), (2, "b"), (3, "c")]),
        [(1, "a"), (2, "b"), (3, "c")],
    ),
    "array of pandas": (lambda: load("pandas").array([0, 1, 2], dtype="Int64"), ROWS),
    "polars": (lambda: load("polars").Series([0, 1, 2]), ROWS),
    "polars of text": (lambda: load("polars").Series(TEXT), TEXT),
    "polars of arrays": (lambda: load("polars").Series(np.arange(6).reshape(3, 2)), torch.arange(6).view(3, 2)),
    "Hugging Face": (lambda: load("datasets").Dataset.from_dict({"x": [0, 1, 2]})["x"], ROWS),
    "Hugging Face in another order": (
        lambda: load("datasets").Dataset.from_dict({"x": [2, 0, 1]}).select([1, 2, 0])["x"],
        ROWS,
    ),
    "Hugging Face of text": (lambda: load("datasets").Dataset.from_dict({"x": TEXT})["x"], TEXT),
    "xarray": (lambda: load("xarray").DataArray(np.arange(3), dims=["t"]), ROWS),
    "variable of xarray": (lambda: load("xarray").Variable(["t"], np.arange(3)), ROWS),
    "text of xarray": (lambda: load("xarray").DataArray(np.array(["a", "b", "c"]), dims=["t"]), ["a", "b", "c"]),
}  # fmt: skip


def check_column(entry: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert entry.dtype is expected.dtype
        assert torch.equal(torch.nan_to_num(entry.float(), -1), torch.nan_to_num(expected.float(), -1))
    elif isinstance(entry, torch.Tensor):
        assert entry.is_nested and [row.tolist() for row in entry.unbind()] == expected
    else:
        assert list(entry) == expected


@pytest.mark.parametrize("name", COLUMNS)
def test_set_column_stores_its_elements(name: str) -> None:
    make, expected = COLUMNS[name]
    column = make()
    if not isinstance(expected, torch.Tensor):
        pytest.importorskip("td_tensorclass")  # values are its nodes
    check_column(TensorDict({"a": column}, [3])["a"], expected)
    check_column(TensorDict({}, [3]).set(("n", "a"), column)["n", "a"], expected)
    if isinstance(expected, torch.Tensor):
        check_column(from_any(column), expected)
        td = TensorDict({"a": torch.zeros(4, *expected.shape[1:], dtype=expected.dtype)}, [4])
        td[1:] = {"a": column}
        check_column(td["a"][1:], expected)


#: A table with a column ``x`` of 0, 1, 2, and a column ``t`` of text where the library has one.
TABLES: dict[str, Callable[[], Any]] = {
    "Arrow": lambda: pa.table({"x": [0, 1, 2], "t": TEXT}),
    "batch of Arrow": lambda: pa.record_batch({"x": [0, 1, 2], "t": TEXT}),
    "structs of Arrow": lambda: pa.array([{"x": i, "t": TEXT[i]} for i in range(3)]),
    "pandas": lambda: load("pandas").DataFrame({"x": [0, 1, 2], "t": TEXT}, index=[4, 5, 6]),
    "polars": lambda: load("polars").DataFrame({"x": [0, 1, 2], "t": TEXT}),
    "Hugging Face": lambda: load("datasets").Dataset.from_dict({"x": [0, 1, 2], "t": TEXT}),
    "Hugging Face in another order": lambda: (
        load("datasets").Dataset.from_dict({"x": [2, 1, 0], "t": TEXT[::-1]}).select([2, 1, 0])
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_set_table_stores_collection(name: str) -> None:
    pytest.importorskip("td_tensorclass")  # values are its nodes
    table = TABLES[name]()
    for td in (TensorDict({"n": table}, [3])["n"], from_any(table), TensorDict(table, [3])):
        assert td.batch_size == (3,)
        assert td["x"].tolist() == [0, 1, 2]
        assert td["t"] == TEXT
    target = TensorDict({"x": torch.zeros(4, dtype=torch.int64), "t": ["u"] * 4}, [4])
    target[:3] = table
    assert (target["x"].tolist(), target["t"]) == ([0, 1, 2, 0], [*TEXT, "u"])
    assert TensorDict({}, [3]).update(table)["x"].tolist() == [0, 1, 2]
    assert (
        TensorDict({"x": ROWS.clone()}, [3])
        .update_({"x": table["x"]} if name == "pandas" else {"x": ROWS})["x"]
        .equal(ROWS)
    )


def test_columns_of_several_levels_become_nested_keys() -> None:
    frame = load("pandas").DataFrame({("a", "x"): [0, 1, 2], ("a", "y"): [3, 4, 5], ("b", "x"): [6, 7, 8]})
    td = TensorDict({"n": frame}, [3])
    assert td["n", "a", "y"].tolist() == [3, 4, 5] and td["n", "b", "x"].tolist() == [6, 7, 8]
    assert TensorDict({"n": load("pandas").DataFrame(index=range(3))}, [3])["n"].batch_size == (3,)
    assert TensorDict({"n": load("pandas").DataFrame({1: [0, 1, 2]})}, [3])["n", "1"].tolist() == [0, 1, 2]


def test_columns_of_one_name_raise() -> None:
    frame = load("pandas").DataFrame([[1, 2]] * 3, columns=["a", "a"])
    with pytest.raises(FormatError, match="^key 'n': .*two columns are called 'a': rename one$"):
        TensorDict({"n": frame}, [3])


def test_variables_of_xarray_share_dims_from_the_left() -> None:
    xarray = load("xarray")
    data = xarray.Dataset(
        {"u": (("t", "f"), np.zeros((3, 2))), "v": (("t",), np.arange(3))}, coords={"t": [5, 6, 7]}
    )
    td = from_any(data)
    assert (td.batch_size, td.names, sorted(td.keys())) == ((3,), ["t"], ["u", "v"])
    held = TensorDict({"n": data}, [3])
    assert held["n", "v"].tolist() == [0, 1, 2]
    assert from_any(xarray.Dataset()).batch_size == ()
    other = xarray.Dataset({"u": (("t",), np.zeros(3)), "v": (("s",), np.zeros(3))})
    assert from_any(other).batch_size == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: load("polars").DataFrame({"x": [0]}).lazy(),
        lambda: pa.table({"x": [0]}).to_reader(),
        lambda: pyarrow.dataset.dataset(pa.table({"x": [0]})),
    ],
    ids=["LazyFrame", "reader", "data set"],
)
def test_set_table_that_is_not_in_memory_raises(make: Callable[[], Any]) -> None:
    value = make()
    told = rf"a {type(value).__name__} cannot be an entry: it is not in memory: collect\(\) it, or use iter_batches$"
    for write in (
        lambda: TensorDict({"a": value}),
        lambda: from_any(value),
        lambda: TensorDict().update(value),
    ):
        with pytest.raises(TypeError, match=told):
            write()


@pytest.mark.parametrize(
    "make",
    [
        lambda: pa.array([0, None, 2]),
        lambda: make_series([0, None, 2], dtype="Int64"),
        lambda: load("polars").Series([0, None, 2]),
    ],
    ids=["Arrow", "pandas", "polars"],
)  # fmt: skip
def test_null_among_integers_names_key_and_way_out(make: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^key 'age': column .*: 1 of 3 values are null, the first in row 1: fill them first, or conv",
    ):
        TensorDict({"age": make()}, [3])


@pytest.mark.parametrize(
    "make", [lambda: make_series([0, 1]), lambda: pa.array([0, 1]), lambda: load("polars").Series([0, 1])]
)
def test_column_of_other_length_names_the_way_out(make: Callable[[], Any]) -> None:
    value = make()
    with pytest.raises(
        BatchSizeError,
        match=rf"^key 'x' has shape \[2\], which does not start with the batch size \[3\]; a {type(value).__name__} is stored "
        r"as its elements: wrap it in NonTensorData to store the object$",
    ):
        TensorDict({"x": value}, [3])


@pytest.mark.parametrize(
    "name", [name for name, (_, expected) in COLUMNS.items() if isinstance(expected, torch.Tensor)]
)
def test_zero_leaves_column_unchanged(name: str) -> None:
    make, expected = COLUMNS[name]
    column = make()
    TensorDict({"a": column}, [3])["a"].zero_()
    if "xarray" in name:
        return  # an array of numpy, whose memory a leaf shares
    check_column(TensorDict({"a": column}, [3])["a"], expected)


@pytest.mark.parametrize("name", TABLES)
def test_zero_leaves_table_unchanged(name: str) -> None:
    pytest.importorskip("td_tensorclass")
    table = TABLES[name]()
    TensorDict({"n": table}, [3])["n", "x"].zero_()
    assert TensorDict({"n": table}, [3])["n", "x"].tolist() == [0, 1, 2]


def test_scalar_of_another_library_is_a_value() -> None:
    pytest.importorskip("td_tensorclass")
    scalar, day = pa.scalar(3), load("pandas").Timestamp("2020")
    td = TensorDict({"a": scalar, "b": day}, [3])
    assert td["a"] is scalar and td["b"] is day


def test_non_tensor_data_keeps_the_frame() -> None:
    values = pytest.importorskip("td_tensorclass")
    frame = pa.table({"x": [0, 1]})
    assert TensorDict({"a": values.NonTensorData(frame)}, [3])["a"] is frame


def test_tensorclass_field_takes_a_column() -> None:
    classes = pytest.importorskip("td_tensorclass")

    class Sample(classes.TensorClass):
        age: torch.Tensor

    for options in ({}, {"autocast": True}, {"tensor_only": True}, {"nocast": True}):
        cls = type(Sample)("Sample", (Sample,), {}, **options)
        assert cls(age=pa.array([0, 1, 2]), batch_size=[3]).age.tolist() == [0, 1, 2]
