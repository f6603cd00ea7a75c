"""Tests of conversion from Python objects, without siblings: all entries are tensors."""

from __future__ import annotations

import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import td_core
from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import BatchSizeError, KeyPathError, MissingPluginError, StructureError

Pair = namedtuple("Pair", "a b")


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def list_keys(node: Any) -> list[Any]:
    return list(node.keys(True, True))


class TestFromDict:
    SOURCE: dict[str, Any] = {"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3, 2, 4)}}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("kwargs", "size", "inner"),
        [
            ({}, [], []),
            ({"auto_batch_size": True}, [3, 2], [3, 2, 4]),
            ({"batch_dims": 1}, [3], [3]),
            ({"batch_dims": 0}, [], []),
            ({"batch_size": [3]}, [3], [3]),
            ({"batch_size": 3}, [3], [3]),
            ({"auto_batch_size": True, "batch_size": [3]}, [3], [3]),
        ],
    )
    def test_from_dict_batch_size_options_set_sizes(
        self, kwargs: Any, size: list[int], inner: list[int]
    ) -> None:
        for result in (TensorDict.from_dict(self.SOURCE, **kwargs), td_core.from_dict(self.SOURCE, **kwargs)):
            assert type(result) is TensorDict
            assert result.batch_size == torch.Size(size)
            assert result["b"].batch_size == torch.Size(inner)

    def test_from_dict_sets_names_and_device(self) -> None:
        result = TensorDict.from_dict(self.SOURCE, names=["n"], batch_dims=1, device="meta")
        assert result.names == result["b"].names == ["n"]
        assert result["b", "c"].device.type == "meta"

    def test_from_dict_nested_containers_become_nodes(self) -> None:
        @dataclasses.dataclass
        class Point:
            x: float
            y: Any

        record = np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")])
        source = {"t": (1, (2, 3)), "n": Pair(1, {"z": 2}), "p": Point(1.0, (2,)), "r": record, "l": [1, 2]}
        assert list_keys(TensorDict.from_dict(source)) == [
            ("t", "0"), ("t", "1", "0"), ("t", "1", "1"), ("n", "a"), ("n", "b", "z"), ("p", "x"), ("p", "y", "0"),
            ("r", "i"), ("r", "f"), "l",
        ]  # fmt: skip

    def test_from_dict_collection_keeps_batch_size(self) -> None:
        assert TensorDict.from_dict(make_dense_td()).batch_size == torch.Size([3])

    @pytest.mark.parametrize(
        ("source", "kwargs", "error", "message"),
        [
            (3, {}, TypeError, "from_dict takes a mapping or a collection of entries; got int"),
            (
                {"a": 1},
                {"batch_size": [], "batch_dims": 1},
                ValueError,
                "give batch_size or batch_dims, not both",
            ),
            ({"a": torch.zeros(2)}, {"batch_size": [3]}, BatchSizeError, r"key 'a' has shape \[2\]"),
            ({("a", 1): torch.zeros(2)}, {}, KeyPathError, "a key is a string"),
        ],
    )
    def test_from_dict_invalid_arguments_raises(
        self, source: Any, kwargs: Any, error: type, message: str
    ) -> None:
        with pytest.raises(error, match=message):
            td_core.from_dict(source, **kwargs)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ({"a": {"c": 1}, ("a", "c"): 2}, {("a", "c"): 2}),
            ({("a", "c"): 2, "a": {"c": 1}}, {("a", "c"): 1}),
            ({"a": {"d": 2}, ("a", "b"): {"c": 1}}, {("a", "b", "c"): 1, ("a", "d"): 2}),
            ({("a", "b"): {"c": 1}, "a": {"d": 2}}, {("a", "b", "c"): 1, ("a", "d"): 2}),
            ({("a", "b"): {"c": 1}, ("a", "b", "c"): 2}, {("a", "b", "c"): 2}),
            ({"a": {"b": {"c": 1}}, ("a", "b", "d"): 2}, {("a", "b", "c"): 1, ("a", "b", "d"): 2}),
            ({"a": 1, ("b", "c"): {"d": 2}, "b": {"e": 3}}, {"a": 1, ("b", "c", "d"): 2, ("b", "e"): 3}),
        ],
    )
    @pytest.mark.parametrize("build", [TensorDict.from_dict, lambda source: TensorDict({"n": source})["n"]])
    def test_from_dict_with_nested_keys_keeps_all_entries(
        self, build: Any, source: Any, expected: Any
    ) -> None:
        assert {key: int(leaf) for key, leaf in build(source).items(True, True)} == expected

    def test_from_dict_mapping_containing_itself_raises(self) -> None:
        source: dict[str, Any] = {"a": 1}
        source["self"] = {"again": source}
        with pytest.raises(StructureError, match="a mapping that contains itself"):
            td_core.from_dict(source)

    def test_from_dict_instance_sets_entries_and_batch_size(self, td: Any) -> None:
        result = td.from_dict_instance({"a": torch.ones(3), "b": {"c": torch.ones(3)}}, batch_size=[3])
        assert list_keys(result) == ["a", ("b", "c")]
        assert result.batch_size == result["b"].batch_size == torch.Size([3])

    def test_from_dict_instance_keeps_classes_of_nodes(self) -> None:
        class Own(TensorDict):
            """A user-defined subclass."""

        member = TensorDict({"c": torch.zeros(2)}, [2])
        instance = Own(
            {"own": Own({"deep": Own({"x": 1})}), "stack": LazyStackedTensorDict(member, member), "x": 1}
        )
        result = instance.from_dict_instance(
            {"own": {"deep": {"x": 2}, "new": {"x": 3}}, "stack": {"c": torch.ones(2, 2)}, "x": {"y": 4}}
        )
        kinds = {key: type(result[key]) for key in ("own", ("own", "deep"), ("own", "new"), "stack", "x")}
        assert kinds.pop(("own", "deep")) is kinds.pop("own") is type(result) is Own
        assert set(kinds.values()) == {TensorDict}  # a mapping is stored as a TensorDict, not as a lazy stack
        assert result["own", "deep", "x"] == 2 and result["x", "y"] == 4

    def test_make_tensordict_combines_mapping_and_keywords(self) -> None:
        assert td_core.make_tensordict(
            {"a": torch.zeros(3)}, b=torch.zeros(3), batch_size=[3]
        ).batch_size == (3,)
        result = td_core.make_tensordict(
            a=torch.zeros(3, 2), b={"c": torch.zeros(3)}, auto_batch_size=True, device="cpu"
        )
        assert result.batch_size == torch.Size([3])
        assert result.device == torch.device("cpu")


