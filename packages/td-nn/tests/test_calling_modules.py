"""TensorDictModule, WrapModule and wrappers: arguments, results, errors, and selection of outputs."""

from __future__ import annotations

import functools
from collections import namedtuple

import pytest
import torch
from torch import nn

from td_core import KeyThroughLeafError, LockedError, TensorDict, lazy_stack
from td_nn import (
    EnsembleModule,
    MissingKeyError,
    OutputError,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
    dispatch,
)

ONE = torch.ones(1)
Pair = namedtuple("Pair", "first second")


def identity(x):
    return x


def test_call_stores_results_in_input():
    td = TensorDict({"x": torch.ones(3, 2), "n": {"k": torch.zeros(3)}}, [3])
    made = TensorDictModule(lambda x, k: (x.sum(-1), k + 1), ["x", ("n", "k")], ["s", ("n", "o")])
    assert made(td) is td
    assert td["s"].tolist() == [2, 2, 2]
    assert td["n", "o"].tolist() == [1, 1, 1]


def test_call_with_lazy_stack_stores_result():
    stack = lazy_stack([TensorDict(x=ONE), TensorDict(x=2 * ONE)])
    result = TensorDictModule(lambda x: x + 1, ["x"], ["y"])(stack)
    assert result is stack
    assert [member["y"].item() for member in stack.tensordicts] == [2, 3]


@pytest.mark.parametrize(
    ("in_keys", "option"),
    [({"a": "x", "b": "y"}, None), ({"a": "x", "b": "y"}, True), ({"x": "a", "y": "b"}, False)],
)
def test_call_dict_in_keys_passes_keyword_arguments(in_keys, option):
    made = TensorDictModule(lambda *, b, a: a - b, in_keys, ["z"], out_to_in_map=option)
    assert made.in_keys == ["x", "y"]
    assert made(TensorDict(x=3 * ONE, y=ONE))["z"] == 2
    assert made(3 * ONE, y=ONE) == 2


def test_call_one_key_for_two_arguments_passes_it_twice():
    made = TensorDictModule(lambda a, b: a + b, {"a": "x", "b": "x"}, ["z"])
    assert made(TensorDict(x=ONE))["z"] == 2
    assert made(x=ONE) == 2


def test_construct_out_to_in_map_without_dict_warns():
    with pytest.warns(UserWarning, match="changes nothing for a list"):
        TensorDictModule(identity, ["x"], ["y"], out_to_in_map=True)


@pytest.mark.parametrize(("in_keys", "option"), [({("a", "b"): "x"}, None), ({"x": 1}, False)])
def test_construct_argument_name_not_string_raises(in_keys, option):
    with pytest.raises(TypeError, match="an argument name is a string; got"):
        TensorDictModule(identity, in_keys, ["y"], out_to_in_map=option)


def test_call_swapped_dict_in_keys_raises_with_hint():
    made = TensorDictModule(lambda weight: weight, {"x": "weight"}, ["y"])
    with pytest.raises(TypeError) as caught:
        made(TensorDict(weight=ONE))
    assert "in_keys leads from arguments to keys" in notes(caught.value)


def notes(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("inplace", "keys", "same", "batch"),
    [
        (True, ["x", "y"], True, [1]),
        (False, ["y"], False, []),
        (None, ["y"], False, []),
        ("empty", ["y"], False, [1]),
    ],
)
def test_call_inplace_chooses_collection_of_results(inplace, keys, same, batch):
    td = TensorDict({"x": ONE}, [1], device="cpu")
    result = TensorDictModule(identity, ["x"], ["y"], inplace=inplace)(td)
    assert (list(result.keys()), result is td, list(result.batch_size)) == (keys, same, batch)
    assert result.device == (None if inplace in (False, None) else torch.device("cpu"))
    out = TensorDict(z=ONE)
    assert TensorDictModule(identity, ["x"], ["y"], inplace=inplace)(td, tensordict_out=out) is out
    assert list(out.keys()) == ["z", "y"]


