"""Conversion to Python objects: dicts, lists, named tuples, arrays and plain TensorDicts."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import DepthError, StructureError

Pair = namedtuple("Pair", "a b")


class TestToDict:
    def test_to_dict_returns_nested_dicts(self, td: Any) -> None:
        result = td.to_dict()
        assert list(result) == ["a", "b"]
        assert torch.equal(result["b"]["c"], td["b", "c"])

    @pytest.mark.parametrize(
        ("convert", "kind"), [(False, torch.Tensor), (True, list), ("numpy", np.ndarray)]
    )
    def test_to_dict_convert_tensors_returns_type(self, td: Any, convert: Any, kind: type) -> None:
        result = td.to_dict(convert_tensors=convert)
        assert type(result["a"]) is type(result["b"]["c"]) is kind
        assert np.asarray(result["a"]).tolist() == td["a"].tolist()

    def test_to_dict_tolist_first_converts_nested_nodes(self) -> None:
        td = TensorDict({"n": TensorDict({"b": torch.zeros(2, 1)}, [2])})
        assert td.to_dict(convert_tensors=True, tolist_first=True) == {"n": [{"b": [0.0]}, {"b": [0.0]}]}

    def test_numpy_arrays_share_memory(self, make_dense: Callable[[], TensorDict]) -> None:
        td = make_dense()
        td.numpy()["b"]["c"][0] = 5
        assert td["b", "c"][0] == 5

    def test_to_dict_uneven_entry_raises(self) -> None:
        with pytest.raises(StructureError, match="key 'a'"):
            LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]).to_dict()


class TestToList:
    def test_tolist_returns_one_dict_per_element(self, td: Any) -> None:
        result = td.tolist(convert_tensors=True)
        assert [item["a"] for item in result] == td["a"].tolist()
        assert result[0]["b"] == {"c": 1.0, "d": [0.0] * 4}

    def test_tolist_two_batch_dims_returns_nested_lists(self) -> None:
        td = TensorDict({"a": torch.arange(4).view(2, 2)}, [2, 2])
        assert td.tolist(convert_tensors=True) == [[{"a": 0}, {"a": 1}], [{"a": 2}, {"a": 3}]]
        assert TensorDict({"a": 1}).tolist(convert_tensors=True) == {"a": 1}

    def test_tolist_convert_nodes_false_keeps_collections(self, td: Any) -> None:
        assert [item.batch_size for item in td.tolist(convert_nodes=False)] == [torch.Size([])] * 3
        with pytest.raises(TypeError, match="convert_tensors needs convert_nodes"):
            td.tolist(convert_nodes=False, convert_tensors=True)


class TestToNamedTuple:
    def test_to_namedtuple_returns_nested_tuples(self, td: Any) -> None:
        result = td.to_namedtuple()
        assert result._fields == ("a", "b")
        assert type(result).__name__ == type(result.b).__name__ == "GenericDict"
        assert torch.equal(result.b.c, td["b", "c"])

    def test_to_namedtuple_dest_cls_returns_its_instance(self) -> None:
        result = TensorDict({"b": 1, "a": 2}).to_namedtuple(Pair)
        assert isinstance(result, Pair)
        assert (result.a, result.b) == (2, 1)

    def test_to_namedtuple_round_trip_keeps_keys(self) -> None:
        td = TensorDict({"a": 1, "b": {"c": 2}})
        again = TensorDict.from_namedtuple(td.to_namedtuple())
        assert list(again.keys(True, True)) == list(td.keys(True, True))

    def test_to_namedtuple_invalid_identifier_raises(self) -> None:
        with pytest.raises(ValueError, match="valid identifiers"):
            TensorDict({"a b": 1}).to_namedtuple()


class TestToTensorDict:
    def test_to_tensordict_returns_dense_unlocked_copy(self, td: Any) -> None:
        result = td.lock_().to_tensordict()
        assert type(result) is type(result["b"]) is TensorDict
        assert not result.is_locked
        for key, leaf in td.items(True, True):
            assert result[key].data_ptr() != leaf.data_ptr()
            torch.testing.assert_close(result[key], leaf)

    def test_to_tensordict_keeps_sizes_names_and_device(self, make_dense: Callable[[], TensorDict]) -> None:
        td = TensorDict(make_dense(), [3], names=["t"], device="cpu").to_tensordict()
        assert td.names == td["b"].names == ["t"]
        assert td["b"].batch_size == (3,)
        assert td.device == torch.device("cpu")


def test_conversions_at_depth_two_thousand_keep_leaves() -> None:
    tree: dict[str, Any] = {"x": [1, 2]}
    for _ in range(2000):
        tree = {"k": tree}
    td = TensorDict.from_dict(tree, auto_batch_size=True)
    assert td.batch_size == (2,)
    node = td.to_tensordict().to_dict()
    for _ in range(2000):
        node = node["k"]
    assert node["x"].tolist() == [1, 2]
    assert td.to_namedtuple().k.k.k._fields == ("k",)
    with pytest.raises(DepthError, match="cannot be nested as deep"):
        td.to_struct_array()


def test_numpy_unsupported_leaf_error_names_key() -> None:
    td = TensorDict({"n": {"b": torch.zeros(2, dtype=torch.bfloat16)}}, batch_size=[2])
    with pytest.raises(TypeError, match=r"cannot convert key \('n', 'b'\): .*BFloat16"):
        td.to_struct_array()


def test_to_namedtuple_same_fields_share_one_class() -> None:
    cls = namedtuple("Pair", "x y")
    made = TensorDict({"x": 1, "y": {"x": 2, "y": {"z": 3}}}).to_namedtuple(cls)
    assert (type(made), type(made.y)) == (cls, cls)
    assert made.y.y.z == 3 and type(made.y.y) is not cls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_numpy_nested_tensor_returns_tuple_of_arrays(layout: torch.layout) -> None:
    leaf = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=layout)
    arrays = TensorDict({"n": {"a": leaf}}).numpy()["n"]["a"]
    assert [array.shape for array in arrays] == [(1, 2), (3, 2)]
