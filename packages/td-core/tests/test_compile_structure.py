"""Test torch.compile(fullgraph=True) on updates, key operations and conversions of dense and lazy collections."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, assert_close, merge_tensordicts, pad_sequence
from td_core.errors import StructureError

pytestmark = pytest.mark.once


class Name(str, enum.Enum):
    A, B, Z = "a", "b", "z"


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6.0).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, batch_size=[3]
    )


def make_lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*make_dense_td().clone().unbind(0))


def set_and_return(td: Any, index: Any, value: Any) -> Any:
    td[index] = value
    return td


def write_in_context(td: Any) -> Any:
    with td.flatten_keys(".") as flat:
        flat["q"] = flat["a"] + 1
    return td


def write_in_view(td: Any) -> Any:
    with td.view(3, 1) as raised:
        raised["a"] = raised["a"] + 1
        raised["q"] = raised["b", "c"] * 2
    return td


ARRAY = np.array([2, 0], dtype=np.int32)

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "select": lambda td: td.select("a", ("b", "c")),
    "exclude": lambda td: td.exclude("a", ("b", "c")),
    "split_keys": lambda td: td.split_keys(["a"])[1],
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "flatten_keys as a context": lambda td: write_in_context(td.clone()),
    "view as a context": lambda td: write_in_view(td.clone()),
    "where a number": lambda td: td.where(torch.tensor([True, False, True]), -1),
    "masked_fill": lambda td: td.masked_fill(torch.tensor([True, False, True]), -1),
    "index by an array": lambda td: td.contiguous()[ARRAY],
    "index by a list": lambda td: td[[2, 0]],
    "write by a list": lambda td: set_and_return(
        td.view(3, 1).clone(), [2, 0], make_dense_td().view(3, 1)[:2]
    ),
    "write a number by a mask": lambda td: set_and_return(
        td.clone().unsqueeze(-1), torch.tensor([True, False, True]), 0
    ),
    "repeat_interleave": lambda td: td.repeat_interleave(torch.tensor([2, 0, 1]), dim=0, output_size=3),
    "cast to a complex dtype": lambda td: td.complex64(),
    "cast to an unsigned dtype": lambda td: td.uint16(),
    "set a list of tensors and numbers": lambda td: td.clone().set("z", [td["b", "c"][0], 2, 3.5]),
    "keys of an enumeration": lambda td: td.clone().set(Name.Z, td[Name.A] + td.get((Name.B, "c")).sum()),
    "rename_key_": lambda td: td.clone().rename_key_("a", "z"),
    "rename_keys": lambda td: td.rename_keys({"a": "z"}),
    "empty": lambda td: td.empty(recurse=True),
    "update": lambda td: td.clone().update({"a": torch.ones(3), "n": {"q": torch.ones(3)}}),
    "update with a collection": lambda td: td.clone().update(make_dense_td()),
    "update_": lambda td: td.clone().update_(make_dense_td()),
    "replace": lambda td: td.replace(a=torch.ones(3)),
    "fill_": lambda td: td.clone().fill_("a", 2),
    "zero_": lambda td: td.clone().zero_(),
    "write a collection": lambda td: set_and_return(td.clone(), 0, make_dense_td()[1]),
    "write a number": lambda td: set_and_return(td.clone(), slice(0, 2), 0),
    "write a new key": lambda td: set_and_return(td.clone(), 1, {"a": torch.ones(2), "z": torch.ones(2)}),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "apply with another": lambda td: td.apply(torch.add, make_dense_td()),
    "apply with a default": lambda td: td.apply(
        lambda x, y: x if y is None else y, TensorDict(a=torch.ones(3), batch_size=[3]), default=None
    ),
    "apply with a batch size": lambda td: td.apply(lambda leaf: leaf.sum(), batch_size=[]),
    "named_apply": lambda td: td.named_apply(lambda key, leaf: leaf + len(key), nested_keys=True),
    "metadata": lambda td: td.apply(lambda leaf: leaf * td.numel() + td.depth),
    "rename": lambda td: td.rename("time"),
    "to_dict": lambda td: td.to_dict()["b"]["c"],
    "from_dict": lambda td: TensorDict.from_dict(
        {"a": td["a"], "q": (td["a"], {"z": td["a"]})}, batch_dims=1
    ),
    "to_tensordict": lambda td: td.to_tensordict(),
    "merge_tensordicts": lambda td: merge_tensordicts(td, TensorDict(z=torch.ones(3), batch_size=[3])),
    "pad_sequence": lambda td: pad_sequence([td, td[:2]]),
}


@pytest.mark.parametrize("make", [make_dense_td, make_lazy])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_compile_program_has_no_graph_break(program: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    expected = program(make())
    result = torch.compile(program, backend="eager", fullgraph=True)(make())
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected)
    else:
        assert_close(result, expected)
        assert list(result.keys(True)) == list(expected.keys(True))


def make_uneven() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*[TensorDict(a=torch.ones(2, i), batch_size=[2]) for i in (1, 2, 3)])


def set_item(stack: Any, index: Any) -> Any:
    stack[index].zero_()
    return [member["a"] for member in stack.tensordicts]


KNOWN: dict[str, Any] = {
    "list": [2, 0],
    "negative": [-1],
    "range": range(2),
    "nothing": [],
    "beside a slice": ([2, 0], slice(1)),
    "beside an int": (range(1, 3), 0),
    "behind None": (None, [1]),
    "behind an ellipsis": (..., [1, 2], slice(None)),
}
UNKNOWN: dict[str, Any] = {
    "tensor": torch.tensor([2, 0]),
    "tensor without dims": torch.tensor(1),
    "mask": torch.tensor([True, False, True]),
    "array": np.array([2, 0]),
    "beside an int": (torch.tensor([2, 0]), 0),
}


@pytest.mark.parametrize("index", KNOWN.values(), ids=KNOWN)
def test_compile_constant_index_returns_members_not_copies(index: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(set_item, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(make_uneven(), index), set_item(make_uneven(), index))


def test_compile_nested_stack_index_returns_members_not_copies() -> None:
    def program(stack: Any) -> Any:
        stack[:2, [1]].zero_()
        return [member["a"] for inner in stack.tensordicts for member in inner.tensordicts]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    stacks = [LazyStackedTensorDict(make_uneven(), make_uneven()) for _ in range(2)]
    torch.testing.assert_close(compiled(stacks[0]), program(stacks[1]))
    assert (
        sum(int(member["a"].sum()) for inner in stacks[0].tensordicts for member in inner.tensordicts) == 16
    )


@pytest.mark.parametrize("index", UNKNOWN.values(), ids=UNKNOWN)
def test_compile_tensor_index_of_members_breaks_graph(index: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(set_item, backend="eager")
    torch.testing.assert_close(compiled(make_uneven(), index), set_item(make_uneven(), index))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="which members of a lazy stack a tensor selects"):
        torch.compile(set_item, backend="eager", fullgraph=True)(make_uneven(), index)


@pytest.mark.parametrize("index", UNKNOWN.values(), ids=UNKNOWN)
def test_compile_write_at_tensor_index_has_no_graph_break(index: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(set_and_return, backend="eager", fullgraph=True)
    assert_close(
        compiled(make_lazy().unsqueeze(1), index, 0), set_and_return(make_lazy().unsqueeze(1), index, 0)
    )


def test_export_tensor_index_of_members_raises() -> None:
    class Model(torch.nn.Module):
        def forward(self, stack: Any, index: Any) -> Any:
            return stack[index]["a"]

    index = torch.tensor([2, 0])
    with pytest.raises(StructureError, match="which members of a lazy stack a tensor selects is not known"):
        torch.export.export(Model(), (make_lazy(), index), strict=False)
