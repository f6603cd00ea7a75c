"""Compare every pointwise method of the tables with torch on plain leaves."""

from __future__ import annotations

import inspect
import operator
import warnings
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._foreach import Op, foreach, make_op
from td_core._ops.pointwise import OPS, PointwiseMixin
from td_core._torch_private import foreach_kernel, functorch_level
from td_core.errors import BatchSizeError, StructureError

SEED = 7


def leaves(shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tails = {"a": (), "b": (4,), "c": (1, 2)}
    return {
        key: torch.rand(*shape, *tail, generator=generator).mul(0.9).to(dtype) for key, tail in tails.items()
    }


def nested(shape: tuple[int, ...] = (2, 3)) -> TensorDict:
    flat = leaves(shape)
    return TensorDict({"a": flat["a"], "n": {"b": flat["b"], "m": {"c": flat["c"]}}}, shape)


MAKE = {
    "flat": lambda: TensorDict(leaves(), [2, 3]),
    "nested": nested,
    "lazy": lambda: LazyStackedTensorDict(nested((3,)), nested((3,)) + 0.05, stack_dim=0),
    "lazy along 1": lambda: LazyStackedTensorDict(*[nested((2,)) + 0.01 * i for i in range(3)], stack_dim=1),
    "nested lazy": lambda: TensorDict(
        {"a": torch.rand(2, 3), "l": LazyStackedTensorDict(nested((3,)), nested((3,)), stack_dim=0)}, [2, 3]
    ),
}


@pytest.fixture(params=MAKE)
def td(request: pytest.FixtureRequest) -> TensorDict:
    return MAKE[request.param]()


def entries(td: TensorDict) -> dict[object, Tensor]:
    return dict(td.items(include_nested=True, leaves_only=True))


def check(result: TensorDict, expected: dict[object, Tensor]) -> None:
    found = entries(result)
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, equal_nan=True)


def made(parameters: int, inplace: bool) -> list[str]:
    """Return the names of the methods made by a factory that have this many parameters, with ``self``."""
    return [
        name
        for name, method in vars(PointwiseMixin).items()
        if inspect.isfunction(method)
        and not name.startswith("_")
        and method.__code__.co_name == "method"
        and len(inspect.signature(method).parameters) == parameters
        and name.endswith("_") is inplace
    ]


UNARY = made(1, False)
UNARY_INPLACE = made(1, True)
BINARY = [name for name in made(3, False) if name not in ("bitwise_and", "logical_and")]
BINARY_INPLACE = made(2, True)
TORCH_NAME = {"mod": "remainder"}
DUNDERS = ["add", "sub", "mul", "truediv", "pow", "mod"]
BOOLEAN = ["and_", "or_", "xor"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]


def test_method_tables_list_all_methods() -> None:
    assert (len(UNARY), len(UNARY_INPLACE), len(BINARY), len(BINARY_INPLACE)) == (34, 29, 7, 7)


@pytest.mark.parametrize("name", UNARY)
def test_unary_each_name_equals_torch(name: str, td: TensorDict) -> None:
    expected = {key: getattr(torch, name)(leaf) for key, leaf in entries(td).items()}
    result = getattr(td, name)()
    check(result, expected)
    assert type(result) is type(td)
    assert result.batch_size == td.batch_size


@pytest.mark.parametrize("name", UNARY_INPLACE)
def test_unary_inplace_each_name_equals_torch(name: str, td: TensorDict) -> None:
    expected = {key: getattr(torch, name[:-1])(leaf) for key, leaf in entries(td).items()}
    before = td._leaves()
    assert getattr(td, name)() is td
    check(td, expected)
    assert all(new is old for new, old in zip(td._leaves(), before, strict=True))


def reference(name: str, leaf: Tensor, other: object) -> Tensor:
    if name in ("maximum", "minimum"):
        other = torch.as_tensor(other, dtype=leaf.dtype)
    return getattr(torch, TORCH_NAME.get(name, name))(leaf, other)


