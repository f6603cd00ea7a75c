"""Single entries: read, stored, written in place and removed; length and rows of a collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import NO_DEFAULT, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import (
    BatchSizeError,
    KeyPathError,
    KeyThroughLeafError,
    LockedError,
    StructureError,
)
from td_core.spi import RULES


def test_getitem_missing_key_error_suggests_closest_key():
    td = TensorDict({"observation": 1, "n": {"reward": 2}})
    with pytest.raises(
        KeyPathError, match="key 'observatoin' not found in TensorDict: did you mean 'observation'"
    ):
        td["observatoin"]
    with pytest.raises(KeyPathError, match="key 'rewrd' not found in key 'n'.*'reward'"):
        td["n", "rewrd"]
    with pytest.raises(KeyThroughLeafError, match="key 'observation' is a tensor, so it has no entry 'x'"):
        td["observation", "x"]
    assert td.get("nope") is None and td.get(("observation", "x"), 7) == 7


def test_set_invalid_value_leaves_collection_unchanged():
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(BatchSizeError, match=r"key \('x', 'y'\)"):
        td["x", "y"] = torch.zeros(2)
    with pytest.raises(KeyThroughLeafError):
        td["a", "b"] = torch.zeros(3)
    assert list(td.keys(True)) == ["a"]


def test_set_nested_extends_shorter_batch_size():
    td = TensorDict(
        {
            "long": TensorDict({"a": torch.zeros(3, 4)}, [3, 4]),
            "short": TensorDict({"b": {"c": torch.zeros(3)}}),
        },
        [3],
    )
    assert td["long"].batch_size == torch.Size([3, 4])
    assert td["short"].batch_size == td["short", "b"].batch_size == torch.Size([3])
    with pytest.raises(
        BatchSizeError, match=r"key 'x': the batch size \[3\] does not fit: key \('b', 'c'\) has shape \[2\]"
    ):
        td["x"] = TensorDict({"b": {"c": torch.zeros(2)}})


def test_len_bool_and_iter_follow_batch_size():
    assert len(TensorDict(batch_size=[3])) == 3
    with pytest.raises(RuntimeError, match="is ambiguous"):
        bool(TensorDict())
    with pytest.raises(RuntimeError, match="without batch dims"):
        iter(TensorDict())
    assert [int(row["a"]) for row in TensorDict({"a": torch.arange(3)}, [3])] == [0, 1, 2]


def test_set_inplace_tensor_over_node_raises():
    td = TensorDict({"a": {"b": torch.zeros(3)}}, [3])
    with pytest.raises(
        StructureError, match="cannot write key 'a' in place: it is a TensorDict, the value a Tensor"
    ):
        td.set_("a", torch.ones(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_set_strided_nested_tensor_stores_it():
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    td = TensorDict({"a": rows}, [2])
    td["b"] = rows
    assert td["a"] is rows
    assert td["b"] is rows


def test_iter_many_rows_keeps_order() -> None:
    td = TensorDict({"a": torch.arange(150), "n": {"b": torch.arange(150)}}, [150])
    assert [(int(row["a"]), int(row["n", "b"])) for row in td] == [(i, i) for i in range(150)]


def test_iterate_without_batch_dims_raises_naming_count_as_mapping():
    with pytest.raises(StructureError) as caught:
        iter(TensorDict(a=torch.ones(2)))
    assert str(caught.value) == (
        "cannot iterate over a TensorDict without batch dims; use keys(). A library that searches a batch for tensors finds "
        "them after td_core.count_as_mapping(); log() of Lightning also takes batch_size="
    )


def make_tree() -> TensorDict:
    return TensorDict({"a": torch.arange(2.0), "n": {"b": torch.ones(2, 3), "m": {}}}, [2])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_tree,
    "lazy": lambda: lazy_stack(list(make_tree().unbind(0))),
    "params": lambda: TensorDictParams(make_tree(), no_convert=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_get_each_kind_returns_entry_or_default(kind: str) -> None:
    td = KINDS[kind]()
    assert td.get("a").tolist() == td["a"].tolist() == td.get(("a",), 7).tolist() == [0, 1]
    assert torch.equal(td.get(("n", "b")), torch.ones(2, 3)) and td.get("n").batch_size == (2,)
    for key in ("z", ("n", "z"), ("z", "z"), ("a", "z")):
        assert td.get(key) is None
        assert td.get(key, 7) == td.get(key, default=7) == 7
        assert key not in td
        with pytest.raises(KeyError):
            td.get(key, NO_DEFAULT)
        with pytest.raises(KeyError):
            td[key]


def test_get_in_form_of_dense_entry_raises_or_pads() -> None:
    td = make_tree()
    with pytest.raises(TypeError, match=r"TensorDict.get\(\) takes no as_list: only lazy stacks do"):
        td.get("a", as_list=True)
    assert td.get("a", as_list=False) is td["a"]
    ragged = TensorDict(
        {"n": {"r": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}}, [2]
    )
    assert ragged.get(("n", "r"), as_padded_tensor=True, padding_value=5.0).tolist() == [[1, 5], [1, 1]]
    members = lazy_stack([TensorDict({"r": torch.ones(n)}) for n in (1, 2)])
    assert [row.tolist() for row in TensorDict({"s": members}).get(("s", "r"), as_list=True)] == [[1], [1, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_set_each_kind_stores_converted_value(kind: str) -> None:
    td = KINDS[kind]()
    assert td.set("new", [5, 6]) is td
    td["deep", "er", "x"] = torch.ones(2, 4)
    td["level"] = {"y": torch.zeros(2)}
    assert td["new"].tolist() == [5, 6]
    assert torch.equal(td["deep", "er", "x"], torch.ones(2, 4))
    assert [td.get(key).batch_size for key in ("deep", ("deep", "er"), "level")] == [(2,)] * 3
    with pytest.raises(BatchSizeError, match="key 'bad'"):
        td["bad"] = torch.zeros(3)
    assert "bad" not in td


def test_set_inplace_existing_entry_keeps_leaf() -> None:
    td = make_tree().lock_()
    held = td["n", "b"]
    assert td.set(("n", "b"), torch.full((2, 3), 4.0), inplace=True) is td
    assert td["n", "b"] is held and held.unique().tolist() == [4]
    with pytest.raises(LockedError, match="cannot set key 'new'"):
        td.set("new", torch.zeros(2), inplace=True)
    assert td.unlock_().set("new", torch.zeros(2), inplace=True)["new"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_set_underscore_each_kind_writes_into_leaf(kind: str) -> None:
    td = KINDS[kind]()
    assert td.lock_().set_("a", torch.tensor([7.0, 8.0])) is td
    assert td["a"].tolist() == [7, 8]
    with pytest.raises(RuntimeError, match="'b'"):
        td.set_(("n", "b"), torch.zeros(2, 4))
    with pytest.raises(KeyPathError, match="key 'z' not found"):
        td.set_("z", torch.zeros(2))
    assert torch.equal(td["n", "b"], torch.ones(2, 3))


def test_set_underscore_shape_error_names_key_and_both_shapes() -> None:
    with pytest.raises(StructureError, match=r"cannot write key \('n', 'b'\).*\[2, 3\].*\[2, 4\]"):
        make_tree().set_(("n", "b"), torch.zeros(2, 4))


def test_set_rows_of_uneven_stack_stores_one_per_member() -> None:
    stack = lazy_stack([TensorDict(), TensorDict()])
    stack["r"] = [torch.ones(1), torch.ones(2)]
    stack["n", "r"] = [torch.ones(2), torch.ones(1)]
    assert [[member["r"].tolist(), member["n", "r"].tolist()] for member in stack.tensordicts] == [
        [[1], [1, 1]],
        [[1, 1], [1]],
    ]
    stack.tensordicts[1].lock_()
    with pytest.raises(LockedError, match="cannot set key 'q'"):
        stack["q"] = [torch.ones(1), torch.ones(2)]
    assert "q" not in stack.tensordicts[0]


def test_popitem_removes_last_entry_first() -> None:
    td = make_tree().set("z", torch.zeros(2))
    assert [td.popitem()[0] for _ in range(3)] == ["z", "n", "a"]


def test_set_named_level_under_new_path_names_all_parents() -> None:
    td = TensorDict(batch_size=[2])
    td["x", "y", "z"] = TensorDict({"a": torch.zeros(2)}, [2], names=["time"])
    for node in (td, td["x"], td["x", "y"], td["x", "y", "z"]):
        assert node.names == ["time"]


def test_set_named_level_names_parents_unless_it_contradicts() -> None:
    td = TensorDict({"n": {}}, [2])
    td["n", "m"] = TensorDict({"x": torch.zeros(2)}, [2], names=["time"])
    assert td.names == td["n"].names == td["n", "m"].names == ["time"]
    with pytest.raises(StructureError, match="contradict those of its parent"):
        td["n", "q"] = TensorDict({"x": torch.zeros(2)}, [2], names=["env"])
    assert "q" not in td["n"]


@pytest.mark.parametrize("kind", KINDS)
def test_setdefault_stores_only_missing_entry(kind: str) -> None:
    td = KINDS[kind]()
    assert td.setdefault("a", torch.zeros(2)).tolist() == [0, 1]
    assert td.setdefault(("n", "q"), torch.ones(2)).tolist() == [1, 1]
    assert td["n", "q"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_remove_each_kind_removes_one_entry(kind: str) -> None:
    td = KINDS[kind]()
    assert td.pop(("n", "b")).shape == (2, 3)
    assert list(td.keys(True)) == ["a", "n", ("n", "m")]
    assert td.pop(("n", "b"), 7) == 7
    for call in (lambda: td.pop(("n", "b")), lambda: td.del_(("n", "b")), lambda: td.pop("z")):
        with pytest.raises(KeyPathError, match="not found"):
            call()
    del td["n", "m"]
    assert td.del_("a") is td and list(td.keys(True)) == ["n"]
    key, level = td.popitem()
    assert (key, level.batch_size, td.is_empty()) == ("n", (2,), True)
    with pytest.raises(KeyPathError, match="is empty"):
        td.popitem()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "remove",
    [lambda td: td.pop("a"), lambda td: td.del_(("n", "b")), lambda td: td.popitem(), lambda td: td.clear()],
    ids=["pop", "del_", "popitem", "clear"],
)
def test_remove_from_locked_collection_removes_nothing(kind: str, remove: Callable[[Any], Any]) -> None:
    td = KINDS[kind]().lock_()
    with pytest.raises(LockedError):
        remove(td)
    assert set(td.keys(True)) == {"a", "n", ("n", "b"), ("n", "m")}
    remove(td.unlock_())
    assert len(list(td.keys(True))) < 4


def test_pop_entry_of_some_members_returns_list() -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": 1, "b": 2}), TensorDict({"a": 3}))
    first, second = stack.clone().pop("b")
    assert first.item() == 2 and second is None
    assert [float(part) for part in stack.pop("b", 5)] == [2, 5]
    assert stack.pop("b", 7) == 7
    assert (
        list(stack.clear().keys()) == [] and [member.is_empty() for member in stack.tensordicts] == [True] * 2
    )


def test_create_nested_returns_collection_with_empty_levels() -> None:
    td = TensorDict(batch_size=[2], device="cpu")
    assert td.create_nested(("x", "y")) is td
    assert td["x", "y"].is_empty() and td["x", "y"].batch_size == (2,)
    assert td["x"].device == torch.device("cpu")


@pytest.mark.parametrize("count", [0, 1, 64, 65, 130])
def test_iterate_yields_every_row_in_order(count: int) -> None:
    td = TensorDict({"a": torch.arange(count), "n": {"b": torch.arange(count) * 2}}, [count])
    rows = list(td)
    assert [row["a"].item() for row in rows] == list(range(count))
    assert [row["n", "b"].item() for row in reversed(td)] == [2 * i for i in reversed(range(count))]
    assert all(row.batch_size == () for row in rows)


def test_bool_of_collection_raises_with_its_class() -> None:
    for td in (make_tree(), KINDS["lazy"]()):
        with pytest.raises(StructureError, match=rf"the truth value of a {type(td).__name__} is ambiguous"):
            bool(td)


@pytest.mark.parametrize("index", [0, slice(None), torch.tensor([True])], ids=["int", "slice", "mask"])
def test_delete_index_raises(index: Any) -> None:
    td = make_tree()
    with pytest.raises(KeyPathError, match="only keys can be deleted, not the index"):
        del td[index]
    assert set(td.keys()) == {"a", "n"}


@pytest.mark.parametrize("form", [{"as_list": True}, {"as_nested_tensor": True}, {"as_padded_tensor": True}])
def test_get_form_of_even_entry_in_program_of_tensordict_returns_entry(
    form: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    td = TensorDict(a=torch.arange(2), n={"b": torch.ones(2)}, batch_size=[2])
    for node, key, expected in (
        (td, "a", td["a"]),
        (td, ("n", "b"), td["n", "b"]),
        (td["n"], "b", td["n", "b"]),
    ):
        assert node.get(key, **form) is expected
    assert td.get("z", 5, **form) == 5
