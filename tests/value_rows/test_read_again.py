"""Values that other processes wrote are read again, those of rows only where they are new."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import td_core
from td_core import TensorDict
from td_core.errors import StructureError
from td_memmap import _value_rows as value_rows


def test_read_again_reads_rows_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [f"v{i}" for i in range(50)]
    TensorDict({"s": wanted}, [50]).memmap(tmp_path)
    node, writer = td_core.open(tmp_path).get("s"), TensorDict.load_memmap(tmp_path).get("s")
    read, counts = value_rows.SavedRows.read, []

    def note(self: value_rows.SavedRows, slots: Any) -> list[object]:
        counts.append(len(slots))
        return read(self, slots)

    monkeypatch.setattr(value_rows.SavedRows, "read", note)
    node = node._keeper.read_again(node)
    assert node._keeper.read_again(node) is node
    for places, is_replaced in (([3, 7], False), ([7], False), ([0, 1, 2], True)):
        if is_replaced:  # the files by those of the next number
            for name, value in {"_SPARE": 0, "_SPARE_OF_SLOT": 0, "_GROWTH": 1}.items():
                monkeypatch.setattr(value_rows, name, value)
        for place in places:
            writer[place] = wanted[place] = f"new {place} {len(counts)}"
        copied = pickle.loads(pickle.dumps(node._keeper))
        assert copied.read_again(node).tolist() == wanted
        assert counts.pop() == 50
        node = node._keeper.read_again(node)
        assert node.tolist() == wanted
    assert counts == [50, 2, 1, 50]


def test_read_again_of_one_value_returns_the_stack_that_it_became(tmp_path: Path) -> None:
    TensorDict({"s": "a"}, [3]).memmap(tmp_path)
    node = td_core.open(tmp_path).get("s")
    node = node._keeper.read_again(node)
    assert (node.data, node.batch_size) == ("a", (3,))
    TensorDict.load_memmap(tmp_path)[1] = {"s": "b"}
    node = node._keeper.read_again(node)
    assert node.tolist() == ["a", "b", "a"]
    TensorDict.load_memmap(tmp_path)[2] = {"s": "c"}
    assert node._keeper.read_again(node).tolist() == ["a", "b", "c"]


def test_read_again_of_values_of_another_size_raises(tmp_path: Path) -> None:
    TensorDict({"s": ["a", "b"]}, [2]).memmap(tmp_path)
    node = td_core.open(tmp_path).get("s")
    TensorDict({"s": ["a", "b", "c"]}, [3]).memmap(tmp_path)
    with pytest.raises(StructureError, match="cannot read a NonTensorStack: .* holds something else by now"):
        node._keeper.read_again(node)


def test_read_again_of_a_part_of_one_value_is_refused(tmp_path: Path) -> None:
    TensorDict({"s": "a"}, [3]).memmap(tmp_path)
    part = td_core.open(tmp_path)[:2].get("s")
    assert part._keeper.read_again(part) is None


def test_values_that_are_opened_for_reading_are_written_in_memory(tmp_path: Path) -> None:
    TensorDict({"s": ["a", "b"], "one": "x"}, [2]).memmap(tmp_path)
    opened = td_core.open(tmp_path)
    TensorDict.load_memmap(tmp_path)[0] = {"s": "other"}
    opened[1] = {"s": "mine", "one": "y"}
    assert (opened["s"], opened["one"]) == (["a", "mine"], ["x", "y"])
    opened.get("one").update_(TensorDict({"one": ["z", "z"]}, [2]).get("one"))
    again = pickle.loads(pickle.dumps(opened))
    again[0] = {"s": "copy"}
    assert (again["s"], again["one"]) == (["copy", "mine"], ["z", "z"])
    assert opened["s"] == ["a", "mine"]
    loaded = TensorDict.load_memmap(tmp_path)
    assert (loaded["s"], loaded["one"]) == (["other", "b"], "x")