@pytest.mark.parametrize("name", [*BINARY, "add", "sub", "clamp_min"])
@pytest.mark.parametrize("other", [2, 0.5, np.float32(0.25)], ids=str)
def test_binary_number_operand_equals_torch(name: str, other: float, td: TensorDict) -> None:
    expected = {key: reference(name, leaf, float(other)) for key, leaf in entries(td).items()}
    check(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", [*BINARY, "add", "sub", "rsub", "clamp_min"])
def test_binary_collection_operand_equals_torch(name: str, td: TensorDict) -> None:
    other = td.cos()
    expected = {key: reference(name, leaf, leaf.cos()) for key, leaf in entries(td).items()}
    check(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", [*BINARY, "add", "sub", "rsub", "clamp_min"])
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 3), (2, 1)], ids=str)
def test_binary_tensor_operand_broadcasts_on_batch_dims(
    name: str, shape: tuple[int, ...], td: TensorDict
) -> None:
    other = torch.rand(shape) + 0.5
    expected = {
        key: reference(name, leaf, other.expand(2, 3).reshape(2, 3, *[1] * (leaf.ndim - 2)))
        for key, leaf in entries(td).items()
    }
    check(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", [*BINARY_INPLACE, "add_", "sub_"])
@pytest.mark.parametrize("kind", ["number", "tensor", "collection"])
def test_binary_inplace_each_name_equals_torch(name: str, kind: str, td: TensorDict) -> None:
    other = {"number": 0.5, "tensor": torch.full((3,), 0.5), "collection": td * 0 + 0.5}[kind]
    expected = {key: reference(name[:-1], leaf, 0.5) for key, leaf in entries(td).items()}
    before = td._leaves()
    assert getattr(td, name)(other) is td
    check(td, expected)
    assert all(new is old for new, old in zip(td._leaves(), before, strict=True))


@pytest.mark.parametrize("name", DUNDERS)
def test_operator_each_symbol_equals_torch(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    for other in (1.5, td.cos()):
        expected = {
            key: function(leaf, other if isinstance(other, float) else leaf.cos())
            for key, leaf in entries(td).items()
        }
        check(function(td, other), expected)


@pytest.mark.parametrize("name", [name for name in DUNDERS if name != "mod"])
def test_reflected_operator_number_on_left_equals_torch(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    check(function(1.5, td), {key: function(1.5, leaf) for key, leaf in entries(td).items()})


@pytest.mark.parametrize("name", [name for name in DUNDERS if name != "mod"])
def test_operator_tensor_or_array_on_left_equals_torch(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    left = torch.rand(2, 3) + 0.5
    expected = {
        key: function(left.reshape(2, 3, *[1] * (leaf.ndim - 2)), leaf) for key, leaf in entries(td).items()
    }
    check(function(left, td), expected)
    check(function(left.numpy(), td), expected)


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow"])
def test_augmented_assignment_returns_same_object(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    expected = {key: function(leaf.clone(), 2.0) for key, leaf in entries(td).items()}
    assert function(td, 2.0) is td
    check(td, expected)


@pytest.mark.parametrize("name", BOOLEAN)
def test_bitwise_operator_bool_leaves_equals_torch(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    low, high = td > 0.3, td < 0.7
    check(function(low, high), {key: function(leaf > 0.3, leaf < 0.7) for key, leaf in entries(td).items()})
    check(function(True, low), {key: function(True, leaf > 0.3) for key, leaf in entries(td).items()})
    check(~low, {key: ~(leaf > 0.3) for key, leaf in entries(td).items()})
    check(low.bitwise_and(high), {key: (leaf > 0.3) & (leaf < 0.7) for key, leaf in entries(td).items()})
    check(low.logical_and(high), {key: (leaf > 0.3) & (leaf < 0.7) for key, leaf in entries(td).items()})
    check(
        low.logical_and(False),
        {key: torch.zeros_like(leaf, dtype=torch.bool) for key, leaf in entries(td).items()},
    )


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_each_symbol_equals_torch(name: str, td: TensorDict) -> None:
    function = getattr(operator, name)
    for other in (0.5, td.cos()):
        expected = {
            key: function(leaf, other if isinstance(other, float) else leaf.cos())
            for key, leaf in entries(td).items()
        }
        check(function(td, other), expected)
    check(function(0.5, td), {key: function(0.5, leaf) for key, leaf in entries(td).items()})


def test_comparison_with_mapping_compares_entries() -> None:
    result = TensorDict({"a": torch.arange(2), "n": {"b": torch.zeros(2)}}, [2]) == {
        "a": torch.tensor([0, 0]),
        "n": {"b": torch.zeros(2)},
    }
    assert result["a"].tolist() == [True, False]
    assert result["n", "b"].tolist() == [True, True]


def test_eq_unsupported_type_is_false_and_lt_raises() -> None:
    td = TensorDict({"a": 1})
    assert (td == None) is False  # noqa: E711
    assert (td != "x") is True
    with pytest.raises(TypeError, match="not supported between instances of 'TensorDict' and 'str'"):
        td < "x"  # noqa: B015


def test_neg_abs_operators_equal_torch(td: TensorDict) -> None:
    check(-td, {key: -leaf for key, leaf in entries(td).items()})
    check(abs(-td), entries(td))


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_add_sub_rsub_alpha_equals_torch(name: str, td: TensorDict) -> None:
    for other in (2.0, td.cos(), torch.tensor(2.0)):
        expected = {
            key: getattr(torch, name)(leaf, leaf.cos() if isinstance(other, type(td)) else 2.0, alpha=3)
            for key, leaf in entries(td).items()
        }
        check(getattr(td, name)(other, alpha=3), expected)
        if name != "rsub":
            check(getattr(td.clone(), f"{name}_")(other, alpha=3), expected)


@pytest.mark.parametrize("limits", [(0.2, 0.6), (0.2, None), (None, 0.6)], ids=str)
def test_clamp_each_limit_equals_torch(limits: tuple[float | None, float | None], td: TensorDict) -> None:
    expected = {key: leaf.clamp(*limits) for key, leaf in entries(td).items()}
    check(td.clamp(*limits), expected)
    tensors = [None if limit is None else torch.full((3,), limit) for limit in limits]
    check(td.clamp(*tensors), expected)
    collections = [None if limit is None else td * 0 + limit for limit in limits]
    check(td.clamp(*collections), expected)
    out = td.clone()
    assert td.clamp(*limits, out=out) is out
    check(out, expected)


def test_clamp_without_limits_raises() -> None:
    with pytest.raises(TypeError, match=r"clamp\(\) needs min, max or both"):
        TensorDict({"a": 1}).clamp()


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_lerp_addcmul_addcdiv_equal_torch(name: str, td: TensorDict) -> None:
    one, two = td.cos(), td + 1
    function = getattr(torch, name)
    expected = {key: function(leaf, leaf.cos(), leaf + 1) for key, leaf in entries(td).items()}
    check(getattr(td, name)(one, two), expected)
    check(getattr(td.clone(), f"{name}_")(one, two), expected)
    if name == "lerp":
        check(td.lerp(one, 0.25), {key: leaf.lerp(leaf.cos(), 0.25) for key, leaf in entries(td).items()})
        weight = torch.rand(3)
        check(
            td.lerp(one, weight),
            {
                key: leaf.lerp(leaf.cos(), weight.view(3, *[1] * (leaf.ndim - 2)))
                for key, leaf in entries(td).items()
            },
        )
    else:
        valued = {key: function(leaf, leaf.cos(), leaf + 1, value=0.5) for key, leaf in entries(td).items()}
        check(getattr(td, name)(one, two, value=0.5), valued)
        check(getattr(td.clone(), f"{name}_")(one, two, value=0.5), valued)
        check(
            getattr(td, name)(2, two),
            {key: function(leaf, torch.full_like(leaf, 2), leaf + 1) for key, leaf in entries(td).items()},
        )


def test_add_collections_broadcasts_batch_sizes() -> None:
    td = nested()
    for other in (td[0], td[:1]):
        check(td + other, {key: leaf + leaf[0] for key, leaf in entries(td).items()})
        check(other + td, {key: leaf[0] + leaf for key, leaf in entries(td).items()})
        check(td.clone().add_(other), {key: leaf + leaf[0] for key, leaf in entries(td).items()})
    assert (td[0] + td).batch_size == (2, 3)


def test_add_larger_tensor_expands_batch_size() -> None:
    td = nested()
    result = td + torch.ones(4, 2, 3)
    assert result.batch_size == (4, 2, 3)
    check(result, {key: (leaf + 1).expand(4, *leaf.shape) for key, leaf in entries(td).items()})


def test_add_default_replaces_missing_keys() -> None:
    a, b, c = torch.rand(2), torch.rand(2, 3), torch.rand(2)
    first = TensorDict({"a": a, "n": {"b": b}}, [2])
    second = TensorDict({"n": {"b": b, "d": c}, "m": {"c": c}}, [2])
    for default in (10.0, torch.tensor(10.0)):
        result = first.sub(second, default=default)
        check(result, {"a": a - 10, ("n", "b"): b - b, ("n", "d"): 10 - c, ("m", "c"): 10 - c})
    check(first.sub(second, default="intersection"), {("n", "b"): b - b})
    with pytest.raises(TypeError, match=r"default= is a number, a tensor, 'intersection' or None; got 'bad'"):
        first.sub(second, default="bad")


@pytest.mark.parametrize("call", ["add", "add_", "__eq__", "__lt__", "maximum"])
def test_binary_different_keys_raises_with_keys(call: str) -> None:
    td = nested()
    other = nested()
    del other["n", "m", "c"]
    with pytest.raises(StructureError, match=r"differ at key \('n', 'm'\).*missing keys \['c'\]"):
        getattr(td, call)(other)


@pytest.mark.parametrize("call", ["add", "add_", "__eq__", "__lt__", "maximum"])
def test_binary_different_keys_in_lazy_stack_raises_with_path(call: str) -> None:
    td, other = (
        TensorDict({"n": {"l": LazyStackedTensorDict(TensorDict({"m": {key: torch.ones(1)}}))}})
        for key in "ac"
    )
    with pytest.raises(
        StructureError, match=r"differ at key \('n', 'l', 'm'\): missing keys \['a'\], extra keys \['c'\]"
    ):
        getattr(td, call)(other)


def test_binary_failing_leaf_raises_same_type_with_key() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, 4)}}, [2])
    other = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2, 5)}}, [2])
    with pytest.raises(
        RuntimeError, match=r"cannot compute add: key \('n', 'b'\): .*\(shapes \[\[2, 4\], \[2, 5\]\]\)"
    ):
        td.add(other)
    with pytest.raises(NotImplementedError, match=r"cannot compute bitwise_and: key 'a'"):
        td.bitwise_and(td)


