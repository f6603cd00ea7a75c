"""NonTensorData: one value for the whole batch, and values set into collections."""

from __future__ import annotations

import copy
import enum
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    assert_close,
    lazy_stack,
    make_tensordict,
    merge_tensordicts,
    pad_sequence,
    unpad_sequence,
)
from td_core.errors import BatchSizeError, KeyPathError, LockedError, StructureError
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
def test_set_object_is_one_value_for_batch(value: Any) -> None:
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
def test_set_list_is_one_value_per_element(value: Any, batch_size: list[int], wanted: Any) -> None:
    td = TensorDict({"a": value}, batch_size=batch_size)
    assert type(td.get("a")) is NonTensorStack
    assert td["a"] == wanted
    if batch_size:
        assert td[1]["a"] == wanted[1]


@pytest.mark.parametrize(
    "value", [[(1, 2), (3, 4)], [(1,), ()], [range(2), range(2)], [torch.Size([1]), (2,)]]
)
def test_set_list_of_tuples_is_one_value_per_element(value: Any) -> None:
    assert TensorDict({"k": value}, batch_size=[2])["k"] == value


VALUE_AND_TENSOR: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "sub": lambda a, b: a.sub(b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "addcmul": lambda a, b: a.addcmul(b, b),
    "maximum": lambda a, b: a.maximum(b),
    "in place": lambda a, b: a.mul_(b),
    ">": lambda a, b: a > b,
}


@pytest.mark.parametrize("operation", VALUE_AND_TENSOR.values(), ids=VALUE_AND_TENSOR)
@pytest.mark.parametrize("lazy", [False, True])
def test_arithmetic_values_missing_on_one_side_are_ignored(operation: Any, lazy: bool) -> None:
    def make(**values: Any) -> Any:
        members = [
            TensorDict({"n": TensorDict({"x": torch.ones(2) + i, **values}, [2])}, [2]) for i in range(2)
        ]
        return LazyStackedTensorDict(*members) if lazy else torch.stack(members)

    with_value, without, another = make(s="q"), make(), make(t="r")
    for pair in ((with_value, without), (without, with_value), (with_value, another)):
        first, second = pair[0].clone(), pair[1]
        wanted = operation(make(), make())["n", "x"]
        keys = list(first["n"].keys())
        result = operation(first, second)
        assert result["n", "x"].equal(wanted)
        assert list(result["n"].keys()) == keys
    with pytest.raises(StructureError, match="missing keys"):
        operation(make(), TensorDict({"n": TensorDict({"y": torch.ones(2, 2)}, [2, 2])}, [2, 2]))


def test_compare_values_missing_on_one_side_raises() -> None:
    first, second = TensorDict({"x": 1, "s": "q"}), TensorDict({"x": 1})
    for a, b in ((first, second), (second, first)):
        with pytest.raises(StructureError, match="keys"):
            a.__eq__(b)


def test_numpy_omits_none() -> None:
    assert list(TensorDict({"a": None, "b": "x"}).numpy()) == ["b"]


def test_set_list_of_other_length_raises() -> None:
    with pytest.raises(
        BatchSizeError, match="a list of 2 values gives one for each element of a batch, whose size is"
    ):
        TensorDict({"a": ["x", "y"]}, batch_size=[3])


