"""update, update_, copy_, fill and replace: values and order of entries; a failed write changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import (
    BatchSizeError,
    KeyPathError,
    KeyThroughLeafError,
    LockedError,
    StructureError,
)
from td_core.spi import RULES


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

    def test_update_stores_source_leaves(self, make_dense: Any) -> None:
        td, source = make_dense(), make_dense()
        td.update(source)
        assert td["a"] is source["a"]
        assert td["b", "c"] is source["b", "c"]
        assert td["b"] is not source["b"]

    def test_update_clone_stores_copies(self, make_dense: Any) -> None:
        td, source = make_dense(), make_dense()
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
    def test_update_keys_to_update_changes_only_given_keys(
        self, td: Any, keys: list[Any], changed: list[Any], snapshot: Any
    ) -> None:
        before = snapshot(td)
        td.update(
            {"a": torch.full((3,), 5.0), "b": {"c": torch.full((3,), 5.0), "d": torch.full((3,), 5.0)}},
            keys_to_update=keys,
        )
        for key, value in before.items():
            new = td.get(key)
            assert (new.shape == value.shape and bool((new == value).all())) != (key in changed)

    def test_update_single_key_to_update_raises(self, make_dense: Any) -> None:
        with pytest.raises(TypeError, match="a sequence of keys; got the single key 'a'"):
            make_dense().update({"a": torch.ones(3)}, keys_to_update="a")

    def test_update_is_leaf_replaces_node(self, make_dense: Any) -> None:
        td, source = make_dense(), TensorDict({"b": {"e": torch.zeros(3)}}, [3])
        td.update(source, is_leaf=lambda cls: True)
        assert list(td.keys(True, True)) == ["a", ("b", "e")]

    def test_replace_accepts_any_keyword_as_key(self) -> None:
        td = TensorDict({"a": 1})
        result = td.replace(clone=2, inplace=3)
        assert list(result.keys()) == ["a", "clone", "inplace"] and list(td.keys()) == ["a"]

    def test_update_batch_size_true_copies_batch_size_of_source(self) -> None:
        td = TensorDict({"a": torch.zeros(4, 2)}, [4])
        td.update(TensorDict({"a": torch.zeros(3)}, [3]), update_batch_size=True)
        assert td.batch_size == torch.Size([3])
        assert td["a"].shape == torch.Size([3])

    def test_update_batch_size_mismatch_changes_nothing(
        self, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense()
        before = snapshot(td)
        with pytest.raises(
            BatchSizeError, match=r"\[4\] of the source does not fit: key 'b' is not updated and has \[3\]"
        ):
            td.update(TensorDict({"a": torch.zeros(4)}, [4]), update_batch_size=True)
        assert_unchanged(td, before)

    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("join", [TensorDict.stack, TensorDict.lazy_stack], ids=["dense", "lazy"])
    def test_update_lazy_stack_of_other_length_copies_members(self, count: int, dim: int, join: Any) -> None:
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

    def test_update_ignore_lock_stays_locked(self, make_dense: Any) -> None:
        td = make_dense().lock_()
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
    def test_update_bad_source_changes_nothing(
        self, td: Any, source: Any, error: type, message: str, snapshot: Any, assert_unchanged: Any
    ) -> None:
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td.update(source)
        assert_unchanged(td, before)

    def test_update_with_itself_as_entry_raises(self, make_dense: Any) -> None:
        td = make_dense()
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

    def test_update_inplace_keeps_leaf_objects(self, make_dense: Any) -> None:
        td = make_dense()
        leaf = td["a"]
        td.update_(make_dense().apply(lambda x: x + 1))
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
    def test_update_inplace_bad_source_changes_nothing(
        self, source: Any, error: type, message: str, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense()
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td.update_(source)
        assert_unchanged(td, before)

    def test_update_inplace_leaf_requiring_grad_raises(self) -> None:
        td = TensorDict({"a": torch.zeros(1), "w": torch.zeros(1, requires_grad=True)})
        with pytest.raises(StructureError, match="key 'w' in place: it is a leaf that requires grad"):
            td.update_({"a": 1, "w": 1})
        assert td["a"] == 0
        with torch.no_grad():
            td.update_({"a": 1, "w": 1})
        assert td["w"] == 1

    def test_copy_writes_all_leaves(self, td: Any, make_dense: Any) -> None:
        td.copy_(make_dense().apply(torch.zeros_like))
        assert all(not value.any() for value in td.values(True, True))

    def test_update_inplace_uneven_members_writes_each(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
        stack.update_(stack.apply(lambda x: x + 1))
        assert [member["a"].tolist() for member in stack.tensordicts] == [[1.0], [1.0, 1.0]]


SHORT: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "set_": lambda td, key, value: td.set_(key, value),
    "set": lambda td, key, value: td.set(key, value, inplace=True),
    "update_": lambda td, key, value: td.update_({key: value}),
    "update": lambda td, key, value: td.update({key: value}, inplace=True),
    "copy_": lambda td, key, value: td.copy_(TensorDict().set(key, value).auto_batch_size_(2)),
    "index": lambda td, key, value: td.__setitem__(..., TensorDict().set(key, value).auto_batch_size_(2)),
}


class TestValuesOfFewerDims:
    # All dims have the same size, so that torch alone would broadcast the value to the last dims.
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
    def test_write_stack_with_bad_member_writes_nothing(self, write: Any) -> None:
        first, last = TensorDict({"a": torch.zeros(3, 2)}, [3]), TensorDict({"a": torch.zeros(3, 5)}, [3])
        with pytest.raises(StructureError, match=r"key 'a' in place: it has shape \[3, 5\] there"):
            write(LazyStackedTensorDict(first, last), "a", torch.ones(2, 3, 2))
        assert not first["a"].any()


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
    def test_replace_keeps_original(self, td: Any, snapshot: Any, assert_unchanged: Any) -> None:
        before = snapshot(td)
        new = td.replace({"b": {"c": torch.zeros(3)}}, x=torch.ones(3))
        assert_unchanged(td, before)
        assert new["b", "c"].tolist() == [0.0] * 3
        assert list(new.keys()) == ["a", "b", "x"]

    def test_replace_without_entries_returns_self(self, make_dense: Any) -> None:
        td = make_dense()
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


def test_rename_key_to_itself_keeps_keys(td: Any) -> None:
    before = list(td.keys(True))
    assert td.rename_key_("a", "a", safe=True) is td
    assert sorted(map(str, td.keys(True))) == sorted(map(str, before))


@pytest.mark.parametrize("is_leaf", [None, lambda cls: True])
@pytest.mark.parametrize(
    "source", [{"b": {"x": torch.ones(3)}}, TensorDict({"b": {"x": torch.ones(3)}}, [3])]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_update_keys_to_update_keeps_other_entries(inplace, source, is_leaf, make_dense: Any) -> None:
    arguments = {"inplace": inplace, "is_leaf": is_leaf}
    td = make_dense().update(source, keys_to_update=[("b", "y")], **arguments)
    assert list(td.keys(True, True)) == list(make_dense().keys(True, True))
    empty = TensorDict(batch_size=[3]).update(source, keys_to_update=[("b", "y")], **arguments)
    assert list(empty.keys()) == []
    # With a nested key to update, the other entries of its node stay.
    td = make_dense().update(source, keys_to_update=[("b", "x")], **arguments)
    assert list(td["b"].keys()) == ["c", "d", "x"]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("write", ["update", "update_", "copy_"])
def test_update_lazy_stack_from_fewer_batch_dims_broadcasts(write, dim) -> None:
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
def test_flatten_keys_context_writes_back_to_nested_stack(locked) -> None:
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


@pytest.mark.parametrize("source", [{("n", "a"): 1, ("n", "b"): 2}, {"n": {"a": 1, "b": 2}}], ids=str)
def test_update_keys_to_update_accepts_any_mapping_form(source: dict[Any, Any]) -> None:
    td = TensorDict({"n": {"a": 0, "b": 0}})
    td.update(source, keys_to_update=[("n", "a")])
    assert td.to_dict() == {"n": {"a": torch.tensor(1), "b": torch.tensor(0)}}


class TestLenientUpdate:
    """``update_`` in programs of tensordict: entries that the target lacks are skipped, if it has another one."""

    @pytest.fixture(autouse=True)
    def follow_tensordict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RULES, "follows_tensordict", True)

    SOURCES: ClassVar = {
        "leaf": ({"a": torch.ones(2), "z": torch.ones(3)}, [1, 0]),
        "value": ({"a": torch.ones(2), "z": "hello"}, [1, 0]),
        "nested leaf": ({"a": torch.ones(2), "n": {"b": torch.ones(2), "z": torch.ones(2)}}, [1, 1]),
        "node": ({"a": torch.ones(2), "z": {"b": torch.ones(2)}}, [1, 0]),
        "only key of a node": ({"a": torch.ones(2), "n": {"z": torch.ones(2)}}, [1, 0]),
        "key path": ({("n", "b"): torch.ones(2), ("n", "z"): torch.ones(2)}, [0, 1]),
    }
    KINDS: ClassVar = {
        "dense": lambda td: td,
        "locked": lambda td: td.lock_(),
        "shared": lambda td: td.share_memory_(),
        "lazy": lambda td: lazy_stack([td, td.clone()]),
        "parameters": lambda td: TensorDictParams(td).data,
    }

    @pytest.mark.parametrize("method", ["update_", "copy_"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", SOURCES)
    def test_update_in_place_skips_entries_target_lacks(self, name: str, kind: str, method: str) -> None:
        if name == "value":
            pytest.importorskip("td_tensorclass")
        source, expected = self.SOURCES[name]
        target = self.KINDS[kind](TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)}))
        given = source
        if kind == "lazy":
            given = lazy_stack([TensorDict(source), TensorDict(source)])
        elif "path" not in name:
            given = TensorDict(source)
        assert getattr(target, method)(given) is target
        assert sorted(target.keys(True, True), key=str) == [("n", "b"), "a"]
        for leaf, value in zip((target["a"], target["n", "b"]), expected, strict=True):
            assert (leaf == value).all()

    @pytest.mark.parametrize("source", [{"z": torch.ones(2)}, {"n": {"z": torch.ones(2)}}, {"z": "hello"}])
    def test_update_in_place_without_a_common_entry_raises(self, source: dict[str, Any]) -> None:
        if "z" in source and not isinstance(source["z"], torch.Tensor):
            pytest.importorskip("td_tensorclass")
        target = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)})
        with pytest.raises(KeyPathError, match="key 'z' not found"):
            target.update_(TensorDict(source))

    def test_update_in_place_of_requested_missing_key_raises(self) -> None:
        target = TensorDict(a=torch.zeros(2))
        with pytest.raises(KeyPathError, match="key 'z' not found"):
            target.update_({"a": torch.ones(2), "z": torch.ones(2)}, keys_to_update=["a", "z"])
        assert (target["a"] == 0).all()