def test_binary_invalid_operand_raises() -> None:
    td = nested()
    with pytest.raises(TypeError, match=r"add\(\) takes a number, a tensor or a collection; got str: 'x'"):
        td.add("x")
    with pytest.raises(TypeError, match="unsupported operand"):
        td + "x"
    with pytest.raises(
        BatchSizeError, match=r"cannot compute add: an operand of shape \[2\].*batch size \[2, 3\]"
    ):
        td.add(torch.ones(2))
    with pytest.raises(
        BatchSizeError, match=r"add_ in place: an operand of batch size \[4, 2, 3\] does not fit"
    ):
        td.add_(torch.ones(4, 2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda td: td.add_(TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 2)}, [2])),
            "key 'b' has shape",
        ),
        (lambda td: td.add_(TensorDict({"a": torch.ones(2, 3)}, [2])), "missing keys"),
        (lambda td: td.add_(torch.ones(3)), "does not broadcast"),
        (lambda td: td.mul_(1j), "cannot compute mul_ in place: key 'a': .*can't be cast"),
    ],
)
def test_inplace_failing_operand_changes_nothing(make: object, message: str) -> None:
    td = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, [2])
    with pytest.raises(RuntimeError, match=message):
        make(td)
    check(td, {"a": torch.ones(2, 3), "b": torch.ones(2, 4)})