@pytest.mark.parametrize(
    "index",
    [
        1,
        slice(0, 2),
        slice(None),
        torch.tensor([2, 0]),
        torch.tensor([True, False, True]),
        (slice(None), 1),
        ...,
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [True, False])
def test_setitem_index_new_values_are_added(index: Any, nested: bool) -> None:
    expected = np.full((3, 2), None, dtype=object)
    size = torch.zeros(3, 2)[index].shape
    values = np.arange(size.numel()).astype(str).astype(object).reshape(size)
    expected[index.numpy() if isinstance(index, torch.Tensor) else index] = values
    value = TensorDict({"s": NonTensorStack.from_list(values.tolist())}, size)
    td = TensorDict(batch_size=[3, 2])
    for _ in range(2):
        td[index] = {"n": value} if nested else value
        assert (td["n", "s"] if nested else td["s"]) == expected.tolist()


@pytest.mark.parametrize("values", [["x", "y"], [["x"], ["y", "z"]], [["x", "y"], "z"]], ids=str)
def test_set_list_nested_unlike_batch_raises_with_advice(values: list[Any]) -> None:
    with pytest.raises(BatchSizeError, match=r"whose size is \[2, 2\]; wrap the list in NonTensorData"):
        TensorDict({"a": values}, batch_size=[2, 2])


def test_set_list_to_stack_false_keeps_list() -> None:
    with set_list_to_stack(False):
        assert TensorDict({"a": ["x", "y"]}, batch_size=[3])["a"] == ["x", "y"]
        assert list_to_stack() is False
    assert TensorDict({"a": NonTensorData(["x", "y"])}, batch_size=[3])["a"] == ["x", "y"]
    assert TensorDict({}, batch_size=[3]).set_non_tensor("a", [1, 2])["a"] == [1, 2]


def test_settings_nest_decorate_and_persist(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_stack_values_returns_value_per_element() -> None:
    items = [TensorDict({"a": "x"}), TensorDict({"a": "x"})]
    for stacked in (torch.stack(items), LazyStackedTensorDict(*items)):
        assert stacked["a"] == ["x", "x"]
        assert type(stacked.get("a")) is NonTensorStack
    with set_capture_non_tensor_stack(True):
        assert torch.stack(items)["a"] == "x"
        assert torch.stack([items[0], TensorDict({"a": "y"})])["a"] == ["x", "y"]


def test_cat_equal_values_keeps_one_value() -> None:
    def td(value: Any, n: int) -> TensorDict:
        return TensorDict({"a": value}, batch_size=[n])

    assert torch.cat([td("x", 2), td("x", 1)])["a"] == "x"
    assert torch.cat([td("x", 2), td("y", 1)])["a"] == ["x", "x", "y"]
    assert torch.cat([td("1", 2), td(b"1", 1)])["a"] == ["1", "1", b"1"]
    assert torch.cat([td("x", 2), td(NonTensorStack("p", "q"), 2)])["a"] == ["x", "x", "p", "q"]


class TestWriting:
    def test_setitem_index_writes_value(self) -> None:
        td = TensorDict({"a": "x", "b": torch.zeros(2)}, batch_size=[2])
        td[0] = TensorDict({"a": "x", "b": 1})
        assert td["a"] == "x"
        td[0] = TensorDict({"a": "y", "b": 1})
        assert td["a"] == ["y", "x"]
        td[:] = {"a": "z", "b": 1}
        assert td["a"] == ["z", "z"]
        td[1] = {"a": "w", "b": 1}
        assert td["a"] == ["z", "w"]

    def test_set_inplace_writes_value(self) -> None:
        td = TensorDict({"a": "x", "b": torch.zeros(2)}, batch_size=[2]).lock_()
        td.set_("a", "y")
        assert td["a"] == "y"
        td.update_({"a": "z"})
        assert td["a"] == "z"
        td.update_({"a": ["l", "m"]})
        assert td["a"] == ["l", "m"]
        td.update_({"a": "z"})
        assert td["a"] == ["z", "z"]
        td[0] = {"a": "w", "b": 0}
        assert td["a"] == ["w", "z"]
        td.update_({"a": NonTensorStack("p", "q")})
        assert td["a"] == ["p", "q"]
        with pytest.raises(LockedError):
            td["a"] = "x"

    def test_set_in_lazy_stack_writes_members(self) -> None:
        stack = LazyStackedTensorDict(TensorDict({"a": "x"}), TensorDict({"a": "x"}))
        stack["a"] = "y"
        assert stack["a"] == ["y", "y"]
        stack["a"] = ["p", "q"]
        assert stack["a"] == ["p", "q"]
        stack[0] = {"a": "r"}
        assert stack["a"] == ["r", "q"]

    def test_set_replaces_value_by_tensor_and_back(self) -> None:
        td = TensorDict({"a": "x"}, batch_size=[2])
        td["a"] = torch.zeros(2)
        assert td["a"].shape == (2,)
        td.update({"a": "x"})
        assert td["a"] == "x"

    def test_setitem_on_single_value_node_raises(self) -> None:
        with pytest.raises(
            StructureError, match=r"holds one value for the whole batch, so 0 alone cannot be set"
        ):
            NonTensorData("a", batch_size=[2])[0] = "b"

    def test_set_data_of_node_replaces_value(self) -> None:
        node = NonTensorData("a")
        node.data = "b"
        node.set("data", "c")
        assert node.data == node.get("data") == "c"
        assert node.update(NonTensorData("d")).data == "d"
        assert node.update_({"data": "e"}).data == "e"
        with pytest.raises(LockedError, match="cannot replace the value"):
            node.lock_().data = "f"
        with pytest.raises(KeyPathError, match="has no entries but its value, 'data'; got 'other'"):
            NonTensorData("a").set("other", 1)
        with pytest.raises(StructureError, match="takes the value of another one, not of a TensorDict"):
            NonTensorData("a").update(TensorDict())
        assert node.update(NonTensorData("g"), ignore_lock=True).data == "g"

    @pytest.mark.parametrize(
        ("node", "new"),
        [(NonTensorData("a"), NonTensorData("b")), (NonTensorStack("a", "c"), NonTensorStack("b", "d"))],
        ids=repr,
    )
    def test_update_locked_node_only_inplace_works(self, node: Any, new: Any) -> None:
        td = TensorDict({"v": node}, batch_size=node.batch_size).lock_()
        with pytest.raises(LockedError, match="cannot replace the values"):
            td.get("v").update(new)
        assert td.get("v").update(new, inplace=True) is td.get("v")
        assert td["v"] == new._unwrap()

    @pytest.mark.parametrize("node", [NonTensorData("a"), NonTensorStack("a")], ids=repr)
    @pytest.mark.parametrize("method", ["update", "update_"])
    def test_update_with_keyword_entries_raises(self, node: Any, method: str) -> None:
        with pytest.raises(TypeError, match=r"has no entries, so none can be updated; got \['bogus'\]"):
            getattr(node, method)(node, bogus=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
            node.tolist(bogus=1)


def test_linked_list_write_changes_collection() -> None:
    td = TensorDict({"a": NonTensorStack.from_list([["p", "q"], ["r", "s"]], 2)}, batch_size=[2])
    td["a"][0][1] = "x"
    td["a"][1][:] = ["y", "z"]
    assert td["a"] == [["p", "x"], ["y", "z"]]
    assert td.get("a").tolist() == td["a"]


class TestMethods:
    def test_get_set_non_tensor_work(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "s": NonTensorStack("p", "q")})
        assert td.get_non_tensor("a") == "x"
        assert td.get_non_tensor("s") == ["p", "q"]
        assert td.get_non_tensor("b").item() == 1
        assert td.get_non_tensor("zz", 3) == 3
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.get_non_tensor("zz")
        assert td.set_non_tensor(("n", "m"), torch.zeros(3))["n", "m"].shape == (3,)
        assert td.is_non_tensor(("n", "m"))

    def test_is_non_tensor_and_non_tensor_items_return_entries(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "n": {"c": "y"}})
        assert td.is_non_tensor("a")
        assert not td.is_non_tensor("b")
        with pytest.raises(KeyPathError):
            td.is_non_tensor("zz")
        assert [key for key, _ in td.non_tensor_items()] == ["a"]
        assert [key for key, _ in td.non_tensor_items(include_nested=True)] == ["a", ("n", "c")]
        assert list(td.filter_non_tensor_data().keys(True)) == ["b", "n"]
        assert not TensorDict({"a": "x"}).is_empty()

    def test_keys_is_leaf_nontensor_includes_values(self) -> None:
        td = TensorDict({"a": "x", "b": 1, "s": NonTensorStack("p")})
        assert list(td.keys(True, True)) == ["b"]
        assert list(td.keys(True, True, is_leaf=is_leaf_nontensor)) == ["a", "b", "s"]

    def test_predicates_of_value_nodes(self) -> None:
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

    def test_set_node_takes_batch_size_of_collection(self) -> None:
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

    def test_linked_list_slice_write_of_other_size_raises(self) -> None:
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
    def test_assert_close_of_values(self, value: Any, other: Any) -> None:
        def make(value: Any) -> TensorDict:
            return TensorDict({"n": {"v": NonTensorData(value)}, "s": NonTensorStack(value)})

        assert assert_close(make(value), make(copy.deepcopy(value)))
        for key in ("n", "s"):
            with pytest.raises(AssertionError, match=r"key '?(\('n', 'v'\)|s'?) differs"):
                assert_close(make(value).select(key), make(other).select(key))

    def test_eq_of_values_compares_each(self) -> None:
        first = TensorDict({"a": "x", "b": torch.zeros(2), "s": NonTensorStack("p", "q")}, batch_size=[2])
        second = TensorDict({"a": "y", "b": torch.zeros(2), "s": NonTensorStack("p", "r")}, batch_size=[2])
        assert (first == first).all()
        with torch.device("meta"):
            compared = first == second
        assert compared["a"].tolist() == [False, False]
        assert compared["s"].tolist() == [True, False]
        assert (first != second)["s"].tolist() == [False, True]

    def test_repr_of_value_nodes(self) -> None:
        assert (
            repr(NonTensorData("a", batch_size=[3]))
            == "NonTensorData(data=a, batch_size=torch.Size([3]), device=None)"
        )
        assert f"data={'a' * 200}," in repr(NonTensorData("a" * 200))
        assert f"data={'a' * 20}  ...  {'b' * 20}," in repr(NonTensorData("a" * 101 + "b" * 100))
        assert repr(TensorDict({"a": "x", "b": None, "c": MetaData("m")})) == (
            "TensorDict(batch_size=[], fields={a: str, b: NoneType, c: MetaData})"
        )

    def test_repr_html_contains_values(self) -> None:
        td = TensorDict({"a": "<script>", "s": NonTensorStack("p", "q")}, batch_size=[2])
        shown = td._repr_html_() + td.get("a")._repr_html_() + td.get("s")._repr_html_()
        assert shown.count("NonTensorData(data=&lt;script&gt;, batch_size=torch.Size([2])") == 2
        assert shown.count("[&#x27;p&#x27;, &#x27;q&#x27;]") == 2
        assert "<script" not in shown

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, copy.copy, lambda node: pickle.loads(pickle.dumps(node))]
    )
    def test_copy_of_values_equals_original(self, copied: Any) -> None:
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
    def test_deepcopy_copies_values_clone_does_not(self, copied: Any, same: bool) -> None:
        value: list[Any] = [1]
        td = TensorDict({"a": NonTensorData(value), "n": {"s": NonTensorStack(value, {"k": value})}})
        again = copied(td)
        assert (again["a"] is value) is (again["n", "s"][0] is value) is same
        assert (again["n", "s"][1]["k"] is value) is same