def test_call_inplace_empty_keeps_kind():
    stack = lazy_stack([TensorDict(x=ONE), TensorDict(x=ONE)])
    assert type(TensorDictModule(identity, ["x"], ["y"], inplace="empty")(stack)) is type(stack)


@pytest.mark.parametrize(
    "make", [lambda **k: TensorDictModule(identity, "x", "y", **k), TensorDictSequential]
)
def test_construct_unknown_inplace_raises(make):
    with pytest.raises(ValueError, match="inplace is True, False, None or 'empty'; got 'bad'"):
        make(inplace="bad")


def test_call_replaces_entry_by_returned_tensor():
    old, new = torch.zeros(1), torch.ones(1)
    td = TensorDict(x=ONE, y=old)
    assert TensorDictModule(lambda x: new, ["x"], ["y"])(td)["y"] is new
    assert old == 0


def test_call_wrong_batch_size_or_locked_input_raises():
    with pytest.raises(RuntimeError, match="does not start with the batch size"):
        TensorDictModule(lambda x: torch.zeros(2), ["x"], ["y"])(TensorDict({"x": torch.ones(3)}, [3]))
    for key in ("x", "y"):
        with pytest.raises(LockedError):
            TensorDictModule(identity, ["x"], [key])(TensorDict(x=ONE).lock_())


@pytest.mark.parametrize(
    ("returned", "out_keys", "stored"),
    [
        (Pair(ONE, 2 * ONE), ["a", "b"], {"a": 1, "b": 2}),
        ((ONE, 2 * ONE), ["a", "b"], {"a": 1, "b": 2}),
        ((ONE,), ["a"], {"a": 1}),
        ({"b": 2 * ONE, "a": ONE, "c": ONE}, ["a", "b"], {"a": 1, "b": 2}),
        (TensorDict(b=2 * ONE, a=ONE), ["a", "b"], {"a": 1, "b": 2}),
        ({("n", "a"): ONE}, [("n", "a")], {("n", "a"): 1}),
        ({"b": ONE}, ["a"], {("a", "b"): 1}),
        ({"a": ONE}, ["_", "a"], {"a": 1}),
        (None, [], {}),
        ((), [], {}),
        (3, ["a"], {"a": 3}),
    ],
)
def test_call_tuple_or_dict_result_fills_out_keys(returned, out_keys, stored):
    td = TensorDictModule(lambda x: returned, ["x"], out_keys, inplace=False)(TensorDict(x=ONE))
    assert {key: td[key].item() for key in td.keys(True, True)} == stored


def test_call_list_result_is_one_value():
    td = TensorDictModule(lambda x: [x, x], ["x"], ["a"])(TensorDict(x=ONE))
    assert td["a"].shape == (2, 1)
    with pytest.raises(OutputError, match="too few values: 1 for the 2 out_keys"):
        TensorDictModule(lambda x: [x, x], ["x"], ["a", "b"])(TensorDict(x=ONE))


def test_call_dict_result_without_out_key_raises():
    with pytest.raises(RuntimeError, match=r"returned a dict without 'b': it has \['a'\]"):
        TensorDictModule(lambda x: {"a": x}, ["x"], ["a", "b"])(TensorDict(x=ONE))


@pytest.mark.parametrize(
    ("returned", "out_keys", "said"),
    [
        ((ONE, ONE), ["a"], "too many values: 2 for the 1 out_keys ['a']"),
        ((ONE,), ["a", "b"], "too few values: 1 for the 2 out_keys ['a', 'b']"),
        (ONE, ["a", "b"], "too few values: 1 for the 2 out_keys"),
        (None, ["a"], "too few values: 0 for the 1 out_keys"),
        (ONE, [], "too many values: 1 for the 0 out_keys"),
    ],
)
def test_call_wrong_number_of_results_raises(returned, out_keys, said):
    with pytest.raises(RuntimeError) as caught:
        TensorDictModule(lambda x: returned, ["x"], out_keys)(TensorDict(x=ONE))
    assert said in str(caught.value)