def test_inplace_later_leaf_wrong_dtype_changes_nothing() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, [2])
    with pytest.raises(RuntimeError, match=r"cannot compute exp_ in place: key 'b': .*can't be cast"):
        td.exp_()
    with pytest.raises(RuntimeError, match=r"cannot compute add_ in place: key 'b'"):
        td.add_(0.5)
    check(td, {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})


@pytest.mark.parametrize("before", [0, 4])
def test_inplace_later_operand_wrong_dtype_changes_nothing(before: int) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2])
    for _ in range(before):
        td.mul_(td.clone())
    other = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64)}, [2])
    with pytest.raises(RuntimeError, match=r"cannot compute mul_ in place: key 'b': .*can't be cast"):
        td.mul_(other * 2)
    check(td, {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("last", ["expanded", "grad"])
@pytest.mark.parametrize(
    "name", [*UNARY_INPLACE, *BINARY_INPLACE, "sub_ alpha", "masked_fill_", "lerp_", "addcmul_"]
)
def test_inplace_later_leaf_not_writable_changes_nothing(name: str, last: str, stacked: bool) -> None:
    bad = (
        torch.full((1, 2), 0.5).expand(2, 2)
        if last == "expanded"
        else torch.full((2, 2), 0.5, requires_grad=True)
    )
    td = TensorDict({"a": torch.full((2, 2), 0.5), "b": {"c": bad}}, [2])
    target = LazyStackedTensorDict(td.clone(), td) if stacked else td
    other = torch.full((2,), 0.5)
    arguments = {
        **dict.fromkeys(UNARY_INPLACE, ()),
        "sub_ alpha": (other, 2),
        "masked_fill_": (torch.ones(2, dtype=torch.bool), 1.0),
        "lerp_": (target.detach().clone() * 3, 0.5),
        "addcmul_": (target.detach().clone(), target.detach().clone()),
    }.get(name, (other,))
    if stacked and name in ("sub_ alpha", "masked_fill_"):
        arguments = (
            torch.full((2, 2), 0.5) if name != "masked_fill_" else torch.ones(2, 2) > 0,
            *arguments[1:],
        )
    with pytest.raises(RuntimeError, match=r"key \('b', 'c'\).*expanded|requires? grad"):
        getattr(target, name.split()[0])(*arguments)
    for leaf in target._leaves():
        assert (leaf == 0.5).all()


def test_add_default_fills_keys_that_some_members_lack() -> None:
    members = TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.ones(1), "b": torch.ones(1)})
    stack = LazyStackedTensorDict(*members)
    for outer in (stack, TensorDict({"s": stack})):
        result = outer.add(outer, default=5.0)
        result = result if outer is stack else result["s"]
        assert [sorted(member.keys()) for member in result.tensordicts] == [["a"], ["a", "b"]]
        assert result[1]["b"] == 2
    other = TensorDict({"a": torch.ones(2, 1), "b": torch.ones(2, 1)}, [2])
    check(
        stack.add(other, default=5.0), {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[6.0], [2.0]])}
    )


VIEWS_IN_PLACE = {
    "zero_": lambda td: td.zero_(),
    "add_": lambda td: td.add_(1),
    "mul_": lambda td: td.mul_(td.clone()),
    "neg_": lambda td: td.neg_(),
    "copy_": lambda td: td.copy_(td + 1),
    "update_": lambda td: td.update_(td + 1),
    "an index": lambda td: td.__setitem__(slice(None), td + 1),
    "apply_": lambda td: td.apply_(lambda leaf: leaf * 3),
    "load_state_dict": lambda td: td.load_state_dict((td * 2).state_dict()),
}


@pytest.mark.parametrize("name", VIEWS_IN_PLACE)
def test_inplace_conj_and_neg_views_keeps_view_bits(name: str) -> None:
    bases = {"c": torch.tensor([1 + 2j, 3j]), "n": torch.tensor([1.0, 2.0]), "p": torch.ones(2)}
    td = TensorDict({"c": bases["c"].conj(), "n": torch._neg_view(bases["n"]), "p": bases["p"]}, [2])
    plain = td.clone()
    assert not plain["c"].is_conj()
    VIEWS_IN_PLACE[name](td)
    VIEWS_IN_PLACE[name](plain)
    assert td["c"].is_conj() and td["n"].is_neg()
    assert (td == plain).all()
    assert torch.equal(bases["c"].conj().resolve_conj(), plain["c"]) and torch.equal(-bases["n"], plain["n"])


def test_add_locked_td_result_unlocked_and_inplace_allowed() -> None:
    td = nested().lock_()
    assert not (td + 1).is_locked
    assert not td.exp().is_locked
    td.add_(1)