class TestFromAny:
    @pytest.mark.parametrize("value", [3, 2.5, "x", None, torch.zeros(2), np.zeros(3), make_dense_td()])
    def test_from_any_leaf_returns_it_unchanged(self, value: Any) -> None:
        assert TensorDict.from_any(value) is value

    def test_from_any_list_of_numbers_returns_tensor(self) -> None:
        assert td_core.from_any([1, 2]).tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("value", "expected", "size"),
        [
            ({"a": (1, 2)}, [("a", "0"), ("a", "1")], []),
            ((1, {"x": 2}), ["0", ("1", "x")], []),
            (Pair(1, 2), ["a", "b"], []),
            (np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]), ["x", "y"], [1]),
        ],
    )
    def test_from_any_container_returns_collection(
        self, value: Any, expected: list[Any], size: list[int]
    ) -> None:
        result = td_core.from_any(value)
        assert list_keys(result) == expected
        assert result.batch_size == torch.Size(size)

    def test_from_any_batch_size_options_set_size(self) -> None:
        value = Pair(torch.zeros(3, 2), torch.zeros(3, 2))
        assert td_core.from_any(value, auto_batch_size=True).batch_size == (3, 2)
        assert td_core.from_any(value, auto_batch_size=True, batch_dims=1).batch_size == (3,)
        assert td_core.from_any(value, batch_size=[3]).batch_size == (3,)
        with pytest.raises(ValueError, match=r"give batch_size or batch_dims, not both; got \[3\] and 1"):
            td_core.from_any(value, batch_size=[3], batch_dims=1)


