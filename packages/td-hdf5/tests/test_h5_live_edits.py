"""Changes of an open file after which its header must still describe it: shared, foreign and failed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from td_core import (
    KeyPathError,
    StructureError,
    TensorDict,
    UnsupportedOperationError,
    append,
    load,
    unravel_key_to_tuple,
)
from td_hdf5 import PersistentTensorDict, from_h5, save, to_h5

TIED = torch.arange(300.0)

#: A collection, a change of the stored one, and the entries afterwards.
CHANGES: dict[str, tuple[Any, Callable[[Any], Any], dict[Any, torch.Tensor]]] = {
    "delete_level_of_tied_leaf": (
        {"a": {"x": TIED}, "b": {"x": TIED}},
        lambda td: td.del_("a"),
        {("b", "x"): TIED},
    ),
    "set_level_of_tied_leaf_again": (
        {"a": {"x": TIED}, "b": {"x": TIED}},
        lambda td: td.del_("a").set("a", TensorDict({"x": torch.ones(2)})),
        {("b", "x"): TIED, ("a", "x"): torch.ones(2)},
    ),
    "replace_level_of_tied_leaf": (
        {"a": {"x": TIED}, "b": {"x": TIED}},
        lambda td: td.set("a", torch.ones(2)),
        {("b", "x"): TIED, "a": torch.ones(2)},
    ),
    "replace_level_by_its_leaf": (
        {"n": {"b": torch.arange(3)}},
        lambda td: td.set("n", td["n", "b"]),
        {"n": torch.arange(3)},
    ),
    "replace_leaf_by_other_leaf": (
        {"a": torch.zeros(2), "b": torch.arange(3)},
        lambda td: td.set("a", td["b"]),
        {"a": torch.arange(3), "b": torch.arange(3)},
    ),
    "replace_leaf_by_level_with_it": (
        {"a": torch.arange(3)},
        lambda td: td.set("a", TensorDict({"x": td["a"], "y": td["a"][1:]})),
        {("a", "x"): torch.arange(3), ("a", "y"): torch.arange(1, 3)},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_shared_leaf_keeps_the_others(name: str, path: Path) -> None:
    data, change, expected = CHANGES[name]
    stored = to_h5(TensorDict(data), path)
    change(stored)
    for found in (stored, load(path), from_h5(path)):
        assert set(found.keys(True, True)) == expected.keys()
        assert all(found[key].tolist() == value.tolist() for key, value in expected.items())


def test_change_after_other_instance_keeps_its_entries(path: Path) -> None:
    first = to_h5(TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}), path)
    second = from_h5(path, mode="r+")
    first["x"] = torch.ones(3)
    second["y"] = torch.ones(3)
    del first["a"]
    assert sorted(load(path).keys()) == ["n", "x", "y"]
    del first["n"]
    with pytest.raises(
        KeyPathError, match="key 'n' was removed since the collection was opened: open it again"
    ):
        second["n", "c"] = torch.ones(3)
    assert sorted(load(path).keys()) == ["x", "y"]


def test_set_after_append_raises_and_keeps_new_rows(path: Path) -> None:
    stored = to_h5(TensorDict({"a": torch.arange(3)}, [3]), path, chunks=True)
    stored["b"] = torch.ones(3)
    append(TensorDict({"a": torch.arange(2), "b": torch.zeros(2)}, [2]), path)
    with pytest.raises(
        StructureError, match=r"cannot set key 'c': the batch size is \[5\] now, and was \[3\] when"
    ):
        stored["c"] = torch.ones(3)
    del stored["b"]
    assert load(path)["a"].tolist() == [0, 1, 2, 0, 1]
    assert list(load(path).keys()) == ["a"]


def test_loaded_collection_does_not_lock_the_file(path: Path) -> None:
    save(TensorDict({"a": torch.arange(3)}), path)
    loaded = load(path)
    from_h5(path, mode="r+")["b"] = torch.ones(3)
    again = load(path)
    assert (loaded["a"].tolist(), again["b"].tolist()) == ([0, 1, 2], [1, 1, 1])


def test_failed_write_of_entry_leaves_the_file(path: Path) -> None:
    stored = to_h5(TensorDict({"a": torch.zeros(3)}), path)
    stored.kwargs["compression"] = "unknown"
    with pytest.raises(ValueError, match="cannot store key \\('n', 'x'\\) as a dataset: Compression filter"):
        stored["n"] = TensorDict({"x": torch.ones(3)})
    assert list(load(path).keys()) == list(stored.keys()) == ["a"]
    stored.kwargs.clear()
    stored["n"] = TensorDict({"x": torch.ones(3)})
    assert load(path)["n", "x"].tolist() == [1, 1, 1]


def test_batch_size_of_opening_reaches_the_file(path: Path) -> None:
    for options in ({"batch_size": []}, {"auto_batch_size": True, "batch_dims": 0}):
        to_h5(TensorDict({"a": torch.zeros(3)}, [3]), path)
        opened = from_h5(path, mode="r+", **options)
        opened["x"] = torch.ones(5)
        assert (load(path).batch_size, load(path)["x"].sum()) == ((), 5)
    to_h5(TensorDict({"a": torch.zeros(3)}, [3]), path)
    opened = PersistentTensorDict(filename=path, mode="r+", batch_size=[])
    opened["x"] = torch.ones(5)
    assert load(path).batch_size == ()


def write_foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("n")
        group["text"] = "hello"
        group["z"] = np.ones(2)
        group.create_group("m")["more"] = "text"
        file["y"] = np.ones(3)


@pytest.mark.parametrize("keys", ["n", ("n", "m"), "y"], ids=str)
def test_delete_of_foreign_level_with_text_removes_it(keys: Any, path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    write_foreign(path)
    expected = {("n",), ("n", "text"), ("n", "z"), ("n", "m"), ("n", "m", "more"), ("y",)}
    stored = from_h5(path, mode="r+")
    del stored[keys]
    found = {unravel_key_to_tuple(key) for key in load(path).keys(True)}
    prefix = unravel_key_to_tuple(keys)
    assert found == {key for key in expected if key[: len(prefix)] != prefix}
    stored["new"] = torch.ones(2)
    assert load(path)["new"].tolist() == [1, 1]


def test_change_of_file_with_fields_raises(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(3, dtype=[("a", "f4"), ("b", "i8")])
        file["y"] = np.ones(3)
    stored = from_h5(path, mode="r+")
    stored["y"].fill_(5)
    for change in (lambda td: td.set("new", torch.ones(3)), lambda td: td.del_("y")):
        with pytest.raises(
            UnsupportedOperationError, match="cannot change the structure of .*datasets of fields"
        ):
            change(stored)
    assert load(path)["y"].tolist() == [5, 5, 5]
    assert set(load(path)["x"].keys()) == {"a", "b"}