def test_pointwise_result_keeps_names_and_device() -> None:
    td = TensorDict({"a": torch.rand(2, 3)}, [2, 3], names=["x", None], device="cpu")
    for result in (td.exp(), td + 1, td == td, td + torch.ones(3)):
        assert result.names == ["x", None]
        assert result.device == torch.device("cpu")


def test_pointwise_3000_nested_nodes_does_not_recurse() -> None:
    td = TensorDict({"x": torch.ones(1)})
    for _ in range(3000):
        td = TensorDict({"n": td})
    result = (td + td == td * 2).all()
    assert result is True


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_foreach_fused_kernel_equals_single_op(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, TORCH_NAME.get(name, name))
    arguments = [torch.tensor([0, 1, 2]).to(dtype)] * (2 if name in BINARY else 1)

    def outcome(call: object) -> object:
        try:
            return call()
        except (RuntimeError, TypeError) as error:
            return type(error)

    found = outcome(lambda: foreach(make_op(name, function), *[[argument] for argument in arguments])[0])
    expected = outcome(lambda: function(*arguments))
    if isinstance(expected, type):
        assert found is expected or issubclass(found, expected)
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


class Marked(Tensor):
    pass


def test_pointwise_subclass_leaf_keeps_types_of_other_leaves() -> None:
    td = TensorDict({"a": torch.rand(2), "b": torch.rand(2).as_subclass(Marked)}, [2])
    for result in (td.exp(), td + 1, td + TensorDict({"a": torch.rand(2), "b": torch.rand(2)}, [2])):
        assert [type(leaf) for leaf in entries(result).values()] == [Tensor, Marked]
    plain = TensorDict({"a": torch.rand(2), "b": torch.rand(2)}, [2])
    assert [type(leaf) for leaf in entries(plain + td).values()] == [Tensor, Marked]


def test_foreach_without_fused_kernel_runs_loop() -> None:
    assert foreach_kernel("no_such_kernel") is None
    assert foreach(Op(None, torch.exp), [torch.zeros(())]) == [torch.ones(())]


def test_functorch_level_inside_vmap_is_not_none() -> None:
    assert functorch_level() is None
    seen = []
    torch.func.vmap(lambda x: seen.append(functorch_level()) or x)(torch.zeros(2))
    assert seen[0] is not None


def program(td: TensorDict) -> TensorDict:
    other = (td + 1).exp() * td - td.clamp(0.1, 0.5) / 2
    other = other.lerp(td, 0.3).addcmul(td, td, value=2) + (td > 0.5).float()
    return other.sqrt() + torch.ones(other.batch_size)


def test_compile_pointwise_has_no_graph_break(td: TensorDict) -> None:
    torch.compiler.reset()
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    check(compiled(td), entries(program(td)))


def test_compile_inplace_equals_eager() -> None:
    def step(td: TensorDict, other: TensorDict) -> TensorDict:
        return td.add_(other, alpha=2).mul_(0.5)

    td = nested()
    expected = entries(step(td.clone(), td.clone()))
    check(torch.compile(step, fullgraph=True, backend="eager")(td, td.clone()), expected)


def test_pointwise_vmap_and_grad_equal_eager() -> None:
    td = nested()
    check(torch.func.vmap(program)(td), entries(program(td)))
    grads = torch.func.grad(lambda td: (td * td).sum(reduce=True))(td)
    check(grads, {key: 2 * leaf for key, leaf in entries(td).items()})


def test_backward_pointwise_sets_grad() -> None:
    td = nested().requires_grad_()
    (td.exp() + td * td).sum(reduce=True).backward()
    check(td.grad, {key: leaf.detach().exp() + 2 * leaf.detach() for key, leaf in entries(td).items()})


def test_pointwise_tensordict_params_equals_torch() -> None:
    params = TensorDictParams(nested())
    expected = {key: (leaf.detach() + 1).exp() for key, leaf in entries(nested()).items()}
    check((params + 1).exp().detach(), expected)


