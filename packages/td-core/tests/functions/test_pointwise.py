"""Pointwise methods, compared with torch on plain leaves."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import TensorDict, TensorDictParams
from td_core._functions.pointwise import OPS
from td_core._torch.kernels import foreach, make_op
from td_core._torch.operators import OPERATIONS

STRUCTURES = ["flat", "nested", "lazy", "lazy along 1", "nested lazy"]


@pytest.fixture(params=STRUCTURES)
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


UNARY = [row.name for row in OPERATIONS if row.kind == "unary" and row.named]
BINARY = [row.name for row in OPERATIONS if row.kind == "binary" and row.named]
TORCH_NAME = {row.name: row.functions[0] for row in OPERATIONS}
OPERATORS = [row for row in OPERATIONS if row.kind == "binary" and row.dunder]
BOOLEAN = [row.dunder for row in OPERATORS if row.name.startswith("bitwise")]
DUNDERS = [row.dunder for row in OPERATORS if row.dunder not in BOOLEAN]
COMPARISONS = [row.dunder for row in OPERATIONS if row.kind == "comparison"]
OF_TENSORS = [row.name for row in OPERATIONS if row.of_tensors or row.kernel]
OF_INTS = [name for name in BINARY if name.startswith("bitwise") or name in ("gcd", "lcm")]
ON_NUMBERS = [name for name in BINARY if name not in (*OF_INTS, "logical_and")]


def test_methods_of_table_have_own_name_code_and_doc() -> None:
    codes = set()
    for row in OPERATIONS:
        names = (
            [row.name] * row.named + [f"{row.name}_"] * row.inplace + [f"__{row.dunder}__"] * bool(row.dunder)
        )
        for name in names:
            method = getattr(TensorDict, name)
            assert method.__name__ in (name, row.name) or row.kind == "comparison"
            assert method.__code__.co_name == method.__name__  # tracebacks show it
            assert method.__doc__
            codes.add((method.__name__, id(method.__code__)))
    assert len(codes) == len(
        {name for name, _ in codes}
    )  # one for each method: torch.compile limits graphs per code
    assert len({identity for _, identity in codes}) == len(codes)


@pytest.mark.parametrize("name", UNARY)
def test_unary_each_name_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    expected = {key: getattr(torch, name)(leaf) for key, leaf in td.items(True, True)}
    result = getattr(td, name)()
    assert_leaves_equal(result, expected)
    assert type(result) is type(td)
    assert result.batch_size == td.batch_size


def compute_with_torch(name: str, leaf: Tensor, other: object) -> Tensor:
    if name in OF_TENSORS:
        other = torch.as_tensor(other, dtype=leaf.dtype)
    return getattr(torch, TORCH_NAME[name])(leaf, other)


@pytest.mark.parametrize("name", ON_NUMBERS)
@pytest.mark.parametrize("other", [2, 0.5, np.float32(0.25)], ids=str)
def test_binary_number_operand_equals_torch(
    name: str, other: float, td: TensorDict, assert_leaves_equal: Any
) -> None:
    expected = {key: compute_with_torch(name, leaf, float(other)) for key, leaf in td.items(True, True)}
    assert_leaves_equal(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_binary_collection_operand_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    other = td.cos()
    expected = {key: compute_with_torch(name, leaf, leaf.cos()) for key, leaf in td.items(True, True)}
    assert_leaves_equal(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", ON_NUMBERS)
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 3), (2, 1)], ids=str)
def test_binary_tensor_operand_broadcasts_on_batch_dims(
    name: str, shape: tuple[int, ...], td: TensorDict, assert_leaves_equal: Any
) -> None:
    other = torch.rand(shape) + 0.5
    expected = {
        key: compute_with_torch(name, leaf, other.expand(2, 3).reshape(2, 3, *[1] * (leaf.ndim - 2)))
        for key, leaf in td.items(True, True)
    }
    assert_leaves_equal(getattr(td, name)(other), expected)


@pytest.mark.parametrize("name", OF_INTS)
def test_binary_of_ints_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    ints = td.mul(10).int64() + 1
    for other in (4, ints * 3 + 1, torch.arange(6).view(2, 3)):
        expected = {
            key: getattr(torch, name)(leaf, _operand_of(other, key, leaf))
            for key, leaf in ints.items(True, True)
        }
        assert_leaves_equal(getattr(ints, name)(other), expected)


def _operand_of(other: Any, key: object, leaf: Tensor) -> Tensor:
    """Return the operand of a leaf: its entry, a number as a tensor, or a tensor with dims for those of the leaf."""
    if isinstance(other, int):
        return torch.tensor(other)
    return other.reshape(2, 3, *[1] * (leaf.ndim - 2)) if isinstance(other, Tensor) else other[key]


@pytest.mark.parametrize("name", DUNDERS)
def test_operator_each_symbol_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    function = getattr(operator, f"__{name}__")
    for other in (1.5, td.cos()):
        expected = {
            key: function(leaf, other if isinstance(other, float) else leaf.cos())
            for key, leaf in td.items(True, True)
        }
        assert_leaves_equal(function(td, other), expected)


@pytest.mark.parametrize("name", [row.dunder for row in OPERATORS if row.reflected and row.dunder in DUNDERS])
def test_reflected_operator_number_on_left_equals_torch(
    name: str, td: TensorDict, assert_leaves_equal: Any
) -> None:
    function = getattr(operator, f"__{name}__")
    assert_leaves_equal(function(1.5, td), {key: function(1.5, leaf) for key, leaf in td.items(True, True)})


@pytest.mark.parametrize("name", [row.dunder for row in OPERATORS if row.reflected and row.dunder in DUNDERS])
def test_operator_tensor_or_array_on_left_equals_torch(
    name: str, td: TensorDict, assert_leaves_equal: Any
) -> None:
    function = getattr(operator, f"__{name}__")
    left = torch.rand(2, 3) + 0.5
    expected = {
        key: function(left.reshape(2, 3, *[1] * (leaf.ndim - 2)), leaf) for key, leaf in td.items(True, True)
    }
    assert_leaves_equal(function(left, td), expected)
    assert_leaves_equal(function(left.numpy(), td), expected)


@pytest.mark.parametrize("name", BOOLEAN)
def test_bitwise_operator_bool_leaves_equals_torch(
    name: str, td: TensorDict, assert_leaves_equal: Any
) -> None:
    function = getattr(operator, f"__{name}__")
    low, high = td > 0.3, td < 0.7
    assert_leaves_equal(
        function(low, high), {key: function(leaf > 0.3, leaf < 0.7) for key, leaf in td.items(True, True)}
    )
    assert_leaves_equal(
        function(True, low), {key: function(True, leaf > 0.3) for key, leaf in td.items(True, True)}
    )
    assert_leaves_equal(~low, {key: ~(leaf > 0.3) for key, leaf in td.items(True, True)})
    assert_leaves_equal(
        low.bitwise_and(high), {key: (leaf > 0.3) & (leaf < 0.7) for key, leaf in td.items(True, True)}
    )
    assert_leaves_equal(
        low.logical_and(high), {key: (leaf > 0.3) & (leaf < 0.7) for key, leaf in td.items(True, True)}
    )
    assert_leaves_equal(
        low.logical_and(False),
        {key: torch.zeros_like(leaf, dtype=torch.bool) for key, leaf in td.items(True, True)},
    )


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_each_symbol_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    function = getattr(operator, f"__{name}__")
    for other in (0.5, td.cos()):
        expected = {
            key: function(leaf, other if isinstance(other, float) else leaf.cos())
            for key, leaf in td.items(True, True)
        }
        assert_leaves_equal(function(td, other), expected)
    assert_leaves_equal(function(0.5, td), {key: function(0.5, leaf) for key, leaf in td.items(True, True)})


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


def test_neg_abs_operators_equal_torch(td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(-td, {key: -leaf for key, leaf in td.items(True, True)})
    assert_leaves_equal(abs(-td), dict(td.items(True, True)))


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_add_sub_rsub_alpha_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    for other in (2.0, td.cos(), torch.tensor(2.0)):
        expected = {
            key: getattr(torch, name)(leaf, leaf.cos() if isinstance(other, type(td)) else 2.0, alpha=3)
            for key, leaf in td.items(True, True)
        }
        assert_leaves_equal(getattr(td, name)(other, alpha=3), expected)
        if name != "rsub":
            assert_leaves_equal(getattr(td.clone(), f"{name}_")(other, alpha=3), expected)


@pytest.mark.parametrize("limits", [(0.2, 0.6), (0.2, None), (None, 0.6)], ids=str)
def test_clamp_each_limit_equals_torch(
    limits: tuple[float | None, float | None], td: TensorDict, assert_leaves_equal: Any
) -> None:
    expected = {key: leaf.clamp(*limits) for key, leaf in td.items(True, True)}
    assert_leaves_equal(td.clamp(*limits), expected)
    tensors = [None if limit is None else torch.full((3,), limit) for limit in limits]
    assert_leaves_equal(td.clamp(*tensors), expected)
    collections = [None if limit is None else td * 0 + limit for limit in limits]
    assert_leaves_equal(td.clamp(*collections), expected)
    out = td.clone()
    assert td.clamp(*limits, out=out) is out
    assert_leaves_equal(out, expected)


def test_clamp_without_limits_raises() -> None:
    with pytest.raises(TypeError, match=r"clamp\(\) needs min, max or both"):
        TensorDict({"a": 1}).clamp()


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_lerp_addcmul_addcdiv_equal_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    one, two = td.cos(), td + 1
    function = getattr(torch, name)
    expected = {key: function(leaf, leaf.cos(), leaf + 1) for key, leaf in td.items(True, True)}
    assert_leaves_equal(getattr(td, name)(one, two), expected)
    assert_leaves_equal(getattr(td.clone(), f"{name}_")(one, two), expected)
    if name == "lerp":
        assert_leaves_equal(
            td.lerp(one, 0.25), {key: leaf.lerp(leaf.cos(), 0.25) for key, leaf in td.items(True, True)}
        )
        weight = torch.rand(3)
        assert_leaves_equal(
            td.lerp(one, weight),
            {
                key: leaf.lerp(leaf.cos(), weight.view(3, *[1] * (leaf.ndim - 2)))
                for key, leaf in td.items(True, True)
            },
        )
    else:
        valued = {key: function(leaf, leaf.cos(), leaf + 1, value=0.5) for key, leaf in td.items(True, True)}
        assert_leaves_equal(getattr(td, name)(one, two, value=0.5), valued)
        assert_leaves_equal(getattr(td.clone(), f"{name}_")(one, two, value=0.5), valued)
        assert_leaves_equal(
            getattr(td, name)(2, two),
            {key: function(leaf, torch.full_like(leaf, 2), leaf + 1) for key, leaf in td.items(True, True)},
        )


def test_add_locked_td_returns_unlocked_and_allows_inplace(make_nested: Any) -> None:
    td = make_nested().lock_()
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
@pytest.mark.parametrize("name", UNARY + ON_NUMBERS)
def test_foreach_fused_kernel_equals_single_op(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, TORCH_NAME[name])
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
        assert [type(leaf) for leaf in result.values(True, True)] == [Tensor, Marked]
    plain = TensorDict({"a": torch.rand(2), "b": torch.rand(2)}, [2])
    assert [type(leaf) for leaf in (plain + td).values(True, True)] == [Tensor, Marked]


def compute_program(td: TensorDict) -> TensorDict:
    other = (td + 1).exp() * td - td.clamp(0.1, 0.5) / 2
    other = other.lerp(td, 0.3).addcmul(td, td, value=2) + (td > 0.5).float()
    return other.sqrt() + torch.ones(other.batch_size)


def test_compile_pointwise_has_no_graph_break(td: TensorDict, assert_leaves_equal: Any) -> None:
    torch.compiler.reset()
    compiled = torch.compile(compute_program, fullgraph=True, backend="eager")
    assert_leaves_equal(compiled(td), dict(compute_program(td).items(True, True)))


def test_pointwise_vmap_and_grad_equal_eager(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    assert_leaves_equal(torch.func.vmap(compute_program)(td), dict(compute_program(td).items(True, True)))
    grads = torch.func.grad(lambda td: (td * td).sum(reduce=True))(td)
    assert_leaves_equal(grads, {key: 2 * leaf for key, leaf in td.items(True, True)})


def test_backward_pointwise_sets_grad(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested().requires_grad_()
    (td.exp() + td * td).sum(reduce=True).backward()
    assert_leaves_equal(
        td.grad, {key: leaf.detach().exp() + 2 * leaf.detach() for key, leaf in td.items(True, True)}
    )


def test_pointwise_tensordict_params_equals_torch(make_nested: Any, assert_leaves_equal: Any) -> None:
    params = TensorDictParams(make_nested())
    expected = {key: (leaf.detach() + 1).exp() for key, leaf in make_nested().items(True, True)}
    assert_leaves_equal((params + 1).exp().detach(), expected)


NUMBERS = st.floats(-2, 2, allow_nan=False, width=32)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]), min_size=1, max_size=5),
    kind=st.sampled_from(STRUCTURES),
    data=st.data(),
)
def test_random_pointwise_program_equals_torch(
    make_collection: Any, names: list[str], kind: str, data: st.DataObject, assert_leaves_equal: Any
) -> None:
    td = make_collection(kind)
    expected = dict(td.items(True, True))
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
        expected = {key: compute_with_torch(name, leaf, per_leaf[key]) for key, leaf in expected.items()}
        td = getattr(td, name)(other) if data.draw(st.booleans()) else getattr(td.clone(), f"{name}_")(other)
    assert_leaves_equal(td, expected)


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


@pytest.mark.parametrize("name", [row.name for row in OPERATIONS if row.loop_in == "autocast"])
def test_unary_autocast_calls_single_op_per_leaf(name, monkeypatch, make_nested):
    # Autocast changes dtypes only in single operations on a GPU, so count the calls instead.
    this = OPS[name]
    calls = []
    monkeypatch.setitem(
        OPS, name, this._replace(single=lambda *given: calls.append(1) or this.single(*given))
    )
    td, operands = make_nested((3,)), [2.0] if name == "pow" else []
    getattr(td, name)(*operands)
    assert not calls
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: True)
    getattr(td, name)(*operands)
    assert len(calls) == len(list(td.values(True, True)))


@pytest.mark.parametrize("name", ["lerp", "lerp_"])
def test_lerp_failing_leaf_raises_with_key(name: str) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, [2])
    with pytest.raises(RuntimeError, match=f"cannot compute {name}.*: key 'b'"):
        getattr(td, name)(td, 0.5)
