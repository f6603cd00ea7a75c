"""Functions over collections: merge, pad, group, collate, compare and expand."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from td_core import (
    LazyStackedTensorDict,
    TensorCollection,
    TensorDict,
    assert_allclose_td,
    assert_close,
    collate,
    expand_as_right,
    expand_right,
    group_by,
    is_tensor_collection,
    isin,
    merge_tensordicts,
    pad_sequence,
    remove_duplicates,
    unpad_sequence,
)
from td_core.errors import KeyPathError, StructureError

Pair = namedtuple("Pair", "a b")


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def list_keys(node: Any) -> list[Any]:
    return list(node.keys(True, True))


class TestMerge:
    def test_merge_nested_keys_keeps_first_value(self) -> None:
        first = TensorDict(a=1, n={"b": 1})
        result = merge_tensordicts(first, TensorDict(a=2, n={"c": 2}), TensorDict(d=3, e={}))
        assert list_keys(result) == ["a", ("n", "b"), ("n", "c"), "d"]
        assert "e" in result
        assert result["a"] == 1
        assert list_keys(first) == ["a", ("n", "b")]

    def test_merge_callback_receives_all_values(self) -> None:
        items = [TensorDict(a=i, n={"b": i}) for i in range(3)]
        result = merge_tensordicts(*items, callback_exist=lambda *entries: torch.stack(entries))
        assert result["n", "b"].tolist() == [0, 1, 2]
        result = merge_tensordicts(*items, callback_exist={("n", "b"): lambda *entries: entries[-1]})
        assert (result["a"], result["n", "b"]) == (0, 2)
        result = merge_tensordicts(*items, callback_exist={"a": lambda *entries: entries[-1]})
        assert (result["a"], result["n", "b"]) == (2, 0)

    def test_merge_invalid_arguments_raises(self) -> None:
        with pytest.raises(StructureError, match="two collections or more, got 1"):
            merge_tensordicts(make_dense_td())
        for items in ([{"a": 1}, {"a": {"x": 1}}], [{"a": {"x": 1}}, {"a": 1}]):
            with pytest.raises(StructureError, match="the structures differ at key 'a'"):
                merge_tensordicts(*map(TensorDict, items))


class TestPadSequence:
    def items(self) -> list[TensorDict]:
        return [
            TensorDict({"a": torch.full((n,), float(n)), "n": {"b": torch.full((n, 3), n)}}, [n])
            for n in (2, 4, 1)
        ]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_pad_sequence_equals_torch(self, side: str) -> None:
        items = self.items()
        result = pad_sequence(items, padding_value=-1, padding_side=side)
        assert result.batch_size == result["n"].batch_size == (3, 4)
        for key in ("a", ("n", "b")):
            expected = torch.nn.utils.rnn.pad_sequence(
                [item[key] for item in items], batch_first=True, padding_value=-1, padding_side=side
            )
            torch.testing.assert_close(result[key], expected)

    @pytest.mark.parametrize(
        ("return_mask", "where"), [(True, "masks"), ("m", "m"), (("m", "k"), ("m", "k"))]
    )
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_unpad_sequence_with_masks_returns_items(self, return_mask: Any, where: Any, side: str) -> None:
        items = self.items()
        padded = pad_sequence(items, return_mask=return_mask, padding_side=side)
        masks = padded[where]
        assert masks["n", "b"].sum(1).tolist() == [2, 4, 1]
        for mask in (masks, masks["a"]):
            again = unpad_sequence(padded.exclude("masks", "m"), mask)
            assert isinstance(again, LazyStackedTensorDict)
            for item, other in zip(items, again.tensordicts, strict=True):
                assert_close(item, other)
                assert item.batch_size == other.batch_size

    def test_unpad_sequence_uses_stored_masks(self) -> None:
        again = unpad_sequence(pad_sequence(self.items(), return_mask=True))
        assert [len(item["a"]) for item in again.tensordicts] == [2, 4, 1]
        assert "masks" not in again

    def test_pad_sequence_pad_dim_pads_that_dim(self) -> None:
        items = [TensorDict({"a": torch.ones(1, n), "b": torch.ones(1, 3)}, [1]) for n in (2, 4)]
        for dim in (1, -1):
            padded = pad_sequence(items, pad_dim=dim, return_mask=True)
            assert padded.batch_size == (2, 1)
            assert padded["a"].sum(-1).tolist() == [[2], [4]]
            assert padded["masks", "b"].shape == (2, 1, 3)
            assert [list(item["a"].shape) for item in unpad_sequence(padded, pad_dim=dim).tensordicts] == [
                [1, 2],
                [1, 4],
            ]

    def test_pad_sequence_padding_value_per_key(self) -> None:
        result = pad_sequence(self.items(), padding_value={("n", "b"): 7})
        assert result["n", "b"][0, 3].tolist() == [7] * 3
        assert result["a"][0, 3] == 0
        with pytest.raises(KeyPathError, match=r"padding_value names \[\('zz',\)\]"):
            pad_sequence(self.items(), padding_value={"zz": 7})

    def test_pad_sequence_drops_keys_missing_in_some_items(self) -> None:
        assert list_keys(
            pad_sequence([TensorDict(a=torch.ones(2), b=torch.ones(2)), TensorDict(a=torch.ones(3))])
        ) == ["a"]

    def test_pad_sequence_out_is_written_inplace(self) -> None:
        out = TensorDict({"a": torch.full((3, 4), 9.0)}, [3, 4])
        leaf = out["a"]
        assert pad_sequence(self.items(), out=out) is out
        assert out["a"] is leaf
        assert leaf[2].tolist() == [1, 0, 0, 0]

    @pytest.mark.parametrize(
        ("items", "kwargs", "error", "message"),
        [
            ([], {}, StructureError, "at least one item"),
            ([TensorDict(a=1)], {}, StructureError, "key 'a' has 0 dims"),
            (
                [TensorDict(a=torch.ones(2, 1)), TensorDict(a=torch.ones(3, 2))],
                {},
                StructureError,
                "differ in other dims",
            ),
            ([TensorDict(a=torch.ones(2))], {"padding_side": "x"}, ValueError, "'left' or 'right'; got 'x'"),
            (
                [TensorDict({"a": torch.ones(2)}, [2]), TensorDict(a=torch.ones(2))],
                {},
                StructureError,
                r"the batch sizes \[\[2\], \[\]\] differ in their dims",
            ),
            (
                [TensorDict(a=torch.ones(2)), TensorDict(a={})],
                {},
                StructureError,
                "the structures differ at key 'a'",
            ),
        ],
    )
    def test_pad_sequence_invalid_arguments_raises(
        self, items: Any, kwargs: Any, error: type, message: str
    ) -> None:
        with pytest.raises(error, match=message):
            pad_sequence(items, **kwargs)

    def test_unpad_sequence_invalid_mask_raises(self) -> None:
        padded = pad_sequence(self.items())
        with pytest.raises(ValueError, match="needs a mask"):
            unpad_sequence(padded)
        with pytest.raises(ValueError, match=r"shape \[3, length\], or a collection; got shape \[3\]"):
            unpad_sequence(padded, torch.tensor([2, 4, 1]))
        mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
        with pytest.raises(ValueError, match="data in more than one place"):
            unpad_sequence(padded, mask)

    def test_unpad_sequence_row_without_data_is_empty(self) -> None:
        padded = TensorDict({"a": torch.ones(2, 3)}, [2])
        again = unpad_sequence(padded, torch.tensor([[True, True, False], [False] * 3]))
        assert [item["a"].shape for item in again.tensordicts] == [(2,), (0,)]

    @given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
    def test_pad_and_unpad_random_lengths_round_trip(self, lengths: list[int], side: str) -> None:
        items = [TensorDict({"a": torch.arange(n * 2).view(n, 2)}, [n]) for n in lengths]
        again = unpad_sequence(pad_sequence(items, return_mask=True, padding_side=side))
        assert [item["a"].tolist() for item in again.tensordicts] == [item["a"].tolist() for item in items]


class TestRows:
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    def test_group_by_equals_python_grouping(self, values: list[int]) -> None:
        td = TensorDict({"a": torch.tensor(values), "i": torch.arange(len(values))}, [len(values)])
        distinct, groups = group_by(td, "a")
        assert distinct.tolist() == sorted(set(values))
        assert [group["i"].tolist() for group in groups] == [
            [i for i, other in enumerate(values) if other == value] for value in sorted(set(values))
        ]

    def test_group_by_row_values_returns_sorted_groups(self) -> None:
        td = TensorDict({"a": torch.tensor([[1, 0], [1, 0], [0, 2]]), "i": torch.arange(3)}, [3])
        distinct, groups = group_by(td, "a")
        assert distinct.tolist() == [[0, 2], [1, 0]]
        assert [group["i"].tolist() for group in groups] == [[2], [0, 1]]

    @pytest.mark.parametrize(
        ("td", "key", "error", "message"),
        [
            (make_dense_td(), "zz", KeyPathError, "key 'zz' not found"),
            (make_dense_td(), "b", TypeError, "'b' is a TensorDict"),
            (TensorDict(a=torch.ones(2)), "a", ValueError, "first batch dim"),
        ],
    )
    def test_group_by_invalid_arguments_raises(self, td: Any, key: str, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            group_by(td, key)

    def test_remove_duplicates_returns_unique_rows_and_indices(self) -> None:
        td = TensorDict({"a": torch.tensor([1, 0, 1, 2]), "b": torch.arange(4)}, [4])
        result, inverse = remove_duplicates(td, "a", return_indices=True)
        assert (result["a"].tolist(), result["b"].tolist()) == ([0, 1, 2], [1, 0, 3])
        assert inverse.tolist() == [1, 0, 1, 2]
        wide = TensorDict({"a": torch.tensor([[1, 0, 1], [1, 0, 1]])}, [2, 3])
        assert remove_duplicates(wide, "a", dim=-1)["a"].tolist() == [[0, 1], [0, 1]]

    def test_isin_returns_mask_per_row(self) -> None:
        td = TensorDict({"a": torch.tensor([[1, 0], [2, 3]])}, [2, 2])
        assert isin(td, TensorDict({"a": torch.tensor([[1, 0]])}, [1, 2]), "a").tolist() == [True, False]
        assert isin(td, TensorDict({"a": torch.tensor([[0], [3]])}, [2, 1]), "a", dim=1).tolist() == [
            False,
            True,
        ]

    def test_row_functions_invalid_arguments_raise(self) -> None:
        td = make_dense_td()
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            remove_duplicates(td, "zz")
        with pytest.raises(ValueError, match=r"dim 1 is not a batch dim of a collection of batch size \[3\]"):
            remove_duplicates(td, "a", dim=1)
        with pytest.raises(KeyPathError, match="key 'b' is not a tensor"):
            isin(td, td, "b")
        with pytest.raises(StructureError, match="rows of 2 elements in the input and 1 in the reference"):
            isin(td, TensorDict({"a": torch.ones(3)}, [3]), "a")


class TestCollate:
    def test_collate_list_returns_stack(self) -> None:
        assert collate([make_dense_td(), make_dense_td()]).batch_size == (2, 3)
        assert isinstance(collate([make_dense_td(), make_dense_td().exclude("a")]), LazyStackedTensorDict)
        td = make_dense_td()
        assert collate(td) is td
        assert collate([]) == []

    def test_collate_containers_returns_same_container(self) -> None:
        samples, numbers = collate([(make_dense_td(), 1), (make_dense_td(), 2)])
        assert (samples.batch_size, numbers.tolist()) == ((2, 3), [1, 2])
        pair = collate([Pair(make_dense_td(), 1), Pair(make_dense_td(), 2)])
        assert isinstance(pair, Pair)
        assert collate([{"x": make_dense_td()}, {"x": make_dense_td()}])["x"].batch_size == (2, 3)
        assert collate([1.5, 2.5]).tolist() == [1.5, 2.5]
        numbers = collate([(1, 2), (3, 4)])
        assert type(numbers) is tuple and [column.tolist() for column in numbers] == [[1, 3], [2, 4]]
        assert type(collate([[1, 2], [3, 4]])) is list

    def ragged(self) -> list[TensorDict]:
        return [TensorDict({"a": torch.full((n,), float(n)), "n": {"b": torch.ones(n, 2)}}) for n in (1, 2)]

    def test_collate_pad_keys_pads_and_returns_masks(self) -> None:
        samples = self.ragged()
        result = collate(samples, pad_keys={"a": -1.0, ("n", "b"): 0.0}, mask_key="m")
        assert type(result) is TensorDict
        assert result["a"].tolist() == [[1, -1], [2, 2]]
        assert result["m", "a"].tolist() == [[True, False], [True, True]]
        assert result["m", "n", "b"].shape == (2, 2, 2)
        assert samples[0]["a"].tolist() == [1]
        pair = collate([Pair(sample, 1) for sample in samples], pad_keys={"a": 0.0, ("n", "b"): 0.0})
        assert pair.a["a"].tolist() == [[1, 0], [2, 2]]
        mapping = collate([{"x": sample} for sample in samples], pad_keys={"a": 0.0, ("n", "b"): 0.0})
        assert mapping["x"]["a"].tolist() == [[1, 0], [2, 2]]
        with pytest.raises(ValueError, match="mask_key='m' needs pad_keys"):
            collate(samples, mask_key="m")

    def test_collate_nested_keys_returns_nested_tensors(self) -> None:
        result = collate(self.ragged(), nested_keys=["a", ("n", "b")])
        assert type(result) is TensorDict
        assert [leaf.tolist() for leaf in result["a"].unbind()] == [[1], [2, 2]]
        assert result["n", "b"].layout == torch.jagged

    def test_collate_pad_keys_different_ndim_raises(self) -> None:
        with pytest.raises(StructureError, match=r"key 'a' has \[1, 2\] dims"):
            collate([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(1, 1))], pad_keys={"a": 0.0})

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("collate_fn", [None, collate])
    def test_data_loader_over_collection_yields_batches(self, workers: int, collate_fn: Any) -> None:
        td = TensorDict({"a": torch.arange(7), "n": {"b": torch.arange(7.0)}}, [7])
        loader = DataLoader(
            td,
            batch_size=3,
            num_workers=workers,
            collate_fn=collate_fn,
            multiprocessing_context="fork" if workers else None,
        )  # type: ignore[arg-type,var-annotated]
        batches = list(loader)
        assert [type(batch) for batch in batches] == [TensorDict] * 3
        assert torch.cat([batch["n", "b"] for batch in batches]).tolist() == list(range(7))

    def test_data_loader_over_list_yields_stacks(self) -> None:
        td = TensorDict({"a": torch.arange(4)}, [4])
        assert [batch["a"].tolist() for batch in DataLoader(list(td), batch_size=2)] == [[0, 1], [2, 3]]  # type: ignore[arg-type,var-annotated]

    def test_data_loader_keeps_collection_because_not_a_mapping(self) -> None:
        td = TensorDict({"a": torch.arange(4), "n": {"b": torch.arange(4)}}, [4])
        assert not isinstance(td, Mapping)
        whole = DataLoader([td, td], batch_size=None)  # type: ignore[arg-type,var-annotated]
        assert [type(item) for item in whole] == [TensorDict] * 2
        assert [item["n", "b"].item() for item in DataLoader(td, batch_size=None)] == [0, 1, 2, 3]  # type: ignore[arg-type,var-annotated]
        # Unpacking with ** uses keys() and indexing, without the Mapping protocol.
        assert list({**td}) == list(dict(td)) == ["a", "n"]

    def test_getitems_returns_indexed_rows(self) -> None:
        assert make_dense_td().__getitems__([0, 2])["a"].tolist() == [[0, 1], [4, 5]]


class TestAssertClose:
    def test_assert_close_equal_collections_returns_true(self) -> None:
        assert assert_close(make_dense_td(), make_dense_td())
        assert assert_allclose_td(make_dense_td(), TensorDict(make_dense_td(), []))
        assert assert_close(make_dense_td(), make_dense_td().exclude("a"), intersection=True)
        assert assert_close(
            make_dense_td(), make_dense_td().apply(lambda x: x + 1e-9 if x.is_floating_point() else x)
        )
        stack = LazyStackedTensorDict(*[TensorDict(a=torch.ones(n)) for n in (1, 2)])
        assert assert_close(stack, stack.clone())

    def test_assert_close_tolerances_and_nan(self) -> None:
        a, b = TensorDict(a=torch.zeros(1)), TensorDict(a=torch.full((1,), 1e-3))
        assert assert_close(a, b, rtol=0, atol=1e-2)
        with pytest.raises(AssertionError, match="key 'a' differs: "):
            assert_close(a, b)
        nan = TensorDict(a=torch.tensor(float("nan")))
        assert assert_close(nan, nan.clone())
        with pytest.raises(AssertionError, match="key 'a' differs"):
            assert_close(nan, nan.clone(), equal_nan=False)

    @pytest.mark.parametrize(
        ("other", "error", "message"),
        [
            (make_dense_td().exclude(("b", "c")), KeyPathError, r"differ at key 'b': missing keys \['c'\]"),
            (make_dense_td().apply(lambda x: x.double()), AssertionError, r"dtype"),
            (
                TensorDict({"a": {}, "b": make_dense_td()["b"]}, [3]),
                AssertionError,
                "the structures differ at key 'a'",
            ),
            ({"a": 1}, TypeError, "compares collections; got dict"),
        ],
    )
    def test_assert_close_difference_raises_with_key(self, other: Any, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            assert_close(make_dense_td(), other)

    def test_assert_close_msg_and_prefix_start_message(self) -> None:
        with pytest.raises(AssertionError, match=r"^here: key \('p', 'a'\) differs"):
            assert_close(TensorDict(a=1), TensorDict(a=2), msg="here: ", prefix="p")


class TestPredicates:
    def test_is_tensor_collection_accepts_class_and_instance(self) -> None:
        assert is_tensor_collection(make_dense_td())
        assert is_tensor_collection(TensorCollection)
        assert not is_tensor_collection(torch.zeros(1))


class TestExpansion:
    def test_expand_right_appends_dims(self) -> None:
        assert expand_right(torch.arange(2), (2, 3)).tolist() == [[0, 0, 0], [1, 1, 1]]
        assert expand_as_right(torch.zeros(3), make_dense_td()).shape == (3,)
        with pytest.raises(RuntimeError, match="must match the existing size"):
            expand_right(torch.zeros(2), (3, 3))
        with pytest.raises(RuntimeError, match="has 2 dims"):
            expand_right(torch.zeros(2, 3), (2,))

    def test_expand_as_right_collection_expands_leaves(self) -> None:
        result = expand_as_right(make_dense_td(), TensorDict(batch_size=[3, 5]))
        assert result.batch_size == result["b"].batch_size == (3, 5)
        assert result["a"].shape == (3, 5, 2)
        assert torch.equal(result["a"][:, 4], make_dense_td()["a"])
        with pytest.raises(RuntimeError, match=r"\[3\] does not start \[4\]"):
            expand_as_right(make_dense_td(), torch.zeros(4))