NUMBERS = st.floats(-2, 2, allow_nan=False, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]), min_size=1, max_size=5),
    st.sampled_from(sorted(MAKE)),
    st.data(),
)
def test_random_programs_equal_torch_on_leaves(names: list[str], kind: str, data: st.DataObject) -> None:
    td = MAKE[kind]()
    expected = entries(td)
    for name in names:
        operand = data.draw(st.one_of(NUMBERS, st.sampled_from([(), (3,), (2, 3), (2, 1)])))
        if isinstance(operand, tuple):
            other: object = torch.rand(operand)
            per_leaf = {
                key: other.expand(2, 3).reshape(2, 3, *[1] * (leaf.ndim - 2))
                for key, leaf in expected.items()
            }
        else:
            other = operand
            per_leaf = dict.fromkeys(expected, operand)
        expected = {key: reference(name, leaf, per_leaf[key]) for key, leaf in expected.items()}
        td = getattr(td, name)(other) if data.draw(st.booleans()) else getattr(td.clone(), f"{name}_")(other)
    check(td, expected)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.clone(),
        lambda x: x + 1,
        lambda x: x * 2.0,
        lambda x: x - x,
        lambda x: -x,
        lambda x: x.exp(),
        lambda x: x.pow(2),
        lambda x: x.maximum(x * 0),
        lambda x: x.abs(),
    ],
)
@pytest.mark.parametrize(
    "names", [("grad", "int"), ("int", "grad"), ("grad", "float"), ("float", "int", "grad")]
)
def test_pointwise_mixed_requires_grad_is_kept_per_leaf(operation, names):
    leaves = {
        "grad": torch.tensor([1.0, 2.0], requires_grad=True),
        "int": torch.tensor([3, 4]),
        "float": torch.tensor([5.0, 6.0]),
    }
    result = operation(TensorDict({name: leaves[name] for name in names}, [2]))
    for name in names:
        expected = operation(leaves[name])
        assert torch.equal(result[name], expected) and result[name].dtype is expected.dtype
        assert result[name].requires_grad == expected.requires_grad
    (grad,) = torch.autograd.grad(result["grad"].sum(), leaves["grad"])
    assert torch.equal(grad, torch.autograd.grad(operation(leaves["grad"]).sum(), leaves["grad"])[0])


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.add_(1),
        lambda x, y: x.neg_(),
        lambda x, y: x.add_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.update_({"grad": y["grad"], "int": y["int"]}),
        lambda x, y: x.__setitem__(slice(0, 2), y),
        lambda x, y: x.__setitem__([0, 1], y),
    ],
)
@pytest.mark.parametrize("result_needs_grad", [True, False])
def test_inplace_mixed_requires_grad_is_tracked_per_leaf(write, result_needs_grad):
    def made(value):
        leaf = torch.tensor([value, value], requires_grad=True)
        return TensorDict(
            {"int": torch.tensor([3, 3]), "grad": leaf * 1 if result_needs_grad else leaf.detach()}, [2]
        )

    for other in (True, False):
        td, source = made(1.0), made(2.0)
        if not other:
            source = source.detach()
        write(td, source)
        expected = made(1.0)
        for key in ("int", "grad"):
            inner = TensorDict({"int": expected[key].clone(), "grad": expected[key].clone()}, [2])
            write(inner, TensorDict({"int": source[key], "grad": source[key]}, [2]))
            assert td[key].tolist() == inner[key].tolist()
        assert not td["int"].requires_grad


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.abs_(),
        lambda td: td.add_(1),
        lambda td: td.mul_(td.detach()),
        lambda td: td.addcmul_(2, 3),
        lambda td: td.masked_fill_(torch.tensor([True, False]), 0),
        lambda td: td.zero_(),
        lambda td: td.fill_("n", 3),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("what", ["leaf", "view of a leaf"])
def test_inplace_leaf_requires_grad_raises_with_key(write, stacked, what):
    def refused(*shape):
        return (
            torch.ones(shape).requires_grad_()
            if what == "leaf"
            else torch.ones(3, *shape).requires_grad_()[1]
        )

    td = TensorDict({"n": {"a": torch.ones(2), "w": refused(2), "z": torch.ones(2)}}, [2])
    if stacked:
        td = LazyStackedTensorDict(*[member.detach() for member in td.unbind(0)])
        td.tensordicts[1]["n", "w"] = refused()
    before = td.clone().detach()
    with pytest.raises(
        StructureError, match=rf"cannot write key \('n', 'w'\) in place: it is a {what} that requires grad"
    ):
        write(td)
    assert (td.detach() == before).all()
    with torch.no_grad():
        write(td)


MIXED = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2)])
@pytest.mark.parametrize("other", MIXED)
@pytest.mark.parametrize("mine", MIXED)
def test_binary_mixed_dtypes_promotes_as_torch(mine, other, shape, stacked):
    x, each = torch.arange(1, torch.Size(shape).numel() + 1).view(shape).to(mine), torch.arange(4).to(other)
    td = TensorDict({"x": x}, [4])
    if stacked:
        td = LazyStackedTensorDict(*td.unbind(0))
    wide = each.view(4, *[1] * (len(shape) - 1))
    assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_equal((td * each)["x"], x * wide)
    assert_equal((td == each)["x"], x == wide)
    if len(shape) > 1 or not stacked:
        assert_equal((td + each[1])["x"], x + wide.flatten()[1])


LISTS = {"none": 1, "number": 1, "one": 2, "two": 3}


def derivatives(operation, operands: str, inplace: bool) -> tuple[list, list]:
    """Compute gradients and forward tangents of an operation on lists of four leaves."""
    generator = torch.Generator().manual_seed(0)
    lists = [
        [torch.rand(n, generator=generator) / 2 + 0.25 for n in (2, 1, 2, 1)] for _ in range(LISTS[operands])
    ]
    numbers = [0.4] if operands == "number" else []
    inputs = [[leaf.clone().requires_grad_() for leaf in leaves] for leaves in lists]
    computed = [[leaf * 1 for leaf in leaves] for leaves in inputs]
    result = operation(*computed, *numbers)
    total = sum((leaf**2).sum() for leaf in (computed[0] if inplace else result))
    gradients = torch.autograd.grad(total, [*chain(*inputs)], allow_unused=True)
    with forward_ad.dual_level():
        duals = [[forward_ad.make_dual(leaf.clone(), leaf + 1) for leaf in leaves] for leaves in lists]
        result = operation(*duals, *numbers)
        tangents = [forward_ad.unpack_dual(leaf).tangent for leaf in (duals[0] if inplace else result)]
    return [*gradients], tangents


