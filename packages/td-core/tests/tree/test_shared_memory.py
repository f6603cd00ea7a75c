"""In-place operations on leaves that share memory: the memory is changed once, as for a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._tree.shared_memory import (
    are_apart,
    group_overlapping,
    identify_view,
    is_same_view,
    may_share_memory,
)
from td_core.errors import StructureError


def make_leaf() -> Tensor:
    return torch.tensor([[0.5, -0.25, 2.0], [1.0, 0.75, -3.0]])


def make_repeated_node(x: Tensor) -> TensorDict:
    level = TensorDict({"a": x}, [2])
    return TensorDict({"n": level, "m": level}, [2])


def make_repeated_member(x: Tensor) -> Any:
    member = TensorDict({"a": x}, [2])
    return LazyStackedTensorDict(member, member)


def make_ragged(x: Tensor) -> TensorDict:
    leaf = torch.nested.nested_tensor_from_jagged(x.view(-1), torch.tensor([0, 2, 6]))
    return TensorDict({"a": leaf, "b": leaf.detach()}, [2])


#: Functions that build a collection whose leaves are views of one tensor.
SHARING: dict[str, Callable[[Tensor], Any]] = {
    "two keys": lambda x: TensorDict({"a": x, "n": {"b": x}}, [2]),
    "three keys": lambda x: TensorDict({"a": x, "b": x, "c": x}, [2]),
    "data": lambda x: TensorDict({"a": x, "n": {"b": x.data}}, [2]),
    "detach": lambda x: TensorDict({"a": x.detach(), "b": x.detach()}, [2]),
    "slice of all": lambda x: TensorDict({"a": x, "b": x[:]}, [2]),
    "other shape": lambda x: TensorDict({"a": x, "b": x.view(2, 3, 1)}, [2]),
    "other order": lambda x: TensorDict({"a": x, "b": x.T}, []),
    "rows too": lambda x: TensorDict({"a": x, "b": x[0], "c": x[1]}, []),
    "overlapping rows": lambda x: TensorDict({"a": x.view(-1)[:4], "b": x.view(-1)[2:]}, []),
    "columns": lambda x: TensorDict({"a": x[:, :1], "b": x[:, 1:]}, [2]),
    "repeated node": make_repeated_node,
    "repeated member": make_repeated_member,
    "views in members": lambda x: LazyStackedTensorDict(TensorDict({"a": x}), TensorDict({"a": x.data})),
    "parameters": lambda x: TensorDictParams(TensorDict({"a": nn.Parameter(x), "b": nn.Parameter(x.data)})),
    "one parameter": lambda x: (lambda p: TensorDictParams(TensorDict({"a": p, "b": p})))(nn.Parameter(x)),
    "ragged": make_ragged,
}

#: An operation on the collection, and the same operation on the plain tensor.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "neg_": (lambda td: td.neg_(), Tensor.neg_),
    "exp_": (lambda td: td.exp_(), Tensor.exp_),
    "sigmoid_": (lambda td: td.sigmoid_(), Tensor.sigmoid_),
    "mul_ number": (lambda td: td.mul_(0.5), lambda x: x.mul_(0.5)),
    "mul_ 0-dim": (lambda td: td.mul_(torch.tensor(0.5)), lambda x: x.mul_(0.5)),
    "iadd": (lambda td: td.__iadd__(3), lambda x: x.add_(3)),
    "isub": (lambda td: td.__isub__(3), lambda x: x.sub_(3)),
    "imul": (lambda td: td.__imul__(3), lambda x: x.mul_(3)),
    "itruediv": (lambda td: td.__itruediv__(3), lambda x: x.div_(3)),
    "ipow": (lambda td: td.__ipow__(2), lambda x: x.pow_(2)),
    "add_ alpha": (lambda td: td.add_(2, alpha=3), lambda x: x.add_(6)),
    "add_ itself": (lambda td: td.add_(td), lambda x: x.add_(x)),
    "add_ copy": (lambda td: td.add_(td.clone()), lambda x: x.add_(x.clone())),
    "sub_ alpha copy": (lambda td: td.sub_(td.clone(), alpha=0.25), lambda x: x.mul_(0.75)),
    "div_ computed": (lambda td: td.div_(td * 0 + 4), lambda x: x.div_(4)),
    "lerp_": (lambda td: td.lerp_(td * 0, 0.1), lambda x: x.lerp_(x * 0, 0.1)),
    "addcmul_": (lambda td: td.addcmul_(td.clone(), td.clone(), value=2), lambda x: x.addcmul_(x, x, value=2)),
    "addcdiv_": (lambda td: td.addcdiv_(td.clone(), td * 0 + 2), lambda x: x.addcdiv_(x.clone(), x * 0 + 2)),
    "clamp_max_": (lambda td: td.clamp_max_(0.6), lambda x: x.clamp_max_(0.6)),
    "maximum_": (lambda td: td.maximum_(0.6), lambda x: x.clamp_min_(0.6)),
    "zero_": (lambda td: td.zero_(), Tensor.zero_),
    "copy_": (lambda td: td.copy_(td * 2), lambda x: x.mul_(2)),
    "update_": (lambda td: td.update_(td * 2), lambda x: x.mul_(2)),
    "apply_": (lambda td: td.apply_(lambda x: x * 2), lambda x: x.mul_(2)),
    "apply_ in place": (lambda td: td.apply_(lambda x: x.mul_(2)), lambda x: x.mul_(2)),
    "apply inplace": (lambda td: td.apply(lambda x: x + 1, inplace=True), lambda x: x.add_(1)),
    "named_apply": (lambda td: td.named_apply(lambda k, x: x + 1, inplace=True), lambda x: x.add_(1)),
    "apply_ of two": (lambda td: td.apply_(lambda x, y: x + y, td.clone()), lambda x: x.mul_(2)),
}  # fmt: skip

#: ``apply_`` calls a function that writes in place once per partly overlapping view, so the memory changes more than once.
#: torch does not support some of the operations for jagged tensors.
EXCLUDED = {
    *((kind, "apply_ in place") for kind in ("rows too", "overlapping rows")),
    *(("ragged", change) for change in ("lerp_", "addcmul_", "addcdiv_", "div_ computed")),
}
CASES = [(kind, change) for kind in SHARING for change in CHANGES if (kind, change) not in EXCLUDED]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_inplace_shared_leaves_changes_memory_once(kind: str, change: str) -> None:
    x, expected = make_leaf(), make_leaf()
    on_collection, on_tensor = CHANGES[change]
    with torch.no_grad():
        on_collection(SHARING[kind](x))
    torch.testing.assert_close(x, on_tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "kind", ["two keys", "data", "repeated node", "repeated member", "other shape", "overlapping rows"]
)
@pytest.mark.parametrize("leaves", [1, 12])
def test_mul_inplace_repeated_calls_change_memory_once(kind: str, leaves: int) -> None:
    # Repeat: the second call reads the metadata cache. Twelve leaves: a fused call handles them at once.
    for _ in range(4):
        apart = {f"k{i}": torch.ones(2, 3) for i in range(leaves)}
        TensorDict({**apart, "n": TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3)})}).mul_(2)
        x = make_leaf()
        td = TensorDict({**apart, "n": SHARING[kind](x)})
        td.mul_(2)
        assert torch.equal(x, make_leaf() * 2)
        assert all(leaf.eq(4).all() for leaf in apart.values())


DIFFERING: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda td, other: td.add_(other),
    "mul_": lambda td, other: td.mul_(other),
    "isub": lambda td, other: td.__isub__(other),
    "lerp_": lambda td, other: td.lerp_(other, 0.5),
    "addcmul_": lambda td, other: td.addcmul_(td.clone(), other),
    "apply_": lambda td, other: td.apply_(lambda x, y: x + y, other),
}


ONE_VIEW = ["two keys", "data", "repeated node", "repeated member"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, change) for kind in ONE_VIEW for change in DIFFERING),
        *((kind, "add_") for kind in ("other shape", "overlapping rows", "other order")),
        *((kind, "lerp_") for kind in ("other shape", "overlapping rows", "other order")),
    ],
)
def test_inplace_shared_leaves_different_operands_raises(kind: str, change: str) -> None:
    x = make_leaf()
    td = SHARING[kind](x)
    td = TensorDict({"first": torch.ones(2), "n": td})
    count = iter(range(2, 20))
    other = td.apply(lambda leaf: torch.full_like(leaf, float(next(count))))
    with pytest.raises(
        StructureError,
        match="(are one tensor, and have operands that differ|overlap in memory|beside the two differs)",
    ):
        DIFFERING[change](td, other)
    assert torch.equal(x, make_leaf()), "nothing was written"
    assert torch.equal(td["first"], torch.ones(2)), "nothing was written"


def test_add_inplace_different_operands_error_names_both_keys() -> None:
    x = make_leaf()
    td = TensorDict({"a": x, "n": {"b": x.data}})
    with pytest.raises(
        StructureError,
        match=r"cannot compute add_ in place: key 'a' and key \('n', 'b'\) are one tensor, and have operands that differ; "
        r"give them equal ones, or exclude\(\) all keys but one",
    ):
        td.add_(TensorDict({"a": x * 0, "n": {"b": x * 0 + 1}}))


def test_add_inplace_nan_operands_count_as_equal() -> None:
    x = torch.zeros(2)
    nan = torch.tensor([float("nan"), 1.0])
    TensorDict({"a": x, "b": x}).add_(TensorDict({"a": nan, "b": nan.clone()}))
    assert torch.equal(x.isnan(), torch.tensor([True, False])) and x[1] == 1


def test_add_inplace_tensor_to_repeated_member_raises() -> None:
    member = TensorDict({"a": torch.zeros(3)})
    stack = LazyStackedTensorDict(member, member)
    with pytest.raises(StructureError, match="key 'a' are one tensor"):
        stack.add_(torch.tensor([1.0, 2.0]))
    assert torch.equal(member["a"], torch.zeros(3))
    stack.add_(torch.tensor([2.0, 2.0]))
    assert torch.equal(member["a"], torch.full((3,), 2.0))


def test_update_inplace_shared_leaves_keeps_last_value() -> None:
    x = torch.zeros(2)
    TensorDict({"a": x, "b": x}).update_({"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    assert torch.equal(x, torch.full((2,), 2.0))


def test_named_apply_inplace_shared_leaf_called_for_first_key() -> None:
    x, seen = torch.zeros(2), []
    td = TensorDict({"a": x, "n": {"b": x.data}, "c": torch.zeros(2)})
    td.named_apply(lambda key, leaf: seen.append(key), nested_keys=True, inplace=True)
    assert seen == ["a", "c"]


def test_apply_call_on_nested_repeated_node_called_once() -> None:
    x = make_leaf()
    make_repeated_node(x).apply(lambda level: level.mul_(2), call_on_nested=True, inplace=True)
    assert torch.equal(x, make_leaf() * 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        nn.init.ones_(self.embed.weight)


@pytest.mark.parametrize(
    "read",
    [
        lambda net: TensorDict.from_module(net).data,
        lambda net: TensorDict.from_module(net).detach(),
        lambda net: TensorDictParams(TensorDict.from_module(net)).data,
        lambda net: TensorDict.from_modules(net, lazy_stack=True).data,
    ],
)
def test_lerp_inplace_tied_weights_moves_one_step(read: Callable[[Any], Any]) -> None:
    net, source = Tied(), Tied()
    nn.init.zeros_(source.embed.weight)
    read(net).lerp_(read(source), 0.1)
    torch.testing.assert_close(net.embed.weight.data, torch.full((4, 3), 0.9))


def test_data_of_tied_weights_keeps_one_tensor() -> None:
    data = TensorDict.from_module(Tied()).data
    assert data["embed", "weight"] is data["head", "weight"]


def test_mul_inplace_shared_leaves_gradient_counts_once() -> None:
    x = make_leaf().requires_grad_()
    y = x * 1
    td = TensorDict({"a": y, "b": y, "part": y[:1]})
    td.mul_(3)
    td["b"].sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_inplace_under_vmap_changes_memory_once() -> None:
    x = make_leaf()
    td = TensorDict({"a": x, "b": x.data}, [2])
    torch.vmap(lambda row: row.mul_(2).add_(row.clone()).apply_(lambda leaf: leaf.mul_(2)))(td)
    assert torch.equal(x, make_leaf() * 8)
    with pytest.raises(StructureError, match="operands that differ"):
        torch.vmap(lambda row: row.add_(TensorDict({"a": row["a"] * 2, "b": row["b"] * 3})))(td)


def test_inplace_under_grad_changes_memory_once() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        return TensorDict({"a": y, "b": y}).mul_(3)["a"].sum()

    assert torch.equal(torch.func.grad(loss)(make_leaf()), torch.full((2, 3), 3.0))


def test_inplace_shared_meta_leaves_succeeds() -> None:
    x = torch.zeros(2, 3, device="meta")
    td = TensorDict({"a": x, "b": x[:], "c": x[0]})
    assert td.mul_(2).add_(td.clone())["a"].is_meta


def test_may_share_memory_distinct_storages_is_false() -> None:
    assert not may_share_memory([torch.zeros(2), torch.zeros(2), torch.zeros(0)])
    assert may_share_memory([torch.zeros(2), torch.zeros(2).to_sparse()]), "torch does not tell"


@pytest.mark.parametrize(
    ("cut", "groups"),
    [
        (lambda x: [x[0], x[1], x[2:]], []),
        (lambda x: [x[:2], x[1:]], [[0, 1]]),
        (lambda x: [x[..., :2], x[..., 2:]], []),
        (lambda x: [x[:, :1], x[:, 1:3], x[:, 3:]], []),
        (lambda x: [x[:, :2], x[:, 1:]], [[0, 1]]),
        (lambda x: [x[:2, :, 0], x[1:, :, 1]], []),
        (lambda x: [x[:0], x], []),
        (lambda x: [x[3], x, torch.zeros(2), x[4]], [[0, 1, 3]]),
        (lambda x: [x.view(torch.int32)[0], x[0]], [[0, 1]]),
        (lambda x: [x.view(torch.complex64).real, x.view(torch.complex64).imag], []),
    ],
)
def test_group_overlapping_returns_groups(
    cut: Callable[[Tensor], list[Tensor]], groups: list[list[int]]
) -> None:
    assert group_overlapping(cut(torch.zeros(5, 4, 6))) == groups


def test_is_same_view_conjugate_returns_false() -> None:
    z = torch.zeros(2, dtype=torch.complex64)
    assert is_same_view(z, z.data) and not is_same_view(z, z.conj())


COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "two keys": SHARING["two keys"],
    "repeated node": make_repeated_node,
    "repeated member": make_repeated_member,
    "data taken before": lambda x: TensorDict({"a": x, "b": x}, [2]).data,
}


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize(
    "change",
    ["neg_", "mul_ number", "iadd", "add_ copy", "lerp_", "apply_", "apply_ in place", "apply_ of two"],
)
def test_compile_inplace_changes_memory_once(kind: str, change: str) -> None:
    torch.compiler.reset()
    x, expected = make_leaf(), make_leaf()
    on_collection, on_tensor = CHANGES[change]

    @torch.compile(fullgraph=True, backend="eager")
    def step(td: Any) -> None:
        on_collection(td)

    step(COMPILED[kind](x))
    torch.testing.assert_close(x, on_tensor(expected))
    y = make_leaf()
    step(COMPILED[kind](y))
    torch.testing.assert_close(y, expected)


def test_compile_lerp_inplace_tied_weights_moves_one_step() -> None:
    torch.compiler.reset()
    net = Tied()

    @torch.compile(fullgraph=True, backend="eager")
    def step(net: nn.Module) -> None:
        weights = TensorDict.from_module(net).data
        weights.lerp_(weights * 0, 0.1)

    step(net)
    torch.testing.assert_close(net.embed.weight.data, torch.full((4, 3), 0.9))


def test_compile_mul_tied_then_untied_changes_both() -> None:
    torch.compiler.reset()
    step = torch.compile(lambda td: td.mul_(2), fullgraph=True, backend="eager")
    x, y = torch.ones(2), torch.ones(2)
    step(TensorDict({"a": x, "b": x}))
    step(TensorDict({"a": x, "b": y}))
    assert torch.equal(x, torch.full((2,), 4.0)) and torch.equal(y, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda x: x, True),
        (lambda x: x.view(2, 2), True),
        (lambda x: x.clone(), False),
        (lambda x: x[:1], False),
        (lambda x: x.T, False),
        (lambda x: x.conj(), False),
        (lambda x: torch._neg_view(x), False),
        (lambda x: x.view(torch.float64), False),
        (lambda x: x.conj().conj(), True),
    ],
)
def test_identify_view_of_changed_tensor(change: Callable[[Tensor], Tensor], same: bool) -> None:
    x = torch.zeros(2, 2, dtype=torch.complex64)
    assert (identify_view(change(x)) == identify_view(x)) is same


def test_bytes_of_conjugate_view_count_once() -> None:
    x = torch.zeros(3, dtype=torch.complex64)
    assert TensorDict({"a": x, "b": x.conj()}).bytes(count_duplicates=False) == 24


def test_are_apart_is_true_only_for_leaves_with_bytes_of_their_own() -> None:
    flat = torch.zeros(12)
    assert are_apart([flat[8:], flat[:4], flat[4:8], flat[4:4], torch.zeros(2), torch.zeros(0)])
    assert not are_apart([flat[:4], flat[3:]])
    assert not are_apart([flat, flat])
    assert not are_apart([flat[:4], flat[4:8].view(torch.uint8)[:3], flat[4:].view(2, 4)])
    assert not are_apart([flat[::2], flat[1::2]])  # the slower way finds that these are apart
    assert not are_apart([torch.zeros(2, device="meta"), torch.zeros(2, device="meta")])
    assert not are_apart([flat[:4], torch.eye(2).to_sparse()])
