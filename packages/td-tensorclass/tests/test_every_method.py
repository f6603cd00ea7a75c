"""Every public method of a collection, on all kinds of tensorclasses: the same result as on the plain collection,
and the same class wherever all entries are fields.

The methods are listed by introspection: a new method fails here until it works, or until its arguments are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import Description, TensorCollection, TensorDict
from td_core._functions.packing import PackLayout
from td_core.errors import LockedError
from td_core.plugins.siblings import METHODS
from td_tensorclass import NonTensorStack, TensorClass, UnknownFieldError, tensorclass


class Plain(TensorClass):
    a: Tensor
    b: Tensor


class Frozen(TensorClass, frozen=True):
    a: Tensor
    b: Tensor


class Child(Plain):
    c: Tensor = None


class Nested(TensorClass):
    a: Tensor
    inner: Plain
    td: TensorDict


class Mixed(TensorClass):
    a: Tensor
    label: str
    make_stack: list


class Sparse(TensorClass):
    a: Tensor
    nothing: Tensor = None
    b: Tensor = None


@tensorclass
class Decorated:
    a: Tensor
    b: Tensor = None


def make_leaf(*tail: int) -> Tensor:
    # Elements between 0.1 and 0.9, where all tested functions are defined.
    return torch.rand(2, 3, *tail, generator=torch.Generator().manual_seed(len(tail))) * 0.8 + 0.1


def make_stack() -> NonTensorStack:
    return NonTensorStack.from_list([["p", "q", "r"], ["s", None, ("t",)]], 2)


SORTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Plain(make_leaf(), make_leaf(4), batch_size=[2, 3]),
    "frozen": lambda: Frozen(make_leaf(), make_leaf(4), batch_size=[2, 3]),
    "inherited": lambda: Child(make_leaf(), make_leaf(4), make_leaf(1), batch_size=[2, 3]),
    "nested": lambda: Nested(
        make_leaf(),
        SORTS["plain"](),
        TensorDict({"x": {"y": make_leaf(5)}}, batch_size=[2, 3]),
        batch_size=[2, 3],
    ),
    "non-tensor": lambda: Mixed(make_leaf(), "text", make_stack(), batch_size=[2, 3]),
    "None": lambda: Sparse(make_leaf(), batch_size=[2, 3]),
    "decorated": lambda: Decorated(make_leaf(), make_leaf(4), batch_size=[2, 3]),
    "named": lambda: Plain(make_leaf(), make_leaf(4), batch_size=[2, 3], names=["time", None]),
}

MASK = torch.tensor([[True, False, True], [False, True, True]])
SCALAR = torch.tensor(0.5)

#: Arguments per method, or a function of the collection that returns them; other methods are called without any.
ARGUMENTS: dict[str, Any] = {
    "add": (1,),
    "add_": (1,),
    "addcdiv": lambda x: (x, x),
    "addcdiv_": lambda x: (x.clone(), x.clone()),
    "addcmul": lambda x: (x, x),
    "addcmul_": lambda x: (x.clone(), x.clone()),
    "apply": (torch.neg,),
    "apply_": (torch.neg_,),
    "bitwise_and": lambda x: (x,),
    "broadcast_to": ((4, 2, 3),),
    "chunk": (2, 1),
    "clamp": (0.2, 0.5),
    "clamp_max": (0.5,),
    "clamp_max_": (0.5,),
    "clamp_min": (0.5,),
    "clamp_min_": (0.5,),
    "copy_": lambda x: (x.clone() * 2,),
    "copy_at_": lambda x: (x[0].clone() * 2, 0),
    "create_nested": ("a",),
    "cummax": (0,),
    "cummin": (0,),
    "del_": ("a",),
    "div": (2,),
    "div_": (2,),
    "entry_class": ("a",),
    "exclude": ("a",),
    "expand": (4, 2, 3),
    "expand_as": (torch.zeros(4, 2, 3),),
    "fill_": ("a", 0.5),
    "flip": (0,),
    "gather": (0, torch.tensor([[0, 1, 1]])),
    "get": ("a",),
    "get_at": ("a", 0),
    "get_item_shape": ("a",),
    "get_non_tensor": ("a",),
    "is_non_tensor": ("a",),
    "lerp": lambda x: (x, 0.5),
    "lerp_": lambda x: (x.clone(), 0.5),
    "load_state_dict": lambda x: ((x.clone() * 2).state_dict(),),
    "logical_and": lambda x: (x,),
    "masked_fill": (MASK, 0.0),
    "masked_fill_": (MASK, 0.0),
    "masked_select": (MASK,),
    "maximum": lambda x: (x,),
    "maximum_": lambda x: (x.clone(),),
    "minimum": lambda x: (x,),
    "minimum_": lambda x: (x.clone(),),
    "mod": (2,),
    "moveaxis": (0, 1),
    "movedim": (0, 1),
    "mul": (2,),
    "mul_": (2,),
    "named_apply": (lambda name, value: value * 2,),
    "narrow": (1, 0, 2),
    "new_full": (5, 3.0),
    "new_empty": (0,),
    "new_ones": (5,),
    "new_tensor": (0,),
    "new_zeros": (5,),
    "permute": (1, 0),
    "pop": ("a",),
    "pow": (2,),
    "pow_": (2,),
    "quantile": (0.5,),
    "refine_names": (..., "other"),
    "rename": ("x", "y"),
    "rename_": ("x", "y"),
    "rename_key_": ("a", "z"),
    "rename_keys": ("a", "z"),
    "repeat": (2, 1),
    "repeat_interleave": (2, 0),
    "replace": ({"a": torch.ones(2, 3)},),
    "reshape": (-1,),
    "roll": (1, 0),
    "rsub": (1,),
    "select": ("a",),
    "separates": ("a",),
    "set": ("a", torch.ones(2, 3)),
    "set_": ("a", torch.ones(2, 3)),
    "set_at_": ("a", torch.ones(3), 0),
    "set_non_tensor": ("a", "value"),
    "setdefault": ("a", torch.ones(2, 3)),
    "softmax": (0,),
    "split": (2, 1),
    "split_keys": (["a"],),
    "sub": (1,),
    "sub_": (1,),
    "swapaxes": (0, 1),
    "swapdims": (0, 1),
    "tensor_split": (2, 1),
    "tile": ((2,),),
    "to": (torch.float64,),
    "transpose": (0, 1),
    "type": (torch.float64,),
    "unbind": (0,),
    "unflatten": (1, (3, 1)),
    "unsqueeze": (0,),
    "update": ({"a": torch.ones(2, 3)},),
    "update_": ({"a": torch.ones(2, 3)},),
    "update_at_": ({"a": torch.ones(3)}, 0),
    "view": (-1,),
    "where": lambda x: (MASK, x * 2),
    "pad": ((1, 1),),
    "flatten": (0, 1),
    "squeeze": (0,),
    "logsumexp": (0,),
}

#: Methods that this test skips: constructors from other objects, joins of several collections, moves to devices or
#: files, and methods of other packages.
ELSEWHERE = {
    name for name in dir(TensorCollection) if name.startswith(("from_", "qint", "quint"))
} | {
    "cat", "cat_from_tensordict", "cat_tensors", "stack", "stack_from_tensordict", "stack_tensors", "lazy_stack",
    "maybe_dense_stack", "fromkeys", "complex32", "cuda", "pin_memory", "pin_memory_", "record_stream", "save", "dumps",
    "load", "load_", "open", "to_module", "as_tensor", "share_memory_", "map", "map_iter", "backward", "data_ptr",
    "declared_fields",
}  # fmt: skip
ELSEWHERE |= {name for name, package in METHODS.items() if package != "td-tensorclass"}

#: Methods whose result is intentionally not of the class, because it has another structure.
LEAVES_THE_CLASS = {"to_tensordict", "attrs", "numpy"}

#: Expected errors of methods that raise for a class with declared fields or a frozen one only.
REFUSED: dict[tuple[str, str], type[Exception]] = {
    ("any", "rename_key_"): UnknownFieldError,
    ("frozen", "rename_key_"): LockedError,
    ("frozen", "unlock_"): FrozenInstanceError,
}

NAMES = sorted(name for name in dir(TensorCollection) if not name.startswith("_") and name not in ELSEWHERE)


def call_method(node: Any, name: str) -> Any:
    """Call a method or read a property. Return its result, or the error that it raises."""
    given = ARGUMENTS.get(name, ())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns about lossy casts
            member = getattr(node, name)
            if not callable(member):
                return member
            return member(*(given(node) if callable(given) else given))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        return error


def to_plain_objects(value: Any) -> Any:
    """Convert any result to plain Python objects, for comparison."""
    if isinstance(value, BaseException):
        bases = (KeyError, IndexError, TypeError, RuntimeError, ValueError)
        return ("error", next((base for base in bases if isinstance(value, base)), type(value)))
    if isinstance(value, TensorCollection) and not value._is_value:
        entries = {key: to_plain_objects(child) for key, child in value._children().items()}
        return (tuple(value.batch_size), value.names, value.device, entries)
    if isinstance(value, TensorCollection):
        return (tuple(value.batch_size), value.tolist())
    if isinstance(value, Tensor):
        return (value.dtype, repr(value.tolist()))  # as text, since NaN differs from itself
    if isinstance(value, np.ndarray):
        return (str(value.dtype), repr(value))
    if isinstance(value, Description):  # the title names the class
        return value.rows
    if isinstance(value, PackLayout):
        return (value.keys, value.shapes, value.dim)
    if isinstance(value, dict):
        return {key: to_plain_objects(item) for key, item in value.items() if item is not None}
    if hasattr(value, "_asdict"):
        return to_plain_objects(value._asdict())
    if isinstance(value, (list, tuple, set)):
        return [to_plain_objects(item) for item in value]
    if type(value).__name__.endswith("View") or type(value).__name__.startswith(
        ("Collection", "Level", "dict_")
    ):
        return [to_plain_objects(item) for item in value]
    return value


def check_class(result: Any, plain: Any, cls: type) -> None:
    """Assert the class of each collection whose keys are all fields."""
    if hasattr(result, "_asdict"):
        return
    if isinstance(result, (list, tuple)) and isinstance(plain, (list, tuple)):
        for pair in zip(result, plain, strict=True):
            check_class(*pair, cls)
    elif type(plain) is TensorDict:
        keys_fit = plain.keys() <= cls._schema.names.keys()
        assert type(result) is (cls if keys_fit else TensorDict)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sort", SORTS)
def test_every_method_of_tensorclass_equals_tensordict(sort: str, name: str) -> None:
    instance = SORTS[sort]()
    plain = SORTS[sort]()._tensordict
    if sort == "frozen":
        plain.lock_()
    refused = REFUSED.get((sort, name)) or REFUSED.get(("any", name))
    if refused is not None:
        assert isinstance(call_method(instance, name), refused)
        return
    result, wanted = call_method(instance, name), call_method(plain, name)
    assert to_plain_objects(result) == to_plain_objects(wanted), (result, wanted)
    # Some methods write in place, so compare the collections afterwards, too.
    assert to_plain_objects(instance._tensordict) == to_plain_objects(plain)
    if name not in LEAVES_THE_CLASS:
        check_class(result, wanted, type(instance))
    if wanted is plain:
        assert result is instance
