"""Lists that write back: items, slices and nested lists reach the collection; pytrees see a plain list."""

from __future__ import annotations

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
