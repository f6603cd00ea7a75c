"""Test nested compile regions on collections, and writes into lazy stacks inside a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no compiled regions"
)


def make_nested_td() -> TensorDict:
    return TensorDict(
        {"a": torch.rand(3), "n": {"b": torch.rand(3), "m": {"c": torch.rand(3, 2)}}}, batch_size=[3]
    )


KINDS: dict[str, Callable[[], Any]] = {
    "nested": make_nested_td,
    "lazy below": lambda: TensorDict(
        {"l": LazyStackedTensorDict(make_nested_td(), make_nested_td()), "a": torch.rand(2)}, [2]
    ),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "unary": lambda td: td.sin(),
    "clone": lambda td: td.clone(),
    "number": lambda td: td + 1,
    "collection": lambda td: td * td,
    "comparison": lambda td: td > 0.5,
    "cast": lambda td: td.to(torch.float64),
    "apply": lambda td: td.apply(torch.cos),
    "named_apply": lambda td: td.named_apply(lambda key, leaf: leaf * 2),
    "sum": lambda td: td.sum(dim=0),
    "lerp": lambda td: td.lerp(td * 2, 0.5),
    "where": lambda td: td.where(torch.ones(td.batch_size, dtype=torch.bool), td * 2),
    "repeat": lambda td: td.repeat(*[2] * td.batch_dims),
    "select": lambda td: td.select("a").sin(),
    "pair": lambda td: (td.sin(), td.cos()),
}


def list_leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for each in (result if isinstance(result, tuple) else (result,)) for leaf in each._leaves()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_nested_region_equals_eager(name: str, kind: str) -> None:
    torch.compiler.reset()
    function, td = CALLS[name], KINDS[kind]()
    if kind == "lazy below" and name == "select":
        td = td.select("a", "l")
    region = torch.compiler.nested_compile_region(function)
    result = torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=True)(td)
    expected = function(td)
    assert type(result) is type(expected)
    for found, leaf in zip(list_leaves(result), list_leaves(expected), strict=True):
        torch.testing.assert_close(found, leaf)


def test_nested_region_called_twice_sets_grad() -> None:
    torch.compiler.reset()
    td = make_nested_td().requires_grad_()
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    result = torch.compile(lambda x: region(region(x)), backend="aot_eager", fullgraph=True)(td)
    sum(leaf.sum() for leaf in result._leaves()).backward()
    leaf = td["n", "b"]
    torch.testing.assert_close(leaf.grad, leaf.detach().sin().cos() * leaf.detach().cos())


def make_members() -> list[TensorDict]:
    return [TensorDict({"a": torch.tensor(float(i)), "n": {"b": torch.ones(2)}}) for i in range(2)]


STACKS: dict[str, Callable[[], Any]] = {
    "lazy": lambda: LazyStackedTensorDict(*make_members()),
    "below": lambda: TensorDict({"l": LazyStackedTensorDict(*make_members())}, batch_size=[2]),
}
#: Values that td-core can store without a plugin.
VALUES: dict[str, Any] = {
    "tuple": (1, 2),
    "list": [1.5, 2],
    "tensor": torch.ones(2, 3),
    "mapping": {"x": torch.ones(2)},
    "collection": TensorDict({"x": torch.ones(2)}, batch_size=[2]),
    "lazy stack": LazyStackedTensorDict(TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(1)})),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "setitem": lambda td, value: td.__setitem__("k", value),
    "set": lambda td, value: td.set("k", value),
    "nested set": lambda td, value: td.set(("p", "k"), value),
    "update": lambda td, value: td.update({"k": value}),
    "nested update": lambda td, value: td.update({"p": {"k": value}}),
    "twice": lambda td, value: td.set("k", value).set("k", value),
    "setdefault": lambda td, value: td.setdefault("k", value),
}


#: All writes with one value, and one write with all values, to limit the number of compilations.
WRITTEN = [
    *[(name, "tensor") for name in WRITES],
    *[("update", value) for value in VALUES if value != "tensor"],
]


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize(("name", "value"), WRITTEN)
def test_compile_write_into_lazy_stack_equals_eager(name: str, value: str, kind: str) -> None:
    torch.compiler.reset()
    written, expected = STACKS[kind](), STACKS[kind]()
    given = VALUES[value]

    def write(td: Any) -> Any:
        WRITES[name](td, given)
        return td.clone()

    copied = torch.compile(write, backend="eager", fullgraph=True)(written)
    WRITES[name](expected, given)
    assert (written == expected).all() and (copied == expected).all()


def test_compile_set_cycle_in_lazy_stack_raises() -> None:
    torch.compiler.reset()
    stack = LazyStackedTensorDict(*make_members())
    with pytest.raises(Exception, match="contains the collection"):
        torch.compile(lambda td: td.set("k", td), backend="eager")(stack)