class TestFromTuplesAndLists:
    def test_from_tuple_numbers_keys_by_position(self) -> None:
        assert list_keys(TensorDict.from_tuple((1, (2, {"a": 3})))) == ["0", ("1", "0"), ("1", "1", "a")]
        assert TensorDict.from_tuple((torch.zeros(3), torch.ones(3)), batch_size=[3]).batch_size == (3,)
        with pytest.raises(TypeError, match="takes a tuple; got int"):
            td_core.from_tuple(3)

    def test_from_namedtuple_uses_fields_as_keys(self) -> None:
        assert list_keys(TensorDict.from_namedtuple(Pair(1, Pair(2, 3)))) == ["a", ("b", "a"), ("b", "b")]
        with pytest.raises(TypeError, match="takes a named tuple; got tuple"):
            td_core.from_namedtuple((1, 2))

    @pytest.mark.parametrize(
        ("kwargs", "kind"),
        [({}, LazyStackedTensorDict), ({"lazy": None}, TensorDict), ({"lazy": False}, TensorDict)],
    )
    def test_from_list_on_lazy_class_keeps_members(self, kwargs: Any, kind: type) -> None:
        items = [TensorDict({"a": torch.tensor(i)}) for i in range(2)]
        result = LazyStackedTensorDict.from_list(items, batch_size=[2], names=["time"], **kwargs)
        assert type(result) is kind
        assert result["a"].tolist() == [0, 1]
        assert (list(result.names), list(result.batch_size)) == (["time"], [2])

    @pytest.mark.parametrize(
        ("items", "kwargs", "kind", "size"),
        [
            ([{"a": 1}, {"a": 2}], {}, TensorDict, [2]),
            ([{"a": 1}, {"b": 2}], {}, LazyStackedTensorDict, [2]),
            ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], {}, LazyStackedTensorDict, [2]),
            ([{"a": 1}, {"a": 2}], {"lazy": True}, LazyStackedTensorDict, [2]),
            ([{"a": torch.zeros(2, 3)}] * 2, {"auto_batch_size": True}, TensorDict, [2, 2, 3]),
            ([{"a": torch.zeros(2, 3)}] * 2, {"batch_dims": 2}, TensorDict, [2, 2]),
            ([{"a": torch.zeros(2, 3)}] * 2, {"batch_size": [2, 2]}, TensorDict, [2, 2]),
            ([make_dense_td(), make_dense_td()], {"names": ["n", None]}, TensorDict, [2, 3]),
        ],
    )
    def test_from_list_returns_stack_of_expected_kind(
        self, items: Any, kwargs: Any, kind: type, size: list[int]
    ) -> None:
        result = TensorDict.from_list(items, **kwargs)
        assert type(result) is kind
        assert result.batch_size == torch.Size(size)
        assert result.names == kwargs.get("names", [None] * len(size))

    def test_from_list_does_not_change_items(self) -> None:
        items = [TensorDict({"a": torch.zeros(2, 3), "b": {"c": torch.zeros(2)}}) for _ in range(2)]
        result = TensorDict.from_list(items, auto_batch_size=True, device="meta")
        assert result.batch_size == (2, 2)
        assert result["b", "c"].device.type == "meta"
        assert [item.batch_size for item in (*items, items[0]["b"])] == [torch.Size()] * 3
        assert TensorDict.from_list(items, auto_batch_size=True, batch_size=[2]).batch_size == (2,)

    @pytest.mark.parametrize(
        ("items", "kwargs", "error", "message"),
        [
            ([], {}, StructureError, "at least one item"),
            ([{"a": 1}, 2], {}, TypeError, "item 1 is a int"),
            ([{"a": 1}], {"batch_size": [2]}, BatchSizeError, r"\[2\] does not fit a stack of 1 items"),
            ([{"a": 1}], {"batch_size": [1], "batch_dims": 1}, ValueError, "not both"),
            ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], {"lazy": False}, StructureError, "key 'a'"),
        ],
    )
    def test_from_list_invalid_arguments_raises(
        self, items: Any, kwargs: Any, error: type, message: str
    ) -> None:
        with pytest.raises(error, match=message):
            TensorDict.from_list(items, **kwargs)


