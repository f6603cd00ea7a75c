"""Compare every torch function of the dispatch table with the function on plain leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_core._functions import torch_function
from td_core._functions.torch_function import TABLE
from td_core._torch.operators import OPERATIONS
from td_core.errors import KeyMismatchError


@pytest.fixture(params=["nested", "lazy"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


def assert_entry_equal(result: object, expected: object, key: object) -> None:
    """Check one key of a function's result on a collection against its result on that leaf."""
    if isinstance(expected, (tuple, list)):
        assert len(result) == len(expected)
        for part, value in zip(result, expected, strict=True):
            assert_entry_equal(part, value, key)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(result[key], expected, equal_nan=True)
    else:
        assert result == expected


#: Arguments after the first one, per function that needs them.
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "amax": (0,),
    "amin": (0,),
    "all": (0,),
    "any": (0,),
    "argmax": (0,),
    "argmin": (1,),
    "argsort": (0, True),
    "count_nonzero": (0,),
    "cumprod": (0,),
    "cumsum": (1,),
    "diff": (1, 1),
    "isin": (torch.tensor([0.0]),),
    "kthvalue": (2, 1),
    "log_softmax": (0,),
    "logcumsumexp": (1,),
    "median": (0,),
    "nanmedian": (1,),
    "nanquantile": (0.5, 0),
    "sort": (1, True),
    "topk": (2, 1),
    "broadcast_to": ((5, 2, 3),),
    "chunk": (2,),
    "clamp": (0.2, 0.6),
    "clamp_max": (0.5,),
    "clamp_min": (0.5,),
    "clamp_min_": (0.5,),
    "clamp_max_": (0.5,),
    "clip": (0.2, 0.6),
    "cummax": (0,),
    "cummin": (1,),
    "flatten": (0, 1),
    "flip": ((0,),),
    "gather": (1, torch.tensor([[0, 1], [2, 0]])),
    "logsumexp": (0,),
    "max": (1,),
    "mean": (0,),
    "min": (0,),
    "moveaxis": (0, 1),
    "movedim": (0, 1),
    "nanmean": (0,),
    "nansum": (0,),
    "narrow": (1, 0, 2),
    "permute": ((1, 0),),
    "prod": (0,),
    "quantile": (0.5, 0),
    "repeat_interleave": (2, 0),
    "reshape": ((3, 2),),
    "roll": (1, 0),
    "rot90": (1, (0, 1)),
    "softmax": (0,),
    "split": (1,),
    "std": (0,),
    "sum": (0,),
    "swapaxes": (0, 1),
    "swapdims": (0, 1),
    "tensor_split": (2,),
    "tile": ((2, 1),),
    "transpose": (0, 1),
    "unflatten": (1, (3, 1)),
    "unsqueeze": (0,),
    "var": (0,),
}
#: Functions whose shape argument has to include the feature dims for a plain leaf.
ON_BATCH_DIMS = {"broadcast_to", "permute", "reshape", "tile"}
ELSEWHERE = {
    "addcdiv", "addcmul", "lerp", "gather", "masked_fill", "masked_select", "is_floating_point", "numel",
    "atleast_3d", "bitwise_not", "detach_", "allclose", "equal", "index_add", "index_copy", "matmul",
    "scatter_reduce", "take_along_dim", "unique",
}  # fmt: skip
TWO_OPERANDS = [name for row in OPERATIONS for name in row.functions if row.kind in ("binary", "comparison")]
OTHERS = {
    "cat",
    "concat",
    "concatenate",
    "stack",
    "unbind",
    "where",
    *torch_function._LIKE,
    *torch_function._JOINS,
}
NAMES = sorted(
    {function.__name__ for function in TABLE if getattr(torch, function.__name__, None) is function}
    - {*ELSEWHERE, *TWO_OPERANDS, *OTHERS}
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_BATCH_DIMS])
def test_torch_function_one_td_equals_torch_per_leaf(name: str, td: TensorDict) -> None:
    function = getattr(torch, name)
    arguments = ARGUMENTS.get(name, ())
    leaves = {key: leaf.clone() for key, leaf in td.items(True, True)}
    if name in ("all", "any"):
        td, leaves = td > 0.5, {key: leaf > 0.5 for key, leaf in leaves.items()}
    if name == "squeeze":
        td, leaves = td[:, :1], {key: leaf[:, :1] for key, leaf in leaves.items()}
        arguments = (1,)
    expected = {key: function(leaf, *arguments) for key, leaf in leaves.items()}
    result = function(td, *arguments)
    for key, value in expected.items():
        assert_entry_equal(result, value, key)


