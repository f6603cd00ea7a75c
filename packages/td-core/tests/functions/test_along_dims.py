"""Functions along batch dims: each call equals torch on the leaves, for the kinds of collections and under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core.errors import BatchSizeError, DimError, DimNamesError, KeyMismatchError

KINDS = ["flat", "nested", "lazy", "lazy along 1", "nested lazy", "longer batch size"]
INDEX = torch.tensor([2, 0])
FULL = torch.tensor([[0, 1, 0], [1, 1, 0]])

#: Calls on ``x``, a collection of batch size (2, 3) or one of its leaves. ``wide(index)`` has dims for those of the leaf.
CALLS = [
    "x.cumsum(0)", "x.cumsum(dim=-1 - tail)", "x.cumsum(1, dtype=torch.float64)", "x.cumprod(1)", "x.logcumsumexp(0)",
    "x.log_softmax(1)", "x.diff(1, 1)", "x.diff(n=2, dim=1)", "x.diff(n=3, dim=0)", "x.diff(dim=0, prepend=x, append=x[:1])",
    "x.argmax(0)", "x.argmin(1, True)", "x.argmax()", "x.count_nonzero(0)", "x.sort(1).values",
    "x.sort(dim=0, stable=True)[1]", "x.sort(dim=1, descending=True)", "x.argsort(1, descending=True)", "x.argsort(0)",
    "x.topk(2, 1)", "x.topk(1, 0, False)", "x.kthvalue(2, 1)", "x.kthvalue(1, 0, True)", "x.median(1)",
    "x.median(0, True).indices", "x.median()", "x.nanmedian(0)", "x.nanquantile(0.5, 1)", "x.index_add(1, INDEX, x[:, 1:])",
    "x.index_add(1, INDEX, x[:, 1:], alpha=3)", "x.index_copy(1, INDEX, x[:, 1:])",
    "x.scatter_reduce(0, wide(FULL), x, 'sum')", "x.scatter_reduce(0, wide(FULL), x, 'amin', include_self=False)",
    "x.take_along_dim(wide(FULL), 0)", "x.take_along_dim(wide(FULL), 1)", "torch.isin(x, torch.tensor([0.5]), invert=True)",
    "x.nan_to_num(0.5, posinf=2.0)", "(x / 0).nan_to_num(neginf=-1.0, posinf=3.0)", "x.round(decimals=1)", "x.logit(0.1)",
    "x.div(0.3, rounding_mode='floor')", "torch.div(x, x + 0.1, rounding_mode='trunc')", "torch.max(x, 1 - x)",
    "torch.min(x, other=x * 2)", "x.max(1 - x)", "(x > 0.5).all(0, True)", "torch.any(x > 0.5, 1, keepdim=True)",
    "(x > 0.5).all((0, 1))", "torch.clamp_max(x, max=0.5)", "torch.clamp_min(x, min=0.5)", "x.unbind()[0]", "x.flip(0, 1)",
    "x.relu()", "x.nan_to_num()", "(x * 9) // 2", "x % 0.3", "2 % (x + 1)", "9 // (x + 0.1)", "torch.hstack([x, x])",
    "torch.vstack([x, x])", "torch.cumsum(x, 0)", "torch.sort(x, dim=1)", "torch.topk(x, 2, 1)", "torch.diff(x, dim=1)",
    "torch.atan2(torch.ones(()), x)",
]  # fmt: skip


def compute(call: str, x: Any, tail: int = 0) -> Any:
    """Evaluate a call on a collection, or on a leaf with ``tail`` feature dims."""

    def wide(index: Tensor) -> Tensor:
        shape = (*index.shape, *x.shape[2:]) if isinstance(x, Tensor) else index.shape
        return index.reshape(*index.shape, *[1] * tail).expand(shape)

    return eval(call, {"x": x, "torch": torch, "INDEX": INDEX, "FULL": FULL, "wide": wide, "tail": tail})


def assert_equals_torch(call: str, td: Any) -> None:
    result = compute(call, td)
    for key, leaf in td.items(True, True):
        expected = compute(call, leaf, leaf.ndim - 2)
        pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
        for found, wanted in pairs:
            torch.testing.assert_close(found[key], wanted)
            assert wanted.shape[: found.ndim] == found.batch_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_call_equals_torch_on_leaves(call: str, kind: str, make_collection: Any) -> None:
    assert_equals_torch(call, make_collection(kind))


@pytest.mark.parametrize("call", CALLS)
def test_call_on_parameters_equals_torch(call: str, make_nested: Any) -> None:
    params = TensorDictParams(make_nested())
    assert_equals_torch(call, params)
    result = compute(call, params)
    for part in result if isinstance(result, tuple) else (result,):
        assert not isinstance(part, TensorDictParams)


@pytest.mark.parametrize("kind", ["nested", "lazy"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # of torch, which has no rule for some functions
def test_call_under_vmap_equals_loop(call: str, kind: str, make_collection: Any) -> None:
    parts = [make_collection(kind) + i for i in range(2)]
    mapped = torch.vmap(lambda x: compute(call, x))(torch.stack(parts))
    for i, part in enumerate(parts):
        wanted = compute(call, part)
        pairs = zip(mapped, wanted, strict=True) if isinstance(wanted, tuple) else [(mapped, wanted)]
        for found, expected in pairs:
            for key, leaf in expected.items(True, True):
                torch.testing.assert_close(found[i][key], leaf)


@pytest.mark.parametrize("call", CALLS)
def test_call_keeps_or_drops_names_of_dims(call: str, make_nested: Any) -> None:
    td = make_nested()
    td.names = ["t", "u"]
    result = compute(call, td)
    for part in result if isinstance(result, tuple) else (result,):
        kept = {"x.argmax()": [], "x.median()": [], "(x > 0.5).all((0, 1))": []}.get(call, ["t", "u"])
        removed = {1: ["t"], 0: ["u"]}[1 if "1" in call else 0] if part.ndim == 1 else kept
        assert part.names == removed


NAMED: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "unbind": (lambda x: x.unbind("u"), lambda x: x.unbind(1)),
    "split": (lambda x: x.split(2, "u"), lambda x: x.split(2, 1)),
    "chunk": (lambda x: x.chunk(2, dim="u"), lambda x: x.chunk(2, 1)),
    "tensor_split": (lambda x: x.tensor_split(2, "u"), lambda x: x.tensor_split(2, 1)),
    "squeeze": (lambda x: x[:, :1].squeeze("u"), lambda x: x[:, :1].squeeze(1)),
    "permute": (lambda x: x.permute("u", "t"), lambda x: x.permute(1, 0)),
    "permute list": (lambda x: x.permute(["u", "t"]), lambda x: x.permute(1, 0)),
    "permute dims": (lambda x: x.permute(dims=("u", 0)), lambda x: x.permute(1, 0)),
    "transpose": (lambda x: x.transpose("t", "u"), lambda x: x.transpose(0, 1)),
    "swapaxes": (lambda x: x.swapaxes("t", -1), lambda x: x.swapaxes(0, 1)),
    "movedim": (lambda x: x.movedim("t", 1), lambda x: x.movedim(0, 1)),
    "flatten": (lambda x: x.flatten("t", "u"), lambda x: x.flatten(0, 1)),
    "unflatten": (lambda x: x.unflatten("u", (3, 1)), lambda x: x.unflatten(1, (3, 1))),
    "narrow": (lambda x: x.narrow("u", 1, 2), lambda x: x.narrow(1, 1, 2)),
    "flip": (lambda x: x.flip(("t", "u")), lambda x: x.flip((0, 1))),
    "roll": (lambda x: x.roll(1, "u"), lambda x: x.roll(1, 1)),
    "rot90": (lambda x: x.rot90(1, ("t", "u")), lambda x: x.rot90(1, (0, 1))),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, "u"), lambda x: x.repeat_interleave(2, 1)),
    "gather": (lambda x: x.gather("t", FULL), lambda x: x.gather(0, FULL)),
    "cat": (lambda x: TensorDict.cat([x, x], "u"), lambda x: TensorDict.cat([x, x], 1)),
    "size": (lambda x: x.size("u"), lambda x: x.size(1)),
    "to_lazystack": (lambda x: x.to_lazystack("u"), lambda x: x.to_lazystack(1)),
    "map": (
        lambda x: x.map(torch.exp, dim="u", num_workers=0),
        lambda x: x.map(torch.exp, dim=1, num_workers=0),
    ),
    "sum": (lambda x: x.sum(("t", "u")), lambda x: x.sum((0, 1))),
    "cumsum": (lambda x: x.cumsum("u"), lambda x: x.cumsum(1)),
    "index_add": (lambda x: x.index_add("u", INDEX, x[:, 1:]), lambda x: x.index_add(1, INDEX, x[:, 1:])),
    "take_along_dim": (lambda x: x.take_along_dim(FULL, "t"), lambda x: x.take_along_dim(FULL, 0)),
    "unique": (lambda x: x.unique(dim="t"), lambda x: x.unique(dim=0)),
}


@pytest.mark.parametrize("kind", ["nested", "lazy"])
@pytest.mark.parametrize("name", NAMED)
def test_dim_by_name_equals_dim_by_position(name: str, kind: str, make_collection: Any) -> None:
    td = make_collection(kind)
    td.names = ["t", "u"]
    by_name, by_position = (call(td) for call in NAMED[name])
    if not isinstance(by_name, tuple):
        by_name, by_position = (by_name,), (by_position,)
    for found, wanted in zip(by_name, by_position, strict=True):
        assert (found.equal(wanted) and found.names == wanted.names) if name != "size" else found == wanted


@pytest.mark.parametrize("name", NAMED)
def test_unknown_name_of_dim_raises(name: str, make_nested: Any) -> None:
    with pytest.raises(
        DimNamesError, match=r"no batch dim is named '[tu]'; the names are \[\]|\[None, None\]"
    ):
        NAMED[name][0](make_nested())


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_unique_returns_each_row_once(dim: int | None) -> None:
    td = TensorDict({"b": torch.tensor([[2, 1, 2], [2, 1, 2]]), "n": {"a": torch.ones(2, 3, 2)}}, [2, 3])
    rows, inverse, counts = td.unique(return_inverse=True, return_counts=True, dim=dim)
    wanted = {None: [1, 2], 0: [[2, 1, 2]], 1: [[1, 2], [1, 2]]}[dim]
    assert rows["b"].tolist() == wanted
    assert counts.tolist() == {None: [2, 4], 0: [2], 1: [1, 2]}[dim]
    source = td.reshape(-1) if dim is None else td
    assert rows[(slice(None),) * (dim or 0) + (inverse,)].equal(source)
    kept, inverse, counts = td.unique(False, True, True, dim)
    assert kept["b"].tolist() == {None: [2, 1], 0: [[2, 1, 2]], 1: [[2, 1], [2, 1]]}[dim]
    assert counts.tolist() == {None: [4, 2], 0: [2], 1: [2, 1]}[dim]
    assert kept[(slice(None),) * (dim or 0) + (inverse,)].equal(source)


def test_unique_compares_all_leaves_in_order() -> None:
    td = TensorDict({"a": [1, 0, 1, 0], "b": [5.0, 4.0, 3.0, 4.0]}, [4])
    assert [td.unique()[key].tolist() for key in "ab"] == [[0, 1, 1], [4.0, 3.0, 5.0]]
    assert torch.unique(td).equal(td.unique())
    assert torch.unique(td, dim=0, return_counts=True)[1].tolist() == [2, 1, 1]
    with pytest.raises(ValueError, match="this TensorDict has none"):
        TensorDict({}, [2]).unique()


def make_matrices(stacked: bool) -> Any:
    td = TensorDict(
        {"v": torch.rand(3, 2), "n": {"m": torch.rand(3, 5, 2), "k": torch.rand(3, 6, 5, 2)}}, [3]
    )
    return lazy_stack([td[i] for i in range(3)]) if stacked else td


@pytest.mark.parametrize("stacked", [False, True])
def test_matmul_tensor_equals_torch(stacked: bool) -> None:
    td, weight, vector = make_matrices(stacked), torch.rand(2, 4), torch.rand(2)
    for result, wanted in [
        (td @ weight, lambda x: x @ weight),
        (td.matmul(vector), lambda x: x @ vector),
        (torch.matmul(td, weight), lambda x: x @ weight),
    ]:
        assert result.batch_size == (3,)
        for key, leaf in td.items(True, True):
            torch.testing.assert_close(result[key], wanted(leaf))
    left = torch.rand(5, 5)
    torch.testing.assert_close((left @ td["n"])["m"], left @ td["n", "m"])
    torch.testing.assert_close((weight.T @ td.select("v"))["v"], torch.einsum("ij,bj->bi", weight.T, td["v"]))


@pytest.mark.parametrize("stacked", [False, True])
def test_matmul_collection_equals_torch_for_each_row(stacked: bool) -> None:
    td = make_matrices(stacked)
    other = make_matrices(False).apply(lambda x: x.mT if x.ndim > 2 else x)
    result = td @ other
    for key, leaf in td.items(True, True):
        wanted = torch.stack([a @ b for a, b in zip(leaf, other[key], strict=True)])
        torch.testing.assert_close(result[key], wanted)


def test_matmul_other_operands_raise() -> None:
    td = make_matrices(False)
    with pytest.raises(
        ValueError, match=r"matmul: key 'a' of shapes \[3\] and \[2, 4\]: a matrix or a vector has one"
    ):
        TensorDict({"a": torch.rand(3)}, [3]) @ torch.rand(2, 4)
    with pytest.raises(
        TypeError,
        match=r"a matrix or a vector for all leaves, or a collection; got torch.Size\(\[3, 2, 4\]\)",
    ):
        td @ torch.rand(3, 2, 4)
    with pytest.raises(RuntimeError, match="matmul: key 'v' of shapes"):
        td @ torch.rand(3, 4)
    with pytest.raises(BatchSizeError, match=r"both collections have one batch size; got \[3\] and \[1\]"):
        td @ td[:1]
    with pytest.raises(KeyMismatchError):
        td @ td.select("v")
    with pytest.raises(
        TypeError, match="matmul takes a matrix or a vector for all leaves, or a collection; got 'x'"
    ):
        td.matmul("x")
    with pytest.raises(TypeError, match="or a collection; got 2"):
        td @ 2


@pytest.mark.parametrize("kind", KINDS)
def test_equal_and_allclose(kind: str, make_collection: Any) -> None:
    td = make_collection(kind)
    near = td + 1e-9
    assert td.equal(td.clone()) is torch.equal(td, td.clone()) is True
    assert td.allclose(near) is torch.allclose(td, near) is True
    changed = td.clone()
    changed.set_at_("a", 9.0, (0, 0))
    assert not td.equal(changed) and not td.allclose(changed) and td.allclose(changed, atol=10.0)
    assert not td.equal(td[:1]) and not td.equal(td.select("a")) and not td.equal(td.exclude("a"))
    nan = td * torch.nan
    assert not nan.equal(nan) and not nan.allclose(nan) and nan.allclose(nan, equal_nan=True)


def test_equal_other_shapes_of_leaves_is_false() -> None:
    td = TensorDict({"a": torch.zeros(2, 1)}, [2])
    assert not td.equal(TensorDict({"a": torch.zeros(2, 3)}, [2]))
    with pytest.raises(TypeError, match="equal.. compares two collections; got a Tensor"):
        td.equal(torch.zeros(2))


ERRORS: dict[str, tuple[Callable[[Any], object], type[Exception] | tuple[type[Exception], ...], str]] = {
    "dim": (lambda x: x.cumsum(2), DimError, "out of range"),
    "feature": (lambda x: x.sort("feature"), DimNamesError, "no batch dim is named 'feature'"),
    "topk": (lambda x: x.topk(4, 1), RuntimeError, "cannot compute topk: key 'a'"),
    "index": (lambda x: x.index_add(1, FULL, x), BatchSizeError, "takes an index with one dim"),
    "source": (
        lambda x: x.index_add(1, INDEX, torch.ones(2)),
        BatchSizeError,
        "takes an index with one dim and a collection with 2",
    ),
    "full index": (
        lambda x: x.scatter_reduce(1, INDEX, x, "sum"),
        BatchSizeError,
        "takes an index with 2 dims",
    ),
    "range": (
        lambda x: x.index_add(1, INDEX + 5, x[:, 1:]),
        (IndexError, RuntimeError),
        "cannot compute index_add: key 'a'",
    ),
    "take": (
        lambda x: x.take_along_dim(torch.zeros(3, 3, 3).long(), 0),
        BatchSizeError,
        "one dim for each batch dim",
    ),
    "prepend": (lambda x: x.diff(prepend=torch.ones(1)), TypeError, "collections|Tensor"),
    "reduce": (
        lambda x: x.scatter_reduce(0, FULL, x, "median"),
        RuntimeError,
        "cannot compute scatter_reduce: key 'a'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_argument_raises(name: str, make_nested: Any) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call(make_nested())


@pytest.mark.parametrize(
    ("name", "dims"), [("dstack", 3), ("column_stack", 2), ("row_stack", 2), ("hstack", 1)]
)
def test_joins_of_batches_with_one_dim_equal_torch(name: str, dims: int) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    function = getattr(torch, name)
    for item in (td, td.unsqueeze(0)):
        result = function([item, item])
        assert torch.equal(result["a"], function([item["a"], item["a"]]))
        assert result.batch_size == result["a"].shape
        assert result.ndim == max(dims, item.ndim)


def test_list_of_keys_selects_entries(make_nested: Any) -> None:
    td = make_nested()
    assert td[["a", ("n", "b")]].equal(td.select("a", ("n", "b")))
    assert lazy_stack([td, td])[["a"]].equal(lazy_stack([td, td]).select("a"))
    with pytest.raises(IndexError, match=r"update\(\) sets the entries of several keys"):
        td[["a", "n"]] = td
    with pytest.raises(KeyError, match="'z'"):
        td[["a", "z"]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.rename(a="c"), r"no dim is named \['a'\].*; rename_keys\({'a': 'c'}\) renames entries"),
        (
            lambda x: x.rename({"a": "c"}),
            r"no dim is named \['a'\].*; rename_keys\({'a': 'c'}\) renames entries",
        ),
    ],
)
def test_rename_of_keys_names_the_method(
    call: Callable[[Any], object], message: str, make_nested: Any
) -> None:
    with pytest.raises(DimNamesError, match=message):
        call(make_nested())


def test_rename_takes_a_mapping_of_dims(make_nested: Any) -> None:
    td = make_nested()
    td.names = ["t", "u"]
    assert td.rename({"t": "v"}).names == ["v", "u"]