class TestMetaData:
    def test_join_metadata_of_same_object_keeps_one(self) -> None:
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
                    return type, (obj.__name__, obj.__bases__, {})  # as cloudpickle does
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


#: Collections of two elements with the values "a" and "b", or with one value "a" for both.
HOLDERS: dict[str, Callable[[], Any]] = {
    "one value": lambda: TensorDict({"k": "a"}, [2]),
    "locked": lambda: TensorDict({"k": "a"}, [2], lock=True),
    "metadata": lambda: TensorDict({"k": MetaData("a")}, [2]),
    "values": lambda: TensorDict({"k": NonTensorStack("a", "b")}, [2]),
    "members": lambda: lazy_stack([TensorDict({"k": "a"}), TensorDict({"k": "b"})]),
    "members with a batch": lambda: lazy_stack([TensorDict({"k": key}, [1]) for key in "ab"], 1)[0],
}


@pytest.mark.parametrize("index", [0, -1, slice(1), torch.tensor([True, False]), ...])
@pytest.mark.parametrize("name", HOLDERS)
def test_set_at_index_writes_value(name: str, index: Any) -> None:
    td = HOLDERS[name]()
    wanted = np.array(td.get("k").tolist())
    wanted[index.numpy() if isinstance(index, torch.Tensor) else index] = "z"
    assert td.set_at_("k", "z", index) is td
    assert td["k"] == wanted.tolist()