@pytest.mark.parametrize("name", sorted(ON_BATCH_DIMS))
def test_torch_function_shape_argument_excludes_feature_dims(name: str, td: TensorDict) -> None:
    function = getattr(torch, name)
    (shape,) = ARGUMENTS[name]
    result = function(td, shape)
    assert result.batch_size == function(torch.empty(2, 3), shape).shape
    for key, leaf in td.items(True, True):
        tail = (
            range(2, leaf.ndim)
            if name == "permute"
            else [1] * (leaf.ndim - 2)
            if name == "tile"
            else leaf.shape[2:]
        )
        torch.testing.assert_close(result[key], function(leaf, (*shape, *tail)))


@pytest.mark.parametrize("name", ["addcdiv", "addcmul", "lerp"])
def test_torch_function_three_tds_equals_torch_per_leaf(name: str, td: TensorDict) -> None:
    function = getattr(torch, name)
    result = function(td, td + 1, td + 2)
    for key, leaf in td.items(True, True):
        torch.testing.assert_close(result[key], function(leaf, leaf + 1, leaf + 2))


def align_value(value: Tensor, leaf: Tensor) -> Tensor:
    return value.reshape(*value.shape, *[1] * (leaf.ndim - value.ndim))


@pytest.mark.parametrize("name", TWO_OPERANDS)
def test_torch_function_two_operands_equals_torch_per_leaf(name: str, td: TensorDict) -> None:
    function = getattr(torch, name)
    left = torch.rand(2, 3) + 0.1
    if name.startswith(("bitwise", "logical")):
        td, left = td > 0.5, left > 0.5
    elif name in ("gcd", "lcm"):
        td, left = (td * 10).int64(), (left * 10).long()
    other = td.clone()
    pairs = {key: (leaf, other[key]) for key, leaf in td.items(True, True)}
    results = [function(td, other), function(td, left)]
    expected = [
        {k: function(*v) for k, v in pairs.items()},
        {k: function(v[0], align_value(left, v[0])) for k, v in pairs.items()},
    ]
    results.append(function(left, td))
    expected.append({k: function(align_value(left, v[0]), v[0]) for k, v in pairs.items()})
    for result, values in zip(results, expected, strict=True):
        for key, value in values.items():
            torch.testing.assert_close(result[key], value)


def test_tensor_method_td_operand_equals_torch_per_leaf(td: TensorDict) -> None:
    left = torch.rand(2, 3)
    for key, leaf in td.items(True, True):
        torch.testing.assert_close(left.add(td)[key], align_value(left, leaf) + leaf)
        torch.testing.assert_close(left.sub(td)[key], align_value(left, leaf) - leaf)


@pytest.mark.parametrize("name", torch_function._LIKE)
def test_like_functions_return_same_structure(name: str, td: TensorDict) -> None:
    function = getattr(torch, name)
    arguments = {"full_like": (2.0,), "randint_like": (5,)}.get(name, ())
    result = function(td, *arguments, dtype=torch.float64)
    assert type(result) is type(td)
    assert result.batch_size == td.batch_size
    assert all(leaf.dtype == torch.float64 for leaf in result._leaves())
    for key, leaf in function(td, *arguments).items(True, True):
        assert leaf.shape == td[key].shape
        if name in ("full_like", "ones_like", "zeros_like"):
            assert torch.equal(leaf, function(td[key], *arguments))
    assert function(td, *arguments, device="meta").device == torch.device("meta")


