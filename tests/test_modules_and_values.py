"""Modules of td-nn on tensorclasses and on collections with values that are not tensors."""

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
    """A class that is a field."""

    a: torch.Tensor
    b: Optional[torch.Tensor] = None  # noqa: UP045


class Given(tensorclass.TensorClass):
    """What a module takes."""

    x: torch.Tensor
    inner: Inner
    name: str = "unnamed"


class Made(tensorclass.TensorClass):
    """What it returns."""

    y: torch.Tensor
    z: Optional[torch.Tensor] = None  # noqa: UP045


class Add(nn.TensorClassModuleBase[Given, Made]):
    """A module from class to class."""

    def forward(self, x: Given) -> Made:
        assert isinstance(x.inner, Inner)
        self.seen = x
        return Made(y=x.x + x.inner.a, batch_size=x.batch_size)


def given(**options: Any) -> Given:
    return Given(x=ONE, inner=Inner(a=ONE, batch_size=[2]), batch_size=[2], **options)


def test_t1_types_are_read_from_the_subscript() -> None:
    assert (Add.input_type, Add.output_type) == (Given, Made)
    child = type("Child", (Add,), {})
    assert child.input_type is Given
    assert child().as_td_module().in_keys == ["x", ("inner", "a"), ("inner", "b"), "name"]
    with pytest.raises(TypeError, match="abstract"):
        nn.TensorClassModuleBase[Given, Made]()


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (nn.TensorClassModuleBase, "Untyped does not say what it takes and returns"),
        (nn.TensorClassModuleBase[torch.Tensor, Made], "<class 'torch.Tensor'> is not one"),
        (nn.TensorClassModuleBase[Given, TensorDict], "is not one"),
    ],
)
def test_t1_module_without_two_tensorclasses_stays_one(base: Any, said: str) -> None:
    class Untyped(base):
        def forward(self, x: Any) -> Any:
            return Made(y=x, batch_size=[])

    assert torch.equal(Untyped()(ONE).y, ONE)
    with pytest.raises(ValueError, match=said):
        Untyped().as_td_module()


def test_t2_module_reads_and_writes_fields() -> None:
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
    assert wrapped(given())["y"].tolist() == [2, 2]
    assert wrapped.select_out_keys("y")(x=ONE, inner_a=ONE).tolist() == [2, 2]


def test_t2_output_goes_where_it_is_asked_to() -> None:
    out = TensorDict()
    assert Add().as_td_module()(given(), tensordict_out=out) is out
    assert list(out.keys()) == ["y"]
    with pytest.raises(TypeError, match="foo"):
        Add().as_td_module()(given(), foo=1)


def test_t2_wrapped_module_is_a_member() -> None:
    double = nn.TensorDictModule(lambda y: y * 2, ["y"], ["q"])
    seq = nn.TensorDictSequential(Add().as_td_module(), double)
    assert seq(given())["q"].tolist() == [4, 4]


def test_m1_tensorclass_is_read_and_written() -> None:
    data = given()
    result = nn.TensorDictModule(lambda x, a: x + a, ["x", ("inner", "a")], [("inner", "b")])(data)
    assert result is data
    assert data.inner.b.tolist() == [2, 2]
    with pytest.raises(AttributeError, match="Given has no field 'q'"):
        nn.TensorDictModule(lambda x: x, ["x"], ["q"])(data)
    empty = nn.TensorDictModule(lambda x: x, ["x"], ["x"], inplace="empty")(data)
    assert (type(empty), empty.inner) == (Given, None)


def test_m1_values_are_passed_and_stored_as_they_are() -> None:
    seen: list[Any] = []

    def note(name: Any) -> Any:
        seen.append(name)
        return name.upper(), None

    data = nn.TensorDictModule(note, ["name"], ["loud", "nothing"])(TensorDict({"name": "n"}, [2]))
    assert (seen, data["loud"], data["nothing"]) == (["n"], "N", None)
    assert nn.TensorDictModule(note, ["name"], ["loud", "nothing"])(name="n")[0] == "N"


def test_m1_lists_of_tensors_become_what_the_collection_makes_of_them() -> None:
    data = nn.TensorDictModule(lambda x: [x, x], ["x"], ["y"])(TensorDict(x=ONE))
    assert torch.equal(data["y"], TensorDict({"y": [ONE, ONE]})["y"])


def test_d5_value_among_the_inputs_leaves_no_batch() -> None:
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


def test_module_of_a_class_is_pickled() -> None:
    copied = pickle.loads(pickle.dumps(Add().as_td_module().select_out_keys("y")))
    assert copied(given()).keys() == {"y"}