def test_compare_numpy_scalars_by_value() -> None:
    values = [np.float64(1.5), np.int64(3), np.datetime64("2020-01-01"), np.str_("a")]
    for value in values:
        twice = [TensorDict({"k": NonTensorData(type(value)(value)), "x": torch.ones(1)}) for _ in range(2)]
        assert torch.utils._pytree.tree_map(torch.add, *twice)["x"].item() == 2
        with set_capture_non_tensor_stack(True):
            assert type(torch.stack(twice).get("k")) is NonTensorData


ENTRIES: dict[str, Callable[[], Any]] = {
    "one": lambda: NonTensorData("hi"),
    "number": lambda: NonTensorData(3),
    "list": lambda: NonTensorData(["p", "q"]),
    "stack": lambda: NonTensorStack("a", "b"),
    "meta": lambda: MetaData("m"),
    "typed": lambda: MetaData[str]("m"),
    "tensor": lambda: torch.zeros(2),
    "level": lambda: TensorDict({"a": torch.zeros(2)}, [2]),
    "nothing": lambda: None,
}
LEVELS = ("tensor", "level", "nothing")


def holding(name: str) -> TensorDict:
    entry = ENTRIES[name]()
    return TensorDict({} if entry is None else {"k": entry}, batch_size=[2])


class TestStateDicts:
    @pytest.mark.parametrize("flatten", [True, False])
    @pytest.mark.parametrize("given", [name for name in ENTRIES if name not in LEVELS])
    @pytest.mark.parametrize("held", [name for name in ENTRIES if name not in LEVELS])
    def test_load_state_dict_replaces_values(self, held: str, given: str, flatten: bool) -> None:
        source = holding(given)
        target = holding(held).load_state_dict(source.state_dict(flatten=flatten))
        assert target["k"] == source["k"]
        for cls in (NonTensorData, NonTensorStack, MetaData):
            assert isinstance(target.get("k"), cls) == isinstance(source.get("k"), cls)
        if held == given:
            assert type(target.get("k")) is type(source.get("k"))
        assert target.get("k").batch_size == source.get("k").batch_size

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("other", ["tensor", "level"])
    def test_load_state_dict_value_for_tensor_or_node_raises(self, other: str, strict: bool) -> None:
        for held, given in ((other, "one"), ("one", other)):
            with pytest.raises(StructureError, match="key 'k' is a .* on one side and a"):
                holding(held).load_state_dict(holding(given).state_dict(), strict=strict)

    def test_load_state_dict_strict_names_missing_values(self) -> None:
        with pytest.raises(StructureError, match=r"missing keys: \['k'\]"):
            holding("one").load_state_dict(holding("nothing").state_dict())
        with pytest.raises(StructureError, match=r"unexpected keys: \['k'\]"):
            holding("nothing").load_state_dict(holding("stack").state_dict())
        assert holding("one").load_state_dict(holding("nothing").state_dict(), strict=False)["k"] == "hi"
        assert holding("nothing").load_state_dict(holding("stack").state_dict(), strict=False)["k"] == [
            "a",
            "b",
        ]


class Captioned(TensorClass):
    image: torch.Tensor
    caption: Any = None


def in_a_module(*values: Any, **others: Any) -> Any:
    module: Any = torch.nn.Module()
    one, below, column, field = values
    tree = {
        "w": torch.zeros(2),
        "one": one,
        "column": NonTensorStack(*column),
        "n": {"below": below, "held": Captioned(torch.zeros(2), field, batch_size=[2])},
    }
    module.params = TensorDictParams(TensorDict({**tree, **others}, batch_size=[2]))
    return module


