"""Test torch.compile(fullgraph=True): no graph break in documented operations, no recompilation per structure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from td_core import LazyStackedTensorDict, NestedKey, TensorDict, assert_close, pad_sequence

pytestmark = pytest.mark.once


def make_td(n: int = 4) -> TensorDict:
    return TensorDict(
        {"a": torch.arange(n * 3.0).view(n, 3), "n": {"b": torch.ones(n), "c": {"d": torch.zeros(n, 2)}}},
        batch_size=[n],
    )


PROGRAMS = {
    "construct": lambda td: TensorDict(
        {"x": td["a"] + 1, "y": {"z": td["n", "b"]}}, batch_size=td.batch_size
    ),
    "construct by keyword": lambda td: TensorDict(x=td["a"], batch_size=[4]),
    "get nested": lambda td: td["n", "c", "d"] + td.get(("n", "b"))[:, None],
    "get a default": lambda td: td["a"] if td.get("missing") is None else td["n", "b"],
    "set": lambda td: td.clone().set("z", td["a"] * 2),
    "set nested": lambda td: td.clone().set(("n", "new", "z"), td["a"] * 2),
    "setitem by key": lambda td: set_item(td.clone(), ("n", "b"), td["n", "b"] * 3),
    "contains": lambda td: td["a"] if ("n", "b") in td.keys(include_nested=True) else td["n", "b"],
    "what is a key": lambda td: [
        td[key] if isinstance(key, NestedKey) else td["n", "c", "d"] for key in ("a", ("n", "b"), ["a"], 1)
    ],
    "keys": lambda td: [td[key] for key in td.keys(include_nested=True, leaves_only=True)],
    "items": lambda td: {key: value + 1 for key, value in td.items(include_nested=True, leaves_only=True)},
    "pop": lambda td: td.clone().pop("a"),
    "index int": lambda td: td[1],
    "index slice": lambda td: td[1:3],
    "index tensor": lambda td: td[torch.tensor([2, 0])],
    "index ellipsis": lambda td: td[..., 0],
    "index none": lambda td: td[None],
    "index mask": lambda td: td[td["n", "b"] > 0],
    "index mask of two dims": lambda td: td.view(2, 2)[td["n", "b"].view(2, 2) > 0],
    "use what a mask gave": lambda td: select_part(td, td["n", "b"] > 0),
    "setitem by index": lambda td: set_item(td.clone(), 0, td[1]),
    "setitem by mask": lambda td: fill_part(td.clone(), td["n", "b"] > 0),
    "setitem by mask, of a size": lambda td: set_item(td.clone(), torch.arange(4) < 2, td[:2] + 1),
    "setitem by mask, from a dict": lambda td: set_item(td.clone(), torch.arange(4) < 2, {"a": td["a"][:2]}),
    "update_at_ by mask": lambda td: td.clone().update_at_(td[:2] + 1, torch.arange(4) < 2),
    "stack": lambda td: torch.stack([td, td + 1], 0),
    "cat": lambda td: torch.cat([td, td], 0),
    "lazy stack": lambda td: LazyStackedTensorDict(td, td + 1, stack_dim=0)["n", "b"],
    "vmap over a lazy stack": lambda td: torch.vmap(torch.neg)(LazyStackedTensorDict(td, td + 1))["a"],
    "tree_map over a lazy stack": lambda td: tree_map(torch.neg, LazyStackedTensorDict(td, td + 1)),
    "tree_map over an uneven stack": lambda td: tree_map(torch.neg, make_uneven(td)),
    "lazy stack index": lambda td: LazyStackedTensorDict(td, td + 1, stack_dim=0)[:, 0]["a"],
    "unbind": lambda td: td.unbind(0)[1],
    "split": lambda td: td.split(2)[0],
    "unary": lambda td: td.exp(),
    "scalar arithmetic": lambda td: td * 2 + 1,
    "arithmetic": lambda td: td + td,
    "in place": lambda td: td.clone().add_(1),
    "compare": lambda td: td == td,
    "apply": lambda td: td.apply(lambda leaf: leaf.cos()),
    "apply in place": lambda td: td.clone().apply_(lambda leaf: leaf * 2),
    "apply in place, views": lambda td: td.clone().apply_(lambda leaf: leaf.flip(0)[:]),
    "view": lambda td: td.view(2, 2),
    "reshape": lambda td: td.reshape(-1),
    "permute": lambda td: td.view(2, 2).permute(1, 0),
    "unsqueeze": lambda td: td.unsqueeze(-1),
    "expand": lambda td: td.expand(3, 4),
    "flatten keys": lambda td: td.flatten_keys("."),
    "select": lambda td: td.select("a", ("n", "b")),
    "exclude": lambda td: td.exclude(("n", "c")),
    "update": lambda td: td.clone().update({"a": td["a"] + 1}),
    "to dtype": lambda td: td.to(torch.float64),
    "clone": lambda td: td.clone(),
    "detach": lambda td: td.detach(),
    "detach in place": lambda td: td.clone().detach_(),
    "sum": lambda td: td.sum(0),
    "mean of features": lambda td: td.mean(dim=0),
    "zero": lambda td: td.clone().zero_(),
    "checkpoint": lambda td: checkpoint(lambda inner: inner["a"].sin() * 2, td, use_reentrant=False),
    "checkpoint that makes one": lambda td: checkpoint(lambda inner: inner + 1, td, use_reentrant=False),
    "checkpoint with a keyword": lambda td: checkpoint(scale, td["a"], by=td, use_reentrant=False),
}


def make_uneven(td):
    return LazyStackedTensorDict(*[TensorDict({"a": leaf}, [4]) for leaf in (td["a"], td["n", "c", "d"])])


def set_item(td, index, value):
    td[index] = value
    return td


def scale(leaf, by):
    return leaf * by["n", "b"][:, None]


def select_part(td, mask):
    part = td[mask]
    part["z"] = part["a"] + 1
    return torch.stack([part * 2, part])


def fill_part(td, mask):
    td[mask] = td[mask] + 1
    return td


def list_leaves(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PROGRAMS)
def test_compile_program_has_one_graph_and_equals_eager(name):
    program = PROGRAMS[name]
    expected = program(make_td())
    counter = CompileCounter()
    compiled = torch.compile(program, fullgraph=True, backend=counter)
    result = compiled(make_td())
    assert type(result) is type(expected)
    for got, wanted in zip(list_leaves(result), list_leaves(expected), strict=True):
        torch.testing.assert_close(got, wanted)
    frames = counter.frame_count
    compiled(make_td())
    assert counter.frame_count == frames <= 1


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no regions")
def test_compile_nested_region_with_td_equals_eager():
    region = torch.compiler.nested_compile_region(lambda td: TensorDict({"a": td["a"] + 1}, td.batch_size))
    compiled = torch.compile(lambda td: region(region(td))["a"], fullgraph=True, backend=CompileCounter())
    torch.testing.assert_close(compiled(make_td()), make_td()["a"] + 2)


def test_compile_aot_backward_sets_grad():
    def program(td):
        return (td * 2).exp().sum(dim=0)["n", "b"]

    td = make_td()
    leaf = td["n", "b"].requires_grad_()
    torch.compile(program, fullgraph=True, backend="aot_eager")(td).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (2 * leaf).exp().detach())


#: Operations that compute with the batch size, and could specialise the graph to its value.
SIZED = {
    "int": lambda td: td[0] + 1,
    "slices": lambda td: [td[1:3], td[-2:], td[:-1:2]],
    "view": lambda td: td.view(-1, 1).view(-1),
    "reshape": lambda td: td.reshape(1, -1),
    "expand": lambda td: td.expand(2, -1),
    "split": lambda td: td.split([1, td.shape[0] - 1]),
    "split by a size": lambda td: td.split(8),
    "chunk": lambda td: td.chunk(1),
    "tensor_split": lambda td: td.tensor_split([1, 3]),
    "gather": lambda td: td.gather(0, torch.tensor([1, 0])),
    "write": lambda td: set_item(td.clone(), slice(1, None), 0),
    "update": lambda td: td.clone().update(td + 1).flatten_keys("."),
    "stack": lambda td: torch.stack([td, td + 1]),
    "lazy stack": lambda td: torch.cat([LazyStackedTensorDict(td, td + 1), LazyStackedTensorDict(td, td)]),
    "join into another": lambda td: torch.cat([td, td], out=torch.cat([td, td])),
    "guess the batch size": lambda td: td.clone().auto_batch_size_(1),
    "pad": lambda td: pad_sequence([td, td[1:]]),
}


@pytest.mark.parametrize("name", SIZED)
def test_compile_varying_batch_size_makes_at_most_two_graphs(name):
    program = SIZED[name]
    counter = CompileCounter()
    compiled = torch.compile(program, fullgraph=True, backend=counter)
    for n in (4, 5, 6):
        for got, wanted in zip(
            list_leaves(compiled(make_td(n))), list_leaves(program(make_td(n))), strict=True
        ):
            torch.testing.assert_close(got, wanted)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_with_td_input_and_output_equals_eager(mode):
    traced = make_fx(lambda td: (td + 1, td[0], td.view(2, 2)), tracing_mode=mode)(make_td())
    td = make_td() * 2
    for found, expected in zip(traced(td), (td + 1, td[0], td.view(2, 2)), strict=True):
        assert found.batch_size == expected.batch_size
        assert_close(found, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_dynamic_batch_size_equals_eager(strict):
    class Model(torch.nn.Module):
        def forward(self, td):
            return td[1:].reshape(-1, 1)

    rows = {0: torch.export.Dim("rows", min=4)}
    shapes = {"td": [rows, [rows, [rows]]]}
    program = torch.export.export(Model(), (make_td(),), dynamic_shapes=shapes, strict=strict).module()
    assert_close(program(make_td(7)), make_td(7)[1:].reshape(-1, 1))


def test_compile_del_in_repeated_member_does_not_recompile():
    counter = CompileCounter()
    compiled = torch.compile(lambda stack: stack.del_(("n", "b"))["a"] + 1, fullgraph=True, backend=counter)
    for _ in range(3):
        member = make_td()
        stack = LazyStackedTensorDict(member, make_td(), member)
        compiled(stack)
        assert list(stack.keys(True, True)) == ["a", ("n", "c", "d")]
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_uneven_lazy_stack_equals_eager(strict):
    class Model(torch.nn.Module):
        def forward(self, stack):
            return stack * 2

    def stack():
        return LazyStackedTensorDict(*[TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)])

    result = torch.export.export(Model(), (stack(),), strict=strict).module()(stack())
    assert [member["a"].tolist() for member in result.tensordicts] == [[[2.0] * n] * 2 for n in (1, 3)]


def test_export_with_td_input_and_output_equals_eager():
    class Model(torch.nn.Module):
        def forward(self, td):
            return td.set("y", td["a"].sum(-1))

    program = torch.export.export(Model(), (make_td(),))
    result = program.module()(make_td())
    assert isinstance(result, TensorDict)
    torch.testing.assert_close(result["y"], make_td()["a"].sum(-1))


def test_fake_tensor_mode_shape_ops_return_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        td = make_td()
        result = torch.stack([td, td])[0].exp().reshape(2, 2)
    assert result["n", "c", "d"].shape == (2, 2, 2)


def test_export_load_in_other_process_equals_eager(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, td, stack, ragged):
            return {"td": td * 2, "stacks": [stack + td["a"].sum(), ragged * 2]}

    made = """
td = TensorDict({"a": torch.ones(2, 3), "n": {}}, [2], device="cpu", names=["rows"])
stack = LazyStackedTensorDict(td, td, stack_dim_name="s")
ragged = LazyStackedTensorDict(TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(2)))
"""
    given = {"torch": torch, "TensorDict": TensorDict, "LazyStackedTensorDict": LazyStackedTensorDict}
    exec(made, given)
    td, stack, ragged = given["td"], given["stack"], given["ragged"]
    torch.export.save(torch.export.export(Model(), (td, stack, ragged)), tmp_path / "program.pt2")
    script = f"""
import torch
from td_core import LazyStackedTensorDict, TensorDict
{made}
print(torch.export.load({str(tmp_path / "program.pt2")!r}).module()(td, stack, ragged))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{Model()(td, stack, ragged)}\n", done.stderr