def test_torch_stack_and_cat_equal_torch_per_leaf(make_nested: Any) -> None:
    td = make_nested()
    for dim in (0, 1, -1):
        joined = torch.stack([td, td + 1], dim)
        for key, leaf in td.items(True, True):
            place = dim % 3
            torch.testing.assert_close(joined[key], torch.stack([leaf, leaf + 1], place))
    for function in (torch.cat, torch.concat, torch.concatenate):
        for key, leaf in td.items(True, True):
            torch.testing.assert_close(function((td, td + 1), dim=1)[key], torch.cat([leaf, leaf + 1], 1))
    out = torch.stack([td, td])
    assert torch.stack([td, td + 1], out=out) is out
    torch.testing.assert_close(out[1]["a"], td["a"] + 1)
    with pytest.raises(TypeError, match="cannot stack: item 1 is a Tensor, not a collection"):
        torch.stack([td, torch.zeros(2, 3)])
    with pytest.raises(TypeError, match="item 0 is a Tensor, item 1 a TensorDict"):
        torch.cat([torch.zeros(2, 3), td])


def test_torch_unbind_equals_torch_per_leaf(td: TensorDict) -> None:
    for parts, dim in ((torch.unbind(td), 0), (torch.unbind(td, 1), 1)):
        for key, leaf in td.items(True, True):
            assert_entry_equal(parts, torch.unbind(leaf, dim), key)


def test_torch_where_gather_masked_equal_torch_per_leaf(td: TensorDict) -> None:
    condition = torch.tensor([[True, False, True], [False, False, True]])
    for key, leaf in td.items(True, True):
        where = torch.where(align_value(condition, leaf), leaf, -leaf)
        torch.testing.assert_close(torch.where(condition, td, -td)[key], where)
        torch.testing.assert_close(
            torch.where(condition, 1.0, td)[key], leaf.masked_fill(align_value(condition, leaf), 1)
        )
        torch.testing.assert_close(
            torch.masked_fill(td, condition, 2)[key], leaf.masked_fill(align_value(condition, leaf), 2)
        )
        torch.testing.assert_close(torch.masked_select(td, condition)[key], leaf[condition])
    index = torch.tensor([[0, 1], [2, 0]])
    for key, leaf in td.items(True, True):
        full = align_value(index, leaf).expand(2, 2, *leaf.shape[2:])
        torch.testing.assert_close(torch.gather(td, 1, index)[key], leaf.gather(1, full))


def test_torch_atleast_3d_prepends_batch_dims(td: TensorDict) -> None:
    result = torch.atleast_3d(td)
    for key, leaf in td.items(True, True):
        assert torch.equal(result[key], leaf.unsqueeze(0))


def test_torch_numel_all_detach_equal_methods(td: TensorDict) -> None:
    assert torch.numel(td) == td.numel()
    assert torch.is_floating_point(td) is True
    assert torch.all(td > -1) is True
    assert torch.equal((torch.bitwise_not(td > 0.5) == (td <= 0.5))["a"], torch.ones(2, 3, dtype=torch.bool))
    assert torch.detach_(td) is td


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda td: torch.zeros(2, 3).add_(td), "td.apply(lambda x1: torch.Tensor.add_(tensor, x1))"),
        (lambda td: torch.select(td, 0, 0), "td.apply(lambda x1: torch.select(x1, 0, 0))"),
        (lambda td: torch.dist(td, td, p=2), "td.apply(lambda x1, x2: torch.dist(x1, x2, p=2), td2)"),
        (lambda td: torch.block_diag(td, td), "td.apply(lambda x1, x2: torch.functional.block_diag(x1, x2), td2)"),
        (lambda td: torch.fill_(td, 0), "td.apply(lambda x1: torch.fill_(x1, 0))"),
        (lambda td: torch.cartesian_prod(*[td] * 3),
         "td.apply(lambda x1, x2, x3: torch.functional.cartesian_prod(x1, x2, x3), td2, td3)"),
        (lambda td: torch.searchsorted(torch.ones(9), td), "td.apply(lambda x1: torch.searchsorted(tensor, x1))"),
    ],
)  # fmt: skip
def test_torch_function_unsupported_raises_with_whole_line(call: object, line: str, make_nested: Any) -> None:
    with pytest.raises(TypeError) as caught:
        call(make_nested())
    name = line.partition(": ")[2].partition("(")[0]
    assert str(caught.value).startswith(f"{name} takes no collections; call it on the leaves that it is for")
    assert str(caught.value).endswith(f"or on each: {line}")


