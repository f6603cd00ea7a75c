"""NonTensorData and MetaData: one value for the whole batch, set into and read from collections."""

from __future__ import annotations

import copy
import enum
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    assert_close,
    lazy_stack,
)
from td_core.errors import BatchSizeError, KeyPathError, StructureError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    NonTensorStack,
    TensorClass,
    _value_settings,
    capture_non_tensor_stack,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensorclass,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_list_to_stack,
)


class Color(enum.Enum):
    RED = 1


class Thing:
    """A value that is equal only to itself."""


THING = Thing()


VALUES: list[Any] = [
    "text",
    b"bytes",
    None,
    Color.RED,
    THING,
    {1, 2},
    ("a", "b"),
    Path("/a"),
    torch.float32,
    slice(3),
    np.array(["a", "b"]),
    np.array([THING, None], dtype=object),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_set_object_stores_one_value_for_batch(value: Any) -> None:
    td = TensorDict({"a": value}, batch_size=[3])
    assert td["a"] is value
    entry = td.get("a")
    assert type(entry) is NonTensorData
    assert entry.batch_size == (3,)
    assert td[0]["a"] is value
    assert td.reshape(1, 3)["a"] is value
    assert [[each is value for each in row] for row in torch.stack([td, td])["a"]] == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("value", "batch_size", "wanted"),
    [
        (["x", "y"], [2], ["x", "y"]),
        (["x", "y"], [], ["x", "y"]),
        ([{"q": 1}, {"q": 2}], [2], [{"q": 1}, {"q": 2}]),
        ([1, "x"], [2], [1, "x"]),
        ([None, None], [2], [None, None]),
        ([["a", "b"], ["c", "d"]], [2], [["a", "b"], ["c", "d"]]),
        ([["a", "b"], ["c", "d"]], [2, 2], [["a", "b"], ["c", "d"]]),
        ([["a"], ["c", "d"]], [2], [["a"], ["c", "d"]]),
        ([NonTensorData("a"), NonTensorData(["b"])], [2], ["a", ["b"]]),
        ([NonTensorData("a"), "b"], [2], ["a", "b"]),
        ([NonTensorStack("a", "b"), NonTensorStack("c", "d")], [2, 2], [["a", "b"], ["c", "d"]]),
    ],
)
def test_set_list_stores_one_value_per_element(value: Any, batch_size: list[int], wanted: Any) -> None:
    td = TensorDict({"a": value}, batch_size=batch_size)
    assert type(td.get("a")) is NonTensorStack
    assert td["a"] == wanted
    if batch_size:
        assert td[1]["a"] == wanted[1]


@pytest.mark.parametrize(
    "value", [[(1, 2), (3, 4)], [(1,), ()], [range(2), range(2)], [torch.Size([1]), (2,)]]
)
def test_set_list_of_tuples_stores_one_value_per_element(value: Any) -> None:
    assert TensorDict({"k": value}, batch_size=[2])["k"] == value


def test_numpy_of_collection_omits_none_entries() -> None:
    assert list(TensorDict({"a": None, "b": "x"}).numpy()) == ["b"]


def test_set_list_of_other_length_raises() -> None:
    with pytest.raises(
        BatchSizeError, match="a list of 2 values gives one for each element of a batch, whose size is"
    ):
        TensorDict({"a": ["x", "y"]}, batch_size=[3])


@pytest.mark.parametrize("values", [["x", "y"], [["x"], ["y", "z"]], [["x", "y"], "z"]], ids=str)
def test_set_list_of_other_shape_than_batch_raises(values: list[Any]) -> None:
    with pytest.raises(BatchSizeError, match=r"whose size is \[2, 2\]; wrap the list in NonTensorData"):
        TensorDict({"a": values}, batch_size=[2, 2])


def test_set_list_to_stack_false_keeps_list() -> None:
    with set_list_to_stack(False):
        assert TensorDict({"a": ["x", "y"]}, batch_size=[3])["a"] == ["x", "y"]
        assert list_to_stack() is False
    assert TensorDict({"a": NonTensorData(["x", "y"])}, batch_size=[3])["a"] == ["x", "y"]
    assert TensorDict({}, batch_size=[3]).set_non_tensor("a", [1, 2])["a"] == [1, 2]