def with_derivative(name: str, operands: str) -> tuple[list, list] | None:
    """Compute the derivatives with the single operation per leaf; return None if torch cannot."""

    def one_by_one(*given):
        *lists, last = given
        rest = [repeat(last)] if operands == "number" else [last]
        return list(map(OPS[name].single, *lists, *rest))

    try:
        return derivatives(one_by_one, operands, name.endswith("_"))
    except (RuntimeError, TypeError):
        return None


with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # torch 2.14 warns about an import of its own at the first dual tensor
    DERIVATIVES = {
        f"{name}, {operands}": (name, operands, expected)
        for name in OPS
        for operands in LISTS
        if OPS[name].fused is not None and (expected := with_derivative(name, operands)) is not None
    }


@pytest.mark.parametrize(("name", "operands", "expected"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_foreach_gradients_equal_single_op_gradients(name, operands, expected):
    found = derivatives(partial(foreach, OPS[name]), operands, name.endswith("_"))
    for kind, mine, theirs in zip(("gradient", "tangent"), found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None), kind
            assert a is None or torch.allclose(a, b, equal_nan=True), kind


@pytest.mark.parametrize("name", ["exp", "log1p", "pow", "reciprocal", "tan"])
def test_unary_autocast_calls_single_op_per_leaf(name, monkeypatch):
    # Autocast chooses the dtype in single operations only, and on a GPU only: so count calls instead of dtypes.
    this = OPS[name]
    calls = []
    monkeypatch.setitem(
        OPS, name, this._replace(single=lambda *given: calls.append(1) or this.single(*given))
    )
    td, operands = nested((3,)), [2.0] if name == "pow" else []
    getattr(td, name)(*operands)
    assert not calls
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: True)
    getattr(td, name)(*operands)
    assert len(calls) == len(list(td.values(True, True)))


@pytest.mark.parametrize("number", [np.float32(2), np.array([2.0, 3.0]), np.array(2.0)], ids=repr)
def test_add_numpy_operand_equals_torch(number: Any) -> None:
    leaf = torch.arange(4.0).view(2, 2)
    td, wide = TensorDict({"a": leaf.clone()}, [2]), torch.as_tensor(number).float()
    expected = leaf + (wide.unsqueeze(-1) if wide.ndim else wide)
    assert torch.equal((td + number)["a"], expected)
    with torch.device("meta"):  # an array is moved to the device of the leaves, not to the default device
        assert torch.equal((td + number)["a"], expected)
        assert torch.equal(td.add_(number)["a"], expected)
    if not wide.ndim:
        td[0] = type(number)(7) if isinstance(number, np.generic) else 7
        assert td["a"].tolist() == [[7, 7], expected[1].tolist()]


def test_addcmul_float_with_int_leaf_promotes_to_float() -> None:
    td = TensorDict({"a": torch.arange(3)})
    assert td.addcmul(0.5, td)["a"].tolist() == [0, 1.5, 3]
    with pytest.raises(RuntimeError, match="addcmul_ in place: key 'a': result type Float can't be cast"):
        td.addcmul_(0.5, 4)
    assert td["a"].tolist() == [0, 1, 2]


TERNARY = ["lerp_", "addcmul_", "addcdiv_"]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", [*BINARY_INPLACE, "add_", "sub_", *TERNARY])
def test_inplace_overlapping_operand_is_read_before_write(name: str, mixed: bool) -> None:
    dtype = torch.float64 if mixed else torch.float32
    whole = [torch.rand(8), torch.rand(8, 2, dtype=dtype), torch.rand(4, 4)]
    expected = [each.clone() for each in whole]

    def leaves_of(tensors: list[Tensor], shift: int) -> list[Tensor]:
        first, second, third = tensors
        one = torch.full((7,), 0.5)  # torch writes this leaf before it raises at the next one
        return [one, first[shift : 7 + shift], second[shift : 7 + shift], third.t() if shift else third]

    def td_of(leaves: list[Tensor]) -> TensorDict:
        return TensorDict({"o": leaves[0], "n": {"a": leaves[1], "b": leaves[2]}, "t": leaves[3]})

    td = td_of(leaves_of(whole, 1))
    others = [td_of(leaves_of(whole, 0))] * (1 + (name in TERNARY))
    assert getattr(td, name)(*others) is td
    for leaf, other in zip(leaves_of(expected, 1), leaves_of(expected, 0)):
        operand = other.clone()
        getattr(leaf, name.replace("maximum", "clamp_min").replace("minimum", "clamp_max"))(
            *[operand] * len(others)
        )
    assert all(map(torch.equal, whole, expected))


def test_add_inplace_overlap_with_autograd_raises() -> None:
    whole = torch.rand(8, requires_grad=True).clone()
    with pytest.raises(RuntimeError, match="the input tensor and the written-to tensor"):
        TensorDict({"a": whole[1:]}).add_(TensorDict({"a": whole[:-1]}))


def test_binary_operand_without_batch_dims_matches_feature_dims() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.ones(2, 1, 4)}}, [2])
    for c in (torch.tensor(4.0), torch.full((4,), 4.0)):
        other = TensorDict({"a": torch.tensor(2.0), "b": {"c": c}})
        for result in (td * other, other * td):
            assert result.batch_size == (2,)
            assert torch.equal(result["a"], torch.full((2, 3), 2.0))
            assert torch.equal(result["b", "c"], torch.full((2, 1, 4), 4.0))
        written = td.clone().mul_(other)
        assert torch.equal(written["a"], torch.full((2, 3), 2.0))
        assert torch.equal(written["b", "c"], torch.full((2, 1, 4), 4.0))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 1), (3, 3)])
