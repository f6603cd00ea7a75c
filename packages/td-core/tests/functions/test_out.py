"""The argument out of every operation that has it: an empty collection is filled, and out= excludes inplace=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack, maybe_dense_stack, pad_sequence


def make_data() -> TensorDict:
    leaves = {"a": torch.arange(12.0).view(3, 4), "n": {"b": torch.arange(60.0).view(3, 4, 5)}}
    return TensorDict(leaves, batch_size=[3, 4])


OPERATIONS: dict[str, Callable[[TensorDict, Any], Any]] = {
    "apply": lambda td, out: td.apply(lambda leaf: leaf + 1, out=out),
    "named_apply": lambda td, out: td.named_apply(lambda key, leaf: leaf + 1, out=out),
    "cat": lambda td, out: torch.cat([td, td], 0, out=out),
    "stack": lambda td, out: torch.stack([td, td], 0, out=out),
    "lazy_stack": lambda td, out: lazy_stack([td, td], 0, out=out),
    "maybe_dense_stack": lambda td, out: maybe_dense_stack([td, td], 0, out=out),
    "clamp": lambda td, out: td.clamp(2, 5, out=out),
    "torch.clamp": lambda td, out: torch.clamp(td, 2, 5, out=out),
    "gather": lambda td, out: td.gather(0, torch.zeros(2, 4, dtype=torch.int64), out=out),
    "logsumexp": lambda td, out: td.logsumexp(dim=1, out=out),
    "norm": lambda td, out: td.norm(out=out),
    "torch.exp": lambda td, out: torch.exp(td, out=out),
    "torch.add": lambda td, out: torch.add(td, td, alpha=2, out=out),
    "torch.add number": lambda td, out: torch.add(torch.ones(3, 4), td, out=out),
    "torch.cumsum": lambda td, out: torch.cumsum(td, 1, out=out),
    "torch.sum": lambda td, out: torch.sum(td, 0, out=out),
    "torch.logsumexp": lambda td, out: torch.logsumexp(td, 0, out=out),
    "where": lambda td, out: td.where(torch.arange(12).view(3, 4) > 5, -1, out=out),
    "map": lambda td, out: td.map(lambda chunk: chunk + 1, 0, num_workers=0, num_chunks=2, out=out),
    "pad_sequence": lambda td, out: pad_sequence([td, td], out=out),
}

EMPTY: dict[str, Callable[[Any], Any]] = {
    "dense": lambda result: TensorDict(batch_size=result.batch_size),
    "empty levels": lambda result: result.empty(recurse=True),
    "lazy": lambda result: (
        lazy_stack([TensorDict(batch_size=result.batch_size[1:]) for _ in range(result.batch_size[0])])
        if result.batch_size
        else TensorDict()
    ),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("name", OPERATIONS)
def test_empty_out_is_filled_and_returned(name: str, kind: str) -> None:
    expected = OPERATIONS[name](make_data(), None)
    out = EMPTY[kind](expected)
    assert OPERATIONS[name](make_data(), out) is out
    assert set(out.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(out[key], expected[key])


def test_map_without_results_leaves_empty_out() -> None:
    out = TensorDict(batch_size=[3, 4])
    assert make_data().map(lambda chunk: None, 0, num_workers=0, out=out) is out
    assert out.is_empty()


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


@pytest.mark.parametrize("name", ["max", "sort", "cummin"])
def test_values_and_indices_are_written_into_out(name: str) -> None:
    function = getattr(torch, name)
    expected = function(make_data(), 0)
    out = tuple(TensorDict(batch_size=part.batch_size) for part in expected)
    result = function(make_data(), 0, out=out)
    assert result.values is out[0] and result.indices is out[1]
    for found, wanted in zip(out, expected, strict=True):
        assert found.equal(wanted)


def test_out_of_torch_function_writes_into_leaves() -> None:
    out = make_data()
    leaf = out["a"]
    torch.neg(make_data(), out=out)
    assert out["a"] is leaf
    torch.testing.assert_close(leaf, -make_data()["a"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda td: torch.all(td > 0, out=td), "out= is for results that are collections; got a bool"),
        (lambda td: torch.exp(td, out=td["a"]), "out= of collections is a collection; got a Tensor"),
    ],
)
def test_out_that_cannot_hold_the_result_raises(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(make_data())
