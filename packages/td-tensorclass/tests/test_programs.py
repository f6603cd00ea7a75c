"""Random programs of shape operations: each value must move together with the number at its position."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass


class Row(TensorClass):
    number: Tensor
    value: Any
    shared: Any = None


def make_values(numbers: Tensor) -> Any:
    """Build non-tensor data with one string per number."""
    if not numbers.ndim:
        return NonTensorData(f"v{numbers.item()}")
    return NonTensorStack.from_list([f"v{number}" for number in numbers.flatten().tolist()], 1).reshape(
        numbers.shape
    )


def make_dense(numbers: Tensor) -> TensorDict:
    inner = TensorDict({"number": numbers, "value": make_values(numbers)}, batch_size=numbers.shape)
    return TensorDict(
        {"number": numbers, "value": make_values(numbers), "inner": inner, "shared": "s"},
        batch_size=numbers.shape,
    )


def make_lazy(numbers: Tensor) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*[make_dense(part) for part in numbers.unbind(0)])


def make_tensorclass(numbers: Tensor) -> Row:
    return Row(numbers, make_values(numbers), "s", batch_size=numbers.shape)


def make_lazy_tensorclass(numbers: Tensor) -> Row:
    return Row.lazy_stack([make_tensorclass(part) for part in numbers.unbind(0)])


KINDS = {
    "dense": make_dense,
    "lazy": make_lazy,
    "tensorclass": make_tensorclass,
    "lazy tensorclass": make_lazy_tensorclass,
}


def list_elements(column: Any, ndim: int) -> list[Any]:
    """Return the values of non-tensor data, one per batch element, in C order."""
    found = [column.tolist()]
    for _ in range(ndim):
        found = [value for values in found for value in values]
    return found


def assert_values_match_numbers(node: Any) -> None:
    numbers = node.get("number")
    assert numbers.shape == node.batch_size
    # Read the node under the key, because reading the attribute returns the bare value.
    entries = node._tensordict if isinstance(node, Row) else node
    assert list_elements(entries.get("value"), numbers.ndim) == [
        f"v{number}" for number in numbers.flatten().tolist()
    ]
    if "shared" in entries.keys():
        assert set(list_elements(entries.get("shared"), numbers.ndim)) <= {"s"}
    if "inner" in entries.keys():
        assert_values_match_numbers(entries["inner"])


def draw_halves(draw: Callable[[Any], Any], size: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)


def draw_positions(draw: Callable[[Any], Any], size: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.integers(-size, size - 1), max_size=4)), dtype=torch.int64)


def write_drawn(node: Any, draw: Callable[[Any], Any]) -> Any:
    node, source = node.clone(), draw(st.integers(0, len(node) - 1))
    node[draw(st.integers(0, len(node) - 1))] = node[source].clone()
    return node


def gather_drawn(node: Any, draw: Callable[[Any], Any]) -> Any:
    size = node.batch_size
    flat = torch.tensor(draw(st.lists(st.integers(0, size[0] - 1), min_size=1, max_size=3)))
    return node.gather(0, flat.view(-1, *[1] * (len(size) - 1)).expand(-1, *size[1:]))


def choose_drawn(node: Any, draw: Callable[[Any], Any]) -> Any:
    mask = draw_halves(draw, node.numel()).view(node.batch_size)
    return torch.where(mask, node, node.flip(0))


#: Operations by name; each takes a node with at least one element and dim, and hypothesis' draw function.
STEPS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda node, draw: node[draw(st.integers(0, len(node) - 1))],
    "slice": lambda node, draw: node[draw(st.integers(0, len(node) - 1)) :],
    "mask": lambda node, draw: node[draw_halves(draw, len(node))],
    "positions": lambda node, draw: node[draw_positions(draw, len(node))],
    "last dim": lambda node, draw: node[..., 0],
    "new dim": lambda node, draw: node[None],
    "masked_select": lambda node, draw: node.masked_select(
        draw_halves(draw, node.numel()).view(node.batch_size)
    ),
    "flatten": lambda node, draw: node.reshape(-1),
    "unflatten": lambda node, draw: node.unflatten(0, (1, -1)),
    "permute": lambda node, draw: node.permute(*draw(st.permutations(range(node.batch_dims)))),
    "unsqueeze": lambda node, draw: node.unsqueeze(draw(st.integers(-1, node.batch_dims))),
    "squeeze": lambda node, draw: node.squeeze(0),
    "expand": lambda node, draw: node.expand(2, *node.batch_size),
    "repeat": lambda node, draw: node.repeat(2, *[1] * (node.batch_dims - 1)),
    "repeat_interleave": lambda node, draw: node.repeat_interleave(2, dim=-1),
    "flip": lambda node, draw: node.flip(draw(st.integers(0, node.batch_dims - 1))),
    "roll": lambda node, draw: node.roll(draw(st.integers(-2, 2)), -1),
    "narrow": lambda node, draw: node.narrow(0, 0, draw(st.integers(1, len(node)))),
    "unbind": lambda node, draw: node.unbind(-1)[-1],
    "split": lambda node, draw: node.split(2, 0)[-1],
    "chunk": lambda node, draw: node.chunk(2, -1)[0],
    "tensor_split": lambda node, draw: node.tensor_split(2, 0)[-1],
    "stack": lambda node, draw: torch.stack([node, node.flip(0)], draw(st.integers(0, node.batch_dims))),
    "cat": lambda node, draw: torch.cat([node, node.flip(0)], draw(st.integers(0, node.batch_dims - 1))),
    "lazy_stack": lambda node, draw: type(node).lazy_stack([node, node.flip(0)]),
    "gather": gather_drawn,
    "where": choose_drawn,
    "written": write_drawn,
    "clone": lambda node, draw: node.clone(),
    "contiguous": lambda node, draw: node.contiguous(),
    "to": lambda node, draw: node.to("cpu"),
    "tree_map": lambda node, draw: torch.utils._pytree.tree_map(torch.clone, node),
    "pickle": lambda node, draw: pickle.loads(pickle.dumps(node)),
    "deepcopy": lambda node, draw: copy.deepcopy(node),
    "arithmetic": lambda node, draw: node + node - node,
    "state dict": lambda node, draw: node.clone().load_state_dict(node.state_dict()),
    "dict": lambda node, draw: type(node).from_dict(node.to_dict(), batch_size=node.batch_size),
}


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_random_shape_operations_move_values_like_leaves(kind: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    node = KINDS[kind](torch.arange(torch.Size(shape).numel()).view(shape))
    assert_values_match_numbers(node)
    for _ in range(data.draw(st.integers(1, 5))):
        if not node.batch_dims or not node.numel() or node.numel() > 100:
            break
        name = data.draw(st.sampled_from(sorted(STEPS)))
        node = STEPS[name](node, data.draw)
        if not node.numel() and "number" not in node.keys():
            # A stack without members has no entries.
            break
        assert_values_match_numbers(node)