@pytest.mark.parametrize("in_keys", [["x", "missing"], {"x": "x", "y": "missing"}])
def test_call_missing_input_passes_none_to_callable(in_keys):
    made = TensorDictModule(lambda x, y: x if y is None else y, in_keys, ["z"])
    assert made(TensorDict(x=ONE))["z"] == 1


@pytest.mark.parametrize("in_keys", [["hiden"], {"input": "hiden"}])
def test_call_missing_input_and_callable_fails_raises_missing_key(in_keys):
    made = TensorDictModule(nn.Linear(1, 1), in_keys, ["z"])
    with pytest.raises(KeyError) as caught:
        made(TensorDict(hidden=ONE))
    assert caught.value.missing == ["hiden"]
    for part in ("misses its input 'hiden'", "did you mean 'hidden'?", "raised TypeError: linear()"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_call_strict_missing_input_raises_before_callable_runs():
    called = []
    made = TensorDictModule(called.append, ["x", ("n", "y")], ["z"], strict=True)
    with pytest.raises(MissingKeyError, match=r"misses its input \('n', 'y'\): existing keys: \['x'\]"):
        made(TensorDict(x=ONE))
    assert called == []


@pytest.mark.parametrize("strict", [False, True])
def test_call_key_path_through_leaf_raises(strict):
    made = TensorDictModule(identity, [("x", "y")], ["z"], strict=strict)
    with pytest.raises(KeyThroughLeafError, match="key 'x' is a tensor, so it has no entry 'y'"):
        made(TensorDict(x=ONE))


def test_call_callable_raises_keeps_type_and_adds_note():
    class Odd(Exception):
        pass

    def fail(x):
        raise Odd("so it is")

    with pytest.raises(Odd) as caught:
        TensorDictModule(fail, ["x"], ["y"])(TensorDict(x=torch.ones(2, 3)))
    said = notes(caught.value)
    assert "so it is" in said
    assert (
        "raised in TensorDictModule(fail), which reads {'x': Tensor of shape [2, 3]} and writes ['y']" in said
    )


def test_call_passes_keywords_to_callable():
    made = TensorDictModule(lambda x, scale=1: x * scale, ["x"], ["y"])
    assert made(TensorDict(x=ONE), scale=3)["y"] == 3
    assert made(x=ONE, scale=3) == 3
    assert TensorDictModule(lambda x, scale: x * scale, ["x"], ["y"], method_kwargs={"scale": 2})(ONE) == 2


@pytest.mark.parametrize("more", [(1,), (1, 2)])
@pytest.mark.parametrize("first", [TensorDict(x=ONE), ONE])
def test_call_extra_positional_arguments_raises(first, more):
    with pytest.raises(
        ValueError, match=r"takes no positional arguments but the collection, or its inputs \['x'\]"
    ):
        TensorDictModule(identity, ["x"], ["y"])(first, *more)


def test_call_keyword_also_in_method_kwargs_raises():
    made = TensorDictModule(lambda x, p: x, ["x"], ["y"], method_kwargs={"p": 1})
    with pytest.raises(TypeError, match="p is given in the call and in the method_kwargs"):
        made(TensorDict(x=ONE), p=2)


@pytest.mark.parametrize("given", [3, nn.Linear, "relu"])
def test_construct_uncallable_raises(given):
    with pytest.raises(ValueError, match="is called, so it is a function"):
        TensorDictModule(given, ["x"], ["y"])


def test_call_with_method_calls_it_on_any_object():
    assert TensorDictModule(torch, ["x"], ["y"], method="relu")(x=-ONE) == 0
    with pytest.raises(ValueError, match="has no method 'reluu'"):
        TensorDictModule(torch, ["x"], ["y"], method="reluu")


def test_construct_registers_module_and_repr_shows_it():
    made = TensorDictModule(nn.Linear(2, 1), ["x"], [("n", "y")])
    assert list(made.state_dict()) == ["module.weight", "module.bias"]
    assert list(TensorDictModule(nn.Linear(2, 1).forward, ["x"], ["y"]).parameters()) == []
    assert repr(made) == (
        "TensorDictModule(\n    module=Linear(in_features=2, out_features=1, bias=True),\n"
        "    in_keys=['x'],\n    out_keys=[('n', 'y')])"
    )


def test_repr_of_wrapped_sequence_shows_it_as_module():
    seq = TensorDictSequential(TensorDictModule(nn.Identity(), ["x"], ["y"]))
    assert "TensorDictSequential(\n" in repr(TensorDictModule(seq, ["x"], ["y"]))
    assert "TensorDictSequential(\n" in repr(TensorDictModuleWrapper(seq))
    assert "TensorDictSequential(\n" in repr(WrapModule(seq))


class Policy(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012  declares keys
    out_keys = ["y"]  # noqa: RUF012  declares keys

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 3), nn.Tanh())


