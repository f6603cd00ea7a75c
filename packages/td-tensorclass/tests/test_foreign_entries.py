"""Arrays and tables of other libraries in fields, text and dates of numpy as values of rows, and what the alias keeps."""

from __future__ import annotations

import array
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import NotRequired

from td_core import TensorDict, from_any, from_pytree, lazy_stack
from td_core.errors import BatchSizeError
from td_core.spi import RULES, Coercer, hookimpl
from td_core.testing import installed
from td_tensorclass import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TypedTensorDict,
    UnknownFieldError,
    tensorclass,
)


class Column:
    """A column of another library."""

    def __init__(self, *values: float) -> None:
        self.values = [*values]


class Frame(dict[str, Any]):
    """A table of another library, which is a mapping of columns."""


def convert_frame(frame: Any, size: torch.Size, device: object) -> TensorDict:
    rows = len(next(iter(frame.values())).values)
    return TensorDict({key: column.values for key, column in frame.items()}, [rows])


class Plugin:
    """Converts tables to collections and columns to tensors."""

    @hookimpl
    def td_coercers(self) -> list[Coercer]:
        return [
            Coercer((Column,), lambda column, size, device: torch.tensor(column.values)),
            Coercer((Frame,), convert_frame),
        ]


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    with installed(Plugin()):
        yield


@tensorclass
class Plain:
    x: Tensor
    table: Any = None


@tensorclass(autocast=True)
class Cast:
    x: Tensor
    table: TensorDict = None


@tensorclass(nocast=True)
class NoCast:
    x: Tensor
    table: Any = None


@tensorclass(tensor_only=True)
class Only:
    x: Tensor
    table: TensorDict = None


class Typed(TypedTensorDict):
    x: Tensor
    table: NotRequired[TensorDict]


CLASSES = [Plain, Cast, NoCast, Only, Typed]
FRAME = Frame(x=Column(1.0, 2.0))


@pytest.mark.parametrize("cls", CLASSES)
def test_field_of_foreign_column_is_a_tensor(cls: Any) -> None:
    made = cls(x=Column(1.0, 2.0), batch_size=[2])
    assert made.x.tolist() == [1, 2]
    made.x = Column(3.0, 4.0)
    assert made.x.tolist() == [3, 4]
    made[0] = {"x": Column(5.0)}
    assert made.x.tolist() == [5, 4]
    assert made.update({"x": Column(1.0, 2.0)}).x.tolist() == [1, 2]
    assert made.set("x", Column(5.0, 6.0)).x.tolist() == [5, 6]


@pytest.mark.parametrize("cls", CLASSES)
def test_field_of_foreign_table_is_a_collection(cls: Any) -> None:
    made = cls(x=torch.zeros(2), table=FRAME, batch_size=[2])
    assert made.table["x"].tolist() == [1, 2]
    made.table = Frame(x=Column(3.0, 4.0))
    assert made.table["x"].tolist() == [3, 4]


@pytest.mark.parametrize("cls", CLASSES)
def test_write_of_foreign_table_at_index_sets_fields(cls: Any) -> None:
    made = cls(x=torch.zeros(3), batch_size=[3])
    made[:2] = FRAME
    assert made.x.tolist() == [1, 2, 0]
    assert made.update_(Frame(x=Column(4.0, 5.0, 6.0))).x.tolist() == [4, 5, 6]
    assert made.update(Frame(x=Column(1.0, 2.0, 3.0))).x.tolist() == [1, 2, 3]


@pytest.mark.parametrize("cls", [Plain, Cast, Only])
def test_write_of_foreign_table_with_other_column_raises(cls: Any) -> None:
    made = cls(x=torch.zeros(2), batch_size=[2])
    for write in (
        lambda: made.__setitem__(slice(None), Frame(y=Column(1.0, 2.0))),
        lambda: made.update(Frame(y=Column(1.0, 2.0))),
    ):
        with pytest.raises(UnknownFieldError, match="no field 'y'"):
            write()
    assert made.x.tolist() == [0, 0]


def test_field_declared_as_foreign_class_keeps_the_object() -> None:
    @tensorclass(autocast=True)
    class Held:
        column: Column

    column = Column(1.0)
    assert Held(column=column, batch_size=[]).column is column


