"""torch.compile without a graph break, and functorch, on tensorclasses and non-tensor data."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from td_core import TensorDict
from td_core.errors import LockedError
from td_tensorclass import NonTensorStack, TensorClass, UnbatchedTensor, list_to_stack, set_list_to_stack

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Point(TensorClass):
    x: Tensor
    y: Tensor = None
    s: str = "hi"


class Frozen(TensorClass, frozen=True):
    x: Tensor
    s: str = "hi"


class Filled(TensorClass):
    x: Tensor
    y: Tensor = None

    def __post_init__(self) -> None:
        if self.y is None:
            self.y = self.x + 1


class Nested(TensorClass):
    p: Point
    x: Tensor = None


class Cast(TensorClass, autocast=True):
    x: Tensor
    n: int = 1


def make_point() -> Point:
    return Point(torch.arange(6.0).view(3, 2), batch_size=[3])


def write_tensor(p: Any) -> Any:
    p.x = p.x * 2
    return p


def rename_field(p: Any) -> Any:
    p.batch_size = [3]
    p.names = ["rows"]
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
    "construct nested": lambda p: Nested(p, batch_size=[3])[0],
    "construct with casts": lambda p: TensorDict({"x": Cast(p.x, "3").n + p.x}),
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
    "construct with an unbatched tensor": lambda p: TensorDict(
        {"u": UnbatchedTensor(p.x[0] * 2), "x": p.x}, [3]
    )[1:],
    "set an unbatched tensor": lambda p: (
        TensorDict({"x": p.x}, [3]).set("u", UnbatchedTensor(torch.ones(4))) + 1
    ),
    "write properties": lambda p: rename_field(p.clone()),
    "apply to another batch size": lambda p: p.apply(torch.sum, batch_size=[]),
    "hasattr": lambda p: p if hasattr(p, "nothing") else p + 1,
}


def make_columns() -> TensorDict:
    values = NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]], 2)
    return TensorDict({"s": values, "x": torch.arange(6.0).view(2, 3)}, batch_size=[2, 3])


def write_elements(td: Any) -> Any:
    td = td.clone()
    td[0] = td[1]
    td[:, 1:][0, 0].update_({"s": "view"})
    td["s"][1][0] = "list"
    return td


#: Operations on one value per element whose gather map needs no tensor data.
COLUMN_PROGRAMS: dict[str, Callable[[Any], list[Any]]] = {
    "indices": lambda td: [td[0], td[1, -1], td[:, 1:], td[None], td[..., 0]],
    "parts": lambda td: [
        *td.unbind(1),
        *td.split(1),
        *td.split([1, 2], 1),
        *td.chunk(2, 1),
        *td.tensor_split(2, 1),
    ],
    "same order": lambda td: [td.reshape(6), td.view(3, 2), td.flatten(0, 1), td.unsqueeze(1).squeeze(1)],
    "another order": lambda td: [
        td.permute(1, 0),
        td.transpose(0, 1),
        td.flip(0),
        td.roll(1, 0),
        td.narrow(1, 1, 2),
    ],
    "repeated": lambda td: [td.expand(2, 2, 3), td.repeat(2, 1), td.repeat_interleave(2, 0)],
    "joined": lambda td: [torch.stack([td, td]), torch.cat([td, td], 1), TensorDict.lazy_stack([td, td])[0]],
    "written": lambda td: [write_elements(td), td.clone(), td + 1],
}


def assert_same(a: Any, b: Any) -> None:
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
def test_compile_tensorclass_is_one_graph(name: str) -> None:
    if name == "write properties" and TORCH < (2, 13):
        pytest.skip("this torch sets properties before the attributes that they read")
    program = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert_same(compiled(make_point()), program(make_point()))


def test_compile_locked_non_tensor_is_one_graph() -> None:
    torch._dynamo.reset()
    frozen = Frozen(torch.arange(3.0), batch_size=[3])
    compiled = torch.compile(lambda p: p.select("s"), fullgraph=True, backend="eager")
    assert_same(compiled(frozen), frozen.select("s"))


@pytest.mark.parametrize("name", COLUMN_PROGRAMS)
def test_compile_non_tensor_stack_is_one_graph(name: str) -> None:
    program = COLUMN_PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    for result, wanted in zip(compiled(make_columns()), program(make_columns()), strict=True):
        assert_same(result, wanted)


@pytest.mark.parametrize("name", COLUMN_PROGRAMS)
def test_fake_tensor_mode_keeps_non_tensor_values(name: str) -> None:
    program = COLUMN_PROGRAMS[name]
    with FakeTensorMode():
        results = program(make_columns())
    for result, wanted in zip(results, program(make_columns()), strict=True):
        assert (result.batch_size, result["s"]) == (wanted.batch_size, wanted["s"])


def test_compile_data_dependent_index_breaks_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda td: td[torch.tensor([1, 0])] + 1, backend="eager")
    assert_same(compiled(make_columns()), make_columns()[torch.tensor([1, 0])] + 1)


def test_compile_other_batch_size_recompiles_once() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda p: p + 1, fullgraph=True, backend=backend)
    for n in (4, 5, 6, 7):
        assert compiled(Point(torch.zeros(n), batch_size=[n])).x.tolist() == [1] * n
    assert len(graphs) <= 2


def test_vmap_tensorclass_keeps_class_and_non_tensor() -> None:
    seen = []

    def inside(p: Point) -> Point:
        seen.append((type(p), p.batch_size, p.s))
        return p * 2

    result = torch.vmap(inside)(make_point())
    assert type(result) is Point
    assert seen == [(Point, (), "hi")]
    assert result.batch_size == (3,)
    assert result.s == "hi"
    assert result.x.equal(make_point().x * 2)


def test_vmap_non_tensor_stack_keeps_values() -> None:
    td = TensorDict({"x": torch.zeros(3), "s": NonTensorStack("a", "b", "c")}, batch_size=[3])
    assert torch.vmap(lambda part: part + 1)(td)["s"] == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="vmap changed the dims"):
        torch.vmap(lambda part: part["x"] + len(part["s"]))(td)


def test_func_grad_of_tensorclass_returns_tensorclass() -> None:
    p = Point(torch.ones(3))
    grad = torch.func.grad(lambda q: (q.x**2).sum())(p)
    assert type(grad) is Point
    assert grad.x.tolist() == [2, 2, 2]


def test_compile_frozen_class_returns_frozen() -> None:
    frozen = Frozen(torch.ones(3), batch_size=[3])
    for result in (torch.utils._pytree.tree_map(torch.neg, frozen), torch.vmap(torch.neg)(frozen)):
        with pytest.raises(LockedError):
            result.set("x", torch.zeros(3))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_non_tensor_accepts_any_batch_size(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, p: Any) -> Any:
            return p * 2

    rows = {0: torch.export.Dim("rows", min=2)}
    given = TensorDict({"x": torch.ones(3), "s": "text"}, [3])
    program = torch.export.export(Model(), (given,), dynamic_shapes={"p": [rows, []]}, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    more = torch.cat([given, given])
    more["s"] = "text"
    result = torch.export.load(io.BytesIO(file.getvalue())).module()(more)
    assert result.batch_size == (6,)
    assert result["s"] == "text"
    assert result["x"].tolist() == [2] * 6


@pytest.mark.parametrize("strict", [False, True])
def test_export_tensorclass_argument_returns_tensorclass(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, p: Any) -> Any:
            return p * 2

    program = torch.export.export(Model(), (make_point(),), strict=strict)
    assert_same(program.module()(make_point()), make_point() * 2)


@pytest.mark.parametrize(
    "change", [torch.utils._pytree.tree_map, lambda fn, td: torch.func.grad(lambda td: td["x"].sum())(td)]
)
def test_tree_map_non_tensor_keeps_dim_names(change: Any) -> None:
    entries = {
        "x": torch.ones(3),
        "v": "word",
        "s": NonTensorStack("a", "b", "c"),
        "e": {"v": "word"},
        "u": UnbatchedTensor([1]),
    }
    td = TensorDict(entries, [3], names=["t"])
    result = change(torch.neg, td)
    for key in ("v", "s", "e", ("e", "v")):
        assert result.get(key).names == ["t"]


def test_tree_map_tensorclass_returns_tensorclass() -> None:
    result = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, make_point())
    assert type(result) is Point
    assert result.s == "hi"
    assert result.x.equal(make_point().x + 1)


def test_compile_set_list_to_stack_false_keeps_list() -> None:
    def make(x: Tensor) -> Any:
        return TensorDict({"x": x, "k": ["a", "b"]}, batch_size=[2]).get("k")

    def within(x: Tensor) -> Any:
        with set_list_to_stack(False):
            return make(x)

    for fn in (within, set_list_to_stack(False)(make)):
        assert torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2)).data == ["a", "b"]
    assert list_to_stack(allow_none=True) is None


class PassingMode(TorchFunctionMode):
    """A mode that calls every function unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