def test_dispatch_table_functions_are_overridable() -> None:
    # torch.overrides does not list torch.autograd.grad, which dispatches by itself.
    assert all(
        torch.overrides.resolve_name(function) for function in TABLE if function is not torch.autograd.grad
    )


def test_compile_torch_functions_equals_eager(make_nested: Any) -> None:
    def program(td: TensorDict) -> TensorDict:
        stacked = torch.stack([td, torch.zeros_like(td)])
        left, right = torch.unbind(torch.exp(stacked), 0)
        return torch.cat([torch.add(left, right), torch.clamp(left, 0, 1)], 1)

    td = make_nested()
    expected = program(td)
    result = torch.compile(program, fullgraph=True, backend="eager")(td)
    for key, leaf in expected.items(True, True):
        torch.testing.assert_close(result[key], leaf)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.broadcast_to(input=x, size=(5, 2, 3)),
        lambda x: torch.cat(tensors=[x, x], dim=1),
        lambda x: torch.concat(tensors=[x, x], dim=1),
        lambda x: torch.concatenate(tensors=[x, x], dim=1),
        lambda x: torch.permute(input=x, dims=(1, 0)),
        lambda x: torch.pow(input=x, exponent=2),
        lambda x: torch.reshape(input=x, shape=(3, 2)),
        lambda x: torch.stack(tensors=[x, x], dim=1),
        lambda x: torch.swapdims(input=x, dim0=0, dim1=1),
        lambda x: torch.unflatten(input=x, dim=1, sizes=(3, 1)),
    ],
)
def test_torch_function_keywords_equal_torch(call, make_nested):
    td = TensorDict({"a": make_nested()["a"]}, (2, 3))
    assert_entry_equal(call(td), call(td["a"]), "a")