def values_in(module: Any) -> list[Any]:
    params = module.params
    return [
        params["one"],
        params["n", "below"],
        params.get("column").tolist(),
        params["n", "held"].get("caption"),
    ]


OLD, NEW = ("a", "b", ["c", "d"], "e"), ("f", b"7", ["g", "h"], "i")


class TestModules:
    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("locked", [False, True])
    def test_module_load_state_dict_loads_values_in_params(self, assign: bool, locked: bool) -> None:
        file = io.BytesIO()
        torch.save(in_a_module(*NEW).state_dict(), file)
        file.seek(0)
        module = in_a_module(*OLD)
        if locked:
            module.params.lock_()
        outer = torch.nn.Sequential(module)
        state = torch.nn.Sequential(in_a_module(*NEW)).state_dict()
        for each, given in ((module, torch.load(file, weights_only=True)), (outer, state)):
            found = each.load_state_dict(given, assign=assign)
            assert not found.missing_keys and not found.unexpected_keys
            assert values_in(module) == [*NEW]
            module.load_state_dict(in_a_module(*OLD).state_dict())
            assert values_in(module) == [*OLD]

    @pytest.mark.parametrize("inplace", [False, True])
    def test_module_state_dict_values_in_params_round_trip(self, inplace: bool) -> None:
        module, given = in_a_module(*OLD), TensorDict.from_module(in_a_module(*NEW))
        with given.to_module(module, inplace=inplace) as held:
            assert values_in(module) == [*NEW]
            assert held["params", "one"] == "a" and held.get(("params", "column")).tolist() == ["c", "d"]
        assert values_in(module) == [*OLD]
        held = given.to_module(module, inplace=inplace)
        assert values_in(module) == [*NEW]
        held.to_module(module, inplace=inplace)
        assert values_in(module) == [*OLD]

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize(
        ("entry", "missing"),
        [
            ({"w": "x"}, "key ('params', 'w'): TensorDictParams has no value 'w'"),
            (
                {"one": torch.zeros(2)},
                "key ('params', 'one'): TensorDictParams has no parameter or buffer 'one'",
            ),
            (
                {"one": {"x": torch.zeros(2)}},
                "key ('params', 'one'): TensorDictParams has no submodule 'one'",
            ),
            ({"w": {"x": torch.zeros(2)}}, "key ('params', 'w'): TensorDictParams has no submodule 'w'"),
            ({"n": "x"}, "key ('params', 'n'): TensorDictParams has no value 'n'"),
            ("x", "key 'params': Module has no value 'params'"),
        ],
    )
    def test_load_params_of_other_kinds_raises_and_changes_nothing(
        self, entry: Any, missing: str, inplace: bool
    ) -> None:
        module = in_a_module(*OLD)
        given = TensorDict({"params": {"n": {"below": "f"}}})
        if isinstance(entry, dict):
            given["params"].update(entry)
        else:
            given["params"] = entry
        with pytest.raises(KeyPathError, match=re.escape(missing)):
            given.to_module(module, inplace=inplace)
        assert values_in(module) == [*OLD] and not module.params["w"].any()

    def test_load_state_dict_missing_values_stay(self) -> None:
        module = in_a_module(*OLD)
        module.load_state_dict(dict(in_a_module(*NEW).state_dict()))
        assert values_in(module) == [*OLD]

    def test_module_load_unknown_values_are_unexpected(self) -> None:
        module, state = in_a_module(*OLD), in_a_module(*NEW, more="j").state_dict()
        with pytest.raises(RuntimeError, match='Unexpected key.*"params.more"'):
            module.load_state_dict(state)
        assert module.load_state_dict(state, strict=False).unexpected_keys == ["params.more"]
        assert values_in(module) == [*NEW] and "more" not in module.params

    def test_load_state_dict_node_for_value_raises_naming_key(self) -> None:
        module = in_a_module(*OLD, more={"x": torch.zeros(2)})
        with pytest.raises(RuntimeError, match="params: .* key 'more' is a value on one side"):
            module.load_state_dict(in_a_module(*NEW, more="j").state_dict(), strict=False)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    ("held", "given"),
    [
        (NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[2])),
        (MetaData("a"), MetaData("b")),
        (NonTensorStack("a", "b"), NonTensorStack("c", "d")),
    ],
)
def test_non_tensor_data_load_state_dict_sets_value(held: Any, given: Any, flatten: bool) -> None:
    held = held.clone()
    assert held.load_state_dict(given.state_dict(flatten=flatten)) is held
    assert held.tolist() == given.tolist()
    with pytest.raises(StructureError, match=f"a {type(held).__name__} takes the value"):
        held.load_state_dict(TensorDict({"a": torch.ones(1)}).state_dict())
    assert held.tolist() == given.tolist()


def test_set_list_of_unlike_collections_stores_values() -> None:
    first, second = TensorDict({"a": [1, 2]}, [2]), TensorDict({"a": 1})
    td = TensorDict({"items": [first, second]}, [2])
    assert td["items"][0] is first and td["items"][1] is second


