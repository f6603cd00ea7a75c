"""describe(): the rows of all kinds of collections, and their text and HTML; completion of keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack


def make_ragged_stack() -> Any:
    """Return a lazy stack whose members differ in shapes, dtypes and keys."""
    return lazy_stack(
        [
            TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(4)}),
            TensorDict({"a": torch.zeros(2, 5, dtype=torch.half)}),
        ]
    )


BASE = torch.zeros(4, 3)
ROWS: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "nested": (
        TensorDict({"n": {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.int64)}}, batch_size=[2]),
        [(("n", "a"), "f32", (2, 3), 24, 0.6, "cpu", None), (("n", "b"), "i64", (2,), 16, 0.4, "cpu", None)],
    ),
    "params": (
        TensorDictParams(TensorDict({"w": torch.zeros(2)})),
        [(("w",), "f32", (2,), 8, 1.0, "cpu", None)],
    ),
    "ragged stack": (
        make_ragged_stack(),
        [
            (("a",), "f32/f16", (2, 2, -1), 44, 44 / 60, "cpu", None),
            (("b",), "f32", (4,), 16, 16 / 60, "cpu", None),
        ],
    ),
    "ranks differ": (
        lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2, 2)})]),
        [(("a",), "f32", (2, -1), 24, 1.0, "cpu", None)],
    ),
    "jagged": (
        TensorDict({"j": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)}),
        [(("j",), "f32", (2, -1), 20 + 24, 1.0, "cpu", None)],
    ),
    "meta and empty": (
        TensorDict({"m": torch.zeros(5, device="meta"), "e": torch.zeros(0)}),
        [(("m",), "f32", (5,), 20, 1.0, "meta", None), (("e",), "f32", (0,), 0, 0.0, "cpu", None)],
    ),
    "overlap": (
        TensorDict({"all": BASE, "n": {"part": BASE[1:2]}, "other": torch.zeros(3)}),
        [
            (("all",), "f32", (4, 3), 48, 48 / 72, "cpu", None),
            (("n", "part"), "f32", (1, 3), 12, 12 / 72, "cpu", ("all",)),
            (("other",), "f32", (3,), 12, 12 / 72, "cpu", None),
        ],
    ),
    "one storage without overlap": (
        TensorDict({"first": BASE[:2], "last": BASE[2:]}),
        [
            (("first",), "f32", (2, 3), 24, 0.5, "cpu", None),
            (("last",), "f32", (2, 3), 24, 0.5, "cpu", None),
        ],
    ),
    "no leaves": (TensorDict({"n": {}}), []),
}


@pytest.mark.parametrize("name", ROWS)
def test_describe_returns_row_of_each_key(name: str) -> None:
    td, rows = ROWS[name]
    description = td.describe()
    assert [
        (
            row.key,
            row.dtype,
            row.shape,
            row.nbytes,
            pytest.approx(row.share),
            row.device,
            row.shares_memory_with,
        )
        for row in description
    ] == rows
    assert description.nbytes == td.bytes() == sum(row[3] for row in rows)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_describe_strided_nested_tensors_shows_ragged_dims_and_sharing() -> None:
    leaf = torch.nested.nested_tensor([torch.zeros(2, 1), torch.zeros(3, 2)])
    td = TensorDict({"s": leaf, "n": {"x": BASE, "t": leaf}})
    assert [(row.key, row.shape, row.nbytes, row.shares_memory_with) for row in td.describe()] == [
        (("s",), (2, -1, -1), 32, None),
        (("n", "x"), (4, 3), 48, None),
        (("n", "t"), (2, -1, -1), 32, ("s",)),
    ]
    stack = lazy_stack([TensorDict({"s": leaf}), TensorDict({"s": leaf.clone()})])
    assert [(row.shape, row.nbytes) for row in stack.describe()] == [((2, 2, -1, -1), 64)]


def test_describe_uninitialized_parameter_has_no_size() -> None:
    leaf = torch.nn.UninitializedParameter(dtype=torch.float32)
    assert [(row.key, row.shape, row.nbytes) for row in TensorDict({"w": leaf}).describe()] == [
        (("w",), (-1,), 0)
    ]


def test_describe_values_returns_rows_without_size() -> None:
    values = pytest.importorskip("td_tensorclass")
    td = TensorDict({"task": values.NonTensorData("reach"), "a": torch.zeros(2)}, batch_size=[2])
    td["name"] = ["ann", "bob"]
    assert [(row.key, row.dtype, row.shape, row.nbytes) for row in td.describe()] == [
        (("a",), "f32", (2,), 8),
        (("task",), "str", (2,), 0),
        (("name",), "list[str]", (2,), 0),
    ]


def test_describe_values_of_members_returns_one_row() -> None:
    pytest.importorskip("td_tensorclass")
    td = lazy_stack(
        [TensorDict({"info": {"name": name, "n": value}}) for name, value in [("a", 1), ("b", 2)]]
    )
    assert [(row.key, row.dtype) for row in td.describe()] == [
        (("info", "n"), "i64"),
        (("info", "name"), "str"),
    ]


def test_print_description_aligns_columns_and_omits_empty_ones() -> None:
    assert repr(ROWS["overlap"][0].describe()) == (
        "TensorDict [], 72 bytes\n"
        "key     dtype  shape   size      share  device  memory\n"
        "all     f32    [4, 3]  48 bytes  66.7%  cpu\n"
        "n.part  f32    [1, 3]  12 bytes  16.7%  cpu     shared with all\n"
        "other   f32    [3]     12 bytes  16.7%  cpu"
    )
    assert repr(ROWS["nested"][0].describe()).splitlines()[1] == "key  dtype  shape   size      share  device"
    assert repr(ROWS["no leaves"][0].describe()) == "TensorDict [], 0 bytes\nkey"


def test_html_of_description_escapes_keys() -> None:
    shown = TensorDict({"<b>": torch.zeros(2)}).describe()._repr_html_()
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", shown)
    assert cells[:6] == ["key", "dtype", "shape", "size", "share", "device"]
    assert cells[6:] == ["&lt;b&gt;", "f32", "[2]", "8 bytes", "100.0%", "cpu"]
    assert "<b>" not in shown


def test_key_completions_have_nested_keys() -> None:
    assert ROWS["overlap"][0]._ipython_key_completions_() == ["all", "n", ("n", "part"), "other"]
    assert make_ragged_stack()._ipython_key_completions_() == ["a"]