TD = TensorDict({"a": torch.zeros(2)}, [2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.cat([torch.zeros(1)] * 2, out=TD), "out= of tensors is a tensor; got a TensorDict"),
        (lambda: torch.stack([torch.zeros(1)] * 2, out=TD), "out= of tensors is a tensor; got a TensorDict"),
        (
            lambda: torch.cat([TD, TD], out=torch.zeros(4)),
            "out= of collections is a collection; got a Tensor",
        ),
        (lambda: torch.stack([TD, TD], out=torch.zeros(4)), "out= of collections is a collection"),
        (lambda: torch.full_like(torch.zeros(2), TD), "full_like.* a collection as its first argument only"),
        (lambda: torch.where(TD > 0, 1, 0), "where.* a collection as its second or third argument only"),
        (lambda: torch.where(TD > 0, 1, TD), "where.* a collection as its second or third argument only"),
        (lambda: torch.where(TD > 0, TD, 1), "one tensor for all leaves; got a TensorDict"),
        (lambda: TD.masked_fill(TD > 0, 1), "one tensor for all leaves; got a TensorDict"),
        (lambda: TD.masked_select(TD > 0), "one tensor for all leaves; got a TensorDict"),
    ],
)
def test_torch_function_td_in_wrong_argument_raises(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_apply_torch_where_uses_mask_per_leaf():
    assert (TD > 0).apply(torch.where, TD, TD + 1)["a"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_torch_where_uint8_condition_equals_bool(dtype: torch.dtype) -> None:
    condition = torch.tensor([1, 0], dtype=dtype)
    td = TensorDict({"a": torch.full((2,), 2.0)}, [2])
    assert torch.where(condition, torch.zeros(2), td)["a"].tolist() == [0, 2]
    assert torch.where(condition, td, torch.zeros(2))["a"].tolist() == [2, 0]


def test_autograd_grad_td_inputs_returns_td() -> None:
    x = TensorDict(
        {"a": torch.ones(3, requires_grad=True), "n": {"b": torch.ones(3, requires_grad=True)}}, [3]
    )
    given = TensorDict({"n": {"b": torch.full((3,), 5.0)}, "a": torch.ones(3)}, [3])
    found = torch.autograd.grad(x * 2, x, given)
    assert (found["a"].tolist(), found["n", "b"].tolist()) == ([2] * 3, [10] * 3)
    loss = (x["a"] ** 3).sum()
    used = torch.autograd.grad(loss, x, allow_unused=True, retain_graph=True)
    assert [*used.keys(True, True)] == ["a"]
    assert used["a"].tolist() == [3] * 3
    (one,) = torch.autograd.grad(x * 3, x["a"], torch.ones_like(x))
    assert one.tolist() == [3] * 3
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss, x)
    with pytest.raises(TypeError, match="takes one collection; got 2 in a tuple"):
        torch.autograd.grad(loss, (x, x))
    with pytest.raises(KeyMismatchError, match="'n'"):
        torch.autograd.grad(x * 2, x, TensorDict({"a": torch.ones(3)}, [3]))


LOSSES: dict[str, dict[str, Any]] = {
    "binary_cross_entropy": {"weight": torch.tensor(2.0)},
    "binary_cross_entropy_with_logits": {"pos_weight": torch.tensor(3.0)},
    "hinge_embedding_loss": {"margin": 2.0},
    "huber_loss": {"delta": 0.2},
    "kl_div": {"log_target": True},
    "l1_loss": {},
    "mse_loss": {},
    "poisson_nll_loss": {"log_input": False},
    "smooth_l1_loss": {"beta": 0.3},
    "soft_margin_loss": {},
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("reduction", [None, "none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_loss_equals_loss_of_each_leaf(name: str, reduction: str | None, stacked: bool) -> None:
    loss = getattr(torch.nn.functional, name)
    options = LOSSES[name] if reduction is None else {**LOSSES[name], "reduction": reduction}
    first, second = (
        TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.rand(3)}}, batch_size=[3]) for _ in range(2)
    )
    td = lazy_stack([*first.unbind(0)]) if stacked else first
    result = loss(td, second, **options)
    assert result.batch_size == torch.Size([3] if reduction == "none" else [])
    for key in ("a", ("n", "b")):
        torch.testing.assert_close(result[key], loss(first[key], second[key], **options))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, td: f.mse_loss(td, torch.ones(3)), TypeError, r"mse_loss\(\) takes two collections"),
        (lambda f, td: f.l1_loss(torch.ones(3), td), TypeError, r"l1_loss\(\) takes two collections"),
        (lambda f, td: f.mse_loss(td, td, reduction="max"), ValueError, r"reduction of mse_loss\(\) is .* got 'max'"),
        (lambda f, td: f.kl_div(td, td, reduction="batchmean"), ValueError, "got 'batchmean'"),
        (lambda f, td: f.mse_loss(td, td, reduce=False), TypeError, "takes reduction= in place of"),
        (lambda f, td: f.huber_loss(td, td, weight=td), TypeError, "numbers or tensors as options"),
    ],
)  # fmt: skip
def test_loss_bad_argument_raises(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.nn.functional, TensorDict({"a": torch.ones(3)}, batch_size=[3]))
