"""vmap over collections: lazy stacks stay lazy, empty ones have a batch size only, and dims count in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import vmap

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack


def make_stack(dim: int = 0, count: int = 2, rows: int = 3) -> Any:
    leaf = torch.arange(float(rows))
    return lazy_stack(
        [TensorDict({"x": leaf + 10 * i, "n": {"y": leaf * i}}, batch_size=[rows]) for i in range(count)], dim
    )


@pytest.mark.parametrize("out_dim", [0, 1, -1])
@pytest.mark.parametrize("stack_dim", [0, 1])
@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_vmap_over_lazy_stack_returns_lazy_stack(in_dim: int, stack_dim: int, out_dim: int) -> None:
    stack = make_stack(stack_dim)
    result = vmap(lambda data: data.set("z", data["x"] * 2), (in_dim,), out_dim)(stack)
    wanted = stack["x"].movedim(in_dim, 0).movedim(0, out_dim)
    assert type(result) is LazyStackedTensorDict and result.batch_size == wanted.shape
    assert torch.equal(result["x"], wanted) and torch.equal(result["z"], wanted * 2)
    assert result["n"].batch_size == wanted.shape


@pytest.mark.parametrize("stack_dim", range(3))
@pytest.mark.parametrize("in_dim", range(3))
def test_vmap_over_lazy_stack_keeps_stack_dim(in_dim: int, stack_dim: int) -> None:
    stack = lazy_stack([TensorDict({"x": torch.rand(3, 4)}, batch_size=[3, 4]) for _ in range(2)], stack_dim)
    result = vmap(lambda data: data, (in_dim,))(stack)
    order = [in_dim, *[dim for dim in range(3) if dim != in_dim]]
    assert result.stack_dim == order.index(stack_dim)
    assert torch.equal(result["x"], stack["x"].permute(order))


def test_vmap_over_nested_lazy_stacks_returns_lazy_stacks() -> None:
    data = TensorDict({"a": {"in": make_stack()}, "x": torch.ones(2)}, batch_size=[2])
    result = vmap(lambda data: data.set("y", data["x"] + 1))(data)
    assert type(result["a", "in"]) is LazyStackedTensorDict and result["y"].tolist() == [2, 2]
    assert torch.equal(result["a", "in", "x"], make_stack()["x"])
    outer = vmap(lambda data: data)(lazy_stack([make_stack(), make_stack()]))
    assert type(outer[0]) is type(outer) is LazyStackedTensorDict and outer.batch_size == (2, 2, 3)


def test_vmap_returns_lazy_stack_in_each_place_of_the_result() -> None:
    first, x, named = vmap(lambda data, _: (data, data["x"], {"k": data}), (0, 0), (0, 0, {"k": 1}))(
        make_stack(), torch.ones(2)
    )
    assert type(first) is type(named["k"]) is LazyStackedTensorDict and torch.equal(x, make_stack()["x"])
    assert torch.equal(named["k"]["x"], make_stack()["x"].T)
    new = vmap(lambda data: data + 1)(make_stack())
    assert torch.equal(new["x"], make_stack()["x"] + 1)


def test_vmap_over_lazy_stack_in_chunks_and_twice_equals_dense() -> None:
    stack = make_stack(count=5)
    result = vmap(lambda data: data.set("z", data["x"] * 2), chunk_size=2)(stack)
    assert type(result) is LazyStackedTensorDict and torch.equal(result["z"], stack["x"] * 2)
    twice = vmap(vmap(lambda data: data.set("z", data["x"] * 2)))(make_stack())
    assert torch.equal(twice["z"], make_stack()["x"] * 2)


@pytest.mark.parametrize("out_dims", [(0, 0), (1, 0), (0, 1), (1, 1), (-1, -1)])
@pytest.mark.parametrize("stack_dim", range(3))
@pytest.mark.parametrize("in_dims", [(0, 0), (0, 1), (1, 0), (2, 1), (-1, -1)])
def test_vmap_in_vmap_over_lazy_stack_returns_lazy_stack(in_dims: Any, stack_dim: int, out_dims: Any) -> None:
    stack = lazy_stack([TensorDict({"x": torch.rand(3, 4)}, [3, 4]) for _ in range(2)], stack_dim)
    function = vmap(lambda data: data.set("y", data["x"] * 2), (in_dims[1],), out_dims[1])
    result = vmap(function, (in_dims[0],), out_dims[0])(stack)
    wanted = vmap(vmap(lambda x: x, (in_dims[1],), out_dims[1]), (in_dims[0],), out_dims[0])(stack["x"])
    assert type(result) is LazyStackedTensorDict and result.batch_size == wanted.shape
    assert torch.equal(result["x"], wanted) and torch.equal(result["y"], wanted * 2)


def test_vmap_in_vmap_returns_lazy_stacks_in_each_place() -> None:
    data = TensorDict({"n": lazy_stack([make_stack(), make_stack()]), "x": torch.ones(2, 2)}, [2, 2])
    thrice = vmap(vmap(vmap(lambda data: data)))(data["n"])
    assert type(thrice) is type(thrice[0]) is LazyStackedTensorDict
    pair, x = vmap(lambda data, x: vmap(lambda data, x: (data, x + 1))(data, x))(data, data["x"])
    assert type(pair["n"]) is LazyStackedTensorDict and torch.equal(pair["n", "x"], data["n", "x"])
    assert x.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_vmap_over_collection_without_entries_maps_batch_size(in_dim: int, chunk_size: int | None) -> None:
    sizes: list[Any] = []

    def fill(data: Any) -> Any:
        sizes.append(data.batch_size)
        return data.set("v", torch.ones(*data.batch_size, 4))

    result = vmap(fill, (in_dim,), chunk_size=chunk_size)(TensorDict(batch_size=[2, 3]))
    size = (2, 3) if in_dim == 0 else (3, 2)
    assert {*sizes} == {size[1:]} and result.batch_size == size and result["v"].shape == (*size, 4)


@pytest.mark.parametrize(("out_dim", "size"), [(0, (2, 3)), (1, (3, 2)), (-1, (3, 2))])
def test_vmap_returning_collection_without_entries_adds_dim(out_dim: int, size: tuple[int, ...]) -> None:
    data = TensorDict({"n": {}}, batch_size=[2, 3], names=["a", "b"])
    result = vmap(lambda data: data, out_dims=out_dim)(data)
    assert result.batch_size == result["n"].batch_size == size
    assert result.names == ([None, "b"] if out_dim == 0 else ["b", None])
    made, x = vmap(lambda x: (TensorDict(batch_size=[4]), x))(torch.ones(5))
    assert made.batch_size == (5, 4) and x.shape == (5,)


def test_vmap_over_collection_without_entries_beside_tensors() -> None:
    result = vmap(lambda data, x: data.set("v", x.expand(data.batch_size)))(
        TensorDict(batch_size=[2, 3]), torch.ones(2)
    )
    assert result.batch_size == (2, 3)
    nested = vmap(lambda tree: tree["d"].set("v", tree["x"]))(
        {"d": TensorDict(batch_size=[2]), "x": torch.ones(2)}
    )
    assert nested["v"].tolist() == [1, 1]
    holder = vmap(lambda data, x: data.set("v", x))(TensorDict(), torch.ones(2))
    assert holder.batch_size == (2,)
    fixed = vmap(lambda data, x: data.set("v", x.expand(3)), (None, 0))(
        TensorDict(batch_size=[3]), torch.ones(2)
    )
    assert fixed["v"].shape == (2, 3)
    with pytest.raises(ValueError, match=r"got sizes \[5, 2\] for the mapped dimension"):
        vmap(lambda data, x: x)(TensorDict(batch_size=[5]), torch.ones(2))


def test_vmap_over_collection_without_entries_maps_random_numbers_and_gradients() -> None:
    drawn = vmap(lambda data: data.set("v", torch.rand(data.batch_size)), randomness="different")(
        TensorDict(batch_size=[2, 3])
    )
    assert drawn["v"].unique().numel() == 6
    same = vmap(lambda data: data.set("v", torch.rand(data.batch_size)), randomness="same")(
        TensorDict(batch_size=[2, 3])
    )
    assert torch.equal(same["v"][0], same["v"][1])
    gradients = vmap(torch.func.grad(lambda x, data: data.set("v", x)["v"] ** 2))(
        torch.ones(2), TensorDict(batch_size=[2])
    )
    assert gradients.tolist() == [2, 2]


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("stacked", [False, True])
def test_vmap_tuple_of_one_out_dim_equals_int(dim: int, stacked: bool, chunk_size: int | None) -> None:
    td = TensorDict({"a": torch.arange(6.0).view(2, 3), "n": {"b": torch.ones(2, 3, 4)}}, batch_size=[2, 3])
    data = lazy_stack([*td.unbind(0)]) if stacked else td
    result = vmap(lambda x: x + 1, out_dims=(dim,), chunk_size=chunk_size)(data)
    expected = vmap(lambda x: x + 1, out_dims=dim, chunk_size=chunk_size)(td)
    assert result.batch_size == expected.batch_size
    assert bool((result == expected).all())


def test_vmap_negative_out_dims_counts_batch_dims():
    td = TensorDict({"a": torch.zeros(4, 3), "n": TensorDict({"b": torch.zeros(4, 3, 2)}, [4, 3])}, [4, 3])
    result = vmap(torch.neg, out_dims=-1)(td)
    assert result.batch_size == (3, 4)
    assert [tuple(leaf.shape) for leaf in result.values(True, True)] == [(3, 4), (3, 4, 2)]
