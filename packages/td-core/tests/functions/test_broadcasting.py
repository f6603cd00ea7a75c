"""Operations of collections whose batch sizes differ: broadcast from the last dim, or read from the first dim on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import BatchSizeError, TensorDict, TensorDictParams, lazy_stack


def make(*size: int) -> TensorDict:
    """Build a collection with a nested entry; the leaves have distinct values."""
    count = torch.arange(1.0, torch.Size(size).numel() + 1).view(size)
    return TensorDict({"a": count, "n": {"b": torch.stack([count, count * 2], -1)}}, batch_size=size)


KINDS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda td: td,
    "lazy": lambda td: lazy_stack(list(td.unbind(0))),
    "params": lambda td: TensorDictParams(td, no_convert=True),
}
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
    "addcdiv": torch.addcdiv,
    "clamp": torch.clamp,
    "method": lambda x, y, z: x.lerp(y, z),
}
SIZES = [((3,), (2, 3), (3,)), ((3,), (3,), (2, 3)), ((1, 3), (2, 1), (4, 1, 3)), ((2, 3), (3,), (1, 1))]


def widen(leaf: torch.Tensor, ndim: int, most: int) -> torch.Tensor:
    """Insert leading batch dims, so that torch aligns the batch dims of leaves."""
    return leaf.reshape((1,) * (most - ndim) + tuple(leaf.shape))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_ternary_operands_of_other_batch_sizes_broadcast(kind, operation, sizes):
    parts = [make(*size) for size in sizes]
    result = OPERATIONS[operation](KINDS[kind](parts[0]), *parts[1:])
    most = max(map(len, sizes))
    assert result.batch_size == torch.broadcast_shapes(*sizes)
    for key in ("a", ("n", "b")):
        leaves = [widen(part[key], len(size), most) for part, size in zip(parts, sizes, strict=True)]
        assert torch.equal(result[key], OPERATIONS[operation](*leaves)), key


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_ternary_tensor_operand_expands_the_batch(name):
    end, weight = torch.arange(1.0, 7).view(2, 3), torch.full((2, 1), 0.5)
    result = getattr(make(3), name)(end, weight)
    assert result.batch_size == (2, 3)
    assert torch.equal(result["a"], getattr(torch, name)(make(3)["a"].expand(2, 3), end, weight))


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv"])
def test_ternary_operands_that_do_not_fit_raise(name):
    with pytest.raises(BatchSizeError, match=r"shape \[4\] does not broadcast against the batch size \[3\]"):
        getattr(make(3), name)(make(4), make(3))
    data = make(3)
    with pytest.raises(BatchSizeError, match=r"batch size \[2, 3\] does not fit into \[3\]"):
        getattr(data, f"{name}_")(make(2, 3), make(3))
    assert (data == make(3)).all()


MASK = torch.tensor([[True, False, True], [False, False, True]])
#: Operands of torch.where: the condition, and batch sizes or numbers.
WHERE = {
    "larger condition": (MASK, (3,), (3,)),
    "larger condition and a number": (MASK, (3,), 0.0),
    "number first": (MASK, 0.0, (3,)),
    "larger other": (MASK[0], (3,), (2, 3)),
    "larger other and condition": (MASK, (3,), (2, 3)),
    "smaller other": (MASK, (2, 3), (3,)),
    "0-d condition": (torch.tensor(False), (3,), (2, 3)),
    "sizes of one": (MASK, (2, 1), (1, 3)),
}


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_where_broadcasts_condition_and_both_collections(kind, name):
    mask, *sizes = WHERE[name]
    parts = [-make(*size) if isinstance(size, tuple) else size for size in sizes]
    parts[0] = parts[0] + 100
    if isinstance(parts[0], TensorDict):
        parts[0] = KINDS[kind](parts[0])
    result = torch.where(mask, *parts)
    assert result.batch_size == (2, 3)
    for key in ("a", ("n", "b")):
        leaves = [part if isinstance(part, float) else part[key] for part in parts]
        if key != "a":
            leaves = [widen(leaf, 2, 3) if getattr(leaf, "ndim", 3) == 2 else leaf for leaf in leaves]
        condition = mask if key == "a" or not mask.ndim else mask[..., None]
        assert torch.equal(result[key], torch.where(condition, *leaves)), key


@pytest.mark.parametrize(
    ("mask", "other", "message"),
    [
        (
            torch.ones(2, 4, dtype=torch.bool),
            0,
            r"the condition of shape \[2, 4\] does not broadcast against",
        ),
        (torch.ones(4, dtype=torch.bool), 0, r"the condition of shape \[4\] does not broadcast against"),
        (MASK, TensorDict(batch_size=[4]), r"the other collection of shape \[4\] does not broadcast against"),
    ],
)
def test_where_operands_that_do_not_broadcast_raise(mask, other, message):
    with pytest.raises(BatchSizeError, match=message):
        make(3).where(mask, other)


PAIRED: dict[str, Callable[[Any], Any]] = {
    "dense": lambda td: td,
    "lazy": lambda td: lazy_stack(td.unbind(0)) if td.batch_dims else td,
    "lazy last": lambda td: lazy_stack(td.unbind(-1), -1) if td.batch_dims else td,
    "params": lambda td: TensorDictParams(td, no_convert=True),
    "nested lazy": lambda td: (
        TensorDict({"in": lazy_stack(td.unbind(0))}, td.batch_size) if td.batch_dims else td
    ),
}


#: Pairs of batch sizes, of which one starts with the other; [2, 2] could also be read from the last dim.
LONGER = [((), (2, 3)), ((2,), (2, 3)), ((2,), (2, 2)), ((2, 2), (2, 2, 1))]


BINARY = ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max", "mod"]


TERNARY = ["lerp", "addcmul", "addcdiv"]


def make_wide(size: tuple[int, ...], longer: tuple[int, ...], start: float) -> TensorDict:
    """Build a collection of batch size ``size`` whose leaves have the dims ``longer``, and distinct values."""
    leaf = torch.arange(float(start), start + torch.Size(longer).numel()).view(*longer, 1)
    return TensorDict({"a": leaf, "n": {"b": torch.cat([leaf, leaf + 0.5], -1)}}, batch_size=size)


def list_leaves(td: Any) -> list[torch.Tensor]:
    """Return the leaves as they are read, by key."""
    td = td["in"] if "in" in td.keys() else td
    return [td["a"], td["n", "b"]]


@pytest.fixture(params=LONGER, ids=str)
def sizes(request: Any) -> Any:
    return request.param


@pytest.fixture(params=[False, True], ids=["shorter first", "longer first"])
def pair(request: Any, sizes: Any) -> tuple[TensorDict, TensorDict]:
    short, longer = sizes
    first, second = (longer, short) if request.param else (short, longer)
    return make_wide(first, longer, 1), make_wide(second, longer, 20)


COMMON = ["dense", "lazy", "lazy last"]


@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.product([*COMMON, "params"], COMMON), ("nested lazy", "nested lazy")],
)
def test_add_leaves_of_longer_batch_size_pairs_elements(pair: Any, first: str, second: str) -> None:
    left, right = PAIRED[first](pair[0]), PAIRED[second](pair[1])
    if first == "nested lazy" and () in (left.batch_size, right.batch_size):
        return  # without batch dims there is no nested stack
    result = left + right
    assert result.batch_size == max(left.batch_size, right.batch_size, key=len)
    for leaf, a, b in zip(list_leaves(result), list_leaves(left), list_leaves(right), strict=True):
        assert torch.equal(leaf, a + b)
    assert (left == right).batch_size == result.batch_size
    assert not (left == right).any() and (left != right).all()


@pytest.mark.parametrize("name", BINARY)
def test_binary_operation_longer_batch_size_equals_torch(pair: Any, name: str) -> None:
    left, right = pair
    function = getattr(torch, {"mod": "remainder"}.get(name, name))
    wanted = [function(a, b) for a, b in zip(list_leaves(left), list_leaves(right), strict=True)]
    result = getattr(left, name)(right)
    assert result.batch_size == max(left.batch_size, right.batch_size, key=len)
    torch.testing.assert_close(list_leaves(result), wanted)
    if name != "mod":
        size = left.batch_size
        assert getattr(left, f"{name}_")(right) is left and left.batch_size == size
        torch.testing.assert_close(list_leaves(left), wanted)


@pytest.mark.parametrize("name", TERNARY)
def test_ternary_operation_longer_batch_size_equals_torch(pair: Any, sizes: Any, name: str) -> None:
    left, right = pair
    third = make_wide(sizes[0], sizes[1], 3)
    columns = map(list_leaves, (left, right, third))
    wanted = [getattr(torch, name)(*row) for row in zip(*columns, strict=True)]
    torch.testing.assert_close(list_leaves(getattr(left, name)(right, third)), wanted)
    keys = ("end", "weight") if name == "lerp" else ("other1", "other2")
    getattr(left, f"{name}_")(**dict(zip(keys, (right, third), strict=True)))
    torch.testing.assert_close(list_leaves(left), wanted)


@pytest.mark.parametrize("second", COMMON)
@pytest.mark.parametrize("first", [*COMMON, "params"])
def test_operation_in_place_longer_batch_size_keeps_batch_size(pair: Any, first: str, second: str) -> None:
    left, right = PAIRED[first](pair[0].clone()), PAIRED[second](pair[1])
    with torch.no_grad():
        left += right
    assert left.batch_size == pair[0].batch_size
    for leaf, a, b in zip(list_leaves(left), list_leaves(pair[0]), list_leaves(pair[1]), strict=True):
        assert torch.equal(leaf, a + b)


def test_operation_in_place_larger_leaf_raises_and_writes_nothing() -> None:
    data = TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 1)}, batch_size=[2])
    more = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, batch_size=[2, 3])
    with pytest.raises((BatchSizeError, RuntimeError), match="'b'|does not fit"):
        data.add_(more)
    assert data["a"].count_nonzero() == 0


def test_add_leaves_without_the_longer_dims_raises() -> None:
    data = TensorDict({"a": torch.zeros(2, 1)}, batch_size=[2])
    with pytest.raises(
        BatchSizeError, match=r"shape \[2, 3\] does not broadcast against the batch size \[2\]"
    ):
        data + TensorDict({"a": torch.zeros(2, 3, 1)}, batch_size=[2, 3])


ROWS = torch.tensor([True, False])


@pytest.mark.parametrize("second", COMMON)
@pytest.mark.parametrize("first", [*COMMON, "params"])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_where_other_of_longer_batch_size_reads_rows(
    first: str, second: str, width: int, reverse: bool
) -> None:
    size, other = ((2, width), (2,)) if reverse else ((2,), (2, width))
    left, right = make_wide(size, (2, width), 1), make_wide(other, (2, width), 50)
    result = PAIRED[first](left).where(ROWS, PAIRED[second](right))
    assert result.batch_size == (2, width)
    for leaf, a, b in zip(list_leaves(result), list_leaves(left), list_leaves(right), strict=True):
        assert torch.equal(leaf, torch.where(ROWS.view(2, 1, 1), a, b))
    both = torch.arange(2 * width).view(2, width) % 2 == 0
    (leaf,) = list_leaves(torch.where(both, left, right))[:1]
    assert torch.equal(leaf, torch.where(both[..., None], left["a"], right["a"]))


def test_where_other_of_longer_batch_size_pads_missing_entries() -> None:
    left = make_wide((2,), (2, 3), 1).set("left", torch.tensor([5, 6]))
    right = make_wide((2, 3), (2, 3), 50).set("right", torch.ones(2, 3, 4))
    out = TensorDict(batch_size=[2], names=["game"])
    assert left.where(ROWS, right, out=out, pad=7, update_batch_size=True) is out
    assert out.batch_size == (2, 3)
    assert out["left"].tolist() == [[5] * 3, [7] * 3]
    assert out["right"][0].unique().tolist() == [7] and out["right"][1].unique().tolist() == [1]
    back = right.where(ROWS, left, pad=7)
    assert back["left"].tolist() == [[7] * 3, [6] * 3] and back["right"][0].unique().tolist() == [1]
