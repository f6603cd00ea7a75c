"""Copies, gradients as collections, and new collections of the same structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    from_modules,
    lazy_stack,
)
from td_core.errors import KeyMismatchError, StructureError


@pytest.fixture(params=["nested", "lazy", "nested lazy"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


def test_clone_locked_td_copies_leaves_and_is_unlocked(td: TensorDict, assert_leaves_equal: Any) -> None:
    result = td.lock_().clone()
    assert_leaves_equal(result, dict(td.items(True, True)))
    assert type(result) is type(td)
    assert not result.is_locked
    pointers = {leaf.data_ptr() for leaf in td._leaves()}
    assert all(leaf.data_ptr() not in pointers for leaf in result._leaves())


@pytest.mark.parametrize("call", [lambda td: td.clone(recurse=False), lambda td: td.copy()])
def test_clone_recurse_false_shares_leaves_but_not_nodes(call: object, td: TensorDict) -> None:
    result = call(td.lock_())
    assert not result.is_locked
    assert all(new is old for new, old in zip(result._leaves(), td._leaves(), strict=True))
    result["new"] = torch.zeros(2, 3)
    assert "new" not in td


def test_clone_memory_format_applies_to_leaves() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4, 5)})
    result = td.clone(memory_format=torch.channels_last)
    assert result["a"].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(TypeError, match="copies no leaf, so it takes no memory_format"):
        td.clone(recurse=False, memory_format=torch.channels_last)


def test_detach_and_data_share_memory_with_source(td: TensorDict) -> None:
    td.requires_grad_()
    for result in (td.detach(), td.data):
        assert not result.requires_grad
        assert [leaf.data_ptr() for leaf in result._leaves()] == [leaf.data_ptr() for leaf in td._leaves()]
    assert td.requires_grad
    assert td.detach_() is td
    assert not td.requires_grad


def test_requires_grad_sets_all_leaves(td: TensorDict) -> None:
    assert td.requires_grad is False
    assert td.requires_grad_() is td
    assert all(leaf.requires_grad for leaf in td._leaves())
    td.requires_grad = False
    assert td.requires_grad is False


def test_requires_grad_integer_leaf_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1, dtype=torch.int64)}})
    with pytest.raises(
        RuntimeError, match=r"cannot require gradients: key \('n', 'b'\) has dtype torch.int64"
    ):
        td.requires_grad_()
    assert not td.requires_grad


def make_normalised() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    "td",
    [
        TensorDict.from_module(make_normalised()),
        TensorDict.from_module(make_normalised(), as_module=True),
        from_modules(make_normalised(), make_normalised(), as_module=True),
    ],
    ids=["plain", "params", "stacked"],
)
def test_requires_grad_leaves_out_buffers(td: Any) -> None:
    td.requires_grad_(False)
    assert not td.requires_grad
    td.requires_grad_()
    required = {key[-1] for key, leaf in td.items(True, True) if leaf.requires_grad}
    assert required == {"weight", "bias"}
    with pytest.raises(
        RuntimeError, match=r"exclude\(\) the key, or take from_modules\(..., as_module=True\)"
    ):
        td.data.requires_grad_()


def test_requires_grad_impossible_leaf_changes_nothing() -> None:
    with torch.inference_mode():
        sealed = torch.zeros(1)
    td = TensorDict({"a": torch.zeros(1), "b": sealed})
    with pytest.raises(
        RuntimeError, match="cannot require gradients: key 'b' was made under torch.inference_mode"
    ):
        td.requires_grad_()
    assert not td.requires_grad
    first = torch.zeros(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot stop to record gradients: key 'b' was computed from"):
        TensorDict({"a": first, "b": first * 2}).requires_grad_(False)
    assert first.requires_grad


def test_grad_equals_torch_and_zero_grad_removes_it(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    assert td.grad is None
    (td * td).sum(reduce=True).backward()
    assert_leaves_equal(td.grad, {key: 2 * leaf.detach() for key, leaf in td.items(True, True)})
    assert td.zero_grad(set_to_none=False) is td
    assert (td.grad == 0).all()
    td.zero_grad()
    assert td.grad is None


def test_grad_contains_only_leaves_with_gradient(assert_leaves_equal: Any) -> None:
    td = TensorDict({"a": torch.ones(2, requires_grad=True), "n": {"b": torch.ones(2, requires_grad=True)}})
    td["n", "b"].sum().backward()
    assert_leaves_equal(td.grad, {("n", "b"): torch.ones(2)})
    td["a"].grad = torch.ones_like(td["a"])
    td["empty"] = {}
    assert list(td.grad.keys(True)) == [
        "a",
        "n",
        ("n", "b"),
    ]  # a collection without leaves has no gradient


def test_set_grad_copies_into_existing_gradients(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    first, second = td.detach() * 2, td.detach() * 3
    td.grad = first
    assert_leaves_equal(td.grad, dict(first.items(True, True)))
    kept = [leaf.grad for leaf in td._leaves()]
    td.grad = second
    assert_leaves_equal(td.grad, dict(second.items(True, True)))
    assert all(leaf.grad is one for leaf, one in zip(td._leaves(), kept, strict=True))
    td.grad = None
    assert td.grad is None


def test_set_data_shares_memory_of_value(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    other = td.detach() * 2
    td.data = other
    assert_leaves_equal(td.detach(), dict(other.items(True, True)))
    assert td.requires_grad
    other.zero_()
    assert not td.any()


@pytest.mark.parametrize("name", ["data", "grad"])
def test_set_data_or_grad_mismatch_changes_nothing(name: str) -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}})
    for other, error, message in [
        (
            TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(4)}}),
            StructureError,
            r"'b'\) has shape \[3\].*\[4\]",
        ),
        (TensorDict({"a": torch.zeros(2), "n": {"c": torch.zeros(3)}}), KeyError, "'c'"),
        ({"a": torch.zeros(2)}, TypeError, f"{name} is a collection of the same structure; got dict"),
    ]:
        with pytest.raises(error, match=message):
            setattr(td, name, other)
        assert td.all() and td.grad is None
    setattr(td, name, TensorDict({"n": {"b": torch.zeros(3)}}))
    assert td["a"].all() and td["a"].grad is None
    assert not getattr(td, name)["n", "b"].any()


def test_backward_equals_torch() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    td = TensorDict({"a": x * 2, "n": {"b": x * x, "c": torch.ones(2)}}, [2])
    gradient = TensorDict({"n": {"c": torch.ones(2), "b": torch.ones(2)}, "a": torch.full((2,), 10.0)}, [2])
    td.backward(gradient, retain_graph=True)
    torch.testing.assert_close(x.grad, 20 + 2 * x.detach())
    y = torch.ones((), requires_grad=True)
    losses = TensorDict({"a": y * x.sum(), "b": y})
    losses.backward(inputs=TensorDict({"y": y}))
    assert y.grad == 4
    torch.testing.assert_close(x.grad, 20 + 2 * x.detach())


@pytest.mark.parametrize("stacked", [False, True])
def test_backward_gradient_for_tracked_leaves_is_enough(stacked: bool) -> None:
    x = torch.ones(3, requires_grad=True)

    def make(rows: int) -> TensorDict:
        return TensorDict(
            {"a": x[:rows] * 2, "b": torch.ones(rows), "n": {"c": x[:rows] * 3, "d": torch.ones(2)}}
        )

    tracked = {rows: TensorDict({"n": {"c": torch.ones(rows)}, "a": torch.ones(rows)}) for rows in (2, 3)}
    td = lazy_stack([make(2), make(3)]) if stacked else make(3)
    gradient = lazy_stack([tracked[2], tracked[3]]) if stacked else tracked[3]
    td.backward(gradient)
    assert x.grad is not None and x.grad.tolist() == ([10.0, 10.0, 5.0] if stacked else [5.0] * 3)


def test_backward_incomplete_gradient_raises() -> None:
    x = torch.ones(3, requires_grad=True)
    td = TensorDict({"a": x * 2, "n": {"b": x * 3}})
    with pytest.raises(TypeError, match=r"^backward: gradient is a collection; got Tensor$"):
        td.backward(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(KeyMismatchError, match=r"missing keys \['n'\]"):
        td.backward(TensorDict({"a": torch.ones(3)}))
    assert x.grad is None


def test_backward_bad_gradient_raises() -> None:
    td = TensorDict({"n": {"a": torch.ones(2, requires_grad=True)}})
    with pytest.raises(RuntimeError, match=r"backward: key \('n', 'a'\) has shape \[2\].*give gradient="):
        td.backward()
    with pytest.raises(RuntimeError, match="backward: no leaf of this TensorDict requires gradients"):
        td.detach().backward()
    with pytest.raises(StructureError, match="missing keys"):
        td.backward(TensorDict({"n": {}}))


class Marked(Tensor):
    pass


def test_as_tensor_converts_subclass_leaves() -> None:
    marked = torch.zeros(2).as_subclass(Marked)
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    td = TensorDict({"a": marked, "p": nn.Parameter(torch.zeros(2)), "j": jagged})
    result = td.as_tensor()
    assert type(result["a"]) is Tensor
    assert result["a"].data_ptr() == marked.data_ptr()
    assert result["p"] is td["p"]
    assert result["j"] is td["j"]


NEW = {
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_empty": torch.empty,
}


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("size", [(4,), ((4, 5),), (4, 5), ([4],), ()], ids=str)
def test_new_methods_return_size_and_values(name: str, size: tuple[object, ...], td: TensorDict) -> None:
    batch = tuple(size[0]) if size and not isinstance(size[0], int) else size
    result = getattr(td, name)(*size)
    assert result.batch_size == batch
    assert list(result.keys(True, True)) == list(td.keys(True, True))
    for key, leaf in result.items(True, True):
        assert leaf.shape == (*batch, *td[key].shape[2:])
        assert leaf.dtype == td[key].dtype
        if name != "new_empty":
            assert torch.equal(leaf, NEW[name](leaf.shape))


def test_new_full_returns_fill_value(td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(
        td.new_full((2,), 7),
        {key: torch.full((2, *leaf.shape[2:]), 7.0) for key, leaf in td.items(True, True)},
    )
    assert_leaves_equal(
        td.new_full(2, 7, dtype=torch.int8),
        {key: leaf.to(torch.int8) for key, leaf in td.new_full((2,), 7).items(True, True)},
    )


def test_new_zeros_options_apply_to_leaves() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2], names=["x"])
    result = td.new_zeros(4, dtype=torch.float64, device="meta", requires_grad=True)
    leaf = result["a"]
    assert (leaf.dtype, leaf.device, leaf.requires_grad) == (torch.float64, torch.device("meta"), True)
    assert result.device == torch.device("meta")
    assert result.names == ["x"]
    assert td.new_zeros(4).device is None
    assert td.to("cpu").new_zeros(4).device == torch.device("cpu")
    assert td.to("cpu").new_zeros(4, device=None).device is None


def test_new_zeros_empty_lazy_returns_lazy_stack(make_collection: Any) -> None:
    lazy = make_collection("lazy")
    result = lazy.new_zeros(4, 5, empty_lazy=True)
    assert type(result) is LazyStackedTensorDict
    assert result.batch_size == (4, 5)
    assert list(result.keys(include_nested=True)) == ["n", ("n", "m")]
    assert type(lazy.new_zeros(4, 5)) is TensorDict


def test_new_tensor_copies_data_to_every_leaf(td: TensorDict, assert_leaves_equal: Any) -> None:
    result = td.int().new_tensor([1.0, 2.0])
    assert result.batch_size == (2,)
    assert_leaves_equal(
        result, dict.fromkeys(dict(td.items(True, True)), torch.tensor([1, 2], dtype=torch.int32))
    )
    assert result.device == torch.device("cpu")
    copied = td.new_tensor(td.double())
    assert_leaves_equal(copied, dict(td.items(True, True)))
    assert copied._leaves()[0].data_ptr() != td._leaves()[0].data_ptr()
    other = td.new_tensor(torch.zeros(3), dtype=torch.float64, device="meta", requires_grad=True)
    assert all((leaf.dtype, leaf.requires_grad) == (torch.float64, True) for leaf in other._leaves())
    assert other.device == torch.device("meta")
    with pytest.raises(StructureError, match="missing keys"):
        td.new_tensor(TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))


def test_casts_compile_fullgraph(make_nested: Any, assert_leaves_equal: Any) -> None:
    def program(td: TensorDict) -> TensorDict:
        return td.to(torch.float64).clone().detach().to("cpu").float().data.new_zeros(4)

    td = make_nested()
    assert_leaves_equal(
        torch.compile(program, fullgraph=True, backend="eager")(td), dict(program(td).items(True, True))
    )


def test_casts_under_vmap_equal_eager(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    assert_leaves_equal(
        torch.func.vmap(lambda td: td.double().clone())(td), dict(td.double().items(True, True))
    )
    assert_leaves_equal(
        torch.func.vmap(lambda td: td.new_tensor(td * 2))(td), dict((td * 2).items(True, True))
    )


def make_dense(**more: Any) -> TensorDict:
    return TensorDict({"w": torch.arange(4.0), "n": {"v": torch.ones(4, 2)}, **more}, batch_size=[4])


def make_uneven() -> Any:
    """Return a lazy stack whose members differ in shapes and keys."""
    return lazy_stack(
        [TensorDict({"w": torch.ones(2)}), TensorDict({"w": torch.ones(3), "z": torch.ones(1)})]
    )


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_dense,
    "empty node": lambda: make_dense(empty={}, deep={"empty": {}}),
    "lazy": lambda: lazy_stack(make_dense().unbind(0)),
    "uneven": make_uneven,
    "nested stack": lambda: TensorDict({"in": make_uneven()}, batch_size=[2]),
    "params": lambda: TensorDictParams(make_dense(empty={})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_and_grad_of_collection_equal_torch(kind: str) -> None:
    weights = KINDS[kind]().requires_grad_()
    outputs = weights * 3
    ones = outputs.apply(torch.ones_like, filter_empty=True)
    outputs.backward(ones, retain_graph=True)
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 3.0)) for leaf in weights._leaves())
    result = torch.autograd.grad(outputs, weights, ones)
    assert all(torch.equal(leaf, torch.full_like(leaf, 3.0)) for leaf in result._leaves())
    weights.grad = weights.grad * 2
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 6.0)) for leaf in weights._leaves())


def test_backward_lazy_stack_and_dense_gradient_equals_torch() -> None:
    stack, dense = lazy_stack([TensorDict({"w": torch.ones(3)}) for _ in range(2)]), torch.ones(2, 3)
    for weights, gradient in (
        (stack.clone(), TensorDict({"w": dense}, batch_size=[2])),
        (TensorDict({"w": dense.clone()}, batch_size=[2]), stack),
    ):
        (weights.requires_grad_() * 2).backward(gradient)
        assert torch.equal(weights.grad["w"], dense * 2)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (TensorDict({"w": torch.ones(4)}), KeyMismatchError, r"at the root: missing keys \['n'\]"),
        (TensorDict({"w": torch.ones(4), "n": {}}), KeyMismatchError, r"at key 'n': missing keys \['v'\]"),
        (
            TensorDict({"w": torch.ones(4), "n": torch.ones(4)}),
            StructureError,
            r"at key 'n': a TensorDict there",
        ),
        (
            TensorDict({"w": {"x": torch.ones(4)}, "n": {"v": torch.ones(4, 2)}}),
            StructureError,
            r"at key 'w'",
        ),
    ],
)
def test_backward_gradient_without_a_needed_leaf_raises(
    gradient: TensorDict, error: type[Exception], message: str
) -> None:
    weights = make_dense().requires_grad_()
    with pytest.raises(error, match=message):
        (weights * 2).backward(gradient)
    with pytest.raises(error, match=message):
        torch.autograd.grad(weights * 2, weights, gradient)
    assert weights.grad is None


def test_backward_gradient_of_other_member_count_raises() -> None:
    weights = make_uneven().requires_grad_()
    with pytest.raises(
        StructureError, match=r"a lazy stack of 2 members along dim 0 there, batch size \[3\] here"
    ):
        (weights * 2).backward(lazy_stack([TensorDict({"w": torch.ones(2)})] * 3))


def test_grad_of_outputs_with_an_integer_leaf_leaves_it_out() -> None:
    x = torch.ones(4, requires_grad=True)
    outputs = TensorDict({"a": x * 2, "index": torch.arange(4)}, batch_size=[4])
    for gradient in (TensorDict({"a": torch.ones(4)}), torch.ones_like(outputs)):
        (result,) = torch.autograd.grad(outputs, x, gradient, retain_graph=True)
        assert result.tolist() == [2.0] * 4


def make_stack(dim: int = 1) -> Any:
    return lazy_stack(
        [TensorDict({"x": torch.ones(1), "n": {"y": torch.ones(1)}}, [1]) for _ in range(10)], dim
    )


EMPTY_LAZY = {
    "new_zeros": lambda td, size: td.new_zeros(size, empty_lazy=True),
    "new_ones": lambda td, size: td.new_ones(*size, empty_lazy=True),
    "new_empty": lambda td, size: td.new_empty(size, empty_lazy=True),
    "new_full": lambda td, size: td.new_full(size, 3.0, empty_lazy=True),
}


@pytest.mark.parametrize("size", [(10, 1), (1, 10, 1), (1, 100, 1), (4,)])
@pytest.mark.parametrize("name", EMPTY_LAZY)
def test_new_empty_lazy_nested_stack_is_empty_stack(name: str, size: tuple[int, ...]) -> None:
    td = TensorDict(
        {"s": make_stack(), "n": {"s": make_stack(), "a": torch.ones(1, 10)}, "a": torch.ones(1, 10)}, [1, 10]
    )
    result = EMPTY_LAZY[name](td, size)
    assert list(result.keys()) == ["s", "n", "a"] and result.batch_size == size
    assert result["a"].shape == size and result["n", "a"].shape == size
    for key in ("s", ("n", "s")):
        stack = result.get(key)
        assert isinstance(stack, LazyStackedTensorDict) and stack.is_empty() and stack.batch_size == size
        assert stack.stack_dim == min(1, len(size) - 1)
    result["s"].tensordicts[0]["new"] = torch.ones(result["s"].tensordicts[0].batch_size)
    assert type(td.get("s")) is LazyStackedTensorDict and not td.get("s").is_empty(), "the source stays"
    assert not EMPTY_LAZY[name](td, size).get("s").get("n").keys()


def test_new_empty_lazy_node_with_more_batch_dims_keeps_them() -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]) for _ in range(3)], 1)
    result = TensorDict({"s": stack}, [2]).new_zeros(5, empty_lazy=True)
    assert result.get("s").batch_size == (5, 3) and result.get("s").is_empty()
    assert len(result.get("s").tensordicts) == 3


def test_new_zeros_empty_lazy_keeps_nested_stack_empty() -> None:
    members = [
        TensorDict({"s": lazy_stack([TensorDict({"x": 1}), TensorDict({"x": 2})])}, [2]) for _ in range(3)
    ]
    result = lazy_stack(members).new_zeros(4, 5, empty_lazy=True)
    inner = result.tensordicts[0].get("s")
    assert type(inner) is LazyStackedTensorDict and inner.batch_size == (5,) and inner.is_empty()


def test_new_zeros_without_empty_lazy_has_leaves() -> None:
    td = TensorDict({"s": make_stack()}, [1, 10])
    assert td.new_zeros(3, 2)["s", "x"].shape == (3, 2)
