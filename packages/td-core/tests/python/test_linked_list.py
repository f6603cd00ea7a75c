"""Lists that write back: items, slices and nested lists reach the collection; pytrees see a plain list."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from td_core import LinkedList, TensorDict
from td_core.errors import StructureError


class TestToList:
    def test_linked_list_setitem_writes_to_collection(self) -> None:
        td = TensorDict({"a": torch.arange(3)}, [3])
        items = td.tolist(as_linked_list=True)
        assert isinstance(items, LinkedList)
        items[1] = {"a": 7}
        assert td["a"].tolist() == [0, 7, 2]
        assert items[1] == {"a": 7}
        nested = LinkedList([LinkedList([1]), 2], td=items._td).tolist()
        assert nested == [[1], 2] and type(nested) is type(nested[0]) is list
        alone = LinkedList([1])
        alone[:] = [2, 3]
        assert repr(alone) == "LinkedList([2, 3])"
        with pytest.raises(StructureError, match="at an index"):
            items[0] = "x"

    def test_tree_map_linked_list_returns_plain_list(self) -> None:
        items = TensorDict({"a": torch.arange(2)}, [2]).tolist(as_linked_list=True, convert_tensors=True)
        tree = LinkedList([items, 5])
        result = pytree.tree_map(lambda leaf: leaf + 1, {"x": tree})
        assert result == {"x": [[{"a": 1}, {"a": 2}], 6]}
        assert type(result["x"]) is type(result["x"][0]) is list
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
        assert paths == ["[0][0]['a']", "[0][1]['a']", "[1]"]
        structure = pytree.tree_structure(tree)
        assert pytree.treespec_loads(pytree.treespec_dumps(structure)) == structure


class Recorder:
    """A stand-in for a collection that records what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, Any]] = []

    def __setitem__(self, index: Any, value: Any) -> None:
        if value == "refused":
            raise ValueError(value)
        self.written.append((index, value))


def test_set_item_writes_to_collection_before_list() -> None:
    items = LinkedList([1, 2, 3], td=(td := Recorder()))
    items[-1] = 7
    items[0:2] = iter([5, 6])
    assert td.written == [(-1, 7), (slice(0, 2), [5, 6])] and items == [5, 6, 7]
    with pytest.raises(ValueError, match="refused"):
        items[0] = "refused"
    assert items == [5, 6, 7]


def test_set_slice_of_other_length_raises_and_writes_nothing() -> None:
    items = LinkedList([1, 2, 3], td=(td := Recorder()))
    with pytest.raises(ValueError, match="a batch keeps its size: the slice has 2 items, got 1"):
        items[1:] = [5]
    assert items == [1, 2, 3] and not td.written


def test_set_nested_list_keeps_it_and_writes_once() -> None:
    inner = LinkedList([1, 2], td=(below := Recorder()))
    items = LinkedList([inner, 3], td=(td := Recorder()))
    items[0] = [8, 9]
    assert items[0] is inner and inner == [8, 9] and td.written == [(0, [8, 9])] and not below.written
    items[0] = [1]
    assert items[0] == [1] and type(items[0]) is list, "another length replaces the nested list"


def test_changes_of_length_reach_only_the_list() -> None:
    items = LinkedList([1], td=(td := Recorder()))
    items.append(2)
    del items[0]
    assert items == [2] and not td.written


def test_sort_and_reverse_write_to_collection() -> None:
    items = LinkedList([2, 3, 1], td=(td := Recorder()))
    items.sort()
    items.reverse()
    items.sort(key=lambda item: -item, reverse=True)
    assert td.written == [(slice(None), [1, 2, 3]), (slice(None), [3, 2, 1]), (slice(None), [1, 2, 3])]
    assert items == [1, 2, 3]
    alone = LinkedList([2, 1])
    alone.sort()
    assert alone == [1, 2]


@pytest.mark.parametrize("compare", [operator.eq, operator.ne])
def test_comparison_with_a_string_warns(compare: Callable[[object, object], bool]) -> None:
    with pytest.warns(UserWarning, match=r"data\.get\(key\) == value"):
        assert compare(LinkedList(["a", "b"]), "a") is (compare is operator.ne)
    assert LinkedList(["a"]) == ["a"] != LinkedList(["b"])
