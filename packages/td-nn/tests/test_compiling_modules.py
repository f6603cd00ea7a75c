"""Modules and sequences in torch.compile, vmap, grad and torch.export."""

from __future__ import annotations

import inspect
from collections import namedtuple

import pytest
import torch
from torch import nn

from td_core import TensorDict, from_modules, lazy_stack
from td_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
    dispatch,
    interaction_type,
    set_interaction_type,
    set_skip_existing,
)

Row = namedtuple("Row", "make call")
X = torch.arange(6.0).view(2, 3)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Base(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y", "z"]  # noqa: RUF012

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("y", tensordict["x"] + 1).set("z", tensordict["x"] * 2)


def linear(**options):
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 3), ["x"], ["y"], **options)


def two():
    return TensorDictModule(lambda x: (x + 1, x * 2), ["x"], ["y", "z"])


def chain(**options):
    torch.manual_seed(0)
    members = {
        "a": TensorDictModule(nn.Linear(3, 3), ["x"], ["h"]),
        "b": TensorDictModule(nn.ReLU(), ["h"], ["y"]),
    }
    return TensorDictSequential(members, **options)


def td(**more):
    return TensorDict({"x": X.clone(), **more}, [2])


@dispatch(source=["x"], dest=["y"])
def free(tensordict):
    return tensordict.set("y", tensordict["x"] + 1)


@as_tensordict_module(in_keys=["x"], out_keys=["y"])
def function(x):
    return x + 1


def by_td(module):
    return module(td())


def by_position(module):
    return module(X)


def by_keyword(module):
    return module(x=X)


ROWS = {
    **{
        f"module {call.__name__} inplace={inplace}": Row(lambda inplace=inplace: linear(inplace=inplace), call)
        for call in (by_td, by_position, by_keyword)
        for inplace in (True, False, "empty")
    },
    "dict keys": Row(lambda: TensorDictModule(lambda a, b: a - b, {"a": "x", "b": ("n", "b")}, [("n", "y")]),
                     lambda m: m(td(n={"b": X + 1}))),
    "dict keys, tensors": Row(lambda: TensorDictModule(lambda a, b: a - b, {"a": "x", "b": ("n", "b")}, [("n", "y")]),
                              lambda m: m(X, n_b=X)),
    "nested keys": Row(lambda: TensorDictModule(nn.ReLU(), [("n", "b")], [("m", "k", "y")]), lambda m: m(td(n={"b": X}))),
    "tensordict_out": Row(linear, lambda m: m(td(), tensordict_out=TensorDict({}, [2]))),
    "more keywords": Row(lambda: TensorDictModule(lambda x, by: x * by, ["x"], ["y"]), lambda m: m(td(), by=3)),
    "method": Row(lambda: TensorDictModule(torch, ["x"], ["y"], method="relu"), by_td),
    "selection": Row(lambda: two().select_out_keys("z"), by_td),
    "selection, tensors": Row(lambda: two().select_out_keys("z"), by_position),
    "missing key": Row(lambda: TensorDictModule(lambda x, q: x if q is None else q, ["x", "q"], ["y"]), by_td),
    "base": Row(Base, by_td),
    "base, tensors": Row(Base, by_position),
    "base, selection": Row(lambda: Base().select_out_keys("z"), by_td),
    "wrapper": Row(lambda: TensorDictModuleWrapper(linear()), by_td),
    "function of a collection": Row(lambda: WrapModule(lambda td: td + 1), by_td),
    "lazy stack": Row(linear, lambda m: m(lazy_stack([td()[0], td()[1]]))),
    **{
        f"sequence {call.__name__} inplace={inplace}": Row(lambda inplace=inplace: chain(inplace=inplace), call)
        for call in (by_td, by_position, by_keyword)
        for inplace in (None, True, False, "empty")
    },
    "sequence, selection": Row(lambda: chain(selected_out_keys=["y"]), by_td),
    "sequence, tolerant": Row(lambda: chain(partial_tolerant=True), lambda m: m(TensorDict({"h": X}, [2]))),
    "sequence, functions": Row(lambda: TensorDictSequential(two(), lambda td: td.set("w", td["y"] + td["z"])), by_td),
    "sequence of sequences": Row(lambda: TensorDictSequential(chain(), TensorDictModule(nn.ReLU(), "y", "w")), by_td),
    "sequence, part": Row(lambda: chain()[:1], by_td),
    "free function": Row(lambda: free, by_position),
    "function as module": Row(lambda: function, by_keyword),
}  # fmt: skip