class Extended(TensorDictModule):
    def __init__(self):
        super().__init__(nn.Linear(2, 4), ["x"], ["y"])
        self.trunk = nn.Linear(2, 3)

    def extra_repr(self):
        return "gain=1,\nbias=2"


class Wrapping(TensorDictModuleWrapper):
    def __init__(self, inner):
        super().__init__(inner)
        self.trunk = nn.Linear(2, 3)


class Drawing(ProbabilisticTensorDictModule):
    def __init__(self):
        super().__init__(["logits"], ["y"], distribution_class=torch.distributions.Categorical)
        self.trunk = nn.Linear(2, 3)


@pytest.mark.parametrize(
    "make",
    [
        Policy,
        Extended,
        lambda: Wrapping(Extended()),
        Drawing,
        lambda: TensorDictSequential(Policy()),
        lambda: ProbabilisticTensorDictSequential(Policy(), Drawing()),
        lambda: WrapModule(Policy()),
        lambda: TensorDictModuleWrapper(Policy()),
        lambda: EnsembleModule(Policy(), 2),
    ],
)
def test_repr_shows_children_and_keys(make):
    text = repr(make())
    assert "trunk): " in text and "Linear(in_features=2, out_features=3" in text
    assert "in_keys=" in text and "out_keys=['y']" in text
    classes = ("Policy", "Drawing", "Wrapping", "Extended")
    assert text.count("(trunk): ") == sum(text.count(f"{name}(") for name in classes)


def test_repr_of_subclass_shows_extra_repr():
    assert "    gain=1,\n    bias=2,\n    (trunk): Linear" in repr(Extended())


def on_meta():
    return TensorDictModule(nn.Linear(2, 1, device="meta"), ["x"], ["y"])


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (on_meta, "meta"),
        (lambda: TensorDictSequential(TensorDictModule(identity, ["x"], ["x"]), on_meta()), "meta"),
        (lambda: TensorDictSequential({"a": TensorDictSequential(on_meta())}), "meta"),
        (lambda: ProbabilisticTensorDictSequential(on_meta(), Drawing().to("meta")), "meta"),
        (lambda: TensorDictModuleWrapper(on_meta()), "meta"),
        (lambda: WrapModule(on_meta()), "meta"),
        (lambda: Policy().to("meta"), "meta"),
        (lambda: EnsembleModule(TensorDictModule(nn.Linear(2, 1), ["x"], ["y"]), 2), "cpu"),
        (lambda: EnsembleModule(TensorDictModule(nn.Linear(2, 1), ["x"], ["y"]), 2).to("meta"), "meta"),
        (lambda: TensorDictSequential(Policy(), on_meta()), "cpu"),
        (lambda: TensorDictModule(nn.BatchNorm1d(2, affine=False, device="meta"), ["x"], ["y"]), "meta"),
        (
            lambda: ProbabilisticTensorDictModule(
                ["x"], ["y"], distribution_kwargs={"atol": torch.ones(1)}
            ).to("meta"),
            "meta",
        ),
        (lambda: TensorDictModule(identity, ["x"], ["y"]), None),
        (lambda: TensorDictSequential(), None),
        (lambda: WrapModule(identity), None),
        (lambda: ProbabilisticTensorDictModule(["x"], ["y"]), None),
    ],
)
def test_device_is_that_of_parameters_or_buffers(make, device):
    assert make().device == (None if device is None else torch.device(device))