def test_pop_value_equals_get() -> None:
    td = TensorDict({"t": torch.zeros(2), "one": "x", "each": ["a", "b"], "n": {"one": "y"}}, [2])
    assert td.pop(("n", "one")).data == "y"
    assert td.pop("each").tolist() == ["a", "b"]
    assert td.pop("each", "gone") == "gone"
    td["last"] = ["c", "d"]
    assert td.popitem()[1].tolist() == ["c", "d"]
    assert td.pop("one").data == "x"
    assert list(td.keys()) == ["t", "n"]


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "view": lambda td: td.view(2, 2),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "transpose": lambda td: td.transpose(0, 0),
    "permute": lambda td: td.permute(0),
    "unflatten": lambda td: td.unflatten(0, (2, 2)),
    "flip": lambda td: td.flip(0),
    "roll": lambda td: td.roll(1, 0),
    "select": lambda td: td.select("k", "each", ("n", "k")),
    "exclude": lambda td: td.exclude("x"),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("kind", ["dense", "lazy", "locked"])
def test_context_manager_writes_values_back(name: str, kind: str) -> None:
    rows = [TensorDict({"k": "a", "each": each, "n": {"k": "b"}, "x": torch.zeros(2)}) for each in "wxyz"]
    td: Any = lazy_stack(rows)
    if kind != "lazy":
        td = TensorDict({"k": "a", "each": td["each"], "n": {"k": "b"}, "x": torch.zeros(4, 2)}, [4])
    if kind == "locked":
        td.lock_()
    with CONTEXTS[name](td) as part:
        # A value that is replaced in the context is written back to this collection.
        part.set("k", "z")
        part.set_(("n", "k"), "y")
        part["each"] = part.get("each").flatten().reshape(part.batch_size)
    assert td[1]["k"] == td[2]["k"] == "z" and td[3]["n", "k"] == "y"
    assert td["each"] == ["w", "x", "y", "z"]


def renamed(td: Any) -> Any:
    names = [f"{name}{number}" for name, number in zip(td["each"], td["x"].tolist())]
    return TensorDict({"k": "new", "each": NonTensorStack(*names), "x": td["x"] + 1}, td.batch_size)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("workers", [{"num_workers": 0}, {"num_workers": 1, "mp_start_method": "fork"}])
def test_map_out_writes_returned_values(shared: bool, workers: dict[str, Any]) -> None:
    td = TensorDict({"k": "old", "each": NonTensorStack("a", "b", "c"), "x": torch.arange(3)}, [3])
    out = td.clone()
    if shared:
        out.share_memory_()
    td.map(renamed, chunksize=2, out=out, **workers)
    assert out["each"] == ["a0", "b1", "c2"]
    assert (out[0]["k"], out[2]["k"], out["x"].tolist()) == ("new", "new", [1, 2, 3])


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", "y")])
def test_init_from_value_node_raises(value):
    class Field(TensorClass):
        a: object = None

    for make in (TensorDict, TensorDict.from_dict, Field.from_tensordict):
        with pytest.raises((TypeError, ValueError), match=f"got {type(value).__name__}"):
            make(value)


def test_get_value_from_every_kind_works():
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


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", "y")])
@pytest.mark.parametrize(
    "operation",
    [
        lambda td, value: td.update(value),
        lambda td, value: td.update_(value),
        lambda td, value: td.replace(value),
        lambda td, value: td.copy_(value),
        lambda td, value: td.update_at_(value, slice(None)),
        lambda td, value: td.__setitem__(slice(None), value),
        lambda td, value: td["n"].__setitem__(0, value[0]),
        lambda td, value: merge_tensordicts(td, value),
        lambda td, value: make_tensordict(value),
        lambda td, value: TensorDict.from_dict(value),
        lambda td, value: TensorDict(value),
    ],
)
def test_operation_with_value_node_as_collection_raises(operation, value):
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    with pytest.raises((TypeError, ValueError, StructureError), match="mapping|collections? of entries"):
        operation(td, value)


@pytest.mark.parametrize("value", [NonTensorData("x"), NonTensorStack("x", "y"), MetaData("x")])
def test_load_state_dict_keeps_names_of_values(value: Any) -> None:
    td = TensorDict({"v": value, "n": {"v": value}}, [2], names=["t"])
    td.load_state_dict(td.state_dict())
    assert td.get("v").names == td.get(("n", "v")).names == ["t"]
    assert td["v"] == td["n", "v"] == value.tolist()


@pytest.mark.parametrize("value", [NonTensorData("x"), NonTensorStack("x", "y"), MetaData("x")])
@pytest.mark.parametrize("flatten", [True, False])
def test_load_state_dict_keeps_device_of_values(value: Any, flatten: bool) -> None:
    td = TensorDict({"v": value, "n": {"v": value}}, [2], device="cpu")
    td.load_state_dict(td.state_dict(flatten=flatten))
    assert td.get("v").device == td.get(("n", "v")).device == torch.device("cpu")


