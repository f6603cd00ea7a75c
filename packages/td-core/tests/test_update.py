"""update, update_, writing at an index, filling: values, order, and that a refused write changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import (
    BatchSizeError,
    CollectionIndexError,
    KeyPathError,
    KeyThroughLeafError,
    LockedError,
    StructureError,
)


def dense() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, batch_size=[3]
    )


def lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*[dense()[i].clone() for i in range(3)])


KINDS: dict[str, Callable[[], Any]] = {"dense": dense, "lazy": lazy}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def td(request: pytest.FixtureRequest) -> Any:
    return request.param()


def snapshot(node: Any) -> dict[Any, Tensor]:
    return {key: value.clone() for key, value in node.items(True, True)}


def assert_same(node: Any, before: dict[Any, Tensor]) -> None:
    after = snapshot(node)
    assert list(after) == list(before)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=0)


class TestUpdate:
    @pytest.mark.parametrize(
        ("source", "keys"),
        [
            ({"a": torch.ones(3)}, ["a", ("b", "c"), ("b", "d")]),
            ({"b": {"n": torch.ones(3)}}, ["a", ("b", "c"), ("b", "d"), ("b", "n")]),
            ({("b", "n"): torch.ones(3)}, ["a", ("b", "c"), ("b", "d"), ("b", "n")]),
            ({("q", "r", "s"): torch.ones(3)}, ["a", ("b", "c"), ("b", "d"), ("q", "r", "s")]),
            ({"b": torch.ones(3)}, ["a", "b"]),
            ({"a": {"q": torch.ones(3)}}, [("a", "q"), ("b", "c"), ("b", "d")]),
            (TensorDict({"b": {"n": torch.ones(3)}}, [3]), ["a", ("b", "c"), ("b", "d"), ("b", "n")]),
            (None, ["a", ("b", "c"), ("b", "d")]),
            ({}, ["a", ("b", "c"), ("b", "d")]),
        ],
    )
    def test_update_merges_nodes(self, td: Any, source: Any, keys: list[Any]) -> None:
        assert td.update(source) is td
        assert list(td.keys(True, True)) == keys

    def test_update_stores_source_leaves(self) -> None:
        td, source = dense(), dense()
        td.update(source)
        assert td["a"] is source["a"]
        assert td["b", "c"] is source["b", "c"]
        assert td["b"] is not source["b"]

    def test_update_clone_stores_copies(self) -> None:
        td, source = dense(), dense()
        td.update(source, clone=True)
        assert td["a"] is not source["a"]
        td.update({"n": source["b"]}, clone=True)
        assert td["n", "c"] is not source["b", "c"]

    def test_update_inplace_keeps_dtype_of_leaves(self, td: Any) -> None:
        td.update({"a": torch.full((3, 2), 9.0), "n": torch.ones(3)}, inplace=True)
        assert td["a"].dtype == torch.int64
        assert td["a"].tolist() == [[9, 9]] * 3
        assert td["n"].tolist() == [1.0] * 3

    def test_update_keywords_are_entries(self, td: Any) -> None:
        td.update({"a": torch.zeros(3)}, x=torch.ones(3))
        assert td["a"].tolist() == [0.0] * 3
        assert td["x"].tolist() == [1.0] * 3

    @pytest.mark.parametrize(
        ("keys", "changed"),
        [
            (["a"], ["a"]),
            ([("b", "c")], [("b", "c")]),
            (["b"], [("b", "c"), ("b", "d")]),
            ([], []),
            (["zz"], []),
            ([("a", "zz")], []),
            ([("a", "zz"), ("b", "c", "zz"), ("b", "d")], [("b", "d")]),
        ],
    )
    def test_update_keys_to_update_changes_only_these(
        self, td: Any, keys: list[Any], changed: list[Any]
    ) -> None:
        before = snapshot(td)
        td.update(
            {"a": torch.full((3,), 5.0), "b": {"c": torch.full((3,), 5.0), "d": torch.full((3,), 5.0)}},
            keys_to_update=keys,
        )
        for key, value in before.items():
            new = td.get(key)
            assert (new.shape == value.shape and bool((new == value).all())) != (key in changed)

    def test_update_single_key_to_update_raises(self) -> None:
        with pytest.raises(TypeError, match="a sequence of keys; got the single key 'a'"):
            dense().update({"a": torch.ones(3)}, keys_to_update="a")

    def test_update_is_leaf_replaces_node(self) -> None:
        td, source = dense(), TensorDict({"b": {"e": torch.zeros(3)}}, [3])
        td.update(source, is_leaf=lambda cls: True)
        assert list(td.keys(True, True)) == ["a", ("b", "e")]

    def test_replace_accepts_any_keyword_as_key(self) -> None:
        td = TensorDict({"a": 1})
        result = td.replace(clone=2, inplace=3)
        assert list(result.keys()) == ["a", "clone", "inplace"] and list(td.keys()) == ["a"]

    def test_update_batch_size_takes_that_of_source(self) -> None:
        td = TensorDict({"a": torch.zeros(4, 2)}, [4])
        td.update(TensorDict({"a": torch.zeros(3)}, [3]), update_batch_size=True)
        assert td.batch_size == torch.Size([3])
        assert td["a"].shape == torch.Size([3])

    def test_update_batch_size_mismatch_changes_nothing(self) -> None:
        td = dense()
        before = snapshot(td)
        with pytest.raises(
            BatchSizeError, match=r"\[4\] of the source does not fit: key 'b' is not updated and has \[3\]"
        ):
            td.update(TensorDict({"a": torch.zeros(4)}, [4]), update_batch_size=True)
        assert_same(td, before)

    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("join", [TensorDict.stack, TensorDict.lazy_stack], ids=["dense", "lazy"])
    def test_update_lazy_stack_other_length_copies_members(self, count: int, dim: int, join: Any) -> None:
        items = [TensorDict({"a": torch.full((2,), float(i))}, [2]) for i in range(count)]
        source = join(items, dim)
        td = LazyStackedTensorDict(items[0].clone(), items[0].clone(), stack_dim=dim)
        outer = TensorDict({"n": td.clone()}, td.batch_size)
        assert td.update(source, update_batch_size=True) is td
        outer.update(TensorDict({"n": source}, source.batch_size), update_batch_size=True)
        for stack in (td, outer["n"]):
            assert stack.batch_size == source.batch_size
            assert stack["a"].tolist() == source["a"].tolist()
            stack["b"] = torch.zeros(stack.batch_size)
        assert "b" not in source.keys()
        assert outer.batch_size == source.batch_size

    def test_update_lazy_stack_losing_entries_raises(self) -> None:
        td = LazyStackedTensorDict(TensorDict({"a": 0}), TensorDict({"a": 1, "b": 2}))
        source = LazyStackedTensorDict(*[TensorDict({"a": i}) for i in range(3)])
        for arguments in ({}, {"inplace": True}, {"keys_to_update": ["a"]}):
            with pytest.raises(
                BatchSizeError, match=r"lazy stack of 2 along dim 0 .* missing there: \['b'\]"
            ):
                td.update(source, update_batch_size=True, **arguments)
        assert td.batch_size == torch.Size([2])
        td[1].del_("b")
        with pytest.raises(LockedError):
            td.lock_().update(source, update_batch_size=True)

    def test_update_ignore_lock_stays_locked(self) -> None:
        td = dense().lock_()
        td.update({"n": {"x": torch.ones(3)}}, ignore_lock=True)
        assert td.is_locked
        assert td["n"].is_locked

    def test_update_moves_values_to_device(self) -> None:
        td = TensorDict(device="meta").update({"a": torch.zeros(1), "b": {"c": torch.zeros(1)}})
        assert td["a"].device.type == td["b", "c"].device.type == "meta"

    @pytest.mark.parametrize(
        ("source", "error", "message"),
        [
            ({"a": torch.full((3, 2), 9), "q": torch.zeros(4)}, BatchSizeError, r"key 'q' has shape \[4\]"),
            (
                {"q": torch.ones(3), "b": {"c": torch.ones(2)}},
                BatchSizeError,
                r"key \('b', 'c'\) has shape \[2\]",
            ),
            (
                {"q": torch.ones(3), ("a", "x"): torch.ones(3)},
                KeyThroughLeafError,
                "key 'a' is not a collection",
            ),
            ({"q": torch.ones(3), 3: torch.ones(3)}, KeyPathError, "a key is a string"),
            (5, TypeError, "from a mapping or a collection of entries; got int"),
        ],
    )
    def test_update_bad_source_changes_nothing(self, td: Any, source: Any, error: type, message: str) -> None:
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td.update(source)
        assert_same(td, before)

    def test_update_with_itself_as_entry_raises(self) -> None:
        td = dense()
        with pytest.raises(StructureError, match="contains the collection it is set into"):
            td.update({"n": td})

    def test_update_locked_raises_for_new_entries(self, td: Any) -> None:
        td.lock_()
        with pytest.raises(LockedError, match=r"cannot update: the .* is locked"):
            td.update({})
        with pytest.raises(LockedError, match="cannot set key 'q'"):
            td.update({"q": torch.ones(3)}, inplace=True)
        td.update({"a": torch.ones(3, 2)}, inplace=True)
        assert td["a"].sum() == 6

    def test_update_lazy_stack_updates_each_member(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        stack.update(
            LazyStackedTensorDict(*[TensorDict({"a": torch.ones(n), "b": torch.ones(n)}) for n in (3, 4)])
        )
        assert [member["a"].shape[0] for member in stack.tensordicts] == [3, 4]
        with pytest.raises(
            BatchSizeError, match="a lazy stack of 2 along dim 0, the source has batch size \\[3\\]"
        ):
            stack.update(TensorDict(batch_size=[3]))


class TestUpdateInPlace:
    def test_update_inplace_locked_writes_leaves(self, td: Any) -> None:
        td.lock_()
        assert td.update_({"a": 7, "b": {"c": torch.full((3,), 2.0)}}) is td
        assert td["a"].tolist() == [[7, 7]] * 3
        assert td["b", "c"].tolist() == [2.0] * 3

    def test_update_inplace_keeps_leaf_objects(self) -> None:
        td = dense()
        leaf = td["a"]
        td.update_(dense().apply(lambda x: x + 1))
        assert td["a"] is leaf
        assert leaf[0, 0] == 1

    @pytest.mark.parametrize(
        ("source", "error", "message"),
        [
            ({"a": torch.ones(3, 2), "zz": torch.ones(3)}, KeyPathError, "key 'zz' not found"),
            (
                {"a": torch.ones(3, 2), "b": {"zz": torch.ones(3)}},
                KeyPathError,
                "key 'zz' not found in key 'b'",
            ),
            (
                {"b": {"c": torch.ones(3)}, "a": torch.ones(3, 5)},
                StructureError,
                r"shape \[3, 2\] there, the value \[3, 5\]",
            ),
            (
                {"b": {"c": torch.ones(3)}, "a": {"x": torch.ones(3)}},
                StructureError,
                "key 'a' in place: it is a Tensor",
            ),
            ({"a": torch.ones(3, 2), "b": torch.ones(3)}, StructureError, "key 'b' in place"),
        ],
    )
    def test_update_inplace_bad_source_changes_nothing(self, source: Any, error: type, message: str) -> None:
        td = dense()
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td.update_(source)
        assert_same(td, before)

    def test_update_inplace_leaf_requiring_grad_raises(self) -> None:
        td = TensorDict({"a": torch.zeros(1), "w": torch.zeros(1, requires_grad=True)})
        with pytest.raises(StructureError, match="key 'w' in place: it is a leaf that requires grad"):
            td.update_({"a": 1, "w": 1})
        assert td["a"] == 0
        with torch.no_grad():
            td.update_({"a": 1, "w": 1})
        assert td["w"] == 1

    def test_copy_writes_all_leaves(self, td: Any) -> None:
        td.copy_(dense().apply(torch.zeros_like))
        assert all(not value.any() for value in td.values(True, True))

    def test_update_inplace_uneven_members_writes_each(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        stack.update_(stack.apply(lambda x: x + 1))
        assert [member["a"].tolist() for member in stack.tensordicts] == [[1.0], [1.0, 1.0]]


INDICES: list[Any] = [
    0,
    -1,
    slice(0, 2),
    slice(None, None, 2),
    ...,
    None,
    (),
    [0, 2],
    range(2),
    torch.tensor([2, 0]),
    torch.tensor([True, False, True]),
    np.array([1, 2]),
    (slice(1, None), None),
]


SHORT: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "set_": lambda td, key, value: td.set_(key, value),
    "set": lambda td, key, value: td.set(key, value, inplace=True),
    "update_": lambda td, key, value: td.update_({key: value}),
    "update": lambda td, key, value: td.update({key: value}, inplace=True),
    "copy_": lambda td, key, value: td.copy_(TensorDict().set(key, value).auto_batch_size_(2)),
    "index": lambda td, key, value: td.__setitem__(..., TensorDict().set(key, value).auto_batch_size_(2)),
}


class TestValuesOfFewerDims:
    # As many elements in the last dim as in the batch dims: torch alone would line the value up with the wrong ones.
    @pytest.mark.parametrize("key", ["a", ("n", "a")])
    @pytest.mark.parametrize("stack_dim", [None, 0, 1])
    @pytest.mark.parametrize("write", SHORT.values(), ids=SHORT)
    def test_write_fewer_dims_aligns_batch_dims(self, write: Any, stack_dim: Any, key: Any) -> None:
        td: Any = TensorDict({"a": torch.zeros(3, 3, 3), "n": {"a": torch.zeros(3, 3, 3)}}, [3, 3])
        if stack_dim is not None:
            td = LazyStackedTensorDict(*td.unbind(stack_dim), stack_dim=stack_dim)
        value = torch.arange(9.0).view(3, 3)
        write(td, key, value)
        assert torch.equal(td[key], value[..., None].expand(3, 3, 3))

    @pytest.mark.parametrize("write", SHORT.values(), ids=SHORT)
    def test_write_bad_member_writes_nothing(self, write: Any) -> None:
        first, last = TensorDict({"a": torch.zeros(3, 2)}, [3]), TensorDict({"a": torch.zeros(3, 5)}, [3])
        with pytest.raises(StructureError, match=r"key 'a' in place: it has shape \[3, 5\] there"):
            write(LazyStackedTensorDict(first, last), "a", torch.ones(2, 3, 2))
        assert not first["a"].any()


def without_autograd() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, source: td.update_(source),
    "update_ from a mapping": lambda td, source: td.update_(source.to_dict()),
    "update": lambda td, source: td.update(source, inplace=True),
    "a number at an index": lambda td, source: td.__setitem__(slice(0, 2), 1),
    "a mapping at an index": lambda td, source: td.__setitem__(0, source[0].to_dict()),
    "a collection at an index": lambda td, source: td.__setitem__(0, source[0]),
    "a number at positions": lambda td, source: td.__setitem__([0, 1], 1),
    "a collection at positions": lambda td, source: td.__setitem__([0, 1], source[[0, 1]]),
    "apply_": lambda td, source: td.apply_(lambda leaf: torch.ones(3)),
    "add_": lambda td, source: td.add_(source),
    "masked_fill_": lambda td, source: td.masked_fill_(torch.ones(3, dtype=torch.bool), 1),
}
REFUSED_BY_TORCH: dict[str, Callable[[], Tensor]] = {
    "inference": without_autograd,
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "leaf that requires grad": lambda: torch.zeros(3, requires_grad=True),
    "view of a leaf that requires grad": lambda: torch.zeros(6, requires_grad=True)[:3],
}


ONE, TWO = torch.ones(3), torch.full((3,), 2.0)


@pytest.mark.parametrize(
    "source",
    [
        {("n", "b"): ONE, ("n", "c"): TWO, "a": TWO},
        {("n", "b"): ONE, "n": {"b": TWO}},
        {"n": {"b": TWO}, ("n", "b"): ONE},
        {("n", "new"): ONE, ("m", "b"): TWO},
        {("n", "m", "b"): ONE, ("n", "m"): {"b": TWO}},
        {("n", ("m", "b")): ONE, ("n", "m"): {"b": TWO}},
        {("n", ("b",)): ONE, ("n", "b"): TWO},
    ],
    ids=str,
)
def test_update_nested_keys_applies_in_order(source: Any) -> None:
    td, expected = [TensorDict({"a": ONE, "n": {"b": ONE * 0, "m": {"b": ONE}}}, [3]) for _ in range(2)]
    for key, value in source.items():
        expected.update({key: value})
    assert dict(td.update(source).items(True, True)).keys() == dict(expected.items(True, True)).keys()
    assert (td == expected).all()
    written, expected = td.apply(torch.zeros_like), td.apply(torch.zeros_like)
    for key, value in source.items():
        expected.update_({key: value})
    assert (written.update_(source) == expected).all()


class TestAssign:
    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_setitem_equals_torch(self, index: Any) -> None:
        td = dense()
        value = dense()[index].apply(lambda leaf: leaf + 10)
        expected = snapshot(td)
        for key, leaf in expected.items():
            leaf[index] = value.get(key)
        td[index] = value
        assert_same(td, expected)

    @pytest.mark.parametrize("index", INDICES, ids=str)
    @pytest.mark.parametrize("number", [7, 2.0, True, torch.tensor(5), np.array(3.0)])
    def test_setitem_number_fills_index(self, index: Any, number: Any) -> None:
        td = dense()
        expected = snapshot(td)
        for leaf in expected.values():
            leaf[index] = number if isinstance(number, float) else int(number)
        td[index] = number
        assert_same(td, expected)

    def test_setitem_mapping_writes_only_its_keys(self, td: Any) -> None:
        before = snapshot(td)
        td[0] = {"b": {"c": torch.tensor(8.0)}, ("b", "d"): torch.full((4,), 3.0)}
        before["b", "c"][0] = 8
        before["b", "d"][0] = 3
        assert_same(td, before)

    @pytest.mark.parametrize("size", [[], [1], [2]])
    def test_setitem_broadcasts_batch_size_of_value(self, td: Any, size: list[int]) -> None:
        td[0:2] = TensorDict({"b": {"d": torch.full((*size, 4), 9.0)}}, size)
        assert td["b", "d"].sum(-1).tolist() == [36, 36, 0]

    @pytest.mark.parametrize("index", [1, slice(0, 2), [0, 2], torch.tensor([True, False, True])], ids=str)
    @pytest.mark.parametrize(
        "make",
        [
            lambda: TensorDict(batch_size=[3]),
            lambda: TensorDict(a=torch.zeros(3, 4), n=TensorDict(b=torch.zeros(3, 4)), batch_size=[3]),
            lambda: lazy_stack([TensorDict(a=torch.zeros(4), n={"b": torch.zeros(4)}) for _ in range(3)]),
        ],
        ids=["empty", "dense", "lazy"],
    )
    def test_setitem_accepts_value_with_more_batch_dims(self, make: Any, index: Any) -> None:
        td = make()
        expected = torch.zeros(3, 4)
        expected[index] = 2
        value = torch.full((*torch.zeros(3)[index].shape, 4), 2.0)
        td[index] = TensorDict(a=value, n=TensorDict(b=value, batch_size=value.shape), batch_size=value.shape)
        assert td.batch_size == (3,)
        assert torch.equal(td["a"], expected)
        assert torch.equal(td["n", "b"], expected)

    def test_setitem_casts_to_dtype_of_leaf(self, td: Any) -> None:
        td[torch.tensor([0, 2])] = {"a": torch.full((2, 2), 1.7)}
        assert td["a"].tolist() == [[1, 1], [2, 3], [1, 1]]

    @pytest.mark.parametrize(
        "indices", [[0], [1, 0], [(slice(None), 0), (2, 1)], [torch.tensor([True, False, True]), 1]], ids=str
    )
    def test_setitem_new_keys_are_zero_elsewhere(self, indices: list[Any]) -> None:
        td = TensorDict(batch_size=[3, 2])
        expected = {
            "a": torch.zeros(3, 2, 5),
            ("n", "b"): torch.zeros(3, 2, dtype=torch.int64),
            ("agents", "x"): torch.zeros(3, 2, 4, 6),
        }
        for step, index in enumerate(indices, 1):
            size = torch.zeros(3, 2)[index].shape
            value = TensorDict(
                {"a": torch.full((*size, 5), step), "n": {"b": torch.full(size, step)}}, size
            ).float()
            value["n", "b"] = value["n", "b"].long()
            value["agents"] = TensorDict({"x": torch.full((*size, 4, 6), float(step))}, [*size, 4])
            td[index] = value
            for leaf in expected.values():
                leaf[index] = step
        assert td["n"].batch_size == torch.Size([3, 2])
        assert td["agents"].batch_size == torch.Size([3, 2, 4])
        assert_same(td, expected)
        td[0] = {"agents": {"y": torch.ones(2, 4, 3)}}
        assert td["agents", "y"].shape == torch.Size([3, 2, 4, 3])
        with pytest.raises(BatchSizeError, match=r"key \('agents', 'z'\) has shape \[2\], .* size \[2, 4\]"):
            td[0] = {"agents": {"z": torch.ones(2)}}
        td[1] = {"new": {"level": torch.ones(2)}}
        assert td["new", "level"].tolist() == [[0, 0], [1, 1], [0, 0]]

    def test_setitem_locked_new_key_raises(self) -> None:
        td = dense().lock_()
        before = snapshot(td)
        with pytest.raises(LockedError, match="cannot make key 'q'"):
            td[0] = {"a": torch.ones(2), "q": torch.ones(1)}
        assert_same(td, before)
        td[0] = dense()[1]
        assert td["a"][0].tolist() == [2, 3]

    @pytest.mark.parametrize(
        ("index", "value", "error", "message"),
        [
            (5, 0, CollectionIndexError, "index 5 is out of bounds"),
            ((0, 0), 0, CollectionIndexError, "too many indices"),
            (0, "x", StructureError, "a collection of entries, a mapping or a number at an index; got 'x'"),
            (0, None, StructureError, "got None"),
            (slice(0, 2), [TensorDict(), TensorDict()], StructureError, r"got a list of 2: stack\(\)"),
            (slice(None), torch.ones(3), StructureError, r"got a tensor of shape \[3\]"),
            (
                slice(0, 2),
                TensorDict({"a": torch.ones(3, 2)}, [3]),
                BatchSizeError,
                r"\[3\], which does not broadcast to that of the indexed collection, \[2\]",
            ),
            (
                0,
                {"b": {"c": torch.ones(())}, "a": torch.ones(3)},
                StructureError,
                r"key 'a' in place: .*\[2\] there, the value \[3\]",
            ),
            (0, 1j, StructureError, "key 'a' at an index: .*complex"),
            (
                0,
                {"b": {"c": torch.ones(())}, "a": {"x": torch.ones(2)}},
                StructureError,
                "key 'a' at an index: it is a tensor",
            ),
            (
                0,
                {"a": torch.ones(2), "b": torch.ones(2)},
                StructureError,
                "key 'b' at an index: it is a TensorDict",
            ),
        ],
    )
    def test_setitem_bad_value_changes_nothing(
        self, td: Any, index: Any, value: Any, error: type, message: str
    ) -> None:
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td[index] = value
        assert_same(td, before)

    @pytest.mark.parametrize("index", [slice(None), [0, 1], torch.tensor([True, True])], ids=str)
    @pytest.mark.parametrize(
        ("last", "value", "error", "message"),
        [
            ({"a": torch.zeros(2)}, {"a": torch.ones(2, 3)}, StructureError, r"\[2\] there, the value \[3\]"),
            ({"a": torch.zeros(3, requires_grad=True)}, 1, StructureError, "requires grad"),
            ({"a": torch.zeros(1).expand(3)}, {"a": torch.ones(2, 3)}, StructureError, "it is expanded"),
            ({"a": {"x": torch.zeros(3)}}, {"a": torch.ones(2, 3)}, StructureError, "it is a TensorDict"),
            ({"a": torch.zeros(3)}, {"new": torch.ones(2)}, LockedError, "cannot make key 'new'"),
        ],
    )
    def test_setitem_bad_member_writes_nothing(
        self, index: Any, last: Any, value: Any, error: type, message: str
    ) -> None:
        first = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)})
        stack = LazyStackedTensorDict(first, TensorDict(last).lock_())
        for root in (stack, TensorDict({"n": stack}, [2])):
            with pytest.raises(error, match=message):
                root[index] = value if root is stack or value == 1 else {"n": value}
            assert list(first.keys()) == ["a", "b"]
            assert not first["a"].any()

    @pytest.mark.parametrize("index", INDICES, ids=str)
    @pytest.mark.parametrize("as_number", [True, False])
    def test_setitem_nested_lazy_stack_equals_torch(self, index: Any, as_number: bool) -> None:
        # As many members as elements: nothing but the order of the dims tells one from the other.
        members = [TensorDict({"a": torch.arange(3) + 3 * i}, [3]) for i in range(3)]
        td = TensorDict({"n": LazyStackedTensorDict(*members)}, [3])
        expected = td["n", "a"].clone()
        expected[index] = 50
        td[index] = 50 if as_number else td[index].apply(lambda leaf: torch.full_like(leaf, 50))
        assert td["n", "a"].tolist() == expected.tolist()
        assert td["n"].tensordicts[0] is members[0]

    @pytest.mark.parametrize(
        "write",
        [
            lambda td: td.update_({"a": 1, "w": torch.ones(3)}),
            lambda td: td.update_(TensorDict({"a": torch.ones(3), "w": torch.ones(3)}, [3])),
            lambda td: td.apply_(lambda leaf: torch.ones(3)),
            lambda td: td.__setitem__(slice(0, 2), 1),
            lambda td: td.__setitem__(slice(0, 2), td[0:2] + 1),
        ],
    )
    def test_write_expanded_leaf_writes_nothing(self, write: Any) -> None:
        td = TensorDict({"a": torch.zeros(3), "w": torch.zeros(1).expand(3)}, batch_size=[3])
        with pytest.raises(StructureError, match="key 'w' in place: it is expanded"):
            write(td)
        assert not td["a"].any()

    @pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
    @pytest.mark.parametrize("make", REFUSED_BY_TORCH.values(), ids=REFUSED_BY_TORCH)
    @pytest.mark.parametrize("before", [0, 4])
    def test_write_unwritable_leaf_writes_nothing(self, before: int, make: Any, write: Any) -> None:
        source = TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
        # What leaves look like that were written before is known.
        for _ in range(before):
            write(source.clone(), source)
        with pytest.raises(RuntimeError, match=r"key \('n', 'w'\)"):
            write(TensorDict({"a": (first := torch.zeros(3)), "n": {"w": make()}}, [3]), source)
        assert not first.any()

    @pytest.mark.parametrize(
        "name", ["update_", "a collection at an index", "a collection at positions", "add_"]
    )
    def test_write_rechecks_values_of_other_metadata(self, name: str) -> None:
        write, source = IN_PLACE[name], TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
        for _ in range(4):
            write(source.clone(), source)
        expected, td = source.clone().zero_(), source.clone().zero_()
        write(expected, source)
        write(td, TensorDict({"a": torch.ones(3, dtype=torch.int64), "n": {"w": torch.ones(6)[::2]}}, [3]))
        assert (td == expected).all()
        td.zero_()
        with pytest.raises(RuntimeError, match=r"\('n', 'w'\)"):
            write(td, TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3, 2)}}, [3]))
        assert not td["a"].any()

    @pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
    @pytest.mark.parametrize("before", [0, 4])
    def test_write_inference_leaf_outside_mode_raises(self, before: int, write: Any) -> None:
        source = TensorDict({"a": torch.ones(3), "n": {"w": torch.ones(3)}}, [3])
        for _ in range(before):
            write(source.clone(), source)
        with torch.inference_mode():
            td = source.clone().zero_()
            for _ in range(before):
                write(td, source)
            td.zero_()
        with pytest.raises(StructureError, match="it was made under torch.inference_mode"):
            write(td, source)
        assert not td["a"].any() and not td["n", "w"].any()
        with torch.inference_mode():
            write(td, source)
        assert td["a"].any() and td["n", "w"].any()

    @pytest.mark.parametrize("index", [[2, 0], torch.tensor([True, False, True]), slice(0, 3, 2)], ids=str)
    def test_setitem_casts_each_value_to_its_leaf(self, index: Any) -> None:
        td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, dtype=torch.int64)}}, [3])
        td[index] = TensorDict({"a": torch.ones(2), "n": {"b": torch.tensor([2.5, 3.5])}}, [2])
        expected = torch.zeros(3, dtype=torch.int64)
        expected[index] = torch.tensor([2, 3])
        assert td["n", "b"].tolist() == expected.tolist()
        assert td["a"].tolist() == [1, 0, 1]

    def test_setitem_number_overflow_writes_nothing(self) -> None:
        td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.uint8)}, batch_size=[3])
        with pytest.raises(StructureError, match="key 'b' at an index: .*overflow"):
            td[0] = 300
        assert not td["a"].any()

    @given(st.lists(st.integers(-4, 3), min_size=1, max_size=5), st.booleans())
    def test_setitem_repeated_writes_equal_torch(self, positions: list[int], new: bool) -> None:
        td = TensorDict(batch_size=[4]) if new else TensorDict({"a": torch.zeros(4)}, [4])
        expected = torch.zeros(4)
        for step, at in enumerate(positions, 1):
            td[at] = {"a": torch.tensor(float(step))}
            expected[at] = step
        assert td["a"].tolist() == expected.tolist()


class TestEntriesAtAnIndex:
    def test_set_at_indexes_feature_dims(self, td: Any) -> None:
        td.set_at_("a", 5, (0, 1))
        assert td["a"].tolist() == [[0, 5], [2, 3], [4, 5]]

    def test_set_at_node_writes_its_leaves(self, td: Any) -> None:
        td.set_at_("b", {"c": torch.tensor(4.0)}, 0)
        assert td["b", "c"].tolist() == [4.0, 1.0, 1.0]

    def test_set_at_missing_key_raises(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.set_at_("zz", 1, 0)

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has notes from Python 3.11 on")
    @pytest.mark.parametrize(
        ("key", "do"),
        [
            ("b", lambda td: td.set_at_("b", {"c": torch.ones(7)}, 0)),
            ("b", lambda td: td.get_at("b", 9)),
            (("b", "c"), lambda td: td.get_at(("b", "c"), 9)),
            (("b", "e"), lambda td: td.stack_tensors("a", ("b", "c"), out_key=("b", "e"))),
            (("b", "e"), lambda td: td.cat_tensors("a", ("b", "c"), out_key=("b", "e"))),
        ],
    )
    def test_entry_errors_note_key(self, td: Any, key: Any, do: Any) -> None:
        with pytest.raises((StructureError, IndexError, RuntimeError)) as caught:
            do(td)
        assert caught.value.__notes__ == [f"at key {key!r}"]

    def test_get_at_returns_indexed_entry_or_default(self, td: Any) -> None:
        assert td.get_at("a", (0, 1)) == 1
        assert td.get_at("b", 0).batch_size == torch.Size([])
        assert td.get_at("zz", 0) is None
        assert td.get_at("zz", 0, default=3) == td.get_at("zz", 0, 3) == 3

    def test_update_at_new_key_changes_nothing(self) -> None:
        td = dense()
        before = snapshot(td)
        with pytest.raises(KeyPathError, match="key 'zz' not found in key 'b'"):
            td.update_at_({"a": torch.ones(2), "b": {"zz": torch.ones(())}}, 0)
        assert_same(td, before)

    def test_update_at_and_copy_at_write_index(self, td: Any) -> None:
        td.update_at_({"a": torch.ones(2), "b": {"c": torch.tensor(5.0)}}, 0, keys_to_update=["a"])
        assert td["a"][0].tolist() == [1, 1]
        assert td["b", "c"][0] == 1
        td.copy_at_(dense()[2], slice(0, 2))
        assert td["a"].tolist() == [[4, 5]] * 3


class TestFill:
    def test_fill_and_zero_write_all_leaves(self, td: Any) -> None:
        assert td.fill_("a", 3) is td
        assert td["a"].tolist() == [[3, 3]] * 3
        td.fill_("b", 2)
        assert td["b", "d"].sum() == 24
        td.fill_(("b", "c"), 5)
        assert td["b", "c"].tolist() == [5.0] * 3
        assert td.zero_() is td
        assert all(not value.any() for value in td.values(True, True))

    def test_fill_missing_key_raises(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.fill_("zz", 1)


class TestReplace:
    def test_replace_keeps_original(self, td: Any) -> None:
        before = snapshot(td)
        new = td.replace({"b": {"c": torch.zeros(3)}}, x=torch.ones(3))
        assert_same(td, before)
        assert new["b", "c"].tolist() == [0.0] * 3
        assert list(new.keys()) == ["a", "b", "x"]

    def test_replace_without_entries_returns_self(self) -> None:
        td = dense()
        assert td.replace() is td
        assert td.replace({}) is td


def test_update_deep_tree_does_not_recurse() -> None:
    def deep() -> TensorDict:
        td = TensorDict({"x": torch.zeros(2)}, [2])
        for _ in range(2000):
            td = TensorDict({"k": td}, [2])
        return td

    path = ("k",) * 2000 + ("x",)
    td = deep().update(deep().apply(lambda leaf: leaf + 1))
    assert td[path].tolist() == [1.0, 1.0]
    td.update_(deep())
    td[0] = deep()[1].apply(lambda leaf: leaf + 2)
    assert td[path].tolist() == [2.0, 0.0]
    assert td.fill_(path, 4).replace({"y": torch.zeros(2)})[path].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [(3, 3), (3, 20), (20, 3), (20, 20)])
@pytest.mark.parametrize(
    "write", [TensorDict.update_, TensorDict.copy_, lambda td, other: td.__setitem__(..., other)]
)
def test_copy_different_key_order_matches_by_key(write: Any, outer: int, inner: int, reverse: bool) -> None:
    def tree(value: int, reverse: bool = False) -> TensorDict:
        names = [[f"{level}{i}" for i in range(count)] for level, count in (("a", outer), ("b", inner))]
        flat, below = (list(reversed(each)) if reverse else each for each in names)
        number = {name: i for i, name in enumerate(names[0] + names[1])}
        leaves = {name: torch.full((2,), value + number[name]) for name in flat}
        nested = {name: torch.full((2,), value + number[name]) for name in below}
        return TensorDict({"n": nested, **leaves} if reverse else {**leaves, "n": nested}, [2])

    td = tree(0)
    held = dict(td.items(True, True))
    write(td, tree(1000, reverse))
    expected = tree(1000)
    assert list(td.keys(True, True)) == list(expected.keys(True, True))
    for key, leaf in expected.items(True, True):
        assert td[key] is held[key]
        assert torch.equal(td[key], leaf), key


SEALED: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(2),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("sealed", SEALED)
@pytest.mark.parametrize("write", [lambda td: td.zero_(), lambda td: td.fill_("n", 0)])
def test_fill_unwritable_leaf_writes_nothing(write: Callable[[Any], Any], sealed: str) -> None:
    td = TensorDict({"n": {"a": torch.ones(2), "b": SEALED[sealed](), "c": torch.ones(2)}})
    with pytest.raises((StructureError, RuntimeError), match="in place|in-place"):
        write(td)
    assert all(leaf.tolist() == [1.0, 1.0] for leaf in td.values(True, True))
    write(td.clone().detach())


def test_rename_key_to_itself_keeps_keys(td: Any) -> None:
    before = list(td.keys(True))
    assert td.rename_key_("a", "a", safe=True) is td
    assert sorted(map(str, td.keys(True))) == sorted(map(str, before))


@pytest.mark.parametrize(
    "kind", [lambda td: td, lambda td: td.to_lazystack(0), lambda td: td.to_lazystack(1)]
)
@pytest.mark.parametrize(
    "index", [[0, 7], torch.tensor([0, -9]), (slice(None), torch.tensor([0, 5])), torch.arange(99)]
)
@pytest.mark.parametrize("value", [7, {"a": torch.ones(())}, "of its batch size"])
def test_setitem_out_of_range_position_writes_nothing(kind, index, value):
    td = kind(TensorDict({"a": torch.zeros(3, 3), "n": {"b": torch.zeros(3, 3)}}, [3, 3]))
    if isinstance(value, str):
        size = (3, len(index[1])) if type(index) is tuple else (len(index), 3)
        value = TensorDict({"a": torch.ones(size), "n": {"b": torch.ones(size)}}, size)
    with pytest.raises(CollectionIndexError, match="out of bounds for batch dim"):
        td[index] = value
    assert not td["a"].any()
    assert not td["n", "b"].any()


#: What writes all of a collection, and the same on a tensor.
RECORDED = {
    "update_": (lambda td, new: td.update_(new), lambda leaf, new: leaf.copy_(new)),
    "update_ from a dict": (lambda td, new: td.update_(new.to_dict()), lambda leaf, new: leaf.copy_(new)),
    "update in place": (lambda td, new: td.update(new, inplace=True), lambda leaf, new: leaf.copy_(new)),
    "apply_": (lambda td, new: td.apply_(lambda old, it: old + it, new), lambda leaf, new: leaf.add_(new)),
    "index": (lambda td, new: td.__setitem__(1, new[0]), lambda leaf, new: leaf[1].copy_(new[0])),
    "slice": (
        lambda td, new: td.__setitem__(slice(1, 3), new[:2]),
        lambda leaf, new: leaf[1:3].copy_(new[:2]),
    ),
    "list": (
        lambda td, new: td.__setitem__([2, 0], new[:2]),
        lambda leaf, new: leaf.__setitem__([2, 0], new[:2]),
    ),
    "mask": (
        lambda td, new: td.__setitem__(torch.tensor([True, False, True]), new[1:]),
        lambda leaf, new: leaf.__setitem__(torch.tensor([True, False, True]), new[1:]),
    ),
    "a nested entry": (lambda td, new: td.set_(("n", "b"), new["n", "b"]), None),
    "a nested entry at an index": (lambda td, new: td.set_at_(("n", "b"), new["n", "b"][2], 0), None),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("write", RECORDED)
def test_write_gradients_equal_torch(write, theirs, mine, stacked) -> None:
    def leaves(start: float, grad: bool) -> list[Tensor]:
        shapes = [(3,), (3, 2), (3, 1)]
        return [(torch.rand(shape) + start).requires_grad_(grad) for shape in shapes]

    def collection(a: Tensor, b: Tensor, c: Tensor) -> TensorDict:
        return TensorDict({"a": a * 1, "n": {"b": b * 1, "c": c * 1}}, [3])

    old, new = leaves(1, mine), leaves(2, theirs)
    td, given = collection(*old), collection(*new)
    if stacked:  # of members that have leaves of their own
        td = LazyStackedTensorDict(*[td[i].clone() for i in range(3)])
    whole, single = RECORDED[write]
    plain, theirs_plain = [leaf * 1 for leaf in old], [leaf * 1 for leaf in new]
    for i, (leaf, value) in enumerate(zip(plain, theirs_plain, strict=True)):
        if single is not None:
            single(leaf, value)
        elif i == 1:
            leaf.__setitem__(0, value[2]) if "index" in write else leaf.copy_(value)
    whole(td, given)
    found = [td["a"], td["n", "b"], td["n", "c"]]
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad or stacked
    inputs = [leaf for leaf in (*old, *new) if leaf.requires_grad]
    if inputs:
        gradients = [
            torch.autograd.grad(
                sum((leaf**2).sum() for leaf in each if leaf.requires_grad), inputs, allow_unused=True
            )
            for each in (found, plain)
        ]
        for one, other in zip(*gradients, strict=True):
            zero = torch.zeros(())
            assert torch.allclose(zero if one is None else one, zero if other is None else other)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("write", RECORDED)
def test_write_after_no_grad_records_gradients(write, stacked) -> None:
    start = torch.ones(3, 2, requires_grad=True)
    td = TensorDict({"a": start * 1, "n": {"b": start * 1, "c": start * 1}}, [3])
    if stacked:
        td = LazyStackedTensorDict(*[td[i].clone() for i in range(3)])
    new = TensorDict({"a": start * 2, "n": {"b": start * 2, "c": start * 2}}, [3])
    whole, _ = RECORDED[write]
    with torch.no_grad():
        for _ in range(3):  # what was written before is known
            whole(td, new)
    whole(td, new)
    torch.autograd.grad(sum(leaf.sum() for leaf in td.values(True, True)), start)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        *[whole for whole, single in RECORDED.values() if single is not None],
        lambda td, new: td.zero_(),
        lambda td, new: td.mul_(2),
        lambda td, new: td.sigmoid_(),
        lambda td, new: td.masked_fill_(torch.tensor([True, False, True]), 1.0),
        lambda td, new: td.__setitem__(0, 1.0),
    ],
)
def test_write_view_requiring_grad_writes_nothing(write, stacked) -> None:
    whole = torch.ones(3, 3, 2, requires_grad=True) * 1
    parts = whole[0].unbind(0) if stacked else whole.unbind(0)[:1]
    members = [TensorDict({"a": torch.ones(3, 2)[: len(b)], "n": {"b": b}}, [len(b)]) for b in parts]
    td = LazyStackedTensorDict(*members) if stacked else members[0]
    before = td["a"].clone()
    with pytest.raises(StructureError, match=r"key \('n', 'b'\).*view of which autograd lets nobody write"):
        write(td, TensorDict({"a": before + 1, "n": {"b": td["n", "b"].detach() + 1}}, td.batch_size))
    assert torch.equal(td["a"], before)


@pytest.mark.parametrize("is_leaf", [None, lambda cls: True])
@pytest.mark.parametrize(
    "source", [{"b": {"x": torch.ones(3)}}, TensorDict({"b": {"x": torch.ones(3)}}, [3])]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_update_keys_to_update_keeps_other_entries(inplace, source, is_leaf) -> None:
    arguments = {"inplace": inplace, "is_leaf": is_leaf}
    td = dense().update(source, keys_to_update=[("b", "y")], **arguments)
    assert list(td.keys(True, True)) == list(dense().keys(True, True))
    empty = TensorDict(batch_size=[3]).update(source, keys_to_update=[("b", "y")], **arguments)
    assert list(empty.keys()) == []
    # A key below a level says that the rest of the level stays.
    td = dense().update(source, keys_to_update=[("b", "x")], **arguments)
    assert list(td["b"].keys()) == ["c", "d", "x"]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("write", ["update", "update_", "copy_"])
def test_update_lazy_stack_from_fewer_batch_dims(write, dim) -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(3, 2)}, [3, 2]) for _ in range(4)], dim)
    value = torch.arange(24.0).view(stack.batch_size)
    for size in range(dim + 1):
        getattr(stack, write)(TensorDict({"a": value + size}, value.shape[:size]))
        assert torch.equal(stack["a"], value + size)
        assert stack.batch_size == value.shape
    with pytest.raises((BatchSizeError, StructureError, RuntimeError)):
        getattr(stack, write)(TensorDict({"a": value[..., None, 0]}, []).expand(2))
    with pytest.raises(BatchSizeError, match="key 'b'"):
        stack.update(TensorDict({"b": torch.zeros(3)}))


@pytest.mark.parametrize("locked", [False, True])
def test_flatten_keys_context_writes_nested_lazy_stack(locked) -> None:
    members = [TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)]
    td = TensorDict({"z": lazy_stack(members, 1), "b": torch.zeros(3)}, [3])
    if locked:
        td.lock_()
    with td.flatten_keys() as flat:
        flat["b"] += 1
        flat.set_("z.a", torch.arange(6.0).view(3, 2))
        if not locked:
            flat["z.new"] = torch.ones(3, 2)
    assert members[1]["a"].tolist() == [1, 3, 5]
    assert td["b"].tolist() == [1, 1, 1]
    assert td["z"].tensordicts[0] is members[0]
    assert ("new" in members[0]) is not locked


def test_update_is_leaf_false_merges_nested_keys() -> None:
    td = TensorDict({}).update({("n", "a"): torch.ones(1), ("n", "b"): 2}, is_leaf=lambda cls: False)
    assert set(td["n"].keys()) == {"a", "b"}


REFUSED_VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
}


SHIFTED: dict[str, Callable[[Any, Any], Any]] = {
    "update_": lambda td, source: td[1:].update_(source),
    "update_ from a mapping": lambda td, source: td[1:].update_(source.to_dict()),
    "copy_": lambda td, source: td[1:].copy_(source),
    "set_": lambda td, source: [td[1:].set_(key, source[key]) for key in ("o", ("n", "a"))],
    "load_state_dict": lambda td, source: td[1:].load_state_dict(source.state_dict()),
    "slice": lambda td, source: td.__setitem__(slice(1, None), source),
    "positions": lambda td, source: td.__setitem__([1, 2, 3], source),
    "mask": lambda td, source: td.__setitem__(torch.tensor([False, True, True, True]), source),
    "a mapping at positions": lambda td, source: td.__setitem__([1, 2, 3], source.to_dict()),
    "update_at_": lambda td, source: td.update_at_(source, slice(1, None)),
    "set_at_": lambda td, source: [td.set_at_(key, source[key], slice(1, None)) for key in ("o", ("n", "a"))],
}


@pytest.mark.parametrize("write", SHIFTED.values(), ids=SHIFTED)
@pytest.mark.parametrize("tail", [(), (2,)])
def test_write_overlapping_values_reads_before_writing(write: Any, tail: tuple[int, ...]) -> None:
    whole = torch.arange(4.0).view(4, *[1] * len(tail)).expand(4, *tail).clone()
    td = TensorDict({"o": torch.zeros(4, *tail), "n": {"a": whole}}, [4])
    source = TensorDict({"o": torch.ones(3, *tail), "n": {"a": whole[:3]}}, [3])
    write(td, source)
    assert td["o"].view(4, -1)[:, 0].tolist() == [0, 1, 1, 1]
    assert whole.view(4, -1)[:, 0].tolist() == [0, 0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage")
@pytest.mark.parametrize("kind", REFUSED_VALUES)
def test_update_inplace_unreadable_value_writes_nothing(kind: str) -> None:
    td = TensorDict({"c": torch.ones(3), "a": torch.ones(3)}, [3])
    with pytest.raises(StructureError, match="cannot write key 'a' in place"):
        td.update_({"c": torch.zeros(3), "a": REFUSED_VALUES[kind]()})
    assert td["c"].tolist() == td["a"].tolist() == [1, 1, 1]


REFUSING: dict[str, Callable[[Any, Any], Any]] = {
    "update_ from a collection": lambda td, values: td.update_(TensorDict(values, [3])),
    "slice": lambda td, values: td.__setitem__(slice(None), values),
    "slice of a collection": lambda td, values: td.__setitem__(slice(0, 3), TensorDict(values, [3])),
    "positions": lambda td, values: td.__setitem__([0, 1, 2], values),
    "positions of a collection": lambda td, values: td.__setitem__([0, 1, 2], TensorDict(values, [3])),
    "mask": lambda td, values: td.__setitem__(torch.ones(3, dtype=torch.bool), values),
    "update_at_": lambda td, values: td.update_at_(values, slice(None)),
    "update_at_ at positions": lambda td, values: td.update_at_(values, [0, 1, 2]),
    "load_state_dict": lambda td, values: td.load_state_dict(TensorDict(values, [3]).state_dict()),
}


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage")
@pytest.mark.parametrize("write", REFUSING.values(), ids=REFUSING)
@pytest.mark.parametrize("kind", REFUSED_VALUES)
def test_write_unreadable_value_writes_nothing(kind: str, write: Any) -> None:
    for _ in range(2):
        td = TensorDict({"c": torch.ones(3), "a": torch.ones(3)}, [3])
        with pytest.raises(StructureError, match="cannot write key 'a' in place"):
            write(td, {"c": torch.zeros(3), "a": REFUSED_VALUES[kind]()})
        assert td["c"].tolist() == td["a"].tolist() == [1, 1, 1]
        # Leaves that were written before are no reason to trust a value.
        write(td, {"c": torch.zeros(3), "a": torch.zeros(3)})
        assert td["c"].tolist() == td["a"].tolist() == [0, 0, 0]


def test_setitem_repeated_positions_checks_every_write() -> None:
    for _ in range(3):
        td = TensorDict({"a": torch.zeros(4, 2), "b": torch.zeros(4, 2, 2)}, [4])
        td[[0, 1]] = TensorDict({"a": torch.ones(2, 2), "b": torch.ones(2, 2, 2)}, [2])
        assert td["b"].sum((1, 2)).tolist() == [4, 4, 0, 0]
        wide = TensorDict({"a": torch.zeros(4, 2), "b": torch.zeros(4, 2, 2)}, [4, 2])
        wide[[0, 1]] = TensorDict({"a": torch.ones(2, 2), "b": torch.ones(2, 2, 2)}, [2, 2])
        assert wide["b"].sum((1, 2)).tolist() == [4, 4, 0, 0]
        wide[[[0, 1], [2, 3]], [[0], [1]]] = TensorDict(
            {"a": torch.ones(2, 2), "b": torch.ones(2, 2, 2)}, [2, 2]
        )
        assert wide["a"].tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]
        with pytest.raises((StructureError, BatchSizeError)):
            td[[0, 1, 2]] = TensorDict({"a": torch.ones(2, 2), "b": torch.ones(2, 2, 2)}, [2])


@pytest.mark.parametrize("source", [{("n", "a"): 1, ("n", "b"): 2}, {"n": {"a": 1, "b": 2}}], ids=str)
def test_update_keys_to_update_accepts_any_mapping_form(source: dict[Any, Any]) -> None:
    td = TensorDict({"n": {"a": 0, "b": 0}})
    td.update(source, keys_to_update=[("n", "a")])
    assert td.to_dict() == {"n": {"a": torch.tensor(1), "b": torch.tensor(0)}}
