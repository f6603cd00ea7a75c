"""A table that another program has edited is read by its columns; the header says only what they cannot."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_arrow import from_arrow, to_arrow
from td_core import TensorDict, lazy_stack
from td_core.errors import FormatError, TensorDictError


def make() -> TensorDict:
    """Return a collection with leaves of several kinds."""
    return TensorDict(
        {
            "x": torch.arange(4),
            "h": torch.arange(4).bfloat16(),
            "v": torch.arange(8.0).view(4, 2),
            "n": {"y": torch.arange(4) * 10, "m": {"z": torch.ones(4)}},
        },
        [4],
    )


def read(table: Any, **options: Any) -> Any:
    """Return the collection of a table; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return from_arrow(table, **options)


@pytest.mark.parametrize(
    ("edit", "rows"),
    [
        (lambda t: t.slice(1, 2), [1, 2]),
        (lambda t: t.take(pa.array([3, 0, 0])), [3, 0, 0]),
        (lambda t: t.filter(pc.field("x") > 1), [2, 3]),
        (lambda t: t.sort_by([("x", "descending")]), [3, 2, 1, 0]),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), [0, 1, 2, 3, 0]),
        (lambda t: t.slice(0, 0), []),
    ],
    ids=["slice", "take", "filter", "sort", "concat", "nothing"],
)
def test_other_rows_are_the_batch(edit: Any, rows: list[int]) -> None:
    found = read(edit(to_arrow(make())))
    assert found.batch_size == found["n", "m"].batch_size == (len(rows),)
    assert found["x"].tolist() == rows
    assert found["n", "y"].tolist() == [10 * row for row in rows]
    assert (found["h"].dtype, found["v"].shape) == (torch.bfloat16, (len(rows), 2))


def test_missing_columns_warn_once_and_name_all() -> None:
    table = to_arrow(make()).drop_columns(["x", "n"])
    with pytest.warns(UserWarning, match=r"the columns 'x', .*\('n', 'y'\).* are gone") as caught:
        assert list(from_arrow(table).keys(True, True)) == ["h", "v"]
    assert len(caught) == 1
    assert list(read(table, strict=False).keys(True, True)) == ["h", "v"]
    with pytest.raises(FormatError, match=r"'x'.* are gone: pass strict=False"):
        from_arrow(table, strict=True)


def test_new_column_is_last_and_foreign() -> None:
    found = read(to_arrow(make()).append_column("new", pa.array([[1], [2, 3], [], [4]])))
    assert list(found.keys())[-1] == "new"
    assert found["new"].is_nested


@pytest.mark.parametrize(
    ("array", "check"),
    [
        (pa.array([1.5, 2, 3, 4]), lambda x: x.dtype == torch.float64),
        (
            pa.array([[1, 2]] * 4, pa.list_(pa.int8(), 2)),
            lambda x: (x.dtype, x.shape) == (torch.int8, (4, 2)),
        ),
    ],
)
def test_other_type_has_its_own_meaning(array: Any, check: Any) -> None:
    table = to_arrow(make())
    assert check(read(table.set_column(1, "h", array))["h"])


def test_rename_keeps_the_dtype_of_the_field() -> None:
    table = to_arrow(make().select("h")).rename_columns(["k"])
    assert read(table, strict=False)["k"].dtype == torch.bfloat16


def test_header_alone_is_lost_with_structure_but_no_number() -> None:
    found = read(to_arrow(make()).replace_schema_metadata(None))
    assert found["n", "y"].tolist() == [0, 10, 20, 30]
    assert found["h"].dtype == torch.bfloat16


@pytest.mark.parametrize("table", [pa.table({"a": [1]}), pa.table({"a": ["x", "y"]})])
def test_one_value_that_differs_is_one_for_each_row(table: Any) -> None:
    td_tensorclass = pytest.importorskip("td_tensorclass")
    whole = to_arrow(TensorDict({"v": td_tensorclass.NonTensorData("a", batch_size=[2])}, [2]))
    assert type(read(whole)._get_child("v")) is td_tensorclass.NonTensorData
    edited = whole.set_column(0, whole.schema.field("v"), pa.array(["a", "b"]))
    assert read(edited)["v"] == ["a", "b"]
    other = whole.set_column(0, whole.schema.field("v"), pa.array(["b", "b"]))
    assert read(other)["v"] == "b"


def test_members_follow_their_rows() -> None:
    stack = lazy_stack(
        [
            TensorDict({"a": torch.ones(2) * i, **({"b": torch.ones(1) * i} if i != 1 else {})})
            for i in range(3)
        ]
    )
    table = to_arrow(stack)
    found = read(table.take(pa.array([2, 1])))
    assert [sorted(member.keys()) for member in found.tensordicts] == [["a", "b"], ["a"]]
    assert found.tensordicts[0]["b"].tolist() == [2.0]
    assert read(table.slice(0, 0)).batch_size == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: {**h, "version": 2}, "has the version 2; expected 1: upgrade"),
        (lambda h: {**h, "lead": "x"}, "has the rows 'x'"),
        (lambda h: {**h, "leaves": [{"column": 3}] * len(h["leaves"])}, "its place in the header is damaged"),
        (lambda h: {**h, "leaves": [{"other": 3}] * len(h["leaves"])}, "is damaged"),
        (lambda h: {**h, "nodes": []}, "no nodes"),
        (lambda h: 3, "version"),
    ],
)
def test_damaged_header_is_refused(change: Any, message: str) -> None:
    table = to_arrow(make())
    header = json.loads(table.schema.metadata[b"td"])
    changed = table.replace_schema_metadata({b"td": json.dumps(change(header)).encode()})
    with pytest.raises(FormatError, match=message):
        from_arrow(changed)
    with pytest.raises(FormatError, match="the td header of its schema is damaged"):
        from_arrow(table.replace_schema_metadata({b"td": b"{"}))


EDITS = ["select", "filter", "sort", "slice", "append", "rename", "concat"]


@given(st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 6)), max_size=5))
def test_sequence_of_edits_never_gives_a_wrong_number(edits: list[tuple[str, int]]) -> None:
    table = to_arrow(make())
    for number, (name, i) in enumerate(edits):
        if name == "select":
            table = table.select([column for k, column in enumerate(table.column_names) if k != i])
        elif name == "filter":
            table = table.filter(pa.array([(row + i) % 3 > 0 for row in range(table.num_rows)], pa.bool_()))
        elif name == "sort":
            table = table.take(pa.array(list(range(table.num_rows))[::-1], pa.int64()))
        elif name == "slice":
            table = table.slice(i % 3)
        elif name == "append":
            table = table.append_column(f"new{number}", pa.array([i] * table.num_rows, pa.int64()))
        elif name == "rename" and table.num_columns:
            position = i % table.num_columns
            table = table.rename_columns(
                [f"k{number}" if k == position else column for k, column in enumerate(table.column_names)]
            )
        elif name == "concat":
            table = pa.concat_tables([table, table.slice(0, i)])
    try:
        found = read(table, strict=False)
    except TensorDictError:
        return
    for column in table.column_names:
        if column in found.keys() and column != "n" and isinstance(found.get(column), torch.Tensor):
            values = table[column].to_pylist()
            kind = str(table.schema.field(column).metadata or "")
            if "bfloat16" not in kind:
                assert found[column].tolist() == values