def test_settings_nest_and_work_as_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    @set_capture_non_tensor_stack(True)
    def inside() -> bool | None:
        with set_capture_non_tensor_stack(False):
            assert capture_non_tensor_stack() is False
        return capture_non_tensor_stack()

    assert inside() is True
    assert capture_non_tensor_stack() is False
    assert capture_non_tensor_stack(allow_none=True) is None
    monkeypatch.setattr(_value_settings._state, "list_to_stack", None)
    set_list_to_stack(False).set()
    assert list_to_stack(allow_none=True) is False
    with pytest.raises(TypeError, match="set_list_to_stack takes True or False; got 1"):
        set_list_to_stack(1)  # type: ignore[arg-type]


class TestMethods:
    def test_get_non_tensor_returns_bare_value(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "s": NonTensorStack("p", "q")})
        assert td.get_non_tensor("a") == "x"
        assert td.get_non_tensor("s") == ["p", "q"]
        assert td.get_non_tensor("b").item() == 1
        assert td.get_non_tensor("zz", 3) == 3
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.get_non_tensor("zz")
        assert td.set_non_tensor(("n", "m"), torch.zeros(3))["n", "m"].shape == (3,)
        assert td.is_non_tensor(("n", "m"))

    def test_non_tensor_items_returns_only_non_tensor(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "n": {"c": "y"}})
        assert td.is_non_tensor("a")
        assert not td.is_non_tensor("b")
        with pytest.raises(KeyPathError):
            td.is_non_tensor("zz")
        assert [key for key, _ in td.non_tensor_items()] == ["a"]
        assert [key for key, _ in td.non_tensor_items(include_nested=True)] == ["a", ("n", "c")]
        assert list(td.filter_non_tensor_data().keys(True)) == ["b", "n"]
        assert not TensorDict({"a": "x"}).is_empty()

    def test_keys_is_leaf_nontensor_includes_non_tensor(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "s": NonTensorStack("p")})
        assert list(td.keys(True, True)) == ["b"]
        assert list(td.keys(True, True, is_leaf=is_leaf_nontensor)) == ["a", "b", "s"]

    def test_is_non_tensor_and_is_tensorclass_return_expected(self) -> None:
        data, stack, meta = NonTensorData("a"), NonTensorStack("a"), MetaData("a")
        assert [is_non_tensor(each) for each in (data, stack, meta, "a", TensorDict())] == [
            True,
            True,
            True,
            False,
            False,
        ]
        assert [is_tensorclass(each) for each in (data, stack, NonTensorData, 3)] == [
            True,
            False,
            True,
            False,
        ]
        assert isinstance(data, NonTensorDataBase)
        assert not isinstance(meta, NonTensorData)
        leaves = (NonTensorData, NonTensorStack, TensorDict, torch.Tensor, LazyStackedTensorDict)
        assert [is_leaf_nontensor(cls) for cls in leaves] == [True, True, False, True, False]
        assert not is_leaf_nontensor(dict)
        td = TensorDict({"n": {"a": 1, "b": 2}}).update({"n": {"a": 3}}, is_leaf=is_leaf_nontensor)
        assert list(td["n"].keys()) == ["a", "b"]