def test_state_dict_value_with_dotted_key_of_node_is_kept() -> None:
    td = TensorDict({"": "x", "a": torch.ones(2)})
    with pytest.raises(KeyError, match="two levels have the dotted key ''; use flatten=False"):
        td.state_dict()
    target = TensorDict({"": "y", "a": torch.zeros(2)})
    target.load_state_dict(td.state_dict(flatten=False))
    assert target[""] == "x"


def test_apply_with_collection_of_functions_calls_each() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, batch_size=[3])
    functions = TensorDict({"a": torch.neg, "n": {"b": lambda leaf: leaf * 2}}, batch_size=[3])
    for target in (td, TensorDict.lazy_stack(list(td.unbind(0)))):
        result = target.apply(lambda leaf, function: function(leaf), functions)
        assert (result["a"] == -1).all() and (result["n", "b"] == 2).all()
    with pytest.raises(TypeError, match="not callable"):
        NonTensorData("a")()


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value], lambda value: {"k": (value,)}])
def test_cat_nan_values_keeps_one_value(wrap: Any) -> None:
    parts = [TensorDict({"v": NonTensorData(wrap(float("nan")), batch_size=[2])}, [2]) for _ in range(2)]
    assert type(torch.cat(parts).get("v")) is NonTensorData


def test_pack_with_values_raises() -> None:
    with pytest.raises(StructureError, match=r"cannot pack key \('n', 's'\): it is non-tensor data"):
        TensorDict({"a": torch.zeros(2), "n": {"s": "x"}}).pack()


def test_filter_values_of_some_members_works() -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": 1, "s": "x"}), TensorDict({"a": 1}))
    assert [list(member.keys()) for member in stack.filter_non_tensor_data().tensordicts] == [["a"], ["a"]]


def test_pickle_value_keeps_names_and_lock() -> None:
    node = NonTensorData("x", batch_size=[2])
    node.names = ["t"]
    back = pickle.loads(pickle.dumps(node.lock_()))
    assert (back.names, back.is_locked, back.data, back.batch_size) == (["t"], True, "x", (2,))


