"""apply and named_apply: every parameter, on every kind of core."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import BatchSizeError, KeyPathError, StructureError


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def make_lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*[make_dense_td()[i].clone() for i in range(3)])


def list_keys(node: Any) -> list[Any]:
    return list(node.keys(True))


class TestResult:
    def test_apply_returns_same_structure(self, td: Any) -> None:
        result = td.apply(lambda leaf: leaf + 1)
        assert type(result) is type(td)
        assert list_keys(result) == list_keys(td)
        for key, leaf in td.items(True, True):
            torch.testing.assert_close(result.get(key), leaf + 1)

    def test_apply_keeps_names_and_device(self) -> None:
        td = TensorDict(make_dense_td(), [3], device="cpu", names=["t"]).apply(lambda leaf: leaf)
        assert td.names == td["b"].names == ["t"]
        assert td.device == torch.device("cpu")

    def test_apply_batch_size_sets_every_node(self, td: Any) -> None:
        result = td.apply(torch.sum, batch_size=[])
        assert result.batch_size == result["b"].batch_size == torch.Size([])
        assert result["a"] == 15

    def test_apply_batch_size_sets_names(self) -> None:
        result = make_dense_td().apply(lambda leaf: leaf[None], batch_size=[1, 3], names=["n", None])
        assert result.names == result["b"].names == ["n", None]
        assert TensorDict(make_dense_td(), [3], names=["t"]).apply(
            lambda leaf: leaf, batch_size=[3]
        ).names == [None]

    def test_apply_device_sets_every_node(self) -> None:
        assert (
            TensorDict(make_dense_td(), [3], device="cpu").apply(lambda leaf: leaf, device=None).device
            is None
        )
        result = make_dense_td().apply(lambda leaf: leaf, device="meta")
        assert result["b"].device == result["b", "c"].device == torch.device("meta")

    def test_apply_propagate_lock_locks_result(self, td: Any) -> None:
        td.lock_()
        assert not td.apply(lambda leaf: leaf).is_locked
        assert td.apply(lambda leaf: leaf, propagate_lock=True).is_locked

    def test_apply_fn_returning_collection_nests_it(self) -> None:
        result = make_dense_td().apply(lambda leaf: TensorDict({"q": leaf}, [3]))
        assert list(result.keys(True, True)) == [("a", "q"), ("b", "c", "q"), ("b", "d", "q")]

    def test_apply_wrong_result_batch_size_raises(self, td: Any) -> None:
        with pytest.raises(BatchSizeError, match="key 'a' has shape"):
            make_dense_td().apply(torch.sum)

    def test_apply_unknown_argument_raises(self, td: Any) -> None:
        with pytest.raises(TypeError, match="apply\\(\\) takes no lck"):
            td.apply(torch.sum, lck=True)


class TestDropping:
    def test_apply_none_drops_entry_and_emptied_nodes(self, td: Any) -> None:
        assert list_keys(td.named_apply(lambda key, leaf: leaf if key == "a" else None)) == ["a"]
        assert td.apply(lambda leaf: None) is None

    @pytest.mark.parametrize(
        ("filter_empty", "expected"), [(None, ["e", "a"]), (True, ["a"]), (False, ["e", "n", "a"])]
    )
    def test_apply_filter_empty_drops_empty_nodes(
        self, filter_empty: bool | None, expected: list[str]
    ) -> None:
        td = TensorDict({"e": {}, "n": {"x": 1}, "a": 1})
        result = td.named_apply(lambda key, leaf: leaf if key == "a" else None, filter_empty=filter_empty)
        assert list_keys(result) == expected

    def test_apply_empty_collection_returns_empty_or_none(self) -> None:
        assert TensorDict().apply(lambda leaf: leaf).is_empty()
        assert TensorDict().apply(lambda leaf: leaf, filter_empty=True) is None


class TestOthers:
    def test_apply_others_passes_their_leaves(self, td: Any) -> None:
        result = td.apply(lambda x, y, z: x + y * z, make_dense_td(), make_lazy())
        for key, leaf in td.items(True, True):
            torch.testing.assert_close(result.get(key), leaf + leaf * leaf)

    def test_apply_others_missing_entry_raises(self, td: Any) -> None:
        with pytest.raises(KeyPathError, match="key 'c' not found in key 'b'"):
            td.apply(torch.add, make_dense_td().exclude(("b", "c")))

    def test_apply_default_replaces_missing_entries(self, td: Any) -> None:
        def add(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
            return x if y is None else x + y

        result = td.apply(add, make_dense_td().exclude("b"), default=None)
        assert result["a"].tolist() == [[0, 2], [4, 6], [8, 10]]
        assert result["b", "c"].tolist() == [1.0] * 3

    def test_apply_others_leaf_for_node_raises(self) -> None:
        with pytest.raises(StructureError, match="the structures differ at key 'b'"):
            make_dense_td().apply(torch.add, TensorDict({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, [3]))

    def test_apply_others_dict_raises(self) -> None:
        with pytest.raises(TypeError, match="collections side by side; got dict"):
            make_dense_td().apply(torch.add, {"a": 1})


@pytest.mark.parametrize("make", [lambda td: td, lambda td: LazyStackedTensorDict(td, td.clone())])
@pytest.mark.parametrize("fn", [torch.t, lambda leaf: leaf.flip(0), lambda leaf: leaf[1].expand(3, 3)])
def test_apply_inplace_view_of_leaf_equals_copy(make: Any, fn: Any) -> None:
    td = make(TensorDict({"a": torch.arange(9).view(3, 3)}))
    wanted = td.apply(lambda leaf: fn(leaf).clone())
    assert (td.apply_(fn) == wanted).all()


def test_apply_inplace_overlapping_storage_equals_copy() -> None:
    whole = torch.arange(6)
    TensorDict({"a": whole[1:]}).apply_(lambda leaf: whole[:5])
    assert whole.tolist() == [0, 0, 1, 2, 3, 4]


class TestNames:
    def test_apply_named_passes_keys(self) -> None:
        td = TensorDict({"a": 1, "b": {"c": 2}})
        seen: list[Any] = []

        def note(key: Any, leaf: Any, other: Any) -> Any:
            seen.append((key, other.item()))
            return leaf + other

        assert td.apply(note, td, named=True)["b", "c"] == 4
        assert td.apply(note, td, named=True, nested_keys=True)["a"] == 2
        td.apply_(note, td.clone(), named=True)
        assert seen == [("a", 1), ("c", 2), ("a", 1), (("b", "c"), 2), ("a", 1), ("c", 2)]
        assert td["b", "c"] == 4

    def test_named_apply_passes_last_key(self) -> None:
        seen: list[Any] = []
        make_dense_td().named_apply(lambda key, leaf: seen.append(key))
        assert seen == ["a", "c", "d"]

    def test_named_apply_nested_keys_passes_key_path(self) -> None:
        seen: list[Any] = []
        make_dense_td().named_apply(lambda key, leaf: seen.append(key), nested_keys=True)
        assert seen == ["a", ("b", "c"), ("b", "d")]

    def test_named_apply_lazy_stack_visits_members(self) -> None:
        seen: list[Any] = []
        stack = LazyStackedTensorDict(
            *[TensorDict({"a": torch.zeros(n), "n": {"m": torch.zeros(1)}}) for n in (1, 2)]
        )
        TensorDict({"s": stack}).named_apply(
            lambda key, leaf: seen.append((key, len(leaf))), nested_keys=True
        )
        assert seen == [(("s", "a"), 1), (("s", "n", "m"), 1), (("s", "a"), 2), (("s", "n", "m"), 1)]

    @pytest.mark.parametrize("kwargs", [{"call_on_nested": True}, {"is_leaf": lambda cls: True}])
    def test_named_apply_nested_visits_nodes_as_leaves(self, kwargs: dict[str, Any]) -> None:
        seen: list[Any] = []
        make_dense_td().named_apply(
            lambda key, leaf: seen.append((key, type(leaf))), nested_keys=True, **kwargs
        )
        assert seen == [("a", torch.Tensor), ("b", TensorDict)]

    def test_apply_call_on_nested_stores_returned_nodes(self) -> None:
        td = make_dense_td()
        result = td.apply(
            lambda node: node.sum() if isinstance(node, torch.Tensor) else node,
            batch_size=[],
            call_on_nested=True,
        )
        assert result["a"] == 15
        assert result["b"] is td["b"]


class TestInPlace:
    def test_apply_inplace_locked_writes_leaves(self, td: Any) -> None:
        td.lock_()
        assert td.apply_(lambda leaf: leaf.double() + 1) is td
        assert td["a"].dtype == torch.int64
        assert td["a"].tolist() == [[1, 2], [3, 4], [5, 6]]

    def test_apply_inplace_keeps_leaf_objects(self) -> None:
        td = make_dense_td()
        leaf = td["a"]
        assert td.apply(lambda leaf: leaf + 1, inplace=True)["a"] is leaf

    @pytest.mark.parametrize("size", [[], [2], [7]])
    def test_apply_inplace_ignores_batch_size(self, td: Any, size: list[int]) -> None:
        members = [TensorDict({"x": torch.ones(3)}, [3]) for _ in range(2)]
        td["s"] = lazy_stack(members, 1)
        before, wanted = td.batch_size, {key: leaf + 1 for key, leaf in td.items(True, True)}
        assert td.apply(lambda leaf: leaf + 1, inplace=True, batch_size=size) is td
        assert td.batch_size == before
        for key, leaf in td.items(True, True):
            assert torch.equal(leaf, wanted[key])

    def test_apply_inplace_none_keeps_leaf(self, td: Any) -> None:
        assert td.apply_(lambda leaf: None) is td
        assert td.apply(lambda leaf: None, inplace=True) is None
        assert td["a"].sum() == 15

    def test_apply_inplace_bad_result_writes_nothing(self) -> None:
        td = make_dense_td()
        with pytest.raises(
            StructureError, match=r"key \('b', 'd'\) in place: it has shape \[3, 4\] there, the value \[5\]"
        ):
            td.named_apply(lambda key, leaf: torch.zeros(5) if key == "d" else leaf + 1, inplace=True)
        assert td["a"].sum() == 15

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has notes from Python 3.11 on")
    @pytest.mark.parametrize(
        "walk",
        [
            lambda td, fn: td.apply(fn),
            lambda td, fn: td.apply_(fn),
            lambda td, fn: td.named_apply(lambda key, leaf: fn(leaf)),
            lambda td, fn: td.apply(lambda leaf, other: fn(other), td),
            lambda td, fn: td.apply(fn, batch_size=[]),
        ],
    )
    def test_apply_fn_error_notes_key(self, td: Any, walk: Any) -> None:
        def fn(leaf: Tensor) -> Tensor:
            if leaf.dtype is torch.float64:
                raise LookupError("no")
            return leaf

        td["b", "x"] = td["a"].double()
        with pytest.raises(LookupError, match="^no\n") as caught:
            walk(td, fn)
        assert caught.value.__notes__ == ["at key ('b', 'x')"]

    @pytest.mark.parametrize("locked", [False, True])
    def test_apply_out_writes_inplace_only_if_locked(self, td: Any, locked: bool) -> None:
        out = make_dense_td().zero_() if locked else make_dense_td().exclude("a").zero_()
        leaf = out["b", "c"]
        if locked:
            out.lock_()
        assert td.apply(lambda leaf: leaf + 1, out=out) is out
        assert (out["b", "c"] is leaf) is locked
        assert out["b", "c"].tolist() == [2.0] * 3
        assert leaf.tolist() == [2.0 * locked] * 3
        assert set(list_keys(out)) == {"b", ("b", "c"), ("b", "d"), "a"}

    def test_apply_out_keeps_shared_leaves_unchanged(self, td: Any) -> None:
        shared = td.copy()
        before = td.clone()
        assert td.apply(lambda leaf: leaf + 1, out=td) is td
        assert (shared == before).all() and (td == before.apply(lambda leaf: leaf + 1)).all()


def test_apply_uneven_members_keeps_own_entries() -> None:
    stack = LazyStackedTensorDict(
        *[TensorDict({"a": torch.zeros(n), f"k{n}": torch.zeros(1)}) for n in (1, 2)]
    )
    result = stack.apply(lambda leaf: leaf + 1)
    assert [member["a"].tolist() for member in result.tensordicts] == [[1.0], [1.0, 1.0]]
    assert list(result.tensordicts[0].keys()) == ["a", "k1"]


def test_apply_out_batch_size_sets_result_batch_size() -> None:
    td, out = TensorDict({"a": torch.arange(6.0).view(3, 2)}, [3]), TensorDict({"a": torch.zeros(2, 2)}, [2])
    assert td.apply(lambda leaf: leaf[:2], out=out) is out
    assert out["a"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("size", "mine"), [([3], []), ([3], [3, 2]), ([3, 2], [3])])
def test_apply_out_batch_size_mismatch_raises(size: list[int], mine: list[int]) -> None:
    td, out = TensorDict({"a": torch.zeros(3, 2)}, [3]), TensorDict(batch_size=mine)
    with pytest.raises(BatchSizeError, match=re.escape(f"out= has batch size {mine}, the result has {size}")):
        td.apply(lambda leaf: leaf + 1, batch_size=size, out=out)
    assert not out.keys()
    assert td.apply(lambda leaf: leaf + 1, batch_size=[3], out=TensorDict(batch_size=[3]))["a"].shape == (
        3,
        2,
    )


def test_apply_deep_tree_does_not_recurse() -> None:
    td = TensorDict({"x": torch.zeros(2)}, [2])
    for _ in range(2000):
        td = TensorDict({"k": td}, [2])
    path = ("k",) * 2000 + ("x",)
    assert td.apply(lambda x, y: x + y + 1, td)[path].tolist() == [1.0, 1.0]
    assert td.named_apply(lambda key, leaf: leaf + len(key), nested_keys=True)[path].tolist() == [
        2001.0,
        2001.0,
    ]
    assert td.apply_(lambda leaf: leaf + 1)[path].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("arguments", [{}, {"default": 0}])
@pytest.mark.parametrize("key", [None, "n"])
def test_apply_stacks_of_different_length_raises(key, arguments) -> None:
    two, three = (lazy_stack([TensorDict({"a": torch.zeros(3)}, [3])] * size) for size in (2, 3))
    where = "the root"
    if key is not None:
        two, three = TensorDict({key: two}), TensorDict({key: three})
        where = "key 'n'"
    with pytest.raises(
        BatchSizeError, match=f"{where} is a lazy stack of 2 along dim 0, another .* batch size .3, 3."
    ):
        two.apply(lambda a, b: a + b, three, **arguments)