class TestNode:
    def test_init_non_tensor_data_sets_attributes(self) -> None:
        assert NonTensorData(NonTensorData("a")).data == "a"
        node = NonTensorData("a", batch_size=2, device="cpu", names=["t"])
        assert (node.batch_size, node.device, node.names) == ((2,), torch.device("cpu"), ["t"])
        with pytest.raises(
            TypeError, match="holds one value for the whole batch, and a NonTensorStack has one"
        ):
            NonTensorData(NonTensorStack("a"))
        with pytest.raises(ValueError, match="_is_non_tensor=False has no meaning"):
            NonTensorData("a", None, False)

    def test_set_non_tensor_data_gets_batch_size_of_parent(self) -> None:
        for node in (NonTensorData("x"), NonTensorData("x", batch_size=[2])):
            assert TensorDict({"a": node}, batch_size=[3]).get("a").batch_size == (3,)
        assert TensorDict({"a": NonTensorData("x", batch_size=[3, 4])}, batch_size=[3]).get(
            "a"
        ).batch_size == (3, 4)
        td = TensorDict({"a": "x", "b": torch.zeros(3, 4)})
        td.batch_size = [3, 4]
        assert td.get("a").batch_size == (3, 4)
        assert td.to("cpu").get("a").device == torch.device("cpu")

    def test_tolist_repeats_value_per_element(self) -> None:
        assert NonTensorData("a", batch_size=[2, 3]).tolist() == [["a"] * 3] * 2
        assert NonTensorData(["a"], batch_size=[2]).tolist() == [["a"], ["a"]]
        linked = NonTensorData("a", batch_size=[2, 2]).tolist(as_linked_list=True)
        assert linked == [["a"] * 2] * 2
        with pytest.raises(StructureError, match="one value for the whole batch, so 1 alone cannot be set"):
            linked[0][1] = "b"
        assert NonTensorData("a", batch_size=[2]).maybe_to_stack().tolist() == ["a", "a"]
        assert NonTensorData("a").maybe_to_stack().data == "a"
        assert NonTensorStack.from_nontensordata(NonTensorData("a", batch_size=[2])).tolist() == ["a", "a"]

    def test_linked_list_assign_slice_of_other_size_raises(self) -> None:
        stack = NonTensorStack("a", "b", "c")
        linked = stack.tolist(as_linked_list=True)
        linked[::2] = iter("xy")
        assert linked == stack.tolist() == ["x", "b", "y"]
        with pytest.raises(ValueError, match="the slice has 2 items, got 1"):
            linked[:2] = ["z"]
        assert linked == stack.tolist() == ["x", "b", "y"]

    @pytest.mark.parametrize(
        ("value", "other"), [("x", "y"), (np.ones(2), np.zeros(2)), ({"a": 1}, {"a": 2}), (None, 0)]
    )
    def test_assert_close_different_non_tensor_raises(self, value: Any, other: Any) -> None:
        def make(value: Any) -> TensorDict:
            return TensorDict({"n": {"v": NonTensorData(value)}, "s": NonTensorStack(value)})

        assert assert_close(make(value), make(copy.deepcopy(value)))
        for key in ("n", "s"):
            with pytest.raises(AssertionError, match=r"key '?(\('n', 'v'\)|s'?) differs"):
                assert_close(make(value).select(key), make(other).select(key))

    def test_eq_of_collections_compares_non_tensor(self) -> None:
        first = TensorDict({"a": "x", "b": torch.zeros(2), "s": NonTensorStack("p", "q")}, batch_size=[2])
        second = TensorDict({"a": "y", "b": torch.zeros(2), "s": NonTensorStack("p", "r")}, batch_size=[2])
        assert (first == first).all()
        with torch.device("meta"):
            compared = first == second
        assert compared["a"].tolist() == [False, False]
        assert compared["s"].tolist() == [True, False]
        assert (first != second)["s"].tolist() == [False, True]

    def test_repr_non_tensor_data_shows_value(self) -> None:
        assert (
            repr(NonTensorData("a", batch_size=[3]))
            == "NonTensorData(data=a, batch_size=torch.Size([3]), device=None)"
        )
        assert f"data={'a' * 200}," in repr(NonTensorData("a" * 200))
        assert f"data={'a' * 20}  ...  {'b' * 20}," in repr(NonTensorData("a" * 101 + "b" * 100))
        assert repr(TensorDict({"a": "x", "b": None, "c": MetaData("m")})) == (
            "TensorDict(batch_size=[], fields={a: str, b: NoneType, c: MetaData})"
        )

    def test_repr_html_escapes_non_tensor_values(self) -> None:
        values = {"a": "<script>", "s": NonTensorStack("p", "q"), "t": "x" * 99}
        td = TensorDict(values, batch_size=[2])
        shown = td._repr_html_() + td.get("a")._repr_html_() + td.get("s")._repr_html_()
        assert "str &#x27;&lt;script&gt;&#x27;</span>" in shown
        assert "NonTensorData(data=&lt;script&gt;, batch_size=torch.Size([2])" in shown
        assert "list[str] [&#x27;p&#x27;, &#x27;q&#x27;]</span>" in shown
        assert shown.count("[&#x27;p&#x27;, &#x27;q&#x27;]") == 2
        assert "xxx...xxx" in shown and "x" * 40 not in shown
        assert "<script" not in shown

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, copy.copy, lambda node: pickle.loads(pickle.dumps(node))]
    )
    def test_copy_keeps_non_tensor_values_and_classes(self, copied: Any) -> None:
        td = TensorDict(
            {
                "a": NonTensorData({"k": [1]}, batch_size=[2]),
                "s": NonTensorStack("p", ("q",)),
                "m": MetaData[str]("x"),
            },
            batch_size=[2],
            names=["t"],
        ).lock_()
        again = copied(td)
        assert again["a"] == {"k": [1]}
        assert again["s"] == ["p", ("q",)]
        assert type(again.get("m")) is MetaData[str]
        assert again.names == ["t"]

    @pytest.mark.parametrize(
        ("copied", "same"), [(torch.clone, True), (copy.copy, True), (copy.deepcopy, False)]
    )
    def test_deepcopy_copies_non_tensor_value_clone_shares_it(self, copied: Any, same: bool) -> None:
        value: list[Any] = [1]
        td = TensorDict({"a": NonTensorData(value), "n": {"s": NonTensorStack(value, {"k": value})}})
        again = copied(td)
        assert (again["a"] is value) is (again["n", "s"][0] is value) is same
        assert (again["n", "s"][1]["k"] is value) is same