class TestStructArrays:
    def test_to_struct_array_round_trip_keeps_leaves(self, td: Any) -> None:
        array = td.to_struct_array()
        assert array.shape == (3,)
        assert array.dtype == np.dtype([("a", "<i8", (2,)), ("b", [("c", "<f4"), ("d", "<f4", (4,))])])
        again = TensorDict.from_struct_array(array)
        assert again.batch_size == (3,)
        for key, leaf in td.items(True, True):
            torch.testing.assert_close(again[key], leaf)

    def test_to_struct_array_without_batch_dims_round_trips(self) -> None:
        array = TensorDict({"a": torch.arange(2)}).to_struct_array()
        assert array.shape == ()
        assert array["a"].tolist() == [0, 1]
        assert TensorDict.from_struct_array(array[()])["a"].tolist() == [0, 1]

    def test_from_struct_array_plain_array_raises(self) -> None:
        with pytest.raises(TypeError, match="takes a structured array; got ndarray"):
            td_core.from_struct_array(np.zeros(3))


class TestFromKeysAndSchemas:
    def test_fromkeys_sets_value_under_each_key(self) -> None:
        td = TensorDict.fromkeys(["a", ("b", "c")], 3)
        assert td["b", "c"] == 3
        assert list_keys(td_core.fromkeys([])) == []

    def test_from_schema_makes_zeros_of_shapes_and_dtypes(self) -> None:
        schema = {"a": ([3], torch.float32), ("n", "b"): ([], torch.int64)}
        td = TensorDict.from_schema(schema, batch_size=[2], device="cpu")
        assert td["a"].shape == (2, 3)
        assert td["n", "b"].dtype == torch.int64
        assert not td["a"].any()
        assert td.device == torch.device("cpu")

    def test_from_schema_shared_storage_is_shared(self) -> None:
        assert TensorDict.from_schema({"a": ([3], torch.float32)}, storage="shared").is_shared()

    def test_from_schema_invalid_arguments_raises(self) -> None:
        with pytest.raises(MissingPluginError, match="no installed package provides the format 'bad'"):
            TensorDict.from_schema({}, storage="bad")
        with pytest.raises(TypeError, match="takes no prefix with storage=None"):
            TensorDict.from_schema({}, prefix="x")


class Steps(TensorDict):
    """A subclass without changes."""


ROWS = np.zeros(3, dtype=[("a", "f4")])


@pytest.mark.parametrize("kind", [Steps, TensorDictParams])
@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("from_dict", ({"a": torch.zeros(3, 2)},), {"batch_size": [3]}),
        ("from_any", ({"a": torch.zeros(3, 2)},), {"batch_dims": 1}),
        ("from_list", ([{"a": torch.zeros(2)}] * 3,), {}),
        ("from_tuple", ((torch.zeros(3),),), {"batch_size": [3]}),
        ("from_namedtuple", (Pair(torch.zeros(3), torch.ones(3)),), {"batch_size": [3]}),
        ("from_struct_array", (ROWS,), {}),
        ("from_schema", ({"a": ([2], torch.float32)},), {"batch_size": [3]}),
        ("from_modules", [nn.Linear(1, 2) for _ in range(3)], {}),
    ],
)
def test_from_classmethods_return_the_calling_class(kind: Any, name: str, args: Any, kwargs: Any) -> None:
    result = getattr(kind, name)(*args, **kwargs)
    expected = getattr(TensorDict, name)(*args, **kwargs)
    assert type(result) is kind and type(expected) is TensorDict
    assert result.batch_size == expected.batch_size == torch.Size([3])
    assert result.names == expected.names and result.is_locked == expected.is_locked
    assert list_keys(result) == list_keys(expected) and (result == expected).all()


class TestPytrees:
    def test_from_pytree_collection_returns_it_unchanged(self) -> None:
        td = make_dense_td()
        assert TensorDict.from_pytree(td) is td
        assert td.to_pytree() is td

    def test_from_pytree_invalid_leaf_raises(self) -> None:
        with pytest.raises(
            TypeError, match="the leaf '0' of a pytree is a set; expected a tensor, a number or text"
        ):
            td_core.from_pytree([{1}])
        with pytest.raises(TypeError, match="a pytree is made of dicts, lists and tuples; got int"):
            td_core.from_pytree(3)


TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(TREES)
def test_from_dict_to_dict_round_trip_keeps_tree(tree: dict[str, Any]) -> None:
    assert TensorDict.from_dict(tree).to_dict(convert_tensors=True) == tree


@pytest.mark.parametrize("entry", [{"b": ([2], torch.float32)}, (2, torch.float32), ([2],), 3])
def test_from_schema_entry_not_a_pair_raises(entry):
    with pytest.raises(TypeError, match="key 'a' of a schema is a pair of shape and dtype"):
        TensorDict.from_schema({"a": entry})


def test_make_tensordict_accepts_collection():
    td = TensorDict({"a": torch.ones(2)}, [2])
    made = td_core.make_tensordict(td, batch_size=[2], b=torch.zeros(2))
    assert list(made.keys()) == ["a", "b"] and made["a"] is td["a"] and list(td.keys()) == ["a"]


@pytest.mark.parametrize("name", ["max", "sort", "topk"])
def test_from_namedtuple_torch_return_type_uses_fields(name: str) -> None:
    given = (
        torch.topk(torch.tensor([3, 1, 2]), 2)
        if name == "topk"
        else getattr(torch.tensor([3, 1, 2]), name)(0)
    )
    td = td_core.from_namedtuple(given)
    assert list(td.keys()) == ["values", "indices"]
    assert torch.equal(td["values"], given.values) and torch.equal(td["indices"], given.indices)


def test_from_struct_array_shares_memory() -> None:
    dtype = [("a", "f4", (2,)), ("n", [("b", "i4"), ("c", "?", (4,))])]
    array = np.zeros((2, 3), dtype=dtype)
    td = td_core.from_struct_array(array)
    array["n"]["b"] = 7
    array["a"][0, 0] = 5
    assert (td["n", "b"] == 7).all() and td["a"][0, 0].tolist() == [5, 5]
    td["n", "c"].fill_(True)
    assert array["n"]["c"].all()


@pytest.mark.parametrize(
    "make",
    [lambda array: array, lambda array: array[::-1], lambda array: array[::2]],
    ids=["packed", "back", "step"],
)
def test_from_struct_array_misaligned_fields_copies(make: Any) -> None:
    array = np.zeros(4, dtype=[("a", "i8"), ("b", "f4")])
    array["a"], array["b"] = range(4), range(4)
    td = td_core.from_struct_array(make(array))
    assert td["a"].tolist() == td["b"].tolist() == make(array)["a"].tolist()
    array.flags.writeable = False
    assert td_core.from_struct_array(array)["b"].tolist() == [0, 1, 2, 3]


def load_wrong(data: TensorDict, source: Any) -> None:
    data.load_state_dict(source)


def write_at(data: TensorDict, source: Any) -> None:
    data[...] = source


#: Calls that read a mapping, each on a collection with the nodes that are in the mapping.
READERS: dict[str, Callable[[TensorDict, Any], object]] = {
    "constructor": lambda data, source: TensorDict(source),
    "keywords": lambda data, source: TensorDict(**source),
    "set": lambda data, source: data.set("a", source["a"]),
    "update": lambda data, source: data.update(source),
    "update_": lambda data, source: data.update_(source),
    "update in place": lambda data, source: data.update(source, inplace=True),
    "replace": lambda data, source: data.replace(source),
    "update of stack": lambda data, source: lazy_stack([data, data]).update(source),
    "index": write_at,
    "load_state_dict": load_wrong,
}


@pytest.mark.parametrize("key", [0, b"x", None, 1.5, ("c", 1)], ids=repr)
@pytest.mark.parametrize("reader", READERS)
def test_key_that_is_not_a_string_names_place(reader: str, key: Any) -> None:
    data = TensorDict({"a": {"b": {"c": torch.ones(2)}}})
    message = f"under the key \\('a', 'b'\\): a key is a string .* got {re.escape(repr(key))}"
    with pytest.raises(KeyPathError, match=message):
        READERS[reader](data, {"a": {"b": {key: torch.ones(2)}}})
    assert list(data.keys(True, True)) == [("a", "b", "c")]


def test_key_at_root_that_is_not_a_string_raises_without_place() -> None:
    with pytest.raises(KeyPathError, match="^a key is a string"):
        TensorDict({0: torch.ones(2)})
