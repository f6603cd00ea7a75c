"""Dim names under vmap: the mapped dim has no name, the other dims keep their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import vmap

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams

NAMES = ["time", "env", "agent"]


def make_dense_td(size: tuple[int, ...]) -> TensorDict:
    td = TensorDict({"a": torch.rand(*size, 5), "n": {"b": torch.rand(*size)}, "e": {}}, batch_size=size)
    td.names = NAMES
    return td


def make_lazy_factory(dim: int) -> Callable[[tuple[int, ...]], Any]:
    def make(size: tuple[int, ...]) -> Any:
        parts = make_dense_td(size).unbind(dim)
        return LazyStackedTensorDict(*parts, stack_dim=dim, stack_dim_name=NAMES[dim])

    return make


KINDS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "dense": make_dense_td,
    "lazy along 0": make_lazy_factory(0),
    "lazy along 1": make_lazy_factory(1),
    "lazy along 2": make_lazy_factory(2),
    "level only": lambda size: TensorDict({"l": make_dense_td(size)}, size, names=NAMES),
    "lazy level only": lambda size: TensorDict({"l": make_lazy_factory(1)(size)}, size, names=NAMES),
    "params": lambda size: TensorDictParams(make_dense_td(size), no_convert=True),
    "integers": lambda size: make_dense_td(size).int(),
}
#: Sizes that all differ, and sizes that are all equal.
SIZES = [(2, 3, 4), (2, 2, 2)]


def move_name(names: list[str | None], source: int, target: int | None) -> list[str | None]:
    rest = names[:source] + names[source + 1 :]
    return rest if target is None else [*rest[:target], None, *rest[target:]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_vmap_keeps_names_of_other_dims(source: int, target: int, kind: str, size: tuple[int, ...]) -> None:
    td = KINDS[kind](size)
    seen: list[Any] = []

    def double(part: Any) -> Any:
        seen.append(part.names)
        return part * 2

    result = vmap(double, source, target)(td)
    assert seen == [move_name(NAMES, source, None)]
    assert result.names == move_name(NAMES, source, target)
    assert td.names == NAMES
    for level in [result["n"]] if "n" in result.keys() else [result["l"]]:
        assert level.names == result.names


@pytest.mark.parametrize("inner", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("outer", [(0, 0), (1, 1), (2, 0), (0, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["dense", "lazy along 1"])
def test_nested_vmap_keeps_names(kind: str, outer: tuple[int, int], inner: tuple[int, int]) -> None:
    seen: list[Any] = []

    def double(part: Any) -> Any:
        seen.append(part.names)
        return part * 2

    result = vmap(vmap(double, *inner), *outer)(KINDS[kind]((2, 3, 4)))
    within = move_name(NAMES, outer[0], None)
    assert seen == [move_name(within, inner[0], None)]
    within = move_name(within, *inner)
    assert result.names == [*within[: outer[1]], None, *within[outer[1] :]]


#: Functions of a slice with the dims env and agent, and the dim names of their result.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[str | None]]] = {
    "identity": (lambda x: x, ["env", "agent"]),
    "index": (lambda x: x[0], ["agent"]),
    "transpose": (lambda x: x.transpose(0, 1), ["agent", "env"]),
    "unsqueeze": (lambda x: x.unsqueeze(1), ["env", None, "agent"]),
    "sum": (lambda x: x.sum(dim=1), ["env"]),
    "rename": (lambda x: x.rename("x", "y"), ["x", "y"]),
    "stack": (lambda x: torch.stack([x, x]), [None, "env", "agent"]),
    "tree map": (lambda x: torch.utils._pytree.tree_map(torch.sin, x), ["env", "agent"]),
    "no names": (lambda x: x.rename(None, None), [None, None]),
}


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_result_of_function_has_expected_names(name: str, target: int) -> None:
    function, names = FUNCTIONS[name]
    result = vmap(function, 0, target)(make_dense_td((2, 3, 4)))
    assert result.names == [*names[:target], None, *names[target:]]


def test_vmap_constant_result_keeps_names() -> None:
    constant = make_dense_td((2, 3, 4))
    assert vmap(lambda x: constant)(torch.zeros(6)).names == [None, "time", "env", "agent"]


def test_vmap_unmapped_argument_keeps_names() -> None:
    seen = []
    td = make_dense_td((2, 3, 4))

    def add(x: Any, y: Any) -> Any:
        seen.append((x.names, y.names))
        return x + y

    assert vmap(add, (0, None))(td, td[0]).names == [None, "env", "agent"]
    assert seen == [(["env", "agent"], ["env", "agent"])]


def test_vmap_ambiguous_dims_of_size_one_drops_names() -> None:
    td = TensorDict({"a": torch.ones(1, 1, 3, 5)}, batch_size=[1, 1, 3], names=NAMES)
    assert vmap(lambda x: x * 2)(td).names in ([None, "env", "agent"], [None, None, "agent"])


def test_grad_inside_vmap_keeps_names() -> None:
    result = vmap(torch.func.grad(lambda x: x["a"].sum()))(make_dense_td((2, 3, 4)).select("a"))
    assert result.names == [None, "env", "agent"]


def test_compile_vmap_of_named_dims_equals_torch() -> None:
    td = make_dense_td((2, 3, 4)).select("a")
    result = torch.compile(lambda x: vmap(lambda y: y * 2, 1)(x), backend="eager", fullgraph=True)(td)
    assert torch.equal(result["a"], td["a"].transpose(0, 1) * 2)