def test_device_of_subclass_and_of_callable_are_kept():
    made = Policy()
    made.device = "mine"
    assert made.device == "mine" and Policy().device == torch.device("cpu")

    class Call:
        device = "there"

        def __call__(self, x):
            return x

    assert TensorDictModule(Call(), ["x"], ["y"]).device == "there"


def test_compile_module_that_reads_its_device_is_one_graph():
    torch._dynamo.reset()
    layer = TensorDictModule(nn.Linear(2, 1), ["x"], ["y"])
    shift = torch.compile(lambda x: x + torch.ones(2, device=layer.device), fullgraph=True, backend="eager")
    assert shift(torch.zeros(2)).tolist() == [1, 1]


def test_assign_module_attribute_replaces_callable():
    made = TensorDictModule(nn.Identity(), ["x"], ["y"])
    made.module = nn.Flatten(0)
    assert made(torch.ones(2, 2)).shape == (4,)


def test_getattr_reads_attribute_of_wrapped_module():
    made = TensorDictModule(nn.Linear(2, 1), ["x"], ["y"])
    assert made.weight is made.module.weight
    made.extra = 3
    assert not hasattr(made.module, "extra")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'foo'"):
        _ = made.foo
    with pytest.raises(AttributeError):
        _ = made.__foo__
    named = TensorDictSequential({"first": made})
    assert named.first is made
    assert TensorDictModuleWrapper(made).weight is made.weight


def test_call_reads_inputs_with_get_kwargs():
    ragged = lazy_stack([TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(3))])
    made = TensorDictModule(lambda x: x.sum(-1), ["x"], ["y"], get_kwargs={"as_padded_tensor": True})
    assert made(ragged)["y"].tolist() == [1, 3]
    with pytest.raises(TypeError, match="get_kwargs takes no default"):
        TensorDictModule(identity, ["x"], ["y"], get_kwargs={"default": 1})


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.tensor(3))
        self.times = 0

    def reset_parameters(self):
        self.times += 1
        with torch.no_grad():
            self.weight.fill_(7)

    def forward(self, x):
        return x


def test_reset_parameters_recursive_resets_each_submodule_once():
    inner = Counter()
    made = TensorDictSequential(*[TensorDictModule(inner, ["x"], ["x"])] * 2)
    assert made.reset_parameters_recursive() is None
    assert inner.times == 1
    assert inner.weight.tolist() == [7, 7]
    with pytest.warns(UserWarning, match="found no submodule that has reset_parameters"):
        TensorDictModule(nn.Identity(), ["x"], ["y"]).reset_parameters_recursive()


def test_reset_parameters_recursive_resets_given_values_only():
    made = TensorDictModule(Counter(), ["x"], ["y"])
    params = TensorDict.from_module(made).data.clone()
    fresh = made.reset_parameters_recursive(params)
    assert made.weight.tolist() == [0, 0]
    assert params["module", "weight"].tolist() == [7, 7]
    assert type(fresh) is TensorDict
    weight = fresh["module", "weight"]
    assert (type(weight), weight.requires_grad) == (torch.Tensor, True)
    assert weight.data_ptr() == params["module", "weight"].data_ptr()
    assert not fresh["module", "steps"].requires_grad
    with pytest.raises(
        RuntimeError, match=r"resets the parameters of one module; got parameters of batch size \[2\]"
    ):
        made.reset_parameters_recursive(params.expand(2))


