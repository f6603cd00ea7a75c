"""Leaves of Tensor subclasses: results have the values and class of torch's result on each leaf."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from td_core import TensorDict, TensorDictParams, lazy_stack

KEPT = {Tensor.clone, Tensor.to, Tensor.detach}


class Everywhere(Tensor):
    """A subclass without overrides: torch keeps the class in every result."""


class Kept(Tensor):
    """A subclass like the image classes of torchvision: few methods keep the class."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in KEPT else result


class Cloned(Tensor):
    """A subclass that overrides ``clone``."""

    def clone(self, **options):
        copied = super().clone(**options)
        copied.cloned = True
        return copied


class Wrapper(Tensor):
    """A wrapper subclass that supports few operations, like quantized tensors."""

    known = ("add", "add_", "alias", "clone", "detach", "mul", "mul_", "new_zeros", "prod", "stack")

    @staticmethod
    def __new__(cls, inner):
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in cls.known:
            raise NotImplementedError(f"{func} of a wrapper")
        args, kwargs = tree_map_only(Wrapper, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))

    def __repr__(self):
        return "Wrapper"


LEAVES = {
    "everywhere": lambda: torch.rand(4, 3).as_subclass(Everywhere),
    "kept": lambda: torch.rand(4, 3).as_subclass(Kept),
    "parameter": lambda: nn.Parameter(torch.rand(4, 3)),
    "wrapper": lambda: Wrapper(torch.rand(4, 3)),
}
COLLECTIONS = {
    "dense": lambda leaf: TensorDict({"plain": torch.zeros(4, 3), "n": {"x": leaf}}, [4]),
    "params": lambda leaf: TensorDictParams(TensorDict({"n": {"x": leaf}}, [4]), no_convert=True),
    "member": lambda leaf: lazy_stack([TensorDict({"n": {"x": leaf}}, [4])]),
}
#: Operations on a collection and on a leaf; those that Wrapper does not support are last.
OPERATIONS = {
    "clone": (lambda td: td.clone(), Tensor.clone),
    "torch.clone": (torch.clone, Tensor.clone),
    "clone(memory_format)": (lambda td: td.clone(memory_format=torch.preserve_format), Tensor.clone),
    "detach": (lambda td: td.detach(), Tensor.detach),
    "prod": (lambda td: td.prod(), Tensor.prod),
    "add": (lambda td: td + 1, lambda leaf: leaf + 1),
    "mul": (lambda td: td * td, lambda leaf: leaf * leaf),
    "new_zeros": (lambda td: td.new_zeros(2), lambda leaf: leaf.new_zeros(2, 3)),
    "to": (lambda td: td.to(torch.float64), lambda leaf: leaf.to(torch.float64)),
    "to other": (lambda td: td.to(torch.zeros(1).double()), lambda leaf: leaf.to(torch.float64)),
    "float64": (lambda td: td.float64(), lambda leaf: leaf.to(torch.float64)),
    "int64": (lambda td: td.int64(), lambda leaf: leaf.to(torch.int64)),
    "double": (lambda td: td.double(), Tensor.double),
    "new_ones": (lambda td: td.new_ones(2), lambda leaf: leaf.new_ones(2, 3)),
    "new_full": (lambda td: td.new_full((2,), 7), lambda leaf: leaf.new_full((2, 3), 7)),
    "new_empty": (lambda td: td.new_empty(2).zero_(), lambda leaf: leaf.new_zeros(2, 3)),
}
FEW = list(OPERATIONS)[: list(OPERATIONS).index("to")]
CASES = [(kind, operation) for kind in LEAVES for operation in (FEW if kind == "wrapper" else OPERATIONS)]


def get_leaf(result):
    stacked = getattr(result, "tensordicts", None)
    return get_leaf(stacked[0]) if stacked else result["n", "x"]


def to_values(leaf):
    return leaf.inner if isinstance(leaf, Wrapper) else leaf.detach().as_subclass(Tensor)


@pytest.mark.parametrize(("kind", "operation"), CASES)
@pytest.mark.parametrize("around", COLLECTIONS)
def test_operation_returns_same_class_as_torch(around, kind, operation):
    of_td, of_leaf = OPERATIONS[operation]
    leaf = LEAVES[kind]()
    found, wanted = get_leaf(of_td(COLLECTIONS[around](leaf))), of_leaf(leaf)
    if not (around == "params" and kind == "parameter" and isinstance(found, nn.Parameter)):
        assert type(found) is type(wanted)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(to_values(found), to_values(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"memory_format": torch.preserve_format}])