def test_binary_operand_without_batch_size_matches_equal_shapes(
    shape: tuple[int, ...], stacked: bool
) -> None:
    td = TensorDict({"a": torch.rand(3, *shape[1:]), "b": {"c": torch.rand(3, 3)}}, [3])
    leaves = {"a": torch.rand(shape), "b": {"c": torch.rand(3)}}
    other = TensorDict(leaves)
    named = lazy_stack(list(td.unbind(0))) if stacked else td
    for result in (
        named - other,
        -(other - named),
        named.clone().sub_(other),
        named.lerp(other, 1.0) * -1 + td,
    ):
        assert result.batch_size == (3,)
        torch.testing.assert_close(result["a"], td["a"] - leaves["a"])
        # The operand has fewer dims than the leaf, so it matches the feature dims.
        torch.testing.assert_close(result["b", "c"], td["b", "c"] - leaves["b"]["c"])
    assert (named == TensorDict({"a": td["a"], "b": {"c": td["b", "c"]}})).all()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("told", [[3], [3, 2]])
def test_binary_nested_larger_batch_size_matches_equal_shapes(told: list[int], stacked: bool) -> None:
    deep = {"d": torch.rand(3, 2, 4), "e": torch.rand(3, 2)}
    leaves = {"c": torch.rand(3, 2), **deep}
    td = TensorDict(
        {"a": torch.rand(3), "b": TensorDict({**leaves, "n": TensorDict(deep, [3, 2])}, told)}, [3]
    )
    below = TensorDict({**leaves, "n": TensorDict(deep, [3, 2])}, [3, 2])
    other = TensorDict({"a": td["a"], "b": below})
    named = lazy_stack(list(td.unbind(0))) if stacked else td
    for result in (named - other, other - named, named.clone().sub_(other), named.lerp(other, 1.0) - td):
        assert result.batch_size == (3,) == result["a"].shape
        assert result["b", "n"].batch_size == (3, 2)
        assert result["b"].batch_size in ((3,), (3, 2))
        for key, leaf in leaves.items():
            torch.testing.assert_close(result["b", key], torch.zeros_like(leaf))
    assert (other == named).all()


@pytest.mark.parametrize("size", [(4, 3), (4, 1), ()])
def test_binary_nested_batch_dims_align_before_feature_dims(
    size: tuple[int, ...],
) -> None:
    td = TensorDict({"b": TensorDict({"c": torch.rand(3, 2, 2)}, [3, 2])}, [3])
    other = TensorDict({"b": TensorDict({"c": torch.rand(*size, 2)}, [*size, 2])}, size)
    wanted = td["b", "c"] + other["b", "c"][..., None]
    for result in (td + other, other + td):
        assert result["b"].batch_size == (*result.batch_size, 2) == wanted.shape[:-1]
        torch.testing.assert_close(result["b", "c"], wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [(3,), (1, 3), (4, 1), (1, 1), ()])
def test_binary_lazy_stack_aligns_after_batch_dims(size: tuple[int, ...], dim: int) -> None:
    td = TensorDict({"a": torch.rand(4, 3, 3), "n": {"b": torch.rand(4, 3)}}, [4, 3])
    other = TensorDict({"a": torch.rand(*size, 1)[..., 0], "n": {"b": torch.rand(*size, 4)}}, size)
    wanted = {"a": td["a"] + other["a"][..., None], "b": td["n", "b"][..., None] + other["n", "b"]}
    stack = lazy_stack(list(td.unbind(dim)), dim)
    for result in (td + other, stack + other, other + td, other + stack):
        assert result.batch_size == (4, 3)
        torch.testing.assert_close(result["a"], wanted["a"])
        torch.testing.assert_close(result["n", "b"], wanted["b"])
    written = stack.select("a").add_(other.select("a"))
    torch.testing.assert_close(written["a"], wanted["a"])
    for result in (td.addcmul(other, other), stack.addcmul(other, other)):
        torch.testing.assert_close(result["a"], td["a"] + other["a"][..., None] ** 2)
        torch.testing.assert_close(result["n", "b"], td["n", "b"][..., None] + other["n", "b"] ** 2)
    torch.testing.assert_close(td.lerp(other, 1.0)["n", "b"], other["n", "b"].expand(4, 3, 4))


def test_binary_leaf_with_node_raises_with_key() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    other = TensorDict({"a": {"b": torch.zeros(3)}})
    for first, second in ((td, other), (other, td)):
        with pytest.raises(StructureError, match="'a'"):
            first + second


@pytest.mark.parametrize("name", ["lerp", "lerp_"])
def test_lerp_failing_leaf_raises_with_key(name: str) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, [2])
    with pytest.raises(RuntimeError, match=f"cannot compute {name}.*: key 'b'"):
        getattr(td, name)(td, 0.5)