def test_forward_hook_gets_arguments_and_runs_once():
    seen = []
    made = TensorDictModule(lambda x: x + 1, ["x"], ["y"])
    made.register_forward_hook(
        lambda module, args, kwargs, result: seen.append((args, kwargs, result)), with_kwargs=True
    )
    td = TensorDict(x=ONE)
    results = made(td), made(ONE), made(x=ONE)
    assert all(seen[place][2] is result for place, result in enumerate(results))
    assert [(len(args), list(kwargs)) for args, kwargs, _ in seen] == [(1, []), (1, []), (0, ["x"])]
    assert seen[0][0][0] is td


def test_wrap_module_returns_result_of_function():
    td = TensorDict(x=ONE)
    assert WrapModule(lambda td: td + 1)(td)["x"] == 2
    assert WrapModule(lambda td: None)(td) is None
    assert WrapModule(lambda td: TensorDict(y=td["x"]), inplace=True)(td) is td
    assert WrapModule(lambda td: None, inplace=True)(td) is td
    assert list(td.keys()) == ["x", "y"]
    made = WrapModule(nn.Identity(), in_keys=["a"], out_keys=["b"])
    assert (made.in_keys, made.out_keys) == (["a"], ["b"])
    assert "func=Identity()" in repr(made)
    with pytest.raises(TypeError, match="got 3, which cannot be called"):
        WrapModule(3)
    with pytest.raises(TypeError):
        made(td, extra=1)


def test_wrap_module_declared_keys_can_be_selected():
    made = WrapModule(lambda td: td.set("a", ONE).set("b", ONE), out_keys=["a", "b"]).select_out_keys("b")
    assert list(made(TensorDict()).keys()) == ["b"]


def test_as_tensordict_module_function_reads_and_stores_keys():
    @as_tensordict_module(in_keys=["x"], out_keys=["y"])
    def double(x, by=2):
        """Double it."""
        return x * by

    assert (double.__name__, double.__doc__) == ("double", "Double it.")
    assert double(TensorDict(x=ONE))["y"] == 2
    assert (double(ONE), double(x=ONE, by=3)) == (2, 3)
    assert as_tensordict_module(in_keys=["x"], out_keys=["y"])(torch.relu)(-ONE) == 0
    with pytest.raises(TypeError):
        as_tensordict_module(["x"], ["y"])


def test_as_tensordict_module_method_gets_self():
    class Scale:
        def __init__(self, by):
            self.by = by

        @as_tensordict_module(in_keys={"x": "a"}, out_keys=["y"])
        def by_keyword(self, x):
            return x * self.by

        @as_tensordict_module(in_keys=["x"], out_keys=["y"])
        def scale(self, x):
            return x * self.by

        @classmethod
        @as_tensordict_module(in_keys=["x"], out_keys=["y"])
        def named(cls, x):
            return x + len(cls.__name__)

    two, three = Scale(2), Scale(3)
    assert (two.scale(ONE), three.scale(x=ONE), three.scale(TensorDict(x=ONE))["y"]) == (2, 3, 3)
    assert (two.by_keyword(a=ONE), Scale.named(ONE)) == (2, 6)


def test_wrapper_runs_hooks_of_wrapped_module():
    seen = []
    inner = TensorDictModule(nn.Linear(1, 1), ["x"], ["y"])
    inner.register_forward_hook(lambda *args: seen.append(1))
    outer = TensorDictModuleWrapper(inner)
    assert list(outer.state_dict()) == ["td_module.module.weight", "td_module.module.bias"]
    assert torch.equal(outer(ONE), inner.module(ONE))
    assert seen == [1]
    with pytest.raises(AttributeError, match="no attribute 'foo'"):
        _ = outer.foo


