"""Compare every reduction and scan with torch on plain leaves."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core._methods.reductions import ReductionMixin
from td_core._tree.walks import list_nested
from td_core.errors import DimNamesError, StructureError


@pytest.fixture(params=["nested", "lazy", "lazy along 1", "nested lazy", "longer batch size"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


def flatten_features(td: TensorDict) -> dict[object, Tensor]:
    """Return each leaf with its feature dims flattened to one last dim."""
    sizes = {
        key: td.batch_size if isinstance(key, str) else td[key[:-1]].batch_size for key in td.keys(True, True)
    }
    return {key: leaf.reshape(*sizes[key], -1) for key, leaf in td.items(True, True)}


def names_with_parameters(*parameters: str) -> list[str]:
    """Return the names of the methods made by a factory that have exactly these parameters."""
    return [
        name
        for name, method in vars(ReductionMixin).items()
        if inspect.isfunction(method)
        and method.__code__.co_name == "method"
        and tuple(inspect.signature(method).parameters)[1:] == parameters
    ]


WITH_DTYPE = names_with_parameters("dim", "keepdim", "dtype", "reduce", "key_transform")
DEVIATIONS = names_with_parameters("dim", "keepdim", "correction", "reduce", "key_transform")
EXTREMES = names_with_parameters("dim", "keepdim", "reduce")
WITH_INDICES = names_with_parameters("dim", "keepdim", "reduce", "return_indices")
SCANS = names_with_parameters("dim", "reduce", "return_indices")
REGULAR = WITH_DTYPE + DEVIATIONS + EXTREMES


def test_generated_reduction_methods_have_expected_names() -> None:
    assert WITH_DTYPE == ["sum", "mean", "prod", "nansum", "nanmean"]
    assert (DEVIATIONS, EXTREMES) == (["std", "var"], ["amax", "amin", "argmax", "argmin", "count_nonzero"])
    assert (WITH_INDICES, SCANS) == (["max", "min", "median", "nanmedian"], ["cummax", "cummin"])


def reduce_with_torch(name: str, leaf: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    if name == "prod":
        for dim in sorted(dims, reverse=True):
            leaf = leaf.prod(dim, keepdim=keepdim)
        return leaf
    if name in ("argmax", "argmin", "count_nonzero"):
        rest = [dim for dim in range(leaf.ndim) if dim not in dims]
        result = getattr(leaf.permute(*rest, *dims).flatten(len(rest)), name)(-1)
        return (
            result.reshape([1 if i in dims else size for i, size in enumerate(leaf.shape)])
            if keepdim
            else result
        )
    return getattr(leaf, name)(dims, keepdim=keepdim)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1, -2, (0,), (0, 1), (-1, 0)], ids=str)
@pytest.mark.parametrize("name", REGULAR)
def test_reduce_batch_dims_equals_torch(
    name: str, dim: int | tuple[int, ...], keepdim: bool, td: TensorDict, assert_leaves_equal: Any
) -> None:
    dims = tuple(one % 2 for one in ((dim,) if isinstance(dim, int) else dim))
    result = getattr(td, name)(dim, keepdim)
    assert_leaves_equal(
        result, {key: reduce_with_torch(name, leaf, dims, keepdim) for key, leaf in td.items(True, True)}
    )
    assert result.batch_size == torch.empty(2, 3).sum(dims, keepdim=keepdim).shape


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", REGULAR)
def test_reduce_without_dim_equals_torch_per_leaf(
    name: str, keepdim: bool, td: TensorDict, assert_leaves_equal: Any
) -> None:
    for arguments in ({}, {"dim": None}):
        result = getattr(td, name)(**arguments, keepdim=keepdim)
        assert_leaves_equal(
            result,
            {
                key: reduce_with_torch(name, leaf, tuple(range(leaf.ndim)), keepdim)
                for key, leaf in td.items(True, True)
            },
        )
        assert result.batch_size == ((1, 1) if keepdim else ())


@pytest.mark.parametrize("name", WITH_DTYPE + EXTREMES)
def test_reduce_feature_dims_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    result = getattr(td, name)("feature")
    assert_leaves_equal(
        result,
        {key: reduce_with_torch(name, leaf, (leaf.ndim - 1,)) for key, leaf in flatten_features(td).items()},
    )
    assert result.batch_size == td.batch_size
    assert [node.batch_size for node in list_nested(result)] == [node.batch_size for node in list_nested(td)]


@pytest.mark.parametrize("name", REGULAR)
def test_reduce_all_leaves_returns_one_tensor(name: str, td: TensorDict) -> None:
    everything = torch.cat([leaf.flatten() for leaf in td.values(True, True)])
    torch.testing.assert_close(getattr(td, name)(reduce=True), reduce_with_torch(name, everything, (0,)))
    features = torch.cat([leaf.reshape(2, 3, -1) for leaf in td.values(True, True)], -1)
    torch.testing.assert_close(
        getattr(td, name)("feature", reduce=True), reduce_with_torch(name, features, (2,))
    )


@pytest.mark.parametrize("name", REGULAR)
def test_reduce_all_leaves_along_dim_equals_torch_cat(name: str) -> None:
    td = TensorDict({"a": torch.rand(3, 2), "b": torch.rand(3, 2)}, [3])
    both = torch.cat([td["a"], td["b"]])
    torch.testing.assert_close(getattr(td, name)(0, reduce=True), reduce_with_torch(name, both, (0,)))


def test_reduce_all_leaves_different_shapes_raises(make_nested: Any) -> None:
    with pytest.raises(StructureError, match=r"sum\(dim=0, reduce=True\).*differ: \[\[2, 3\], \[2, 3, 4\]"):
        make_nested().sum(0, reduce=True)


def test_reduce_all_leaves_of_empty_td_raises() -> None:
    with pytest.raises(ValueError, match=r"sum\(reduce=True\) needs a leaf; this TensorDict has none"):
        TensorDict().sum(reduce=True)


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_reduce_dtype_argument_sets_dtype(name: str, assert_leaves_equal: Any) -> None:
    td = TensorDict({"a": torch.arange(1.0, 4.0)}, [3])
    for result in (getattr(td, name)(0, dtype=torch.float64), getattr(td, name)(dtype=torch.float64)):
        assert_leaves_equal(result, {"a": getattr(td["a"].double(), name)()})


@pytest.mark.parametrize("name", DEVIATIONS)
def test_std_var_correction_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(
        getattr(td, name)(0, correction=0),
        {key: getattr(leaf, name)(0, correction=0) for key, leaf in td.items(True, True)},
    )


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", WITH_INDICES)
def test_max_min_dim_returns_values_and_indices(
    name: str, dim: int, keepdim: bool, td: TensorDict, assert_leaves_equal: Any
) -> None:
    place = dim % 2
    expected = {key: getattr(leaf, name)(place, keepdim) for key, leaf in td.items(True, True)}
    result = getattr(td, name)(dim, keepdim)
    assert type(result) is getattr(torch.return_types, name)
    for part, field in ((result.values, "values"), (result.indices, "indices")):
        assert_leaves_equal(part, {key: getattr(value, field) for key, value in expected.items()})
        assert part.batch_size == torch.empty(2, 3).sum(place, keepdim=keepdim).shape
    assert_leaves_equal(
        getattr(td, name)(dim, keepdim, return_indices=False), {k: v.values for k, v in expected.items()}
    )


@pytest.mark.parametrize("name", WITH_INDICES)
def test_max_min_without_dim_returns_values_only(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(
        getattr(td, name)(), {key: getattr(leaf, name)() for key, leaf in td.items(True, True)}
    )
    everything = torch.cat([leaf.flatten() for leaf in td.values(True, True)])
    assert getattr(td, name)(reduce=True) == getattr(everything, name)()


@pytest.mark.parametrize("name", WITH_INDICES)
def test_max_min_feature_dims_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    expected = {key: getattr(leaf, name)(-1) for key, leaf in flatten_features(td).items()}
    result = getattr(td, name)("feature")
    assert_leaves_equal(result.values, {key: value.values for key, value in expected.items()})
    assert_leaves_equal(result.indices, {key: value.indices for key, value in expected.items()})
    together = torch.cat([leaf.reshape(2, 3, -1) for leaf in td.values(True, True)], -1)
    assert torch.equal(getattr(td, name)("feature", reduce=True).indices, getattr(together, name)(-1).indices)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", SCANS)
def test_cummax_cummin_equals_torch(name: str, dim: int, td: TensorDict, assert_leaves_equal: Any) -> None:
    expected = {key: getattr(leaf, name)(dim % 2) for key, leaf in td.items(True, True)}
    result = getattr(td, name)(dim)
    assert_leaves_equal(result.values, {key: value.values for key, value in expected.items()})
    assert_leaves_equal(result.indices, {key: value.indices for key, value in expected.items()})
    assert result.values.batch_size == td.batch_size
    assert_leaves_equal(
        getattr(td, name)(dim, return_indices=False), {key: value.values for key, value in expected.items()}
    )


def test_cummax_reduce_concatenates_leaves() -> None:
    td = TensorDict({"a": torch.tensor([1, 3]), "b": torch.tensor([2, 4])}, [2])
    assert td.cummax(0, reduce=True).values.tolist() == [1, 3, 3, 4]


@pytest.mark.parametrize("dim", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("q", [0.3, [0.25, 0.5]], ids=str)
def test_quantile_batch_dims_equals_torch(
    q: float | list[float],
    dim: int | tuple[int, ...],
    keepdim: bool,
    td: TensorDict,
    assert_leaves_equal: Any,
) -> None:
    level = torch.tensor(q) if isinstance(q, list) else q
    dims = (dim,) if isinstance(dim, int) else dim

    def expected(leaf: Tensor) -> Tensor:
        rest = [one for one in range(leaf.ndim) if one not in dims]
        result = leaf.permute(*rest, *dims).flatten(len(rest)).quantile(level, -1)
        for one in dims if keepdim else ():
            result = result.unsqueeze(one + isinstance(q, list))
        return result

    result = td.quantile(level, dim, keepdim)
    assert_leaves_equal(result, {key: expected(leaf) for key, leaf in td.items(True, True)})
    front = (2,) if isinstance(q, list) else ()
    assert result.batch_size == (*front, *torch.empty(2, 3).sum(dims, keepdim=keepdim).shape)


def test_quantile_without_dim_equals_torch_per_leaf(td: TensorDict, assert_leaves_equal: Any) -> None:
    q = torch.tensor([0.25, 0.5])
    result = td.quantile(q)
    assert result.batch_size == ()
    assert_leaves_equal(result, {key: leaf.quantile(q) for key, leaf in td.items(True, True)})
    everything = torch.cat([leaf.flatten() for leaf in td.values(True, True)])
    torch.testing.assert_close(td.quantile(q, reduce=True), everything.quantile(q))
    for level in (0.5, q):
        expected = {key: leaf.quantile(level, -1) for key, leaf in flatten_features(td).items()}
        assert_leaves_equal(td.quantile(level, "feature"), expected)
    nearest = {key: leaf.quantile(0.4, 0, interpolation="nearest") for key, leaf in td.items(True, True)}
    assert_leaves_equal(td.quantile(0.4, 0, interpolation="nearest"), nearest)


def test_norm_equals_torch(td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(td.norm(), {key: leaf.norm() for key, leaf in td.items(True, True)})
    assert td.norm().batch_size == ()
    assert_leaves_equal(
        td.norm(dtype=torch.float64), {key: leaf.double().norm() for key, leaf in td.items(True, True)}
    )
    out = td.norm() * 0
    assert td.norm(out=out) is out
    assert_leaves_equal(out, {key: leaf.norm() for key, leaf in td.items(True, True)})


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, (0, 1), None], ids=str)
def test_logsumexp_batch_dims_equals_torch(
    dim: object, keepdim: bool, td: TensorDict, assert_leaves_equal: Any
) -> None:
    dims = (0, 1) if dim is None else dim
    expected = {key: leaf.logsumexp(dims, keepdim=keepdim) for key, leaf in td.items(True, True)}
    assert_leaves_equal(td.logsumexp(dim, keepdim), expected)
    out = td.logsumexp(dim, keepdim) * 0
    assert td.logsumexp(dim, keepdim, out=out) is out
    assert_leaves_equal(out, expected)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [None, ()])
def test_logsumexp_without_batch_dims_returns_elements(dim: object, keepdim: bool) -> None:
    td = TensorDict({"a": torch.rand(2, 3), "n": TensorDict({"b": torch.arange(3)}, [3])})
    result = td.logsumexp(dim, keepdim)
    assert (result.batch_size, result["n"].batch_size) == ((), (3,))
    torch.testing.assert_close(result["a"], td["a"])
    torch.testing.assert_close(result["n", "b"], td["n", "b"].float())
    assert result["a"].data_ptr() != td["a"].data_ptr()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_batch_dim_equals_torch(dim: int, td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(td.softmax(dim), {key: leaf.softmax(dim % 2) for key, leaf in td.items(True, True)})
    assert_leaves_equal(
        td.softmax(dim, torch.float64),
        {k: v.softmax(dim % 2, torch.float64) for k, v in td.items(True, True)},
    )
    with pytest.raises(IndexError, match="Dimension out of range"):
        td.softmax(2)


@pytest.mark.parametrize("name", ["all", "any"])
def test_all_any_equal_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    bools = td > 0.5
    assert getattr(bools, name)() is (name == "any")
    assert getattr(td > -1, name)() is True
    assert getattr(td > 9, name)() is False
    for dim in (0, 1, -1):
        expected = {key: getattr(leaf > 0.5, name)(dim % 2) for key, leaf in td.items(True, True)}
        assert_leaves_equal(getattr(bools, name)(dim), expected)


def test_all_any_of_empty_td_equal_python() -> None:
    assert TensorDict().all() is True
    assert TensorDict().any() is False


def test_reduce_dim_name_equals_dim_number(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    td.names = ["time", "agent"]
    assert_leaves_equal(td.sum("time"), dict(td.sum(0).items(True, True)))
    assert td.sum("time").names == ["agent"]
    assert td.sum("agent", keepdim=True).names == ["time", "agent"]
    assert_leaves_equal(td.mean(("time", "agent")), dict(td.mean((0, 1)).items(True, True)))
    assert_leaves_equal(td.max("agent").values, dict(td.max(1).values.items(True, True)))
    assert_leaves_equal(td.cummin("agent").values, dict(td.cummin(1).values.items(True, True)))
    assert_leaves_equal(td.all("agent"), dict(td.all(1).items(True, True)))
    assert_leaves_equal(td.softmax("agent"), dict(td.softmax(1).items(True, True)))
    assert td.quantile(torch.tensor([0.5]), "time").names == [None, "agent"]
    with pytest.raises(
        DimNamesError, match=r"sum: no batch dim is named 'x'; the names are \['time', 'agent'\]"
    ):
        td.sum("x")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda td: td.sum(2),
            IndexError,
            r"Dimension out of range \(expected to be in range of \[-2, 1\], but got 2",
        ),
        (lambda td: td.sum(-3), IndexError, "Dimension out of range"),
        (lambda td: td.sum((0, -2)), IndexError, r"sum: a dim appears twice in \(0, -2\)"),
        (lambda td: td.sum(1.5), TypeError, "sum: dim is an int, a name of a dim, or 'feature'; got 1.5"),
        (lambda td: td.sum("feature", keepdim=True), TypeError, "dim='feature' has no keepdim=True"),
        (lambda td: td.all(5), IndexError, "Dimension out of range"),
        (lambda td: td.cummax(7), IndexError, "Dimension out of range"),
    ],
)
def test_reduce_invalid_dim_raises(
    call: object, error: type[Exception], message: str, make_nested: Any
) -> None:
    with pytest.raises(error, match=message):
        call(make_nested())


def test_reduce_key_transform_renames_nested_keys(make_nested: Any) -> None:
    td = make_nested()
    result = td.sum(0, key_transform=lambda key: (key, "sum"))
    assert set(dict(result.items(True, True))) == {
        ("a", "sum"),
        ("n", "sum", "b", "sum"),
        ("n", "sum", "m", "sum", "c", "sum"),
    }
    assert torch.equal(result["n", "sum", "b", "sum"], td["n", "b"].sum(0))
    assert result.batch_size == result["n"].batch_size == (3,)
    assert set(dict(td.norm(key_transform=str.upper).items(True, True))) == {"A", ("N", "B"), ("N", "M", "C")}
    assert set(dict(td.quantile(0.5, key_transform=str.upper).items(True, True))) == {
        "A",
        ("N", "B"),
        ("N", "M", "C"),
    }


def test_sum_over_stack_dim_returns_dense_else_lazy(make_collection: Any) -> None:
    td = make_collection("lazy along 1")
    assert type(td.sum(1)) is TensorDict
    assert type(td.sum(0)) is LazyStackedTensorDict
    assert td.sum(0).stack_dim == 0
    assert td.quantile(torch.tensor([0.1, 0.2]), 0).stack_dim == 1


def test_sum_uneven_members_keeps_lazy_stack() -> None:
    td = LazyStackedTensorDict(
        TensorDict({"a": torch.ones(2, 3)}, [2]), TensorDict({"a": torch.ones(2, 5)}, [2]), stack_dim=1
    )
    result = td.sum(0)
    assert [member["a"].tolist() for member in result.tensordicts] == [[2.0] * 3, [2.0] * 5]


def test_reduce_compile_and_vmap_equal_eager(make_nested: Any, assert_leaves_equal: Any) -> None:
    def program(td: TensorDict) -> TensorDict:
        return td.sum(0) + td.mean(0) + td.max(0).values + td.amax((0,)) + td.prod(0)

    td = make_nested()
    assert_leaves_equal(
        torch.compile(program, fullgraph=True, backend="eager")(td), dict(program(td).items(True, True))
    )
    stacked = torch.stack([td["n", "b"], td["n", "b"]])
    mapped = torch.func.vmap(program)(TensorDict({"b": stacked}, [2, 2, 3]))
    assert_leaves_equal(mapped[1], dict(program(td["n"].select("b")).items(True, True)))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(REGULAR), data=st.data())
def test_reduce_random_shape_and_dims_equals_torch(
    name: str, data: st.DataObject, assert_leaves_equal: Any
) -> None:
    batch = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    tail = data.draw(st.lists(st.integers(1, 2), max_size=2))
    dims = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, unique=True))
    keepdim = data.draw(st.booleans())
    leaf = torch.rand(*batch, *tail, dtype=torch.float64)
    # torch warns about the standard deviation of a single element, which is nan.
    assume(name not in DEVIATIONS or math.prod(batch[dim] for dim in dims) > 1)
    result = getattr(TensorDict({"a": leaf}, batch), name)(tuple(dims), keepdim)
    assert_leaves_equal(result, {"a": reduce_with_torch(name, leaf, tuple(dims), keepdim)})
    assert result.batch_size == torch.empty(batch).sum(dims, keepdim=keepdim).shape


@pytest.mark.parametrize(
    "make", [lambda td: td, lambda td: LazyStackedTensorDict(td, td), lambda td: td[None]]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.mean(0),
        lambda td: td.std(),
        lambda td: td.quantile(0.5, 0),
        lambda td: td.norm(),
        lambda td: td.softmax(0),
        lambda td: td[:, :0].max(1),
    ],
)
def test_reduce_failing_leaf_raises_with_key(call, make):
    td = TensorDict({"a": torch.ones(3), "n": {"i": torch.ones(3, dtype=torch.int64)}}, [3])
    with pytest.raises(
        (RuntimeError, IndexError, NotImplementedError), match=r"cannot compute \w+: key .*shape"
    ):
        call(make(td) if make(td).ndim == 2 else td[None])


@pytest.mark.parametrize("name", ["mean", "std", "var", "nanmean"])
def test_reduce_feature_dims_failing_leaf_raises_with_key(name):
    td = TensorDict({"fine": torch.ones(2, 3), "n": {"whole": torch.ones(2, 3).int()}}, [2])
    with pytest.raises(RuntimeError, match=r"key 'whole' of shape \[2, 3\]"):
        getattr(td, name)(dim="feature")


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "all", "any"])
def test_reduce_empty_dims_reduces_all_dims(name: str) -> None:
    td = TensorDict({"a": torch.ones(3, 4)}, [3, 4])
    for dim in [], ():
        result = getattr(td, name)(dim=dim)
        assert (result.batch_size, result["a"].shape) == ((), ())


def test_quantile_feature_dims_of_all_leaves_equals_torch() -> None:
    td = TensorDict({"a": torch.rand(2, 3), "n": {"b": torch.rand(2)}}, [2])
    both = torch.cat([td["a"], td["n", "b"][:, None]], 1)
    torch.testing.assert_close(td.quantile(0.3, "feature", reduce=True), both.quantile(0.3, 1))
