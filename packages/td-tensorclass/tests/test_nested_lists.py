"""Lists of lists of values: their items are the values of as many batch dims as the collection has later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import BatchSizeError
from td_tensorclass import NonTensorData, TensorClass

ROWS = [["a", "b"], ["c", "d"], ["e", "f"]]
DEEP = [[["a", "b"], ["c", "d"]]] * 3


class Record(TensorClass):
    s: object
    x: torch.Tensor


def resize(td: Any, *sizes: list[int]) -> Any:
    for size in sizes:
        td.batch_size = size
    return td


#: Collections with the value "f" under ("n", "s") at (2, 1), where the batch size was not known when the rows were set.
LATER: dict[str, Callable[[], Any]] = {
    "set": lambda: TensorDict({"n": resize(TensorDict({"s": ROWS}), [3, 2])}, [3, 2]),
    "set in steps": lambda: TensorDict({"n": resize(TensorDict({"s": ROWS}), [3], [3, 2])}, [3, 2]),
    "set below": lambda: resize(TensorDict({"n": {"s": ROWS}}), [3, 2]),
    "level above": lambda: TensorDict({"n": TensorDict({"s": ROWS})}, [3, 2]),
    "level above with one dim": lambda: TensorDict({"n": TensorDict({"s": ROWS}, [3])}, [3, 2]),
    "stored": lambda: TensorDict(batch_size=[3, 2]).set("n", TensorDict({"s": ROWS}, [3])),
    "updated": lambda: TensorDict(batch_size=[3, 2]).update({"n": TensorDict({"s": ROWS})}),
    "inferred": lambda: TensorDict({"n": {"s": ROWS, "x": torch.zeros(3, 2)}}).auto_batch_size_(),
    "tensorclass": lambda: resize(TensorDict({"n": Record(ROWS, torch.zeros(3, 2))}), [3, 2]),
    "lazy stack": lambda: resize(lazy_stack([TensorDict({"n": {"s": ROWS}})] * 2), [2, 3, 2])[0],
}


@pytest.mark.parametrize("make", LATER.values(), ids=LATER)
def test_batch_size_set_later_gives_one_value_per_element(make: Callable[[], Any]) -> None:
    td = make()
    assert td["n"].batch_size == (3, 2)
    assert [[td[i, j]["n", "s"] for j in range(2)] for i in range(3)] == ROWS
    assert td[:, 1]["n", "s"] == ["b", "d", "f"]


@pytest.mark.parametrize(
    ("size", "value"), [([3], [["a", "b"], ["c", "d"]]), ([3, 2], ["c", "d"]), ([3, 2, 2], "d")]
)
def test_batch_size_takes_as_many_levels_as_it_has_dims(size: list[int], value: Any) -> None:
    td = resize(TensorDict({"s": DEEP}), size)
    assert td[(1,) * len(size)]["s"] == value


def test_write_after_batch_size_was_set_reaches_the_stack() -> None:
    td = resize(TensorDict({"s": ROWS}), [3, 2])
    td[1:][0, 0] = TensorDict({"s": "new"})
    assert td["s"] == [["a", "b"], ["new", "d"], ["e", "f"]]


@pytest.mark.parametrize("rows", [[["a"], ["b", "c"], ["d"]], [["a", "b"]], ["a", "b", "c"]])
def test_batch_size_of_other_lengths_raises_and_changes_nothing(rows: list[Any]) -> None:
    td = TensorDict({"x": torch.zeros(3, 2), "s": rows})
    with pytest.raises(BatchSizeError, match=r"\[3, 2\] does not fit key 's', a NonTensorStack"):
        td.batch_size = [3, 2]
    assert td.batch_size == () and td["s"] == rows


def test_batch_size_keeps_a_list_that_is_one_value() -> None:
    assert resize(TensorDict({"s": NonTensorData(ROWS)}), [3, 2])[2, 1]["s"] == ROWS
