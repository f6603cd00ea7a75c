"""Writes at an index: values equal those of torch, and a failed write changes nothing."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import (
    BatchSizeError,
    CollectionIndexError,
    KeyPathError,
    LockedError,
    StructureError,
)

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


class TestAssign:
    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_setitem_equals_torch(
        self, index: Any, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense()
        value = make_dense()[index].apply(lambda leaf: leaf + 10)
        expected = snapshot(td)
        for key, leaf in expected.items():
            leaf[index] = value.get(key)
        td[index] = value
        assert_unchanged(td, expected)

    @pytest.mark.parametrize("index", INDICES, ids=str)
    @pytest.mark.parametrize("number", [7, 2.0, True, torch.tensor(5), np.array(3.0)])
    def test_setitem_number_fills_index(
        self, index: Any, number: Any, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense()
        expected = snapshot(td)
        for leaf in expected.values():
            leaf[index] = number if isinstance(number, float) else int(number)
        td[index] = number
        assert_unchanged(td, expected)

    def test_setitem_mapping_writes_only_its_keys(
        self, td: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        before = snapshot(td)
        td[0] = {"b": {"c": torch.tensor(8.0)}, ("b", "d"): torch.full((4,), 3.0)}
        before["b", "c"][0] = 8
        before["b", "d"][0] = 3
        assert_unchanged(td, before)

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
    def test_setitem_new_keys_are_zero_elsewhere(self, indices: list[Any], assert_unchanged: Any) -> None:
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
        assert_unchanged(td, expected)
        td[0] = {"agents": {"y": torch.ones(2, 4, 3)}}
        assert td["agents", "y"].shape == torch.Size([3, 2, 4, 3])
        with pytest.raises(BatchSizeError, match=r"key \('agents', 'z'\) has shape \[2\], .* size \[2, 4\]"):
            td[0] = {"agents": {"z": torch.ones(2)}}
        td[1] = {"new": {"level": torch.ones(2)}}
        assert td["new", "level"].tolist() == [[0, 0], [1, 1], [0, 0]]

    @pytest.mark.parametrize("value", [7, torch.tensor(7)], ids=["number", "tensor"])
    @pytest.mark.parametrize("index", [0, slice(0, 2), torch.tensor([True, False, True]), (0, 1)], ids=str)
    def test_setitem_number_makes_new_keys(self, index: Any, value: Any) -> None:
        td = TensorDict(batch_size=[3, 2])
        td[index] = {"a": value, "n": {"b": value}}
        expected = torch.zeros(3, 2, dtype=torch.int64)
        expected[index] = 7
        assert td["a"].equal(expected) and td["n", "b"].equal(expected)

    def test_setitem_locked_new_key_raises(
        self, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense().lock_()
        before = snapshot(td)
        with pytest.raises(LockedError, match="cannot make key 'q'"):
            td[0] = {"a": torch.ones(2), "q": torch.ones(1)}
        assert_unchanged(td, before)
        td[0] = make_dense()[1]
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
        self, td: Any, index: Any, value: Any, error: type, message: str, snapshot: Any, assert_unchanged: Any
    ) -> None:
        before = snapshot(td)
        with pytest.raises(error, match=message):
            td[index] = value
        assert_unchanged(td, before)

    @pytest.mark.parametrize("index", [slice(None), [0, 1], torch.tensor([True, True])], ids=str)
    @pytest.mark.parametrize(
        ("last", "value", "error", "message"),
        [
            ({"a": torch.zeros(2)}, {"a": torch.ones(2, 3)}, StructureError, r"\[2\] there, the value \[3\]"),
            ({"a": torch.zeros(3, requires_grad=True)}, 1, StructureError, "requires grad"),
            ({"a": torch.zeros(1).expand(3)}, {"a": torch.ones(2, 3)}, StructureError, "it is expanded"),
            ({"a": {"x": torch.zeros(3)}}, {"a": torch.ones(2, 3)}, StructureError, "it is a TensorDict"),
            ({"a": torch.zeros(3)}, {"new": torch.ones(2)}, LockedError, r"cannot make key (\('n', )?'new'"),
        ],
    )
    def test_setitem_stack_with_bad_member_writes_nothing(
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
        # The stack dim has the size of the other dim, so that exchanged dims give wrong values and no error.
        members = [TensorDict({"a": torch.arange(3) + 3 * i}, [3]) for i in range(3)]
        td = TensorDict({"n": LazyStackedTensorDict(*members)}, [3])
        expected = td["n", "a"].clone()
        expected[index] = 50
        td[index] = 50 if as_number else td[index].apply(lambda leaf: torch.full_like(leaf, 50))
        assert td["n", "a"].tolist() == expected.tolist()
        assert td["n"].tensordicts[0] is members[0]

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
    def test_set_at_and_get_at_errors_note_key(self, td: Any, key: Any, do: Any) -> None:
        with pytest.raises((StructureError, IndexError, RuntimeError)) as caught:
            do(td)
        assert caught.value.__notes__ == [f"at key {key!r}"]

    def test_get_at_returns_indexed_entry_or_default(self, td: Any) -> None:
        assert td.get_at("a", (0, 1)) == 1
        assert td.get_at("b", 0).batch_size == torch.Size([])
        assert td.get_at("zz", 0) is None
        assert td.get_at("zz", 0, default=3) == td.get_at("zz", 0, 3) == 3

    def test_update_at_new_key_changes_nothing(
        self, make_dense: Any, snapshot: Any, assert_unchanged: Any
    ) -> None:
        td = make_dense()
        before = snapshot(td)
        with pytest.raises(KeyPathError, match="key 'zz' not found in key 'b'"):
            td.update_at_({"a": torch.ones(2), "b": {"zz": torch.ones(())}}, 0)
        assert_unchanged(td, before)

    def test_update_at_and_copy_at_write_index(self, td: Any, make_dense: Any) -> None:
        td.update_at_({"a": torch.ones(2), "b": {"c": torch.tensor(5.0)}}, 0, keys_to_update=["a"])
        assert td["a"][0].tolist() == [1, 1]
        assert td["b", "c"][0] == 1
        td.copy_at_(make_dense()[2], slice(0, 2))
        assert td["a"].tolist() == [[4, 5]] * 3


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


@pytest.mark.parametrize("index", [0, slice(1, None), [1, 0], torch.tensor([False, True])], ids=str)
@pytest.mark.parametrize(
    "make", [lambda value: value, lambda value: {"n": value}, lambda value: {("n",): value}]
)
@pytest.mark.parametrize("value", [2.5, True, torch.tensor(2.5), np.float32(2.5), np.array(2.5)], ids=repr)
def test_setitem_scalar_fills_leaves_below_key(index: Any, make: Any, value: Any) -> None:
    leaves = {"f": torch.zeros(2, 3), "i": torch.zeros(2, dtype=torch.int64)}
    td = TensorDict({"n": {**leaves, "m": {"e": torch.zeros(2)}}}, [2])
    td[index] = make(value)
    expected = {**{key: leaf.clone() for key, leaf in leaves.items()}, "e": torch.zeros(2)}
    for leaf in expected.values():
        leaf[index] = torch.as_tensor(value).to(leaf.dtype)
    for path, key in ((("n", "f"), "f"), (("n", "i"), "i"), (("n", "m", "e"), "e")):
        assert torch.equal(td[path], expected[key])


@pytest.mark.parametrize("source", [1j, {"n": 1j}, {("n", "i"): 1j}], ids=str)
def test_setitem_number_beyond_dtype_raises_with_key(source: Any) -> None:
    td = TensorDict({"n": {"c": torch.zeros(2, dtype=torch.complex64), "i": torch.zeros(2)}}, [2])
    with pytest.raises(StructureError, match=r"cannot write key \('n', 'i'\) at an index: "):
        td[0] = source
    assert td["n", "c"].tolist() == [0, 0] and td["n", "i"].tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("index", [0, slice(0, 1), torch.tensor([0]), torch.tensor([True, False])], ids=str)
@pytest.mark.parametrize(
    "dtype", [None, torch.float32, torch.float64, torch.int64, torch.quint8, torch.qint8]
)
def test_set_at_quantized_leaf_casts_value(dtype: Any, index: Any) -> None:
    td = TensorDict({"a": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)}, [2])
    value: Any = 1.5 if dtype is None else torch.ones(1)
    if dtype in (torch.quint8, torch.qint8):
        value = torch.quantize_per_tensor(value, 0.2, 0, dtype)
    elif dtype is not None:
        value = value.to(dtype)
    td.set_at_("a", value[0] if type(index) is int and dtype is not None else value, index)
    expected = torch.tensor([1.5 if dtype is None else 1.0, 0.0])
    torch.testing.assert_close(td["a"].dequantize(), expected)
