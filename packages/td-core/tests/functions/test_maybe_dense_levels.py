"""maybe_dense_stack stacks each level densely where its own leaves allow it."""

from __future__ import annotations

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, maybe_dense_stack


def make(size: int = 2, more: str | None = None) -> TensorDict:
    """Build a tree of which one leaf, three levels down, has a given size."""
    last = {"z": torch.full((2, size), float(size))} | ({more: torch.ones(2)} if more else {})
    return TensorDict(
        {
            "a": torch.full((2, 3), float(size)),
            "m": {"q": torch.ones(2)},
            "n": {"b": torch.ones(2), "c": {"e": {}, "d": last}},
        },
        batch_size=[2],
        names=["t"],
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("second", [make(3), make(2, "more")], ids=["shape", "key"])
def test_maybe_dense_stack_makes_only_the_uneven_level_lazy(second, dim):
    result = maybe_dense_stack([make(), second], dim, stack_dim_name="s")
    keys = ["m", "n", ("n", "c"), ("n", "c", "e"), ("n", "c", "d")]
    lazy = [key for key in keys if isinstance(result[key], LazyStackedTensorDict)]
    assert (type(result), lazy) == (TensorDict, [("n", "c", "d")])
    assert torch.equal(result["a"], torch.stack([make()["a"], second["a"]], dim if dim >= 0 else 1))
    names = ["t", "t"]
    names[dim] = "s"
    for node in (result, *map(result.get, keys)):
        assert (node.batch_size, node.names) == ((2, 2), names)
    parts = result.unbind(dim)
    assert [part["n", "c", "d"].keys() for part in parts] == [
        x["n", "c", "d"].keys() for x in (make(), second)
    ]
    assert all(
        (part["n", "c", "d"] == x["n", "c", "d"]).all()
        for part, x in zip(parts, (make(), second), strict=True)
    )


@pytest.mark.parametrize(
    "items",
    [
        [make(), make().exclude("a")],
        [make(), make().set("a", torch.ones(2))],
        [make(), make().set("m", torch.ones(2))],
        [TensorDict(a=torch.ones(1)), TensorDict(a={"b": torch.ones(1)})],
        [TensorDict(a=torch.ones(2), batch_size=[2]), TensorDict(a=torch.ones(3), batch_size=[3])],
        [lazy_stack(list(make())), lazy_stack(list(make(3)))],
    ],
    ids=["keys", "shape", "form", "root form", "batch size", "lazy"],
)
def test_maybe_dense_stack_with_uneven_root_is_lazy(items):
    result = maybe_dense_stack(items)
    assert type(result) is LazyStackedTensorDict
    assert all((one == other).all() for one, other in zip(result.tensordicts, items, strict=True))


def test_maybe_dense_stack_of_params_keeps_uneven_level():
    items = [TensorDictParams(TensorDict(a=torch.ones(2), n={"b": torch.ones(k)})) for k in (1, 2)]
    result = maybe_dense_stack(items)
    assert torch.equal(result["a"], torch.ones(2, 2))
    assert [part["n", "b"].shape for part in result.unbind(0)] == [(1,), (2,)]


def test_maybe_dense_stack_negative_dim_is_that_of_the_root():
    def step(size):
        agents = lazy_stack([TensorDict(x=torch.full((1,), size)), TensorDict(y=torch.ones(2))])
        return TensorDict(
            agents=agents, chat=TensorDict(w=torch.zeros(size), batch_size=[size]), x=torch.ones(3)
        )

    for items in ([step(1), step(2)], [step(1), step(1).exclude("x")]):
        last, first = maybe_dense_stack(items, -1), maybe_dense_stack(items, 0)
        for key in ("agents", "chat"):
            assert last.get(key).stack_dim == first.get(key).stack_dim == 0
            assert last.get(key).batch_size == first.get(key).batch_size
        assert all(last[i]["chat"].batch_size == item["chat"].batch_size for i, item in enumerate(items))
