"""Write values that are not tensors: by index, in place, through views, and from state dicts."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    lazy_stack,
    make_tensordict,
    merge_tensordicts,
)
from td_core.errors import KeyPathError, LockedError, StructureError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
)


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
def test_setitem_index_adds_missing_non_tensor_entries(index: Any, nested: bool) -> None:
    expected = np.full((3, 2), None, dtype=object)
    size = torch.zeros(3, 2)[index].shape
    values = np.arange(size.numel()).astype(str).astype(object).reshape(size)
    expected[index.numpy() if isinstance(index, torch.Tensor) else index] = values
    value = TensorDict({"s": NonTensorStack.from_list(values.tolist())}, size)
    td = TensorDict(batch_size=[3, 2])
    for _ in range(2):
        td[index] = {"n": value} if nested else value
        assert (td["n", "s"] if nested else td["s"]) == expected.tolist()


class TestWriting:
    def test_setitem_index_splits_value_of_batch(self) -> None:
        td = TensorDict({"a": "x", "b": torch.zeros(2)}, batch_size=[2])
        td[0] = TensorDict({"a": "x", "b": 1})
        assert td["a"] == "x"
        td[0] = TensorDict({"a": "y", "b": 1})
        assert td["a"] == ["y", "x"]
        td[:] = {"a": "z", "b": 1}
        assert td["a"] == ["z", "z"]
        td[1] = {"a": "w", "b": 1}
        assert td["a"] == ["z", "w"]

    def test_set_and_update_inplace_write_locked_values(self) -> None:
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

    def test_lazy_stack_set_non_tensor_writes_members(self) -> None:
        stack = LazyStackedTensorDict(TensorDict({"a": "x"}), TensorDict({"a": "x"}))
        stack["a"] = "y"
        assert stack["a"] == ["y", "y"]
        stack["a"] = ["p", "q"]
        assert stack["a"] == ["p", "q"]
        stack[0] = {"a": "r"}
        assert stack["a"] == ["r", "q"]

    def test_set_replaces_non_tensor_by_tensor_and_back(self) -> None:
        td = TensorDict({"a": "x"}, batch_size=[2])
        td["a"] = torch.zeros(2)
        assert td["a"].shape == (2,)
        td.update({"a": "x"})
        assert td["a"] == "x"

    def test_non_tensor_data_setitem_raises(self) -> None:
        with pytest.raises(
            StructureError, match=r"holds one value for the whole batch, so 0 alone cannot be set"
        ):
            NonTensorData("a", batch_size=[2])[0] = "b"

    def test_non_tensor_data_set_data_replaces_value(self) -> None:
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
    def test_update_locked_non_tensor_needs_inplace(self, node: Any, new: Any) -> None:
        td = TensorDict({"v": node}, batch_size=node.batch_size).lock_()
        with pytest.raises(LockedError, match="cannot replace the values"):
            td.get("v").update(new)
        assert td.get("v").update(new, inplace=True) is td.get("v")
        assert td["v"] == new._unwrap()

    @pytest.mark.parametrize("node", [NonTensorData("a"), NonTensorStack("a")], ids=repr)
    @pytest.mark.parametrize("method", ["update", "update_"])
    def test_update_non_tensor_with_keywords_raises(self, node: Any, method: str) -> None:
        with pytest.raises(TypeError, match=r"has no entries, so none can be updated; got \['bogus'\]"):
            getattr(node, method)(node, bogus=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
            node.tolist(bogus=1)


def test_write_to_linked_list_changes_collection() -> None:
    td = TensorDict({"a": NonTensorStack.from_list([["p", "q"], ["r", "s"]], 2)}, batch_size=[2])
    td["a"][0][1] = "x"
    td["a"][1][:] = ["y", "z"]
    assert td["a"] == [["p", "x"], ["y", "z"]]
    assert td.get("a").tolist() == td["a"]


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
def test_set_at_index_writes_non_tensor_value(name: str, index: Any) -> None:
    td = HOLDERS[name]()
    wanted = np.array(td.get("k").tolist())
    wanted[index.numpy() if isinstance(index, torch.Tensor) else index] = "z"
    assert td.set_at_("k", "z", index) is td
    assert td["k"] == wanted.tolist()


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


def make_holding(name: str) -> TensorDict:
    entry = ENTRIES[name]()
    return TensorDict({} if entry is None else {"k": entry}, batch_size=[2])


class TestStateDicts:
    @pytest.mark.parametrize("flatten", [True, False])
    @pytest.mark.parametrize("given", [name for name in ENTRIES if name not in LEVELS])
    @pytest.mark.parametrize("held", [name for name in ENTRIES if name not in LEVELS])
    def test_load_state_dict_replaces_non_tensor_values(self, held: str, given: str, flatten: bool) -> None:
        source = make_holding(given)
        target = make_holding(held).load_state_dict(source.state_dict(flatten=flatten))
        assert target["k"] == source["k"]
        for cls in (NonTensorData, NonTensorStack, MetaData):
            assert isinstance(target.get("k"), cls) == isinstance(source.get("k"), cls)
        if held == given:
            assert type(target.get("k")) is type(source.get("k"))
        assert target.get("k").batch_size == source.get("k").batch_size

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("other", ["tensor", "level"])
    def test_load_state_dict_non_tensor_for_other_entry_raises(self, other: str, strict: bool) -> None:
        for held, given in ((other, "one"), ("one", other)):
            with pytest.raises(StructureError, match="key 'k' is a .* on one side and a"):
                make_holding(held).load_state_dict(make_holding(given).state_dict(), strict=strict)

    def test_load_state_dict_strict_missing_non_tensor_raises(self) -> None:
        with pytest.raises(StructureError, match=r"missing keys: \['k'\]"):
            make_holding("one").load_state_dict(make_holding("nothing").state_dict())
        with pytest.raises(StructureError, match=r"unexpected keys: \['k'\]"):
            make_holding("nothing").load_state_dict(make_holding("stack").state_dict())
        assert (
            make_holding("one").load_state_dict(make_holding("nothing").state_dict(), strict=False)["k"]
            == "hi"
        )
        assert make_holding("nothing").load_state_dict(make_holding("stack").state_dict(), strict=False)[
            "k"
        ] == [
            "a",
            "b",
        ]


class Captioned(TensorClass):
    image: torch.Tensor
    caption: Any = None


def make_module(*values: Any, **others: Any) -> Any:
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


def read_values(module: Any) -> list[Any]:
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
    def test_module_load_state_dict_loads_non_tensor_in_params(self, assign: bool, locked: bool) -> None:
        file = io.BytesIO()
        torch.save(make_module(*NEW).state_dict(), file)
        file.seek(0)
        module = make_module(*OLD)
        if locked:
            module.params.lock_()
        outer = torch.nn.Sequential(module)
        state = torch.nn.Sequential(make_module(*NEW)).state_dict()
        for each, given in ((module, torch.load(file, weights_only=True)), (outer, state)):
            found = each.load_state_dict(given, assign=assign)
            assert not found.missing_keys and not found.unexpected_keys
            assert read_values(module) == [*NEW]
            module.load_state_dict(make_module(*OLD).state_dict())
            assert read_values(module) == [*OLD]

    @pytest.mark.parametrize("inplace", [False, True])
    def test_to_module_swaps_non_tensor_in_params(self, inplace: bool) -> None:
        module, given = make_module(*OLD), TensorDict.from_module(make_module(*NEW))
        with given.to_module(module, inplace=inplace) as held:
            assert read_values(module) == [*NEW]
            assert held["params", "one"] == "a" and held.get(("params", "column")).tolist() == ["c", "d"]
        assert read_values(module) == [*OLD]
        held = given.to_module(module, inplace=inplace)
        assert read_values(module) == [*NEW]
        held.to_module(module, inplace=inplace)
        assert read_values(module) == [*OLD]

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
    def test_to_module_entry_of_other_kind_changes_nothing(
        self, entry: Any, missing: str, inplace: bool
    ) -> None:
        module = make_module(*OLD)
        given = TensorDict({"params": {"n": {"below": "f"}}})
        if isinstance(entry, dict):
            given["params"].update(entry)
        else:
            given["params"] = entry
        with pytest.raises(KeyPathError, match=re.escape(missing)):
            given.to_module(module, inplace=inplace)
        assert read_values(module) == [*OLD] and not module.params["w"].any()

    def test_module_load_state_dict_without_metadata_keeps_values(self) -> None:
        module = make_module(*OLD)
        module.load_state_dict(dict(make_module(*NEW).state_dict()))
        assert read_values(module) == [*OLD]

    def test_module_load_state_dict_unknown_value_is_unexpected(self) -> None:
        module, state = make_module(*OLD), make_module(*NEW, more="j").state_dict()
        with pytest.raises(RuntimeError, match='Unexpected key.*"params.more"'):
            module.load_state_dict(state)
        assert module.load_state_dict(state, strict=False).unexpected_keys == ["params.more"]
        assert read_values(module) == [*NEW] and "more" not in module.params

    def test_module_load_state_dict_value_for_node_raises(self) -> None:
        module = make_module(*OLD, more={"x": torch.zeros(2)})
        with pytest.raises(RuntimeError, match="params: .* key 'more' is a value on one side"):
            module.load_state_dict(make_module(*NEW, more="j").state_dict(), strict=False)


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
def test_view_as_context_manager_writes_non_tensor_back(name: str, kind: str) -> None:
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


def rename_rows(td: Any) -> Any:
    names = [f"{name}{number}" for name, number in zip(td["each"], td["x"].tolist())]
    return TensorDict({"k": "new", "each": NonTensorStack(*names), "x": td["x"] + 1}, td.batch_size)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("workers", [{"num_workers": 0}, {"num_workers": 1, "mp_start_method": "fork"}])
def test_map_with_out_writes_non_tensor_values(shared: bool, workers: dict[str, Any]) -> None:
    td = TensorDict({"k": "old", "each": NonTensorStack("a", "b", "c"), "x": torch.arange(3)}, [3])
    out = td.clone()
    if shared:
        with pytest.warns(UserWarning, match="'each' are not shared|'k' are not shared"):
            out.share_memory_()
    td.map(rename_rows, chunksize=2, out=out, **workers)
    assert out["each"] == ["a0", "b1", "c2"]
    assert (out[0]["k"], out[2]["k"], out["x"].tolist()) == ("new", "new", [1, 2, 3])


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
def test_update_from_non_tensor_as_collection_raises(operation, value):
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    with pytest.raises((TypeError, ValueError, StructureError), match="mapping|collections? of entries"):
        operation(td, value)


@pytest.mark.parametrize("value", [NonTensorData("x"), NonTensorStack("x", "y"), MetaData("x")])
def test_load_state_dict_keeps_names_of_non_tensor(value: Any) -> None:
    td = TensorDict({"v": value, "n": {"v": value}}, [2], names=["t"])
    td.load_state_dict(td.state_dict())
    assert td.get("v").names == td.get(("n", "v")).names == ["t"]
    assert td["v"] == td["n", "v"] == value.tolist()


@pytest.mark.parametrize("value", [NonTensorData("x"), NonTensorStack("x", "y"), MetaData("x")])
@pytest.mark.parametrize("flatten", [True, False])
def test_load_state_dict_keeps_device_of_non_tensor(value: Any, flatten: bool) -> None:
    td = TensorDict({"v": value, "n": {"v": value}}, [2], device="cpu")
    td.load_state_dict(td.state_dict(flatten=flatten))
    assert td.get("v").device == td.get(("n", "v")).device == torch.device("cpu")


def test_state_dict_empty_key_needs_flatten_false() -> None:
    td = TensorDict({"": "x", "a": torch.ones(2)})
    with pytest.raises(KeyError, match="two levels have the dotted key ''; use flatten=False"):
        td.state_dict()
    target = TensorDict({"": "y", "a": torch.zeros(2)})
    target.load_state_dict(td.state_dict(flatten=False))
    assert target[""] == "x"


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
def test_set_linked_list_into_own_entry_keeps_values(write: Any) -> None:
    td = write(TensorDict({"k": NonTensorStack("a", "b", "c")}, [3]))
    assert [td[i]["k"] for i in range(3)] == ["a", "b", "c"]


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
def test_write_to_view_with_added_dims_changes_value(show: Any, index: Any) -> None:
    td = TensorDict({"n": {"k": "a"}, "x": torch.zeros(())})
    view = show(td)
    view[index] = TensorDict({"n": {"k": "z"}, "x": 1.0}).expand(view[index].batch_size)
    assert (td["n", "k"], td["x"].item()) == ("z", 1)


@pytest.mark.parametrize(
    "index", [1, slice(0, 2), torch.tensor([True, False, True]), torch.tensor([0, 2]), ...]
)
@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_write_of_a_dict_into_values_names_non_tensor_data(kind: str, index: Any) -> None:
    rows = [TensorDict({"x": torch.zeros(()), "c": NonTensorData({"i": i})}) for i in range(3)]
    td = lazy_stack(rows) if kind == "lazy" else torch.stack(rows)
    with pytest.raises(
        StructureError, match=r"key 'c' at an index: .*a dict that is a value needs NonTensorData\(dict\)"
    ):
        td[index] = {"x": 1.0, "c": {"i": 5}}
    assert not td["x"].any() and td["c"] == [{"i": 0}, {"i": 1}, {"i": 2}]
    td[index] = {"x": 1.0, "c": NonTensorData({"i": 5})}
    assert td[2 if index is ... else index].get("x").all()
    with pytest.raises(
        StructureError, match=r"key 'c' in place: .*NonTensorData\(dict\) for a dict that is a value"
    ):
        td[0].update_({"c": {"i": 5}})
