"""Errors of :func:`td_memmap.append_memmap` name the saved value of a key and the value in the new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict

td_memmap: Any = pytest.importorskip("td_memmap")
td_tensorclass: Any = pytest.importorskip("td_tensorclass")
AppendError, append_memmap = td_memmap.AppendError, td_memmap.append_memmap
MetaData = td_tensorclass.MetaData
NonTensorData = td_tensorclass.NonTensorData
NonTensorStack = td_tensorclass.NonTensorStack
TensorClass = td_tensorclass.TensorClass


class Point(TensorClass):
    x: Tensor


class Moved(TensorClass):
    x: Tensor


class Opaque:
    """A value that can be saved only with pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"Opaque({self.number})"


def value(data: Any, cls: Any = NonTensorData) -> Any:
    return cls(data, batch_size=[2])


ONES = torch.ones(2)
POINT = Point(ONES, batch_size=[2])
MUST_STAY = "the value of key 'v' must stay; it is {}, the rows have {}$"
#: The saved value, the value in the new rows, and the end of the message.
CASES: list[tuple[Any, Any, str]] = [
    (
        "train",
        NonTensorStack("a", "b"),
        MUST_STAY.format("a NonTensorData of 'train'", r"a NonTensorStack of \['a', 'b'\]"),
    ),
    ("train", "test", MUST_STAY.format("'train'", "'test'")),
    ("train", {"a": ONES}, MUST_STAY.format("a NonTensorData of 'train'", "a TensorDict")),
    ("train", POINT, MUST_STAY.format("a NonTensorData of 'train'", "a Point")),
    ("train", ONES, "key 'v' is a NonTensorData of 'train', the rows have a tensor there$"),
    (
        "train",
        value("train", MetaData),
        MUST_STAY.format("a NonTensorData of 'train'", "a MetaData of 'train'"),
    ),
    (value((1, 2)), value([1, 2]), MUST_STAY.format(r"\(1, 2\)", r"\[1, 2\]")),
    (value((1, 2)), value((1, 3)), MUST_STAY.format(r"\(1, 2\)", r"\(1, 3\)")),
    (value(None), value("a"), MUST_STAY.format("None", "'a'")),
    (value(float("nan")), value(0.0), MUST_STAY.format("nan", "0.0")),
    (value(Opaque(1)), value(Opaque(2)), MUST_STAY.format(r"Opaque\(1\)", r"Opaque\(2\)")),
    (value(Opaque(1)), value("a"), MUST_STAY.format(r"Opaque\(1\)", "'a'")),
    (value("a"), value(Opaque(2)), MUST_STAY.format("'a'", r"Opaque\(2\)")),
    (value("x" * 500), value("y"), MUST_STAY.format(f"'{'x' * 199}...", "'y'")),
    (POINT, Moved(ONES, batch_size=[2]), MUST_STAY.format("a Point", "a Moved")),
    (POINT, {"x": ONES}, MUST_STAY.format("a Point", "a TensorDict")),
    (POINT, "x", MUST_STAY.format("a Point", "a NonTensorData of 'x'")),
    (POINT, ONES, "key 'v' is a Point, the rows have a tensor there$"),
    ({"x": ONES}, POINT, "key 'v' is a plain collection, the rows have a Point there$"),
    ({"x": ONES}, "x", "key 'v' is a plain collection, the rows have a NonTensorData of 'x' there$"),
    ({"x": ONES}, ONES, "key 'v' is a TensorDict, the rows have a tensor there$"),
    (ONES, "x", "cannot append to key 'v': it is a tensor, the rows have a NonTensorData of 'x' there$"),
    (ONES, {"x": ONES}, "cannot append to key 'v': it is a tensor, the rows have a TensorDict there$"),
    (NonTensorStack("a", "b"), "x", "key 'v' is of a kind that cannot grow"),
]


@pytest.mark.parametrize(("saved", "given", "message"), CASES)
def test_append_other_value_error_names_both(saved: Any, given: Any, message: str, tmp_path: Path) -> None:
    rows = [TensorDict({"a": ONES, "v": each}, batch_size=[2]) for each in (saved, given)]
    rows[0].memmap(tmp_path / "save", allow_pickle=True, compatible=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(AppendError, match=message):
        append_memmap(tmp_path / "save", rows[1], allow_pickle=True, compatible=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "saved",
    [each for each, *_ in CASES if not isinstance(each, NonTensorStack)],
    ids=lambda each: str(each)[:30],
)
def test_append_equal_value_adds_rows(saved: Any, tmp_path: Path) -> None:
    rows = TensorDict({"a": ONES, "v": saved}, batch_size=[2])
    rows.memmap(tmp_path / "save", allow_pickle=True)
    append_memmap(tmp_path / "save", rows, allow_pickle=True)
    assert TensorDict.load_memmap(tmp_path / "save", allow_pickle=True)["a"].tolist() == [1, 1, 1, 1]
