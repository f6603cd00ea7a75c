"""Contradictory arguments raise; arguments apply to nested nodes and to all entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack, merge_tensordicts


@pytest.mark.parametrize(
    "call",
    [
        lambda td, out: td.gather(0, torch.tensor([1, 0]), out=out, inplace=True),
        lambda td, out: td.gather(0, torch.tensor([1, 0]), out, inplace=True),
        lambda td, out: td.apply(torch.exp, out=out, inplace=True),
        lambda td, out: td.apply_(torch.exp, out=out),
        lambda td, out: td.named_apply(lambda key, leaf: leaf + 1, out=out, inplace=True),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "stack"])
def test_write_out_and_in_place_raises(call: Any, kind: str) -> None:
    td = TensorDict({"a": torch.arange(2.0)}, [2])
    td = td if kind == "dense" else LazyStackedTensorDict(*td.unbind(0))
    out = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(
        ValueError, match=r"writes into out= or, with inplace=True, into this collection; got both"
    ):
        call(td, out)
    assert td["a"].tolist() == [0, 1] and out["a"].tolist() == [0, 0]


def make_stack(dim: int = 1) -> Any:
    return lazy_stack(
        [TensorDict({"x": torch.ones(1), "n": {"y": torch.ones(1)}}, [1]) for _ in range(10)], dim
    )


NEW = {
    "new_zeros": lambda td, size: td.new_zeros(size, empty_lazy=True),
    "new_ones": lambda td, size: td.new_ones(*size, empty_lazy=True),
    "new_empty": lambda td, size: td.new_empty(size, empty_lazy=True),
    "new_full": lambda td, size: td.new_full(size, 3.0, empty_lazy=True),
}


@pytest.mark.parametrize("size", [(10, 1), (1, 10, 1), (1, 100, 1), (4,)])
@pytest.mark.parametrize("name", NEW)
def test_new_empty_lazy_nested_stack_is_empty_stack(name: str, size: tuple[int, ...]) -> None:
    td = TensorDict(
        {"s": make_stack(), "n": {"s": make_stack(), "a": torch.ones(1, 10)}, "a": torch.ones(1, 10)}, [1, 10]
    )
    result = NEW[name](td, size)
    assert list(result.keys()) == ["s", "n", "a"] and result.batch_size == size
    assert result["a"].shape == size and result["n", "a"].shape == size
    for key in ("s", ("n", "s")):
        stack = result.get(key)
        assert isinstance(stack, LazyStackedTensorDict) and stack.is_empty() and stack.batch_size == size
        assert stack.stack_dim == min(1, len(size) - 1)
    result["s"].tensordicts[0]["new"] = torch.ones(result["s"].tensordicts[0].batch_size)
    assert type(td.get("s")) is LazyStackedTensorDict and not td.get("s").is_empty(), "the source stays"
    assert not NEW[name](td, size).get("s").get("n").keys()


def test_new_empty_lazy_node_with_more_batch_dims_keeps_them() -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]) for _ in range(3)], 1)
    result = TensorDict({"s": stack}, [2]).new_zeros(5, empty_lazy=True)
    assert result.get("s").batch_size == (5, 3) and result.get("s").is_empty()
    assert len(result.get("s").tensordicts) == 3


def test_new_zeros_empty_lazy_keeps_nested_stack_empty() -> None:
    members = [
        TensorDict({"s": lazy_stack([TensorDict({"x": 1}), TensorDict({"x": 2})])}, [2]) for _ in range(3)
    ]
    result = lazy_stack(members).new_zeros(4, 5, empty_lazy=True)
    inner = result.tensordicts[0].get("s")
    assert type(inner) is LazyStackedTensorDict and inner.batch_size == (5,) and inner.is_empty()


def test_new_zeros_without_empty_lazy_has_leaves() -> None:
    td = TensorDict({"s": make_stack()}, [1, 10])
    assert td.new_zeros(3, 2)["s", "x"].shape == (3, 2)


def merge_three(callback: Any) -> Any:
    first = TensorDict({"all": 0, "n": {"some": 10, "all": 1}, "one": 5})
    second = TensorDict({"all": 1, "n": {"some": 11, "all": 2}})
    third = TensorDict({"all": 2, "n": {"all": 3}})
    return merge_tensordicts(first, second, third, callback_exist=callback)


def join_three(*values: Any) -> Any:
    assert len(values) == 3
    return torch.stack(values)


@pytest.mark.parametrize(
    "callback",
    [join_three, {"all": join_three, ("n", "all"): join_three, ("n", "some"): join_three, "one": join_three}],
    ids=["one", "by key"],
)
def test_merge_callback_receives_keys_of_all_inputs(callback: Any) -> None:
    result = merge_three(callback)
    assert result["all"].tolist() == [0, 1, 2] and result["n", "all"].tolist() == [1, 2, 3]
    assert result["n", "some"].item() == 10 and result["one"].item() == 5


def test_merge_two_inputs_callback_receives_both() -> None:
    result = merge_tensordicts(TensorDict(a=1, b=2), TensorDict(a=3), callback_exist=lambda a, b: a + b)
    assert result["a"].item() == 4 and result["b"].item() == 2
