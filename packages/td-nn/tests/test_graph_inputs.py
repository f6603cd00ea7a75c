"""The inputs that a CUDA graph copies and compares in each call, tested on the CPU."""

from __future__ import annotations

import pytest
import torch

from td_core import TensorCollection, TensorDict, lazy_stack
from td_nn import MissingKeyError
from td_nn._graph_inputs import copy_inputs, read_inputs

CPU = torch.device("cpu")
ONE = torch.ones(3)


def collection(**more):
    return TensorDict({"x": torch.ones(4, 3), "n": {"i": torch.arange(4)}, **more}, [4])


# Positional arguments, keyword arguments, and the keys that the function reads.
CALLS = {
    "nothing": ((), {}, None),
    "tensors": ((ONE, ONE * 2), {}, None),
    "tensors by keyword": ((ONE,), {"y": ONE * 2, "scale": 3}, None),
    "values": ((1, "a", None, 2.5), {"flag": True}, None),
    "nested": (([ONE, {"a": ONE * 2}], (ONE,)), {"more": {"b": [ONE]}}, None),
    "a function": ((ONE, torch.relu), {}, None),
    "collection": ((collection(),), {}, None),
    "some keys": ((collection(),), {}, ["x"]),
    "nested key": ((collection(),), {}, [("n", "i")]),
    "a key above": ((collection(),), {}, ["n"]),
    "missing key": ((collection(),), {}, ["x", "z"]),
    "collection and tensors": ((collection(), ONE), {"y": ONE}, ["x"]),
    "locked": ((collection().lock_(),), {}, None),
    "lazy stack": ((lazy_stack(list(collection())),), {}, ["x"]),
    "collection by keyword": ((ONE,), {"tensordict_out": collection()}, None),
}  # fmt: skip


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for left, right in zip(found, expected):
            assert_same(left, right)
    elif isinstance(expected, (dict, TensorCollection)):
        assert set(found.keys()) == set(expected.keys())
        for key in expected.keys():
            assert_same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
        assert found.data_ptr() != expected.data_ptr()
    else:
        assert found is expected


@pytest.mark.parametrize(("args", "kwargs", "in_keys"), CALLS.values(), ids=CALLS)
def test_copy_inputs_equals_arguments(args, kwargs, in_keys):
    inputs = read_inputs(args, kwargs, in_keys)
    copies, copied_args, copied_kwargs = copy_inputs(args, kwargs, inputs, in_keys, CPU)
    expected = (args[0].select(*in_keys, strict=False), *args[1:]) if in_keys else args
    assert_same(copied_args, expected)
    assert_same(copied_kwargs, kwargs)
    assert copies.keys() == inputs.tensors.keys()


@pytest.mark.parametrize(("args", "kwargs", "in_keys"), CALLS.values(), ids=CALLS)
def test_check_against_equal_inputs_passes(args, kwargs, in_keys):
    other = dict(reversed(kwargs.items()))
    read_inputs(args, other, in_keys).check_against(read_inputs(args, kwargs, in_keys), "it")


def call(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("captured", "given", "error", "message"),
    [
        (
            call(ONE),
            call(ONE[:2]),
            ValueError,
            r"str was captured with argument 0 of shape \[3\] .* got \[2\]",
        ),
        (call(ONE), call(ONE.int()), ValueError, "dtype torch.float32; got .* torch.int32"),
        (call(ONE, 1), call(ONE, 2), ValueError, "argument 1 = 1, which is a constant of the graph; got 2"),
        (call(ONE, True), call(ONE, 1), ValueError, "argument 1 = True"),
        (call(ONE, 1), call(ONE, ONE), ValueError, "arguments that nest in another way"),
        (call(ONE), call(ONE, ONE), ValueError, "with argument 0; got argument 0, argument 1"),
        (call(x=ONE), call(y=ONE), ValueError, "arguments that nest in another way"),
        (call([ONE]), call((ONE,)), ValueError, "arguments that nest in another way"),
        (call(collection()), call(ONE), ValueError, r"captured with entry .*; got argument 0"),
        (call(collection()), call(TensorDict(x=ONE)), MissingKeyError, r"misses its input \[\('n', 'i'\)\]"),
        (call(collection(z=ONE[0].expand(4))), call(collection()), MissingKeyError, r"input \['z'\]"),
        (call(collection()), call(collection(z=torch.ones(4))), ValueError, "got entry .*, entry 'z'"),
        (
            call(collection()),
            call(TensorDict(collection().to_dict())),
            ValueError,
            r"the batch size = torch.Size\(\[4\]\)",
        ),
        (
            call(collection(batch_size=torch.ones(4))),
            call(collection()),
            MissingKeyError,
            r"misses its input \['batch_size'\]",
        ),
    ],
)
def test_check_against_other_inputs_raises(captured, given, error, message):
    with pytest.raises(error, match=message):
        read_inputs(*given, None).check_against(read_inputs(*captured, None), "it")
