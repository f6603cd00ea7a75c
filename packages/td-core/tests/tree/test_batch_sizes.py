"""Batch sizes inferred from leaves: auto_batch_size_, its limits, and what lazy stacks allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import BatchSizeError


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def list_batch_sizes(node: Any) -> dict[Any, list[int]]:
    levels = {
        (): node,
        **{key: value for key, value in node.items(True) if not isinstance(value, torch.Tensor)},
    }
    return {key: list(level.batch_size) for key, level in levels.items()}


class TestAutoBatchSize:
    @pytest.mark.parametrize(
        ("source", "batch_dims", "expected"),
        [
            ({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4)}}, None, {(): [3, 4], "b": [3, 4]}),
            ({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4)}}, 1, {(): [3], "b": [3]}),
            ({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3, 2, 4)}}, None, {(): [3, 2], "b": [3, 2, 4]}),
            ({"a": torch.zeros(3, 4), "b": torch.zeros(2)}, None, {(): []}),
            ({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, 2, {(): [3]}),
            ({"a": torch.zeros(3), "e": {"f": {}}}, None, {(): [3], "e": [3], ("e", "f"): [3]}),
            ({"a": torch.zeros(()), "n": {"b": torch.zeros(2)}}, None, {(): [], "n": [2]}),
            ({}, None, {(): []}),
            ({"e": {}}, None, {(): [], "e": []}),
        ],
    )
    def test_auto_batch_size_equals_shared_leading_dims(
        self, source: Any, batch_dims: int | None, expected: Any
    ) -> None:
        td = TensorDict(source)
        assert td.auto_batch_size_(batch_dims) is td
        assert list_batch_sizes(td) == expected

    @pytest.mark.parametrize(("keep", "inner"), [(False, [3]), (True, [3, 4, 5])])
    def test_auto_batch_size_keep_compliant_size_keeps_nested(self, keep: bool, inner: list[int]) -> None:
        td = TensorDict({"a": torch.zeros(3, 4, 5), "b": TensorDict({"c": torch.zeros(3, 4, 5)}, [3, 4, 5])})
        for batch_size in ([], [3, 4]):
            td.batch_size = batch_size
            td.auto_batch_size_(1, keep_compliant_size=keep)
            assert list_batch_sizes(td) == {(): [3], "b": inner}
            td["b"].batch_size = [3, 4, 5]

    def test_auto_batch_size_keeps_names_of_remaining_dims(self) -> None:
        td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["a", "b"])
        assert td.auto_batch_size_(1).names == ["a"]

    def test_auto_batch_size_negative_dims_raises(self) -> None:
        with pytest.raises(BatchSizeError, match="the number of batch dims; got -1"):
            make_dense_td().auto_batch_size_(-1)

    def test_auto_batch_size_lazy_stack_other_size_raises(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(3)})])
        assert stack.auto_batch_size_(1).batch_size == torch.Size([2])
        for batch_dims in (None, 0, 2):
            with pytest.raises(
                BatchSizeError, match=r"a lazy stack has the batch size of its members, \[2\]"
            ):
                stack.auto_batch_size_(batch_dims)

    @pytest.mark.parametrize(
        "members", [[{"a": torch.zeros(3)}] * 2, [{"n": {"a": torch.zeros(3)}}] * 2, [{}] * 2]
    )
    @pytest.mark.parametrize("batch_dims", [None, 2, 5])
    def test_auto_batch_size_lazy_stack_same_size_is_noop(self, members: Any, batch_dims: int | None) -> None:
        stack = LazyStackedTensorDict(*[TensorDict(member, [3]) for member in members])
        assert stack.auto_batch_size_(batch_dims) is stack
        assert stack.batch_size == torch.Size([2, 3])

    def test_auto_batch_size_nested_lazy_stack_limits_dims(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(3)}) for _ in range(2)])
        td = TensorDict({"s": stack, "n": {"s": stack}, "b": torch.zeros(2, 3)}).auto_batch_size_()
        assert td.batch_size == td["n"].batch_size == td["s"].batch_size == torch.Size([2])
