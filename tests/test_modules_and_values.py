"""Modules of td-nn with tensorclasses and non-tensor values as inputs and outputs."""

from __future__ import annotations

import pickle
from typing import Any, Optional

import pytest
import torch

from td_core import TensorDict

nn = pytest.importorskip("td_nn")
tensorclass = pytest.importorskip("td_tensorclass")

ONE = torch.ones(2)


class Inner(tensorclass.TensorClass):
    """The class of a field."""

    a: torch.Tensor
    b: Optional[torch.Tensor] = None  # noqa: UP045


class Given(tensorclass.TensorClass):
    """The input of a module."""

    x: torch.Tensor
    inner: Inner
    name: str = "unnamed"


class Made(tensorclass.TensorClass):
    """The output of a module."""

    y: torch.Tensor
    z: Optional[torch.Tensor] = None  # noqa: UP045


class Add(nn.TensorClassModuleBase[Given, Made]):
    """A module that maps a Given to a Made."""

    def forward(self, x: Given) -> Made:
        assert isinstance(x.inner, Inner)
        self.seen = x
        return Made(y=x.x + x.inner.a, batch_size=x.batch_size)


def make_input(**options: Any) -> Given:
    return Given(x=ONE, inner=Inner(a=ONE, batch_size=[2]), batch_size=[2], **options)


def test_tensorclass_module_reads_types_from_subscript() -> None:
    assert (Add.input_type, Add.output_type) == (Given, Made)
    child = type("Child", (Add,), {})
    assert child.input_type is Given
    assert child().as_td_module().in_keys == ["x", ("inner", "a"), ("inner", "b"), "name"]
    with pytest.raises(TypeError, match="abstract"):
        nn.TensorClassModuleBase[Given, Made]()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (nn.TensorClassModuleBase, "Untyped does not say what it takes and returns"),
        (nn.TensorClassModuleBase[torch.Tensor, Made], "<class 'torch.Tensor'> is not one"),
        (nn.TensorClassModuleBase[Given, TensorDict], "is not one"),
    ],
)
def test_as_td_module_without_tensorclass_types_raises(base: Any, message: str) -> None:
    class Untyped(base):
        def forward(self, x: Any) -> Any:
            return Made(y=x, batch_size=[])

    assert torch.equal(Untyped()(ONE).y, ONE)
    with pytest.raises(ValueError, match=message):
        Untyped().as_td_module()


def test_as_td_module_reads_and_writes_fields() -> None:
    module = Add()
    wrapped = module.as_td_module()
    assert wrapped.tc_module is module
    assert (wrapped.in_keys, wrapped.out_keys) == (["x", ("inner", "a"), ("inner", "b"), "name"], ["y", "z"])
    data = TensorDict({"x": ONE, "inner": {"a": ONE}, "name": "n", "extra": ONE}, [2])
    result = wrapped(data)
    assert (type(result), list(result.keys()), list(result.batch_size)) == (TensorDict, ["y"], [2])
    assert result["y"].tolist() == [2, 2]
    assert (module.seen.name, module.seen.inner.b) == ("n", None)
    assert "y" not in data
    assert wrapped(make_input())["y"].tolist() == [2, 2]
    assert wrapped.select_out_keys("y")(x=ONE, inner_a=ONE).tolist() == [2, 2]


def test_as_td_module_tensordict_out_is_written() -> None:
    out = TensorDict()
    assert Add().as_td_module()(make_input(), tensordict_out=out) is out
    assert list(out.keys()) == ["y"]
    with pytest.raises(TypeError, match="foo"):
        Add().as_td_module()(make_input(), foo=1)


def test_as_td_module_inside_sequence_passes_output() -> None:
    double = nn.TensorDictModule(lambda y: y * 2, ["y"], ["q"])
    seq = nn.TensorDictSequential(Add().as_td_module(), double)
    assert seq(make_input())["q"].tolist() == [4, 4]


def test_module_on_tensorclass_reads_and_writes_fields() -> None:
    data = make_input()
    result = nn.TensorDictModule(lambda x, a: x + a, ["x", ("inner", "a")], [("inner", "b")])(data)
    assert result is data
    assert data.inner.b.tolist() == [2, 2]
    with pytest.raises(AttributeError, match="Given has no field 'q'"):
        nn.TensorDictModule(lambda x: x, ["x"], ["q"])(data)
    empty = nn.TensorDictModule(lambda x: x, ["x"], ["x"], inplace="empty")(data)
    assert (type(empty), empty.inner) == (Given, None)


def test_module_passes_and_stores_non_tensor_values() -> None:
    seen: list[Any] = []

    def note(name: Any) -> Any:
        seen.append(name)
        return name.upper(), None

    data = nn.TensorDictModule(note, ["name"], ["loud", "nothing"])(TensorDict({"name": "n"}, [2]))
    assert (seen, data["loud"], data["nothing"]) == (["n"], "N", None)
    assert nn.TensorDictModule(note, ["name"], ["loud", "nothing"])(name="n")[0] == "N"


def test_module_list_output_is_stored_as_stack() -> None:
    data = nn.TensorDictModule(lambda x: [x, x], ["x"], ["y"])(TensorDict(x=ONE))
    assert torch.equal(data["y"], TensorDict({"y": [ONE, ONE]})["y"])


def test_dispatch_with_value_argument_has_no_batch_size() -> None:
    class Size(nn.TensorDictModuleBase):
        in_keys, out_keys = ("a", "b"), ("size",)

        def __init__(self) -> None:
            super().__init__()
            self.in_keys, self.out_keys = ["a", "b"], ["size"]

        @nn.dispatch
        def forward(self, tensordict: Any) -> Any:
            return tensordict.set("size", str(list(tensordict.batch_size)))

    assert Size()(torch.ones(3), "text") == "[]"
    assert Size()(torch.ones(3), torch.ones(3)) == "[3]"


def test_pickle_tensorclass_module_keeps_out_keys() -> None:
    copied = pickle.loads(pickle.dumps(Add().as_td_module().select_out_keys("y")))
    assert copied(make_input()).keys() == {"y"}


def test_partial_tolerant_runs_on_members_of_tensorclass_stack() -> None:
    stack = Made.lazy_stack([Made(y=ONE, z=ONE), Made(y=ONE)])
    seq = nn.TensorDictSequential(nn.TensorDictModule(lambda z: z + 1, ["z"], ["y"]), partial_tolerant=True)
    assert [member.y.tolist() for member in seq(stack).tensordicts] == [[2.0, 2.0], [1.0, 1.0]]


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("expand_input", [True, False])
def test_ensemble_repeats_values_for_each_copy(copies: int, expand_input: bool) -> None:
    module = nn.TensorDictModule(torch.nn.Linear(4, 1), ["x"], ["y"])
    ensemble = nn.EnsembleModule(module, copies, expand_input)
    data = TensorDict({"x": torch.ones(2, 4), "name": ["a", "b"]}, [2])
    result = ensemble(data if expand_input else data.expand(copies, 2))
    assert result["name"] == [["a", "b"]] * copies
    assert result[:, 1]["name"] == ["b"] * copies
    assert data["name"] == ["a", "b"]
