"""Operations in place: as torch on plain leaves, and a failed call writes nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core._torch.operators import OPERATIONS
from td_core.errors import StructureError

STRUCTURES = ["flat", "nested", "lazy", "lazy along 1", "nested lazy"]


@pytest.fixture(params=STRUCTURES)
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


INPLACE = [row for row in OPERATIONS if row.inplace]
UNARY_INPLACE = [f"{row.name}_" for row in INPLACE if row.kind == "unary"]
BINARY_INPLACE = [f"{row.name}_" for row in INPLACE if row.kind == "binary"]
AUGMENTED = [row.dunder for row in INPLACE if row.kind == "binary" and row.dunder]
TORCH_NAME = {f"{row.name}_": row.kernel or row.functions[0] for row in INPLACE}


@pytest.mark.parametrize("name", UNARY_INPLACE)
def test_unary_inplace_each_name_equals_torch(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    expected = {key: getattr(torch, name[:-1])(leaf).to(leaf.dtype) for key, leaf in td.items(True, True)}
    before = td._leaves()
    assert getattr(td, name)() is td
    assert_leaves_equal(td, expected)
    assert all(new is old for new, old in zip(td._leaves(), before, strict=True))


@pytest.mark.parametrize("name", BINARY_INPLACE)
@pytest.mark.parametrize("kind", ["number", "tensor", "collection"])
def test_binary_inplace_each_name_equals_torch(
    name: str, kind: str, td: TensorDict, assert_leaves_equal: Any
) -> None:
    other = {"number": 0.5, "tensor": torch.full((3,), 0.5), "collection": td * 0 + 0.5}[kind]
    expected = {key: getattr(torch, TORCH_NAME[name])(leaf, 0.5) for key, leaf in td.items(True, True)}
    before = td._leaves()
    assert getattr(td, name)(other) is td
    assert_leaves_equal(td, expected)
    assert all(new is old for new, old in zip(td._leaves(), before, strict=True))


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_assignment_returns_same_object(
    name: str, td: TensorDict, assert_leaves_equal: Any
) -> None:
    function = getattr(operator, f"__i{name}__")
    expected = {key: function(leaf.clone(), 2.0) for key, leaf in td.items(True, True)}
    assert function(td, 2.0) is td
    assert_leaves_equal(td, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda td: td.add_(TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 2)}, [2])),
            "key 'b' has shape",
        ),
        (lambda td: td.add_(TensorDict({"a": torch.ones(2, 3)}, [2])), "missing keys"),
        (lambda td: td.add_(torch.ones(3)), "does not broadcast"),
        (lambda td: td.mul_(1j), "cannot compute mul_ in place: key 'a': .*can't be cast"),
    ],
)
def test_inplace_failing_operand_changes_nothing(
    make: object, message: str, assert_leaves_equal: Any
) -> None:
    td = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, [2])
    with pytest.raises(RuntimeError, match=message):
        make(td)
    assert_leaves_equal(td, {"a": torch.ones(2, 3), "b": torch.ones(2, 4)})


def test_inplace_later_leaf_wrong_dtype_changes_nothing(assert_leaves_equal: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, [2])
    with pytest.raises(RuntimeError, match=r"cannot compute exp_ in place: key 'b': .*can't be cast"):
        td.exp_()
    with pytest.raises(RuntimeError, match=r"cannot compute add_ in place: key 'b'"):
        td.add_(0.5)
    assert_leaves_equal(td, {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})


@pytest.mark.parametrize("before", [0, 4])
def test_inplace_later_operand_wrong_dtype_changes_nothing(before: int, assert_leaves_equal: Any) -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2])
    for _ in range(before):
        td.mul_(td.clone())
    other = TensorDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex64)}, [2])
    with pytest.raises(RuntimeError, match=r"cannot compute mul_ in place: key 'b': .*can't be cast"):
        td.mul_(other * 2)
    assert_leaves_equal(td, {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("last", ["expanded", "grad"])
@pytest.mark.parametrize(
    "name", [*UNARY_INPLACE, *BINARY_INPLACE, "sub_ alpha", "masked_fill_", "lerp_", "addcmul_"]
)
def test_inplace_later_leaf_not_writable_changes_nothing(name: str, last: str, stacked: bool) -> None:
    bad = (
        torch.full((1, 2), 0.5).expand(2, 2)
        if last == "expanded"
        else torch.full((2, 2), 0.5, requires_grad=True)
    )
    td = TensorDict({"a": torch.full((2, 2), 0.5), "b": {"c": bad}}, [2])
    target = LazyStackedTensorDict(td.clone(), td) if stacked else td
    other = torch.full((2,), 0.5)
    arguments = {
        **dict.fromkeys(UNARY_INPLACE, ()),
        "sub_ alpha": (other, 2),
        "masked_fill_": (torch.ones(2, dtype=torch.bool), 1.0),
        "lerp_": (target.detach().clone() * 3, 0.5),
        "addcmul_": (target.detach().clone(), target.detach().clone()),
    }.get(name, (other,))
    if stacked and name in ("sub_ alpha", "masked_fill_"):
        arguments = (
            torch.full((2, 2), 0.5) if name != "masked_fill_" else torch.ones(2, 2) > 0,
            *arguments[1:],
        )
    with pytest.raises(RuntimeError, match=r"key \('b', 'c'\).*expanded|requires? grad"):
        getattr(target, name.split()[0])(*arguments)
    for leaf in target._leaves():
        assert (leaf == 0.5).all()


VIEWS_IN_PLACE = {
    "zero_": lambda td: td.zero_(),
    "add_": lambda td: td.add_(1),
    "mul_": lambda td: td.mul_(td.clone()),
    "neg_": lambda td: td.neg_(),
    "copy_": lambda td: td.copy_(td + 1),
    "update_": lambda td: td.update_(td + 1),
    "an index": lambda td: td.__setitem__(slice(None), td + 1),
    "apply_": lambda td: td.apply_(lambda leaf: leaf * 3),
    "load_state_dict": lambda td: td.load_state_dict((td * 2).state_dict()),
}


@pytest.mark.parametrize("name", VIEWS_IN_PLACE)
def test_inplace_conj_and_neg_views_keeps_view_bits(name: str) -> None:
    bases = {"c": torch.tensor([1 + 2j, 3j]), "n": torch.tensor([1.0, 2.0]), "p": torch.ones(2)}
    td = TensorDict({"c": bases["c"].conj(), "n": torch._neg_view(bases["n"]), "p": bases["p"]}, [2])
    plain = td.clone()
    assert not plain["c"].is_conj()
    VIEWS_IN_PLACE[name](td)
    VIEWS_IN_PLACE[name](plain)
    assert td["c"].is_conj() and td["n"].is_neg()
    assert (td == plain).all()
    assert torch.equal(bases["c"].conj().resolve_conj(), plain["c"]) and torch.equal(-bases["n"], plain["n"])


def test_compile_inplace_equals_eager(make_nested: Any, assert_leaves_equal: Any) -> None:
    def step(td: TensorDict, other: TensorDict) -> TensorDict:
        return td.add_(other, alpha=2).mul_(0.5)

    td = make_nested()
    expected = dict(step(td.clone(), td.clone()).items(True, True))
    assert_leaves_equal(torch.compile(step, fullgraph=True, backend="eager")(td, td.clone()), expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.add_(1),
        lambda x, y: x.neg_(),
        lambda x, y: x.add_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.update_({"grad": y["grad"], "int": y["int"]}),
        lambda x, y: x.__setitem__(slice(0, 2), y),
        lambda x, y: x.__setitem__([0, 1], y),
    ],
)
@pytest.mark.parametrize("result_needs_grad", [True, False])
def test_inplace_mixed_requires_grad_is_tracked_per_leaf(write, result_needs_grad):
    def made(value):
        leaf = torch.tensor([value, value], requires_grad=True)
        return TensorDict(
            {"int": torch.tensor([3, 3]), "grad": leaf * 1 if result_needs_grad else leaf.detach()}, [2]
        )

    for other in (True, False):
        td, source = made(1.0), made(2.0)
        if not other:
            source = source.detach()
        write(td, source)
        expected = made(1.0)
        for key in ("int", "grad"):
            inner = TensorDict({"int": expected[key].clone(), "grad": expected[key].clone()}, [2])
            write(inner, TensorDict({"int": source[key], "grad": source[key]}, [2]))
            assert td[key].tolist() == inner[key].tolist()
        assert not td["int"].requires_grad


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.abs_(),
        lambda td: td.add_(1),
        lambda td: td.mul_(td.detach()),
        lambda td: td.addcmul_(2, 3),
        lambda td: td.masked_fill_(torch.tensor([True, False]), 0),
        lambda td: td.zero_(),
        lambda td: td.fill_("n", 3),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("what", ["leaf", "view of a leaf"])
def test_inplace_leaf_requires_grad_raises_with_key(write, stacked, what):
    def refused(*shape):
        return (
            torch.ones(shape).requires_grad_()
            if what == "leaf"
            else torch.ones(3, *shape).requires_grad_()[1]
        )

    td = TensorDict({"n": {"a": torch.ones(2), "w": refused(2), "z": torch.ones(2)}}, [2])
    if stacked:
        td = LazyStackedTensorDict(*[member.detach() for member in td.unbind(0)])
        td.tensordicts[1]["n", "w"] = refused()
    before = td.clone().detach()
    with pytest.raises(
        StructureError, match=rf"cannot write key \('n', 'w'\) in place: it is a {what} that requires grad"
    ):
        write(td)
    assert (td.detach() == before).all()
    with torch.no_grad():
        write(td)


TERNARY = [f"{row.name}_" for row in INPLACE if row.kind == "ternary"]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", [*BINARY_INPLACE, *TERNARY])
def test_inplace_overlapping_operand_is_read_before_write(name: str, mixed: bool) -> None:
    dtype = torch.float64 if mixed else torch.float32
    whole = [torch.rand(8), torch.rand(8, 2, dtype=dtype), torch.rand(4, 4)]
    expected = [each.clone() for each in whole]

    def leaves_of(tensors: list[Tensor], shift: int) -> list[Tensor]:
        first, second, third = tensors
        one = torch.full((7,), 0.5)  # torch writes this leaf before it raises at the next one
        return [one, first[shift : 7 + shift], second[shift : 7 + shift], third.t() if shift else third]

    def td_of(leaves: list[Tensor]) -> TensorDict:
        return TensorDict({"o": leaves[0], "n": {"a": leaves[1], "b": leaves[2]}, "t": leaves[3]})

    td = td_of(leaves_of(whole, 1))
    others = [td_of(leaves_of(whole, 0))] * (1 + (name in TERNARY))
    assert getattr(td, name)(*others) is td
    for leaf, other in zip(leaves_of(expected, 1), leaves_of(expected, 0)):
        operand = other.clone()
        getattr(leaf, f"{TORCH_NAME[name]}_")(*[operand] * len(others))
    assert all(map(torch.equal, whole, expected))


def test_add_inplace_overlap_with_autograd_raises() -> None:
    whole = torch.rand(8, requires_grad=True).clone()
    with pytest.raises(RuntimeError, match="the input tensor and the written-to tensor"):
        TensorDict({"a": whole[1:]}).add_(TensorDict({"a": whole[:-1]}))