@pytest.mark.parametrize(
    "masks", [lambda r: None, lambda r: r["masks"].select("x"), lambda r: r["masks", "x"]]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_and_unpad_sequence_values_use_none(side: str, masks: Callable[[Any], Any]) -> None:
    def item(n: int) -> TensorDict:
        names = list("abc"[:n])
        deep = {"t": names, "z": torch.arange(float(n))}
        return TensorDict({"x": torch.ones(n, 2), "v": names, "n": {"s": names, "deep": deep}}, [n])

    items = [item(n) for n in (1, 3)]
    padded = pad_sequence(items, return_mask=True, padding_side=side)
    short = ["a", None, None] if side == "right" else [None, None, "a"]
    assert padded["n", "s"] == padded["v"] == [short, ["a", "b", "c"]]
    given = masks(padded)
    back = unpad_sequence(padded if given is None else padded.exclude("masks"), given)
    for found, wanted in zip(back.tensordicts, items, strict=True):
        assert found.batch_size == found["n"].batch_size == found["n", "deep"].batch_size == wanted.batch_size
        assert found["v"] == found["n", "s"] == found["n", "deep", "t"] == wanted["v"]
        assert torch.equal(found["n", "deep", "z"], wanted["n", "deep", "z"])


@pytest.mark.parametrize(
    "join",
    [
        lambda x, y: torch.stack([x, y]),
        lambda x, y: lazy_stack([x, y]).contiguous(),
        lambda x, y: torch.cat([x.unsqueeze(0), y.unsqueeze(0)]),
    ],
)
def test_stack_uneven_value_stacks_raises(join: Any) -> None:
    first, second = TensorDict({"s": ["a", "b"]}), TensorDict({"s": ["d", "e", "f"]})
    with pytest.raises(
        StructureError, match=r"item 0 has values for a batch of \[(1, )?2\] and item 1 for one of"
    ):
        join(first, second)
    nodes = lazy_stack([first, second]).get("s", as_list=True)
    assert [node.tolist() for node in nodes] == [["a", "b"], ["d", "e", "f"]]


def conversations(batched: bool) -> Any:
    turns = (["hi", "ho", "bye"], ["yes"], [])
    return lazy_stack(
        [TensorDict({"n": {"s": NonTensorStack.from_list(each)}}, [len(each)][:batched]) for each in turns]
    )


READS: list[Callable[[Any], Any]] = [
    lambda td: td["n", "s"],
    lambda td: td.get(("n", "s")).tolist(),
    lambda td: td.to_dict()["n"]["s"],
    lambda td: td.clone()["n"]["s"],
    lambda td: td.flatten_keys(".")["n.s"],
    lambda td: td.to_tensordict()["n", "s"],
    lambda td: td.densify()["n", "s"],
    lambda td: (td + 1)["n", "s"],
    lambda td: td[[2, 0, 1]][[1, 2, 0]]["n", "s"],
    lambda td: lazy_stack([td, td])["n", "s"][1],
    lambda td: pickle.loads(pickle.dumps(td))["n", "s"],
    lambda td: [td[i]["n", "s"] for i in range(3)],
]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("read", READS)
def test_lazy_stack_uneven_values_are_read_as_lists(read: Any, batched: bool) -> None:
    assert read(conversations(batched)) == [["hi", "ho", "bye"], ["yes"], []]


@pytest.mark.parametrize("batched", [False, True])
def test_lazy_stack_write_lists_to_uneven_members(batched: bool) -> None:
    td = conversations(batched)
    td["n", "s"][0] = ["a", "b", "c"]
    td.get(("n", "s"))[1] = NonTensorData("z")
    assert [td[i]["n", "s"] for i in range(3)] == td["n", "s"] == [["a", "b", "c"], ["z"], []]
    with pytest.raises(
        StructureError, match=r"cannot write key 's' in place: it has shape \[3\] there, the value \[2\]"
    ):
        td["n", "s"][0] = ["p", "q"]
    assert td["n", "s"] == [["a", "b", "c"], ["z"], []]


def test_non_tensor_stack_of_uneven_stacks_holds_lists() -> None:
    parts = [NonTensorStack.from_list([[1, 2], [3, 4]]), NonTensorStack.from_list([[5], [6]])]
    for made in (NonTensorStack(*parts), lazy_stack(parts)):
        assert made.batch_size == (2, 2)
        assert made.tolist() == [[[1, 2], [3, 4]], [[5], [6]]]
    assert NonTensorStack(*parts, stack_dim=1).tolist() == [[[1, 2], [5]], [[3, 4], [6]]]
    with pytest.raises(BatchSizeError, match=r"item 0 has batch size \[2, 2\], item 1 has \[2, 1\]"):
        NonTensorStack(*parts, stack_dim=2)


def test_pad_sequence_uneven_values_uses_none() -> None:
    padded = conversations(True).to_padded_tensor()
    assert padded.batch_size == padded["n"].batch_size == padded.get(("n", "s")).batch_size == (3, 3)
    assert padded["n", "s"] == [["hi", "ho", "bye"], ["yes", None, None], [None, None, None]]


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.set("k", td["k"]),
        lambda td: td.update({"k": td["k"]}),
        lambda td: td.set_("k", td["k"]),
        lambda td: td.replace({"k": td["k"]}),
        lambda td: TensorDict(dict(td), [3]),
        lambda td: TensorDict({"k": copy.deepcopy(td["k"])}, [3]),
    ],
)
def test_write_linked_list_of_column_keeps_values(write: Any) -> None:
    td = write(TensorDict({"k": NonTensorStack("a", "b", "c")}, [3]))
    assert [td[i]["k"] for i in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("value", [NonTensorData, MetaData])
def test_where_scalar_condition_returns_one_value(value: Any, condition: bool) -> None:
    first, second = TensorDict({"n": {"k": value("a")}}), TensorDict({"n": {"k": value("b")}})
    chosen = first.where(torch.tensor(condition), second)
    assert isinstance(chosen.get(("n", "k")), NonTensorData)
    assert chosen["n", "k"] == ("a" if condition else "b")


@pytest.mark.parametrize(
    "show",
    [
        lambda td: td.unsqueeze(0),
        lambda td: td.view(1, 1),
        lambda td: td.unsqueeze(0).clone(False),
        lambda td: td.expand(1),
        lambda td: lazy_stack([td, td.clone()]).unsqueeze(1),
    ],
)
@pytest.mark.parametrize("index", [0, ..., slice(None), [0]])
def test_view_with_more_dims_write_reaches_value(show: Any, index: Any) -> None:
    td = TensorDict({"n": {"k": "a"}, "x": torch.zeros(())})
    view = show(td)
    view[index] = TensorDict({"n": {"k": "z"}, "x": 1.0}).expand(view[index].batch_size)
    assert (td["n", "k"], td["x"].item()) == ("z", 1)


@pytest.mark.parametrize("capture", [False, True])
def test_lazy_stack_same_metadata_uneven_members_is_one(capture: bool) -> None:
    thing = NonTensorData("a") if capture else MetaData("a")
    lazy = lazy_stack([TensorDict({"k": thing}, [n]) for n in (2, 3)])
    with set_capture_non_tensor_stack(capture):
        assert (lazy["k"], lazy.get("k").batch_size) == ("a", (2, -1))


def test_stack_same_metadata_uneven_batches_raises() -> None:
    items = [TensorDict({"k": MetaData("a", batch_size=[1, n])}, [1]) for n in (2, 3)]
    for join in (torch.stack, torch.cat):
        with pytest.raises(
            StructureError, match=r"key 'k': item 0 has values for a batch of \[1, 2\] and item 1"
        ):
            join(items)


class Owner:
    parts: Any = None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_deepcopy_value_referring_to_collection_is_remapped(copied: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "owner": Owner()})
    td["owner"].parts = [td]
    found = copied(td)
    assert found["owner"].parts[0] is found and found["owner"] is not td["owner"]
    assert found["a"] is not td["a"]
    owner = copied(td["owner"])
    assert owner.parts[0]["owner"] is owner


def test_node_without_tensors_keeps_values() -> None:
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
