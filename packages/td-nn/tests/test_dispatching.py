"""dispatch: calls of a function of a collection with tensors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from td_core import TensorDict
from td_core.spi import RULES
from td_nn import MissingKeyError, TensorDictModule, TensorDictModuleBase, TensorDictSequential, dispatch
from td_nn._switches import set_dispatch

ONE = torch.ones(1)


class Add(nn.Module):
    """A module with key attributes and a dispatched forward()."""

    def __init__(self, in_keys=("a", ("b", "c")), out_keys=("y",)):
        super().__init__()
        self.in_keys, self.out_keys = list(in_keys), list(out_keys)

    @dispatch
    def forward(self, tensordict, scale=1, *, shift=0):
        """Add."""
        total = sum(tensordict[key] for key in self.in_keys)
        return tensordict.set("y", total * scale + shift)


def test_dispatch_first_argument_not_tensordict_raises():
    with pytest.raises(RuntimeError, match=r"is named tensordict; .* takes \['td'\]"):
        dispatch(source=["a"], dest=["b"])(lambda td: td)
    with pytest.raises(RuntimeError, match="needs lists of keys as source and dest"):
        dispatch(lambda tensordict: tensordict)


def test_dispatch_with_key_lists_decorates_functions_and_methods():
    free = dispatch(source=["a"], dest=["b"])(lambda tensordict: tensordict.set("b", tensordict["a"] + 1))
    assert (free(ONE), free(a=ONE), free(TensorDict(a=ONE))["b"]) == (2, 2, 2)

    class Holder:
        by = 3

        def scale(self, tensordict):
            return tensordict.set("b", tensordict["a"] * self.by)

    bound = dispatch(source=["a"], dest=["b"])(Holder().scale)
    assert (bound(ONE), bound(TensorDict(a=ONE))["b"]) == (3, 3)


def test_call_with_collection_passes_it_unchanged():
    td = TensorDict({"a": ONE, "b": {"c": ONE}})
    assert Add()(td) is td
    assert Add()(tensordict=td) is td
    assert Add()(td, 2, shift=1)["y"] == 5


def test_call_keyword_tensordict_as_in_key_passes_it():
    made = TensorDictModule(lambda x: x + 1, ["tensordict"], ["y"])
    assert made(tensordict=ONE) == 2


def test_call_with_dict_passes_it_as_first_input():
    assert TensorDictModule(lambda x: x["k"], ["x"], ["y"])({"k": ONE}) == 1


def test_call_positional_and_keyword_tensors_fill_in_keys():
    add = Add()
    assert add(ONE, 2 * ONE) == 3
    assert add(ONE, b_c=2 * ONE) == 3
    assert add(a=ONE, b_c=2 * ONE) == 3
    assert add(ONE, 2 * ONE, 10) == 30
    assert add(ONE, b_c=2 * ONE, scale=10, shift=1) == 31


def test_call_input_passed_twice_raises():
    with pytest.raises(RuntimeError, match="the input 'a' is given twice: by position 0 and as a="):
        Add()(ONE, ONE, a=ONE)


def test_call_keyword_of_two_keys_raises():
    add = Add(in_keys=["a_b", ("a", "b")])
    with pytest.raises(RuntimeError, match=r"the keyword a_b stands for two inputs, 'a_b' and \('a', 'b'\)"):
        add(a_b=ONE)


def test_dispatch_separator_joins_nested_keys():
    class Dotted(Add):
        forward = dispatch(separator="__")(inspect.unwrap(Add.forward))

    assert Dotted()(a=ONE, b__c=ONE) == 2


def test_call_with_values_not_tensors_accepts_them():
    made = TensorDictModule(lambda a, b: (a, b), ["a", "b"], ["x", "y"])
    first, second = made(3, b=TensorDict(k=ONE))
    assert (first.item(), second["k"].item()) == (3, 1)


class Size(TensorDictModuleBase):
    in_keys = ["a", "b"]  # noqa: RUF012
    out_keys = ["size"]  # noqa: RUF012
    seen = None

    @dispatch
    def forward(self, tensordict):
        self.seen = tuple(tensordict.batch_size)
        return tensordict.set("size", tensordict["a"])

    @dispatch(auto_batch_size=False)
    def bare(self, tensordict):
        return self.forward(tensordict)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ((torch.ones(3, 4), torch.ones(3, 4, 5)), (3, 4)),
        ((torch.ones(3, 4), torch.ones(3, 5)), (3,)),
        ((torch.ones(3), torch.ones(4)), ()),
        ((torch.ones(3), 2), ()),
        ((torch.ones(3, 4), TensorDict({}, [3])), (3,)),
        ((torch.ones(3),), (3,)),
        (
            (
                torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
                torch.ones(2, 5),
            ),
            (2,),
        ),
    ],
)
def test_call_batch_size_is_shared_leading_dims(values, size):
    made = Size()
    made(*values)
    assert made.seen == size
    made.bare(*values)
    assert made.seen == ()


def test_call_with_tensors_returns_values_of_out_keys():
    made = TensorDictModule(lambda x: (x, x + 1, x + 2), ["x"], ["a", "_", ("n", "b")])
    assert made(ONE) == (1, 3)


def test_call_unwritten_out_key_raises():
    class Lazy(Add):
        @dispatch
        def forward(self, tensordict):
            return tensordict

        @dispatch
        def wrong(self, tensordict):
            return 3

    with pytest.raises(MissingKeyError, match="Lazy did not write 'y'"):
        Lazy()(ONE)
    with pytest.raises(
        TypeError, match="has to return a collection to take its outputs from; it returned a int"
    ):
        Lazy().wrong(ONE)


def test_call_reads_key_attributes_each_time():
    class Named(nn.Module):
        reads, writes = ("a",), ("y",)

        @dispatch(source="reads", dest="writes")
        def forward(self, tensordict):
            return tensordict.set(self.writes[0], tensordict[self.reads[0]])

    made = Named()
    made.reads, made.writes = ["p"], ["q"]
    assert made(p=2 * ONE) == 2


def test_set_dispatch_false_passes_arguments_unchanged():
    made = TensorDictModule(lambda x: x, ["x"], ["y"])
    with set_dispatch(False):
        assert made(TensorDict(x=ONE))["y"] == 1
        with pytest.raises(AttributeError, match="'Tensor' object has no attribute"):
            made(ONE)
        with pytest.raises(TypeError, match="tensordict"):
            made(x=ONE)
    assert made(ONE) == 1


@pytest.mark.parametrize(
    ("word", "expected"), [("0", "off"), ("false", "off"), ("1", "on"), ("maybe", "ValueError")]
)
def test_dispatch_environment_variable_disables_it(word, expected):
    code = """
