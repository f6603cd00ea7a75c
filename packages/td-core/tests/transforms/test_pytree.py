"""Collections as pytrees: Jacobians have the batch size, names and entries of the result, and any object replaces a leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, vmap
from torch.utils import _pytree as pytree

from td_core import StructureError, TensorDict, TensorDictParams, lazy_stack
from td_core._transforms.pytree import Shell
from td_core.spi import Record

JACOBIANS = {
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "jacrev in chunks": lambda f, **options: jacrev(f, chunk_size=2, **options),
}
#: Numbers of rows and features, of which some are equal.
SIZES = [(3, 3), (3, 5), (1, 1), (2, 1)]


def make(rows: int, features: int) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(rows, features, generator=generator) for _ in range(2))
    return TensorDict({"x": x, "n": {"y": y}}, batch_size=[rows], names=["row"])


def multiply(x: Any, y: Any) -> Any:
    return (x * y).sin()


def compute(data: Any) -> TensorDict:
    out = multiply(data["x"], data["n", "y"])
    return TensorDict(
        {"out": out, "deep": {"sum": out.sum(-1)}}, batch_size=data.batch_size[:1], names=["row"]
    )


@pytest.fixture(params=JACOBIANS)
def jacobian(request: Any) -> Callable[..., Any]:
    return JACOBIANS[request.param]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_jacobian_of_collections_equals_torch(jacobian: Any, size: tuple[int, int]) -> None:
    data = make(*size)
    result = jacobian(compute)(data)
    assert result.batch_size == result["deep"].batch_size == (size[0],) and result.names == ["row"]
    wanted = jacrev(multiply, argnums=(0, 1))(data["x"], data["n", "y"])
    assert result["out"].batch_size == (*size, size[0])
    torch.testing.assert_close((result["out", "x"], result["out", "n", "y"]), wanted)
    sums = jacrev(lambda x, y: multiply(x, y).sum(-1), argnums=(0, 1))(data["x"], data["n", "y"])
    torch.testing.assert_close((result["deep", "sum", "x"], result["deep", "sum", "n", "y"]), sums)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_jacobian_of_tensor_input_has_batch_size_of_result(jacobian: Any, size: tuple[int, int]) -> None:
    x = torch.rand(size)
    result = jacobian(lambda x: TensorDict({"out": x.sin()}, batch_size=[size[0]]))(x)
    assert result.batch_size == size[:1]
    torch.testing.assert_close(result["out"], jacrev(torch.sin)(x))
    flat = jacobian(lambda x: TensorDict({"out": x.sin()}, batch_size=x.shape))(x)
    assert flat.batch_size == size


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_hessian_has_batch_size_of_input(size: tuple[int, int]) -> None:
    data = make(*size)
    result = hessian(lambda data: multiply(data["x"], data["n", "y"]).sum())(data)
    wanted = hessian(lambda x, y: multiply(x, y).sum(), argnums=(0, 1))(data["x"], data["n", "y"])
    assert result.batch_size == result["n"].batch_size == (size[0],)
    torch.testing.assert_close((result["x", "x"], result["x", "n", "y"]), wanted[0])
    again = hessian(compute)(data)
    assert again.batch_size == again["deep"].batch_size == (size[0],)
    assert again["out", "x", "n", "y"].shape == size * 3


def test_jacobian_of_several_arguments_holds_tuples(jacobian: Any) -> None:
    data, factor = make(3, 3), torch.rand(3, 3)

    def scale(data: Any, factor: Any) -> TensorDict:
        return TensorDict(
            {"out": multiply(data["x"], factor), "n": {"x": data["x"] * 2}}, batch_size=data.batch_size
        )

    wanted = jacrev(multiply, argnums=(0, 1))(data["x"], factor)
    result = jacobian(scale, argnums=(0, 1))(data, factor)
    assert result.batch_size == (3,) and isinstance(result["out"], tuple)
    to_data, to_factor = result["out"]
    torch.testing.assert_close((to_data["x"], to_factor), wanted)
    assert result["n", "x"][0]["x"].shape == (3,) * 4 and result.get("out")[1] is to_factor
    swapped = jacobian(lambda factor, data: scale(data, factor), argnums=(0, 1))(factor, data)["out"]
    torch.testing.assert_close((swapped[1]["x"], swapped[0]), wanted)
    (single,) = jacobian(scale, argnums=(1,))(data, factor)["out"]
    torch.testing.assert_close(single, wanted[1])


def test_jacobian_of_tuple_of_collections_and_aux(jacobian: Any) -> None:
    data = make(3, 3)
    pair, aux = jacobian(
        lambda data: ((compute(data), TensorDict({"all": data["x"].sum()})), data), has_aux=True
    )(data)
    assert [item.batch_size for item in pair] == [(3,), ()] and aux.batch_size == (3,)
    assert torch.equal(pair[1]["all", "x"], torch.ones(3, 3)) and pair[1]["all"].batch_size == (3,)


@pytest.mark.parametrize(
    "kind", [lambda td: lazy_stack(td.unbind(0)), lambda td: lazy_stack(td.unbind(0)).to_tensordict()]
)
def test_jacobian_of_lazy_stack_equals_dense(jacobian: Any, kind: Callable[[Any], Any]) -> None:
    data = make(3, 3)
    result, wanted = jacobian(compute)(kind(data)), jacrev(compute)(data)
    assert result.batch_size == (3,)
    torch.testing.assert_close(result["out", "n", "y"], wanted["out", "n", "y"])
    lazy = jacobian(lambda data: lazy_stack(compute(data).unbind(0)))(data)
    assert lazy.batch_size == (3,)
    torch.testing.assert_close(lazy["out", "x"], wanted["out", "x"])


def test_jacobian_of_parameters_and_in_vmap(jacobian: Any) -> None:
    data = make(3, 3)
    params = jacrev(compute)(TensorDictParams(data.clone()))
    assert params.batch_size == (3,) and params["out", "x"].shape == (3,) * 4
    rows = vmap(jacobian(lambda row: TensorDict({"out": row["x"].sin()})))(data)
    assert rows.batch_size == (3,) and rows["out", "x"].shape == (3, 3, 3)
    torch.testing.assert_close(rows["out", "x"], torch.stack([jacrev(torch.sin)(x) for x in data["x"]]))


@pytest.mark.parametrize(
    "value", [(1, 2), None, "text", 3, [torch.ones(2)]], ids=lambda value: type(value).__name__
)
def test_tree_map_to_other_objects_keeps_them_at_their_keys(value: object) -> None:
    for data in (make(3, 2), lazy_stack(make(3, 2).unbind(0))):
        result = pytree.tree_map(lambda _: value, data)
        assert result["x"] is value and result["n", "y"] is value and result.get(("n", "y")) is value
        assert result["n"]["y"] is value and "x" in repr(result)
        if isinstance(data, TensorDict):
            for leaves_only, count in ((True, 2), (False, 3)):
                keys = list(result.keys(True, leaves_only))
                assert keys == [key for key, _ in result.items(True, leaves_only)] and ("n", "y") in keys
                assert (
                    len(result.keys(True, leaves_only))
                    == len(list(result.values(True, leaves_only)))
                    == count
                )
    if not isinstance(value, (tuple, list, type(None))):  # these are trees again
        assert pytree.tree_leaves(pytree.tree_map(lambda _: value, make(3, 2))) == [value, value]


@pytest.mark.parametrize("value", [torch.Size([1]), None, "text", 3], ids=lambda value: type(value).__name__)
def test_operation_on_objects_in_place_of_leaves_raises_with_key(value: object) -> None:
    data = make(3, 2)
    operations: list[Any] = [
        lambda a, _: a + 1, lambda a, _: 2 * a, lambda a, b: a + b, lambda a, b: b - a, lambda a, _: -a, lambda a, _: a.sin_(),
        lambda a, _: a == a, lambda a, b: a == b, lambda a, b: b != a, lambda a, _: a.add_(1), lambda a, b: a.lerp(b, 0.5),
        lambda a, _: a.isfinite(), lambda a, b: a.maximum(b), lambda a, b: b.mul_(a), lambda a, b: a.add(b, default=0),
    ]  # fmt: skip
    for tree in (data, lazy_stack(data.unbind(0)), TensorDictParams(data.clone())):
        result: Any = pytree.tree_map(lambda _: value, tree)
        for operation in operations:
            with pytest.raises(
                StructureError, match=f"('x'|'y'.) holds a {type(value).__name__}, which a pytree"
            ):
                operation(result, tree.to_tensordict())
        table = {row.key: row.dtype for row in result.describe()}
        assert table[("x",)] == table["n", "y"] == type(value).__name__


def test_shell_equality_compares_array_values() -> None:
    def shell(*values: Any) -> Shell:
        named = {str(i): np.array(value) for i, value in enumerate(values)}
        return Shell(TensorDict(), Record({}, values=named))

    assert shell([1, 2], ["a"]) == shell([1, 2], ["a"])
    for others in ([1, 3], ["a"]), ([1, 2],), ([1.0, 2.0], ["a"]):
        assert shell([1, 2], ["a"]) != shell(*others)
    assert shell([1, 2]) != [1, 2]


def test_jacobian_batch_size_is_prefix_of_every_shape():
    td = TensorDict({"n": {"b": torch.ones(2)}, "w": torch.ones(2, 3)}, [2])
    jacobian = torch.func.jacrev(lambda params: params * 2)(td)
    for entry in jacobian.values():
        assert entry.shape[: jacobian.ndim] == jacobian.shape
    assert jacobian[0].batch_size == jacobian.batch_size[1:]
