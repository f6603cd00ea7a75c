"""Collate samples into batches, alone and in a DataLoader."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    collate,
)
from td_core.errors import StructureError

Pair = namedtuple("Pair", "a b")


class TestCollate:
    def test_collate_list_returns_stack(self, make_dense: Any) -> None:
        assert collate([make_dense(), make_dense()]).batch_size == (2, 3)
        assert isinstance(collate([make_dense(), make_dense().exclude("a")]), LazyStackedTensorDict)
        td = make_dense()
        assert collate(td) is td
        assert collate([]) == []

    def test_collate_containers_returns_same_container(self, make_dense: Any) -> None:
        samples, numbers = collate([(make_dense(), 1), (make_dense(), 2)])
        assert (samples.batch_size, numbers.tolist()) == ((2, 3), [1, 2])
        pair = collate([Pair(make_dense(), 1), Pair(make_dense(), 2)])
        assert isinstance(pair, Pair)
        assert collate([{"x": make_dense()}, {"x": make_dense()}])["x"].batch_size == (2, 3)
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

    def test_getitems_returns_indexed_rows(self, make_dense: Any) -> None:
        assert make_dense().__getitems__([0, 2])["a"].tolist() == [[0, 1], [4, 5]]