def same(ours, eager):
    if isinstance(eager, tuple):
        assert len(ours) == len(eager)
        for one, other in zip(ours, eager):
            same(one, other)
    elif isinstance(eager, torch.Tensor):
        torch.testing.assert_close(ours, eager)
    else:
        assert type(ours) is type(eager)
        assert ours.batch_size == eager.batch_size
        assert list(ours.keys(True, True)) == list(eager.keys(True, True))
        for key in eager.keys(True, True):
            torch.testing.assert_close(ours[key], eager[key])


@pytest.mark.parametrize("name", ROWS)
def test_compile_fullgraph_equals_eager(name):
    row = ROWS[name]
    module = row.make()
    compiled = torch.compile(lambda: row.call(module), fullgraph=True, backend="eager")
    same(compiled(), row.call(row.make()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(compiled(), row.call(row.make()))


@pytest.mark.parametrize("make", [linear, chain, Base])
@pytest.mark.parametrize("call", [by_td, by_position, by_keyword])
def test_compile_module_object_equals_eager(make, call):
    same(call(torch.compile(make(), fullgraph=True, backend="eager")), call(make()))


@pytest.mark.once
def test_compile_sequence_with_inductor_equals_eager():
    pytest.importorskip("torch._inductor")
    same(by_td(torch.compile(chain(), fullgraph=True)), by_td(chain()))


def count_graphs(fn, calls):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for call in calls:
        call(compiled)
    return counter.frame_count


def test_compile_several_batch_sizes_makes_two_graphs():
    import torch._dynamo.testing

    module = chain()
    calls = [lambda fn, n=n: fn(TensorDict({"x": torch.ones(n, 3)}, [n])) for n in (2, 3, 4, 5)]
    assert count_graphs(module, calls) == 2


@pytest.mark.parametrize("inside", [True, False])
def test_compile_skip_existing_makes_one_graph_per_mode(inside):
    import torch._dynamo.testing

    module = chain()
    given = TensorDict({"x": X, "h": -X, "y": X}, [2])

    def call(td):
        return module(td.copy())["y"].clone()

    def under(mode):
        if inside:

            def switched(td):
                with set_skip_existing(mode):
                    return call(td)

            return switched
        return call

    if inside:
        skipped, run = (
            torch.compile(under(mode), fullgraph=True, backend="eager")(given) for mode in (True, False)
        )
    else:
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for _ in range(2):
            with set_skip_existing(True):
                skipped = compiled(given)
            run = compiled(given)
        assert counter.frame_count <= 2
    assert torch.equal(skipped, X)
    torch.testing.assert_close(run, chain()(X)[1])


@pytest.mark.parametrize("make", [two, lambda: TensorDictSequential(two())])
def test_select_out_keys_after_compile_takes_effect(make):
    module = make()
    compiled = torch.compile(lambda td: module(td), fullgraph=True, backend="eager")
    assert list(compiled(td()).keys()) == ["x", "y", "z"]
    module.select_out_keys("z")
    assert list(compiled(td()).keys()) == ["x", "z"]
    module.reset_out_keys()
    assert list(compiled(td()).keys()) == ["x", "y", "z"]


def test_assign_keys_after_compile_takes_effect():
    module = two()
    compiled = torch.compile(lambda td: module(td), fullgraph=True, backend="eager")
    assert compiled(td())["y"].equal(X + 1)
    module.in_keys, module.out_keys = ["w"], ["p", "q"]
    assert compiled(td(w=-X))["p"].equal(1 - X)


def test_compile_set_interaction_type_inside_equals_eager():
    def read(x):
        with set_interaction_type("mean"):
            return x + (1 if interaction_type() == "mean" else 0)

    assert torch.compile(read, fullgraph=True, backend="eager")(X).sum() == X.sum() + 6


def test_compile_to_module_inside_swaps_parameters():
    module = chain()
    params = TensorDict.from_module(module).data.apply(torch.zeros_like)

    def call(td, params):
        with params.to_module(module):
            return module(td)

    result = torch.compile(call, fullgraph=True, backend="eager")(td(), params)
    assert result["y"].eq(0).all()
    assert module(td())["y"].any()


def test_compile_backward_equals_eager():
    module = chain()
    torch.compile(module, fullgraph=True, backend="aot_eager")(td())["y"].sum().backward()
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(td())["y"].sum().backward()
    for grad, parameter in zip(grads, module.parameters()):
        torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.parametrize("make", [linear, chain, Base])
def test_vmap_over_collection_equals_eager(make):
    module = make()
    same(torch.vmap(module)(td()), make()(td()))


@pytest.mark.parametrize("make", [linear, chain])
def test_vmap_over_parameters_equals_separate_calls(make):
    members = [make() for _ in range(3)]
    for number, member in enumerate(members):
        for parameter in member.parameters():
            parameter.data += number
    params = from_modules(*members, as_module=False).data

    def call(td, params):
        with params.to_module(members[0]):
            return members[0](td)

    result = torch.vmap(call, (None, 0))(td(), params)
    assert result.batch_size == (3, 2)
    for got, member in zip(result["y"], members):
        torch.testing.assert_close(got, member(td())["y"])


def test_grad_of_parameters_equals_autograd():
    module = chain()
    params = TensorDict.from_module(module).data.clone()

    def loss(params):
        with params.to_module(module):
            return module(td())["y"].sum()

    grads = torch.func.grad(loss)(params)
    module(td())["y"].sum().backward()
    for key, parameter in TensorDict.from_module(module).items(True, True):
        torch.testing.assert_close(grads[key], parameter.grad)


def test_functional_call_and_stack_module_state_equal_eager():
    module = chain()
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    assert torch.func.functional_call(module, state, (td(),))["y"].eq(0).all()
    members = [chain() for _ in range(2)]
    params, buffers = torch.func.stack_module_state(members)

    def call(params, buffers, x):
        return torch.func.functional_call(members[0], (params, buffers), (), {"x": x})[1]

    result = torch.vmap(call, (0, 0, None))(params, buffers, X)
    torch.testing.assert_close(result[1], members[1](X)[1])


def export(module, args=(), kwargs=None, **options):
    return torch.export.export(module, args, kwargs, **options).module()


@pytest.mark.parametrize("make", [linear, chain])
@pytest.mark.parametrize("strict", [False, True])
def test_export_by_keyword_or_position_equals_eager(make, strict):
    same(export(make(), (), {"x": X}, strict=strict)(x=X), make()(X))
    same(export(make(), (X,), strict=strict)(X), make()(X))


def test_export_with_collection_and_selection_equals_eager():
    exported = export(chain(selected_out_keys=["y"]), (td(),))
    assert list(exported(td()).keys()) == ["x", "y"]
    same(export(chain(selected_out_keys=["y"]), (), {"x": X})(x=X), chain()(X)[1])
    assert list(export(two().select_out_keys("z"), (td(),))(td()).keys()) == ["x", "z"]


class Sum(TensorDictModuleBase):
    in_keys = ["x", ("n", "k")]  # noqa: RUF012
    out_keys = ["y"]  # noqa: RUF012

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict):
        return tensordict.set("y", tensordict["x"] + tensordict["n", "k"])


@pytest.mark.parametrize("make", [linear, chain])
@pytest.mark.parametrize("strict", [False, True])
def test_export_dynamic_shapes_by_input_name_equals_eager(make, strict):
    shapes = {"x": {0: torch.export.Dim("n")}}
    exported = export(make(), (), {"x": X}, dynamic_shapes=shapes, strict=strict)
    for size in (1, 5):
        same(exported(x=torch.ones(size, 3)), make()(torch.ones(size, 3)))


def test_export_nested_input_by_keyword_equals_eager():
    n = torch.export.Dim("n")
    exported = export(Sum(), (), {"x": X, "n_k": X}, dynamic_shapes={"x": {0: n}, "n_k": {0: n}})
    assert exported(x=torch.ones(5, 3), n_k=torch.ones(5, 3)).shape == (5, 3)


def test_signature_binds_keywords_to_input_names():
    bound = inspect.signature(linear().forward).bind(x=1, tensordict_out=None)
    assert (bound.arguments, bound.kwargs) == (
        {"tensordict_out": None, "x": 1},
        {"tensordict_out": None, "x": 1},
    )
    assert inspect.signature(Sum().forward).bind(1).arguments == {"tensordict": 1}