@pytest.mark.parametrize("wrap", [NonTensorData, lambda value: NonTensorData(value, batch_size=[3])])
def test_non_tensor_data_keeps_foreign_object(wrap: Any) -> None:
    column, buffer = Column(1.0, 2.0), array.array("d", [1, 2])
    td = TensorDict({"a": wrap(column), "b": wrap(buffer)}, [3])
    assert td["a"] is column and td["b"] is buffer
    assert TensorDict({}, [3]).set_non_tensor("a", column)["a"] is column


def test_from_pytree_foreign_leaves_become_entries() -> None:
    made = from_pytree({"a": FRAME, "b": [Column(1.0)], "c": array.array("d", [2.0])})
    assert (made["a", "x"].tolist(), made["b", "0"].tolist(), made["c"].tolist()) == ([1, 2], [1], [2])


DAY = datetime.date(2020, 1, 2)
NOON = datetime.datetime(2020, 1, 2, 12)
#: An array of numpy with a value for each of two rows, and these values.
ROWS: dict[str, tuple[Any, list[Any]]] = {
    "text": (np.array(["a", "bc"]), ["a", "bc"]),
    "bytes": (np.array([b"a", b"bc"]), [b"a", b"bc"]),
    "text of two dims": (np.array([["a", "b"], ["c", "d"]]), [["a", "b"], ["c", "d"]]),
    "days": (np.array(["2020-01-02", "NaT"], "M8[D]"), [DAY, None]),
    "seconds": (np.array(["2020-01-02T12", "NaT"], "M8[s]"), [NOON, None]),
    "nanoseconds": (np.array(["2020-01-02T12", "NaT"], "M8[ns]"), [NOON, None]),
    "durations": (np.array([1, 2], "m8[h]"), [datetime.timedelta(hours=1), datetime.timedelta(hours=2)]),
    "nanoseconds of durations": (np.array([1000, 2000], "m8[ns]"), [datetime.timedelta(microseconds=n) for n in (1, 2)]),
    "no date of Python": (np.array([1, 2], "M8[ns]"), [np.datetime64(1, "ns"), np.datetime64(2, "ns")]),
    "years after 9999": (np.array(["30000", "2"], "M8[Y]"), [np.datetime64("30000"), np.datetime64("0002")]),
    "months": (np.array([1, 2], "m8[M]"), [np.timedelta64(1, "M"), np.timedelta64(2, "M")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_array_of_text_or_dates_is_one_value_for_each_row(name: str) -> None:
    values, expected = ROWS[name]
    td = TensorDict({"a": values}, [2])
    assert isinstance(td.get("a"), NonTensorStack)
    assert td["a"] == expected
    assert [type(value) for value in td["a"]] == [type(value) for value in expected]
    assert td[1]["a"] == expected[1]
    stack = lazy_stack([TensorDict({"x": 0}), TensorDict({"x": 1})])
    assert stack.set("a", values)[0]["a"] == expected[0]
    rows = TensorDict({"x": torch.zeros(3)}, [3])
    rows[1:] = {"a": values}
    assert rows["a"] == [None, *expected]
    assert TensorDict({"a": ["u", "v"]}, [2]).update_({"a": values})["a"] == expected


@pytest.mark.parametrize("size", [[], [3]])
def test_array_of_text_with_other_rows_is_one_value(size: list[int]) -> None:
    values = np.array(["a", "b"])
    td = TensorDict({"a": values}, size)
    assert td["a"] is values and isinstance(td.get("a"), NonTensorData)


def test_array_of_objects_is_one_value() -> None:
    values = np.array(["a", 3], dtype=object)
    assert TensorDict({"a": values}, [2])["a"] is values


def test_array_of_text_fills_two_batch_dims() -> None:
    values = np.array([["a", "b", "c"], ["d", "e", "f"]])
    td = TensorDict({"a": values}, [2, 3])
    assert td.get("a").batch_size == (2, 3) and td[1, 2]["a"] == "f"
    assert TensorDict({"a": np.zeros((0,), "U1")}, [0]).get("a").batch_size == (0,)


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow tensordict, as the alias does."""
    monkeypatch.setattr(RULES, "follows_tensordict", True)


def make_series(base: type = object) -> Any:
    """Return an instance of a class with the name of one of pandas, which is not imported."""
    return type("Series", (base,), {"__module__": "pandas"})()


class Dlpack:
    """An array of another library with DLPack."""

    def __dlpack__(self, **options: Any) -> object:
        return torch.zeros(3).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.zeros(3).__dlpack_device__()


#: Objects that tensordict keeps as one value.
KEPT = {
    "Series": make_series,
    "DLPack": Dlpack,
    "memoryview": lambda: memoryview(np.zeros(3)),
    "array.array": lambda: array.array("d", [1, 2, 3]),
    "text": lambda: np.array(["a", "b", "c"]),
    "dates": lambda: np.array(["2020-01-01"] * 3, "M8[D]"),
}


@pytest.mark.usefixtures("alias")
@pytest.mark.parametrize("name", KEPT)
def test_alias_keeps_foreign_object_as_one_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from td_core._tree.coerce import COERCERS

    monkeypatch.setattr(
        COERCERS, "_by_name", type(COERCERS._by_name)()
    )  # from_any() asks those that are installed
    value = KEPT[name]()
    td = TensorDict({"a": value}, [3])
    assert td["a"] is value and td[0]["a"] is value
    assert TensorDict({}, [3]).set("a", value)["a"] is value
    assert td.update({"b": value})["b"] is value
    assert from_any(value) is value


@pytest.mark.usefixtures("alias")
def test_alias_reads_values_under_a_mask() -> None:
    assert TensorDict({"a": np.ma.masked_array([1, 2], [True, False])}, [2])["a"].tolist() == [1, 2]


class Named:
    """Converts columns of pandas, which it does not import."""

    @hookimpl
    def td_coercers(self) -> list[Coercer]:
        return [Coercer(("pandas.Series",), lambda series, size, device: torch.arange(3))]


def test_alias_asks_coercer_only_in_from_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from td_core._tree.coerce import COERCERS

    monkeypatch.setattr(COERCERS, "_by_name", type(COERCERS._by_name)())
    value = make_series()
    with installed(Named(), id="named"):
        assert TensorDict({"a": value}, [3])["a"].tolist() == [0, 1, 2]
        monkeypatch.setattr(RULES, "follows_tensordict", True)
        assert TensorDict({"a": value}, [3])["a"] is value
        assert from_any(value).tolist() == [0, 1, 2]


def test_foreign_column_of_other_length_raises() -> None:
    with pytest.raises(BatchSizeError, match="a Column is stored as its elements: wrap it in NonTensorData"):
        TensorDict({"a": Column(1.0, 2.0)}, [3])
    assert isinstance(FRAME, Mapping)
    with pytest.raises(BatchSizeError, match="a Frame is stored as its elements: wrap it in NonTensorData"):
        TensorDict({"a": FRAME}, [3])


class Labelled(TensorClass):
    x: torch.Tensor
    label: str = "default"


@pytest.mark.parametrize("make", ["from_dict", "from_tensordict"])
def test_field_without_value_has_default_or_none_as_in_tensordict(
    make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TensorDict(x=torch.zeros(2), batch_size=[2])
    build = {"from_dict": lambda: Labelled.from_dict({"x": source["x"]}, batch_size=[2])}.get(
        make, lambda: Labelled.from_tensordict(source)
    )
    assert build().label == "default"
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    assert (build().label, build().batch_size) == (None, (2,))


def test_value_of_one_element_in_program_of_tensordict_expands_to_a_list(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    one = TensorDict({"text": "a", "x": torch.zeros(3)})
    assert one.expand(2)["text"] == ["a", "a"]
    assert one.unsqueeze(0)["text"] == ["a"]
    assert one.expand(2)[0]["text"] == one.unsqueeze(0).squeeze(0)["text"] == "a"
    assert one[None]["text"] == one.reshape(1)["text"] == one.expand(())["text"] == "a"
    assert TensorDict({"text": "a"}, [2]).unsqueeze(0)["text"] == "a"
