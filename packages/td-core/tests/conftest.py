"""Fixtures that several test files of td-core share: factories of collections and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, kinds, lazy_stack
from td_core._encode.node_kinds import KINDS
from td_core._encode.value_types import VALUES
from td_core._formats.object_locations import STORES
from td_core._formats.serializers import SERIALIZERS
from td_core._tree.coerce import COERCERS
from td_core.plugins.siblings import SiblingMethods
from td_core.spi import Layout, Record, is_stored


def build_nested(shape: tuple[int, ...] = (2, 3)) -> TensorDict:
    generator = torch.Generator().manual_seed(7)

    def leaf(*tail: int) -> Tensor:
        return torch.rand(*shape, *tail, generator=generator).mul(0.9)

    return TensorDict({"a": leaf(), "n": {"b": leaf(4), "m": {"c": leaf(1, 2)}}}, shape)


#: Collections of batch size (2, 3) with values in [0, 1), by the name of their structure.
COLLECTIONS: dict[str, Callable[[], Any]] = {
    "flat": lambda: build_nested().flatten_keys(),
    "nested": build_nested,
    "lazy": lambda: LazyStackedTensorDict(build_nested((3,)), build_nested((3,)) + 0.05, stack_dim=0),
    "lazy along 1": lambda: LazyStackedTensorDict(
        *[build_nested((2,)) + 0.01 * i for i in range(3)], stack_dim=1
    ),
    "nested lazy": lambda: TensorDict(
        {
            "a": torch.rand(2, 3),
            "l": LazyStackedTensorDict(build_nested((3,)), build_nested((3,)) + 0.05, stack_dim=0),
        },
        [2, 3],
    ),
    "longer batch size": lambda: TensorDict({"a": torch.rand(2, 3), "n": build_nested((2, 3, 2))}, [2, 3]),
}


@pytest.fixture(scope="session")
def make_nested() -> Callable[..., TensorDict]:
    """Return a function that builds a tree with leaves at three depths and the given batch size."""
    return build_nested


@pytest.fixture(scope="session")
def make_collection() -> Callable[[str], Any]:
    """Return a function that builds one of ``COLLECTIONS`` by its name."""
    return lambda name: COLLECTIONS[name]()


@pytest.fixture(scope="session")
def assert_leaves_equal() -> Callable[[Any, Mapping[Any, Tensor]], None]:
    """Return a function that compares the leaves of a collection with tensors by key path, in order."""

    def compare(result: Any, expected: Mapping[Any, Tensor]) -> None:
        found = dict(result.items(True, True))
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, equal_nan=True)

    return compare


@pytest.fixture(scope="session")
def dict_layout() -> str:
    """Add a layout of TensorDicts, with a mark and the lock in its headers, and return the name of its format."""

    def flatten(node: Any) -> Record:
        return Record({"mark": "dict", "is_locked": node.is_locked}, dict(node._children()))

    def unflatten(record: Record) -> TensorDict:
        td = TensorDict(dict(record.entries))
        return td.lock_() if record.meta["is_locked"] else td

    kinds.add_layout(TensorDict, "dict/1", Layout(flatten, unflatten, ("Dict",)))
    return "dict/1"


def build_member(i: int) -> TensorDict:
    return TensorDict({"a": torch.full((3, 2), float(i)), "n": {"b": torch.full((3,), 10.0 + i)}}, [3])


@pytest.fixture(scope="session")
def make_member() -> Callable[[int], TensorDict]:
    """Return a function that builds member ``i`` of the stacks of ``make_lazy_stack``."""
    return build_member


@pytest.fixture(scope="session")
def make_lazy_stack() -> Callable[..., LazyStackedTensorDict]:
    """Return a function that builds a lazy stack of members with equal keys and shapes."""

    def build(dim: int = 0, count: int = 4) -> LazyStackedTensorDict:
        return lazy_stack([build_member(i) for i in range(count)], dim)

    return build


@pytest.fixture(scope="session")
def make_ragged_stack() -> Callable[[], LazyStackedTensorDict]:
    """Return a function that builds a lazy stack whose members differ in keys and shapes."""

    def build() -> LazyStackedTensorDict:
        return lazy_stack(
            [TensorDict({"a": torch.full((i + 1,), float(i)), f"only{i}": torch.zeros(1)}) for i in range(3)]
        )

    return build


def build_dense() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, batch_size=[3]
    )


@pytest.fixture(scope="session")
def make_dense() -> Callable[[], TensorDict]:
    """Return a function that builds a tree with integer and float leaves, to be written into."""
    return build_dense


@pytest.fixture(params=["dense", "lazy"])
def td(request: pytest.FixtureRequest) -> Any:
    """Return the tree of ``make_dense``, dense, then as a lazy stack of its rows."""
    rows = [row.clone() for row in build_dense().unbind(0)]
    return build_dense() if request.param == "dense" else LazyStackedTensorDict(*rows)


def copy_leaves(node: Any) -> dict[Any, Tensor]:
    return {key: value.clone() for key, value in node.items(True, True)}


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Any], dict[Any, Tensor]]:
    """Return a function that copies the leaves of a collection, by key path."""
    return copy_leaves


@pytest.fixture(scope="session")
def assert_unchanged() -> Callable[[Any, dict[Any, Tensor]], None]:
    """Return a function that compares a collection with an earlier snapshot, exactly."""

    def compare(node: Any, before: dict[Any, Tensor]) -> None:
        after = copy_leaves(node)
        assert list(after) == list(before)
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, rtol=0, atol=0)

    return compare


@pytest.fixture(scope="session")
def describe_leaf() -> Callable[[Tensor], tuple[Any, ...]]:
    """Return a function that returns all that a write could change in a leaf; the shape and dtype first, the elements last."""

    def describe(leaf: Tensor) -> tuple[Any, ...]:
        plain = leaf.detach().clone() if is_stored(leaf) else leaf.detach()
        if plain.is_meta:
            elements: Any = None
        elif plain.is_quantized:
            elements = plain.int_repr().tolist()
        else:
            # A copy has the strides that a view of bytes needs, also where a dim has size one.
            copy = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain.to_dense())
            elements = copy.flatten().view(torch.uint8).tolist()
        try:
            node: object = leaf.grad_fn
        except RuntimeError as error:  # a view whose base was written
            node = str(error)
        return tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad, node, elements

    return describe


@pytest.fixture(scope="session")
def copy_registries() -> Callable[[], tuple[Any, ...]]:
    """Return a function that copies every registry that a plugin can change."""

    def copies() -> tuple[Any, ...]:
        return (
            dict(KINDS._by_tag),
            dict(KINDS._by_type),
            dict(KINDS._by_name),
            dict(SERIALIZERS._by_name),
            dict(VALUES.by_tag),
            dict(VALUES.by_type),
            dict(VALUES.written),
            dict(COERCERS._by_type),
            dict(STORES._by_scheme),
            {name: value for name, value in vars(SiblingMethods).items() if not name.startswith("__")},
        )

    return copies