UNBATCHED_PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda td: td.clone(),
    "multiply": lambda td: td * 3,
    "index": lambda td: td[1:4],
    "stack": lambda td: torch.stack([td, td]),
    "cast": lambda td: td.to(torch.float64),
    "read": lambda td: TensorDict({"gain": td["gain"] * 2 + td["gain"].shape[0]}),
    "write": lambda td: td.copy().set("gain", UnbatchedTensor(td["obs"][0])),
}
MODES: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("cpu"),
    "mode": PassingMode,
    "two modes": PassingMode,
}


@pytest.mark.parametrize("program", UNBATCHED_PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_compile_unbatched_tensor_under_a_mode_is_one_graph(mode: str, program: str) -> None:
    torch._dynamo.reset()
    td = TensorDict({"obs": torch.ones(6, 2), "gain": UnbatchedTensor([2.0, 3.0, 4.0])}, batch_size=[6])
    function = UNBATCHED_PROGRAMS[program]
    with torch.device("cpu") if mode == "two modes" else nullcontext(), MODES[mode]():
        result = torch.compile(function, fullgraph=True, backend="eager")(td)
        expected = function(td)
    for key in expected.keys():
        assert type(result[key]) is type(expected[key])
        assert torch.equal(torch.as_tensor(result[key]), torch.as_tensor(expected[key]))
