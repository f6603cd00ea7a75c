"""torch.compile without a graph break, and functorch, on tensorclasses and non-tensor data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_tensorclass import NonTensorStack, TensorClass


class Point(TensorClass):
    x: Tensor
    y: Tensor = None
    s: str = "hi"


class Frozen(TensorClass, frozen=True):
    x: Tensor


class Filled(TensorClass):
    x: Tensor
    y: Tensor = None

    def __post_init__(self) -> None:
        if self.y is None:
            self.y = self.x + 1


def point() -> Point:
    return Point(torch.arange(6.0).view(3, 2), batch_size=[3])


def write_tensor(p: Any) -> Any:
    p.x = p.x * 2
    return p


def write_value(p: Any) -> Any:
    p.s = "new"
    return p


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "read": lambda p: p.x + 1,
    "get": lambda p: p.get("x") + 1,
    "read a value": lambda p: TensorDict({"x": p.x, "s": p.s}),
    "arithmetic": lambda p: (p + 1) * p,
    "index": lambda p: p[0],
    "mask": lambda p: p[torch.tensor([2, 0])],
    "construct": lambda p: Point(p.x, batch_size=[3]),
    "construct with a value": lambda p: Point(x=p.x, s="q", batch_size=[3]),
    "construct with post init": lambda p: Filled(p.x),
    "frozen": lambda p: Frozen(p.x) + 1,
    "write": write_tensor,
    "write a value": write_value,
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p, p]),
    "views": lambda p: p.view(1, 3).unsqueeze(0).squeeze(1),
    "unbind": lambda p: p.unbind(0)[1],
    "clone": lambda p: p.clone(),
    "nested": lambda p: TensorDict({"p": p, "t": "text"}, [3])[0],
    "construct with a list": lambda p: TensorDict({"s": ["a", "b", "c"], "x": p.x}, [3]),
    "hasattr": lambda p: p if hasattr(p, "nothing") else p + 1,
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.equal(b)
        return
    assert a.batch_size == b.batch_size
    assert list(a.keys(True)) == list(b.keys(True))
    for key in a.keys(True):
        left, right = a[key], b[key]
        if isinstance(left, Tensor):
            assert left.equal(right)
        elif not hasattr(left, "keys"):
            assert left == right


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph(name: str) -> None:
    program = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    same(compiled(point()), program(point()))


def test_another_batch_size_compiles_once_more() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda p: p + 1, fullgraph=True, backend=backend)
    for n in (4, 5, 6, 7):
        assert compiled(Point(torch.zeros(n), batch_size=[n])).x.tolist() == [1] * n
    assert len(graphs) <= 2


def test_vmap_keeps_the_class_and_its_values() -> None:
    seen = []

    def inside(p: Point) -> Point:
        seen.append((type(p), p.batch_size, p.s))
        return p * 2

    result = torch.vmap(inside)(point())
    assert type(result) is Point
    assert seen == [(Point, (), "hi")]
    assert result.batch_size == (3,)
    assert result.s == "hi"
    assert result.x.equal(point().x * 2)


def test_vmap_carries_values_of_each_element_past_the_function() -> None:
    td = TensorDict({"x": torch.zeros(3), "s": NonTensorStack("a", "b", "c")}, batch_size=[3])
    assert torch.vmap(lambda part: part + 1)(td)["s"] == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="vmap took a dim away"):
        torch.vmap(lambda part: part["x"] + len(part["s"]))(td)


def test_grad() -> None:
    p = Point(torch.ones(3))
    grad = torch.func.grad(lambda q: (q.x**2).sum())(p)
    assert type(grad) is Point
    assert grad.x.tolist() == [2, 2, 2]


def test_tree_map() -> None:
    result = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, point())
    assert type(result) is Point
    assert result.s == "hi"
    assert result.x.equal(point().x + 1)
