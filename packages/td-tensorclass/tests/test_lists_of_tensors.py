"""Lists of tensors and of objects with tensors: each becomes an entry that operations reach, or is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from td_core import BatchSizeError, StructureError, TensorDict, from_any, is_tensor_collection, lazy_stack
from td_core.spi import JaggedParts
from td_tensorclass import NonTensorData

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Box:
    x: torch.Tensor
    y: int = 3


def set_item(value: Any, size: list[int]) -> TensorDict:
    data = TensorDict(batch_size=size)
    data["k"] = value
    return data


#: Ways in which a value gets into a collection of a batch size, under the key "k".
WAYS = {
    "constructor": lambda value, size: TensorDict({"k": value}, size),
    "keyword": lambda value, size: TensorDict(k=value, batch_size=size),
    "from_dict": lambda value, size: TensorDict.from_dict({"k": value}, batch_size=size),
    "item": set_item,
    "set": lambda value, size: TensorDict(batch_size=size).set("k", value),
    "nested": lambda value, size: TensorDict({"n": {"k": value}}, size)["n"],
    "update": lambda value, size: TensorDict(batch_size=size).update({"k": value}),
}

#: Lists of tensors whose shapes differ in one dim, with the shape of the entry in which it is None.
UNEVEN = {
    "vectors": ([torch.arange(3), torch.arange(5)], (2, None)),
    "first dim": ([torch.ones(2, 3), torch.ones(4, 3)], (2, None, 3)),
    "last dim": ([torch.ones(2, 3), torch.ones(2, 4)], (2, 2, None)),
    "middle dim": ([torch.ones(2, 3, 2), torch.ones(2, 1, 2)], (2, 2, None, 2)),
    "without elements": ([torch.ones(0), torch.ones(2)], (2, None)),
    "bools": ([torch.ones(1, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)], (2, None)),
    "parameters": ([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))], (2, None)),
    "arrays": ([np.arange(3.0), np.arange(2.0)], (2, None)),
    "tensor and array": ([torch.ones(3), np.ones(2, dtype=np.float32)], (2, None)),
    "tuple": ((torch.ones(3), torch.ones(2)), (2, None)),
    "lists": ([[torch.ones(3), torch.ones(3)], [torch.ones(2), torch.ones(2)]], (2, 2, None)),
}


def as_rows(value: Any) -> list[Any]:
    return [torch.stack(row) if isinstance(row, list) else torch.as_tensor(row) for row in value]


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("way", WAYS)
def test_uneven_tensors_become_jagged(way: str, name: str) -> None:
    value, shape = UNEVEN[name]
    if (way, name) == ("from_dict", "tuple"):
        pytest.skip("from_dict makes an entry of each item of a tuple")
    data = WAYS[way](value, [2])
    entry, rows = data["k"], as_rows(value)
    assert entry.layout is torch.jagged and entry.dtype is rows[0].dtype
    assert all(size is None or entry.shape[dim] == size for dim, size in enumerate(shape))
    for part, row in zip(entry.unbind(), rows, strict=True):
        assert torch.equal(part, row)
    for place in (0, 1, -1):
        assert torch.equal(data[place]["k"], rows[place])
    assert [part.tolist() for part in data[[1, 0]]["k"].unbind()] == [row.tolist() for row in rows[::-1]]
    again = pickle.loads(pickle.dumps(data))
    assert [part.tolist() for part in again["k"].unbind()] == [row.tolist() for row in rows]


@pytest.mark.parametrize("name", UNEVEN)
def test_operations_reach_uneven_tensors(name: str) -> None:
    value, _ = UNEVEN[name]
    data, rows = TensorDict({"k": value}, [2]), as_rows(value)
    assert torch.equal(data.float()[1]["k"], rows[1].float())
    if rows[0].dtype is not torch.bool:
        assert torch.equal((data + 1)[1]["k"], rows[1] + 1)
    moved = data.to("meta")
    assert (moved[1]["k"].device.type, moved[1]["k"].shape) == ("meta", rows[1].shape)
    assert moved[:1]["k"].shape[0] == 1


def test_index_meta_without_lengths_raises_naming_key() -> None:
    moved = TensorDict({"k": [torch.ones(3), torch.ones(2)]}, [2]).to("meta") + 1
    with pytest.raises(StructureError, match="key 'k': a jagged tensor on the meta device has no lengths"):
        moved[0]


def test_uneven_tensors_keep_gradients() -> None:
    first = torch.ones(3, requires_grad=True)
    data = TensorDict({"k": [first, torch.ones(2)]}, [2])
    (data * 2)["k"].values().sum().backward()
    assert first.grad.tolist() == [2.0, 2.0, 2.0]


REFUSED = {
    "several dims": [torch.ones(2, 3), torch.ones(3, 4)],
    "numbers of dims": [torch.ones(2), torch.ones(2, 3)],
    "dtypes": [torch.ones(2), torch.ones(3, dtype=torch.int64)],
    "devices": [torch.ones(2), torch.ones(3, device="meta")],
    "devices of one shape": [torch.ones(2), torch.ones(2, device="meta")],
    "tensor and None": [torch.ones(2), None],
    "text and tensor": ["a", torch.ones(2)],
    "tensor and dict": [torch.ones(2), {"a": torch.ones(2)}],
    "uneven lists": [[torch.ones(2), torch.ones(3)], [torch.ones(4)]],
    "arrays of several dims": [np.ones((2, 3)), np.ones((3, 4))],
    "nested tensors": [JaggedParts(1, torch.arange(3), torch.tensor([0, 1, 3])).join(), torch.ones(2)],
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_are_not_one_entry_raise_naming_key(way: str, name: str) -> None:
    path = r"key \('n', 'k'\)" if way == "nested" else "key 'k'"
    ways_out = r"lazy_stack\(\[...\]\) of collections .* NonTensorData\(...\)"
    with pytest.raises(StructureError, match=f"{path}: the tensors of a list .*; {ways_out}"):
        WAYS[way](REFUSED[name], [2])


@pytest.mark.parametrize("name", REFUSED)
def test_ways_out_of_error_hold_the_list(name: str) -> None:
    value = REFUSED[name]
    data = TensorDict({"k": NonTensorData(value)}, [2])
    assert data["k"] is value
    if name in ("several dims", "numbers of dims", "dtypes"):
        rows = lazy_stack([TensorDict({"k": row}) for row in value])
        assert [rows[i]["k"] is row for i, row in enumerate(value)] == [True, True]


def test_uneven_tensors_of_other_number_raise() -> None:
    with pytest.raises(BatchSizeError, match=r"key 'k' has shape \[3, j\d+\], which does not start with"):
        TensorDict({"k": [torch.ones(1), torch.ones(2), torch.ones(3)]}, [2])


#: Lists of objects with tensors, with what the entry holds under the keys "x" and "y".
OBJECTS = {
    "dicts": [{"x": torch.ones(4), "y": 3}, {"x": torch.zeros(4), "y": 3}],
    "named tuples": [Pair(torch.ones(4), 3), Pair(torch.zeros(4), 3)],
    "dataclasses": [Box(torch.ones(4)), Box(torch.zeros(4))],
    "collections": [TensorDict(x=torch.ones(4), y=3), TensorDict(x=torch.zeros(4), y=3)],
    "arrays": [{"x": np.ones(4, dtype=np.float32), "y": 3}, {"x": np.zeros(4, dtype=np.float32), "y": 3}],
    "mixed": [{"x": torch.ones(4), "y": 3}, Box(torch.zeros(4))],
    "tuple": ({"x": torch.ones(4), "y": 3}, {"x": torch.zeros(4), "y": 3}),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("way", WAYS)
def test_objects_with_tensors_become_stack(way: str, name: str) -> None:
    if (way, name) == ("from_dict", "tuple"):
        pytest.skip("from_dict makes an entry of each item of a tuple")
    data = WAYS[way](OBJECTS[name], [2])
    assert type(data["k"]) is TensorDict and data["k"].batch_size == (2,)
    assert data["k", "x"].tolist() == [[1.0] * 4, [0.0] * 4]
    assert data["k", "y"].tolist() == [3, 3]
    assert data[1]["k", "x"].tolist() == [0.0] * 4
    assert data.to("meta")["k", "x"].device.type == "meta"


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], [["x"], ["y"]]),
        ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], [["x"], ["x"]]),
        ([{"x": {"z": torch.ones(2)}}, {"x": torch.ones(2)}], [[("x", "z")], ["x"]]),
        ([TensorDict(x=torch.ones(2)), TensorDict(y=torch.ones(2))], [["x"], ["y"]]),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_objects_with_unequal_entries_become_lazy_stack(way: str, value: Any, keys: Any) -> None:
    members = WAYS[way](value, [2])["k"].unbind(0)
    assert [list(member.keys(True, True)) for member in members] == keys


def test_lists_in_objects_are_read() -> None:
    data = TensorDict(
        {"k": [{"x": [torch.ones(1), torch.ones(2)]}, {"x": [torch.ones(3), torch.ones(2)]}]}, [2]
    )
    assert [part.shape for part in data[1]["k", "x"].unbind()] == [(3,), (2,)]
    rows = TensorDict({"k": [[{"x": torch.ones(2)}], [{"x": torch.zeros(2)}] * 2]}, [2])["k"]
    assert [member.batch_size for member in rows.unbind(0)] == [(1,), (2,)]


@pytest.mark.parametrize(
    "value",
    [
        ["a", "b"],
        [{"a": "x"}, {"a": "y"}],
        [None, "a"],
        [Pair("a", "b"), Pair("c", "d")],
        [[1], [2, 3]],
        [(1, 2), (3, 4)],
    ],
    ids=str,
)
def test_lists_without_tensors_stay_values(value: Any) -> None:
    data = TensorDict({"k": value}, [2])
    assert not is_tensor_collection(data["k"]) and list(data["k"]) == value


def test_from_any_reads_lists() -> None:
    assert from_any([{"x": torch.ones(2)}, {"x": torch.zeros(2)}])["x"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert from_any([torch.ones(2), torch.ones(3)]).layout is torch.jagged