class TestMetaData:
    def test_stack_metadata_of_same_object_keeps_one(self) -> None:
        value = [1]
        first, second = MetaData(value, batch_size=[2]), MetaData([1], batch_size=[2])
        assert type(torch.stack([first, first])) is MetaData
        assert torch.stack([first, first]).batch_size == (2, 2)
        assert torch.cat([first, first]).data is value
        assert torch.stack([first, second]).tolist() == [[[1], [1]], [[1], [1]]]
        assert torch.cat([first, second])[0].data is value
        assert first[0].data is first.unsqueeze(0).data is value

    def test_metadata_typed_wrong_type_raises(self) -> None:
        assert MetaData[str] is MetaData[str]
        assert MetaData[str]("a").data == "a"
        assert repr(MetaData[str]("a")) == "MetaData[str](data=a, batch_size=torch.Size([]), device=None)"
        with pytest.raises(TypeError, match=r"MetaData\[str\] takes a str; got 3 of type int"):
            MetaData[str](3)

    @pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
    def test_cloudpickle_typed_metadata_keeps_class(self, protocol: int) -> None:
        class ByValue(pickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, type) and "[" in obj.__name__:
                    return type, (
                        obj.__name__,
                        obj.__bases__,
                        {},
                    )  # cloudpickle pickles such a class by value
                return NotImplemented

        td = TensorDict({"n": {"m": MetaData[Thing](THING)}, "plain": MetaData("x")})
        ByValue(file := io.BytesIO(), protocol).dump([td, td["n"]._children()["m"]])
        again, alone = pickle.loads(file.getvalue())
        assert type(again["n"]._children()["m"]) is type(alone) is MetaData[Thing]
        assert type(again._children()["plain"]) is MetaData

    def test_typed_metadata_write_of_other_type_raises(self) -> None:
        td = TensorDict({"m": MetaData[int](3)}, [2])
        with pytest.raises(TypeError, match=r"MetaData\[int\] takes a int; got 'x' of type str"):
            td.update_(TensorDict({"m": MetaData("x")}, [2]))
        assert td["m"] == 3


def test_set_list_of_collections_keeps_them_as_objects() -> None:
    first, second = TensorDict({"a": [1, 2]}, [2]), TensorDict({"a": 1})
    td = TensorDict({"items": [first, second]}, [2])
    assert td["items"][0] is first and td["items"][1] is second