def test_clone_calls_clone_of_subclass(options):
    td = TensorDict({"x": torch.zeros(2).as_subclass(Cloned)})
    assert td.clone(**options)["x"].cloned


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.mul_(torch.tensor(2.0)),
        lambda td: td.mul_(td.clone()),
        lambda td: td.add_(TensorDict({"n": {"x": td["n", "x"].clone()}}, [4])),
    ],
)
def test_write_inplace_uses_no_extra_operations_of_wrapper(write):
    inner = torch.full((4, 3), 2.0)
    td = TensorDict({"n": {"x": Wrapper(inner)}}, [4])
    assert write(td) is td and torch.equal(inner, torch.full((4, 3), 4.0))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_atleast_nd_keeps_parameters(ndim):
    td = TensorDict({"x": nn.Parameter(torch.zeros(2, 3, 4))}, [2, 3, 4])
    with getattr(td, f"atleast_{ndim}d")() as same:
        assert same is td and isinstance(same["x"], nn.Parameter)
    assert getattr(torch, f"atleast_{ndim}d")(td) is td


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_keeps_attributes_of_leaves(protocol):
    whole = torch.arange(4.0)
    whole.tag = "whole"
    part = whole[1:]
    part.tag = "part"
    parameter = nn.Parameter(torch.zeros(2))
    parameter.tag = "parameter"
    td = TensorDict({"whole": whole, "part": part, "none": torch.zeros(2), "p": parameter})
    found = pickle.loads(pickle.dumps(td, protocol=protocol))
    assert [getattr(leaf, "tag", None) for leaf in found.values()] == ["whole", "part", None, "parameter"]
    if protocol > 2:
        found["whole"][1] = 7
        assert found["part"][0] == 7


@pytest.mark.skipif(not hasattr(nn, "Buffer"), reason="this torch has no torch.nn.Buffer")
def test_pickle_keeps_torch_buffer():
    td = TensorDict({"b": nn.Buffer(torch.zeros(2), persistent=False)})
    found = pickle.loads(pickle.dumps(td))["b"]
    assert isinstance(found, nn.Buffer) and not found.persistent


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="this torch has no integers of less than a byte")
def test_deepcopy_sub_byte_integers_keeps_values():
    leaf = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    copied = copy.deepcopy(TensorDict({"x": leaf}))["x"]
    assert copied.dtype is torch.uint4 and copied.data_ptr() != leaf.data_ptr()
    assert torch.equal(copied.view(torch.uint8), leaf.view(torch.uint8))


def test_share_memory_of_wrapper_raises():
    td = TensorDict({"x": Wrapper(torch.zeros(3))})
    with pytest.raises(RuntimeError, match="cannot share key 'x': a Wrapper has no memory of its own"):
        td.share_memory_()
    assert not td.is_locked


MASK = torch.tensor([True, False, True, False])
REFUSED = {
    "exp_": lambda td: td.exp_(),
    "mul_": lambda td: td.div_(td.mul(1)),
    "masked_fill_": lambda td: td.masked_fill_(MASK, 0),
    "zero_": lambda td: td.zero_(),
    "to": lambda td: td.to(torch.float64),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda td: td.new_ones(2),
    "full_like": lambda td: torch.full_like(td, 2),
    "update_": lambda td: td.update_(TensorDict({"n": {"x": torch.ones(4, 3)}}, [4])),
    "apply_": lambda td: td.apply(lambda leaf: leaf + 1, inplace=True),
    "load_state_dict": lambda td: td.load_state_dict(td.clone().state_dict()),
    "td[...]": lambda td: td.__setitem__(..., 1),
    "td[...] = td": lambda td: td.__setitem__(..., td.clone()),
    "td[mask]": lambda td: td.__setitem__(MASK, 1),
}


@pytest.mark.parametrize("do", REFUSED.values(), ids=REFUSED)
def test_unsupported_operation_of_wrapper_names_key(do):
    td = TensorDict({"plain": torch.ones(4, 3), "n": {"x": Wrapper(torch.ones(4, 3))}}, [4])
    with pytest.raises(NotImplementedError, match=r"\('n', 'x'\).* of a wrapper"):
        do(td)
    assert torch.equal(td["plain"], torch.ones(4, 3))


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="this torch has no integers of less than a byte")
def test_clone_unsupported_dtype_names_key():
    td = TensorDict({"n": {"x": torch.arange(4, dtype=torch.uint8).view(torch.uint4)}})
    with pytest.raises(NotImplementedError, match=r"cannot compute clone: key \('n', 'x'\): .*UInt4"):
        td.clone()