def test_call_partial_of_builtin_equals_torch():
    made = TensorDictModule(functools.partial(torch.add, alpha=2), ["x", "y"], ["z"])
    assert made(ONE, ONE) == 3


class Both(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y", "z"]  # noqa: RUF012

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("y", tensordict["x"]).set("z", tensordict["x"] + 1)


def both():
    return TensorDictModule(lambda x: (x, x + 1), ["x"], ["y", "z"])


@pytest.mark.parametrize("make", [both, Both, lambda: TensorDictSequential(both())])
class TestSelection:
    """select_out_keys() of every kind of module."""

    def test_select_out_keys_orders_results(self, make):
        made = make()
        assert made.select_out_keys("z", "y") is made
        assert made.out_keys == ["z", "y"]
        assert made.out_keys_source == ["y", "z"]
        assert made(ONE) == (2, 1)
        assert made.select_out_keys("y")(ONE) == 1
        with pytest.raises(ValueError, match=r"cannot select 'z': .* writes \['y'\]"):
            made.select_out_keys("z")
        assert made.reset_out_keys().out_keys == ["y", "z"]

    def test_select_out_keys_list_or_unknown_key_raises(self, make):
        with pytest.raises(RuntimeError, match="takes each key as an argument, not a list"):
            make().select_out_keys(["y"])
        with pytest.raises(RuntimeError, match="cannot select 'w'"):
            make().select_out_keys("y", "w")

    def test_select_out_keys_without_keys_removes_all_outputs(self, make):
        assert list(make().select_out_keys()(TensorDict(x=ONE)).keys()) == ["x"]
        assert make().select_out_keys()(ONE) == ()

    def test_select_out_keys_deletes_other_outputs(self, make):
        assert list(make().select_out_keys("z")(TensorDict(x=ONE)).keys()) == ["x", "z"]
        assert list(make().select_out_keys("z")(tensordict=TensorDict(x=ONE)).keys()) == ["x", "z"]

    def test_select_out_keys_is_kept_in_copies(self, make):
        import copy

        made = make().select_out_keys("z")
        other = copy.deepcopy(made)
        other.reset_out_keys()
        assert (made.out_keys, other.out_keys) == (["z"], ["y", "z"])
        assert list(made(TensorDict(x=ONE)).keys()) == ["x", "z"]
        assert list(other(TensorDict(x=ONE)).keys()) == ["x", "y", "z"]
        assert not made.state_dict()


def test_select_out_keys_deletes_unselected_entry_of_input():
    td = TensorDict(x=ONE, y=5 * ONE)
    assert list(both().select_out_keys("z")(td).keys()) == ["x", "z"]
    out = TensorDict(y=ONE)
    assert list(both().select_out_keys("z")(TensorDict(x=ONE), tensordict_out=out).keys()) == ["z"]


def test_select_out_keys_keeps_in_keys_and_sibling_entries():
    made = TensorDictModule(lambda x: (x + 1, x + 2), ["x"], ["x", ("n", "y")]).select_out_keys()
    assert made(TensorDict(x=ONE))["x"] == 2
    result = made(TensorDict({"x": ONE, "n": {"z": ONE}}))
    assert set(result.keys(True, True)) == {"x", ("n", "z")}
    assert list(made(TensorDict(x=ONE)).keys(True)) == ["x"]


def test_forward_called_directly_ignores_selection():
    assert list(both().select_out_keys("z").forward(TensorDict(x=ONE)).keys()) == ["x", "y", "z"]


def test_select_out_keys_keeps_entries_of_returned_collection():
    made = TensorDictModule(lambda x: (TensorDict(y=x), x), ["x"], ["z", "y"]).select_out_keys("z")
    assert list(made(ONE).keys()) == ["y"]