def test_pop_non_tensor_returns_node() -> None:
    td = TensorDict({"t": torch.zeros(2), "one": "x", "each": ["a", "b"], "n": {"one": "y"}}, [2])
    assert td.pop(("n", "one")).data == "y"
    assert td.pop("each").tolist() == ["a", "b"]
    assert td.pop("each", "gone") == "gone"
    td["last"] = ["c", "d"]
    assert td.popitem()[1].tolist() == ["c", "d"]
    assert td.pop("one").data == "x"
    assert list(td.keys()) == ["t", "n"]


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", "y")])
def test_init_collection_from_non_tensor_raises(value):
    class Field(TensorClass):
        a: object = None

    for make in (TensorDict, TensorDict.from_dict, Field.from_tensordict):
        with pytest.raises((TypeError, ValueError), match=f"got {type(value).__name__}"):
            make(value)


def test_get_non_tensor_from_every_kind_returns_value():
    class Sample(TensorClass):
        a: torch.Tensor
        s: str

    sample = Sample(torch.zeros(2), "x", batch_size=[2])
    ragged = lazy_stack([TensorDict({"a": torch.zeros(n), "s": str(n)}) for n in (1, 2)])
    for td in (sample, lazy_stack([sample, sample]), ragged, TensorDict({"a": 1, "s": "x"})):
        assert td.is_non_tensor("s")
        assert not td.is_non_tensor("a")
        assert [(key, node._unwrap()) for key, node in td.non_tensor_items()] == [
            ("s", td.get_non_tensor("s"))
        ]
        filtered = td.filter_non_tensor_data()
        assert "s" not in filtered.keys()
        assert "a" in filtered.keys()


def test_apply_with_collection_of_functions_calls_them() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, batch_size=[3])
    functions = TensorDict({"a": torch.neg, "n": {"b": lambda leaf: leaf * 2}}, batch_size=[3])
    for target in (td, TensorDict.lazy_stack(list(td.unbind(0)))):
        result = target.apply(lambda leaf, function: function(leaf), functions)
        assert (result["a"] == -1).all() and (result["n", "b"] == 2).all()
    with pytest.raises(TypeError, match="not callable"):
        NonTensorData("a")()


def test_pack_with_non_tensor_raises() -> None:
    with pytest.raises(StructureError, match=r"cannot pack key \('n', 's'\): it is non-tensor data"):
        TensorDict({"a": torch.zeros(2), "n": {"s": "x"}}).pack()


def test_pickle_non_tensor_data_keeps_names_and_lock() -> None:
    node = NonTensorData("x", batch_size=[2])
    node.names = ["t"]
    back = pickle.loads(pickle.dumps(node.lock_()))
    assert (back.names, back.is_locked, back.data, back.batch_size) == (["t"], True, "x", (2,))


class Owner:
    parts: Any = None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_deepcopy_object_keeps_reference_to_its_collection(copied: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "owner": Owner()})
    td["owner"].parts = [td]
    found = copied(td)
    assert found["owner"].parts[0] is found and found["owner"] is not td["owner"]
    assert found["a"] is not td["a"]
    owner = copied(td["owner"])
    assert owner.parts[0]["owner"] is owner


def test_empty_recurse_keeps_non_tensor_values() -> None:
    def make(i: int) -> TensorDict:
        level = TensorDict({"x": torch.zeros(2), "w": NonTensorData(i, batch_size=[2])}, [2])
        return TensorDict({"a": torch.zeros(2), "s": NonTensorStack("p", "q"), "n": level}, [2])

    td = make(1)
    empty = td.empty(recurse=True)
    assert set(empty.keys(True)) == {"s", "n", ("n", "w")}
    assert (empty["s"], empty["n", "w"]) == (["p", "q"], 1)
    assert td.empty().is_empty()
    stack = lazy_stack([td, make(2)]).empty(recurse=True)
    assert stack["n", "w"] == [[1, 1], [2, 2]] and stack.get(("n", "x")) is None
    first, rest = td.split_keys(["a"], reproduce_struct=True)
    assert list(first.keys(True)) == ["n", "a"] and ("n", "w") in rest.keys(True)
    assert td.exclude("s").empty(recurse=True, batch_size=[3])["n", "w"] == 1
    with pytest.raises(
        BatchSizeError, match=r"key 's', a NonTensorStack with one value for each element of \[2\]"
    ):
        td.empty(recurse=True, batch_size=[3])