import torch
from td_nn import TensorDictModule
try:
    TensorDictModule(lambda x: x, ["x"], ["y"])(torch.ones(1))
    print("on")
except AttributeError:
    print("off")
"""
    environment = {**os.environ, "DISPATCH_TDNN_MODULES": word}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert expected in done.stdout + done.stderr


def test_dispatch_signature_keeps_parameter_names():
    assert list(inspect.signature(Add.forward).parameters) == ["self", "tensordict", "scale", "shift"]
    assert Add.forward.__wrapped__.__name__ == Add.forward.__name__ == "forward"
    assert Add.forward.__doc__ == "Add."
    for cls in (TensorDictModule, TensorDictSequential):
        parameters = inspect.signature(cls.forward).parameters
        assert parameters["self"].default is parameters["tensordict"].default is None
        assert {"tensordict", "tensordict_out", "kwargs"} <= set(parameters)


def test_dispatch_defaults_are_class_attributes():
    assert (dispatch.DEFAULT_SEPARATOR, dispatch.DEFAULT_SOURCE, dispatch.DEFAULT_DEST) == (
        "_",
        "in_keys",
        "out_keys",
    )


@pytest.mark.parametrize("other", ["text", None, torch.zeros(3, 2, 1), object()])
def test_program_of_tensordict_infers_batch_size_of_tensors(other, monkeypatch):
    if not isinstance(other, torch.Tensor):
        pytest.importorskip("td_tensorclass")
    monkeypatch.setattr(RULES, "follows_tensordict", True)

    @dispatch(source=["a", "b"], dest=["size"])
    def measure(tensordict):
        return tensordict.set("size", torch.zeros((*tensordict.batch_size, 1)))

    assert measure(torch.zeros(3, 2), b=other).shape == (3, 2, 1)
