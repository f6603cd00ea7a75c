"""reduce() and all_reduce(): equal to torch, and errors where ranks disagree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_trees import TREES, assert_same, catch_error, make_nested

from td_core import TensorDict
from td_distributed._group import Group, text_to_bytes
from td_distributed._reduce import GLOO_DTYPES, _buckets, _can_gloo_reduce


def reduce_tree(rank: int, name: str, options: dict[str, Any], early: bool) -> None:
    tree = TREES[name](rank + 1)
    works = tree.all_reduce(async_op=early, **options)
    for work in works or ():
        work.wait()
    assert (works is None) == (not early)
    with torch.no_grad():
        wanted = TREES[name](sum(range(1, dist.get_world_size() + 1)))
    if name == "jagged":
        assert tree["n"].unbind()[0].sum() == wanted["n"].unbind()[0].sum()
        return
    assert_same(tree, wanted)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 8}])
@pytest.mark.parametrize("name", ["nested", "lazy", "jagged", "params", "empty", "consolidated"])
def test_all_reduce_every_kind_equals_torch(
    four: Any, name: str, options: dict[str, Any], early: bool
) -> None:
    assert four.run(reduce_tree, name, options, early) == [None] * 4


def reduce_mixed_dtypes(rank: int) -> Any:
    tree = TensorDict(
        {
            "t": torch.arange(6.0).view(2, 3).t(),
            "i": torch.tensor(rank),
            "b": torch.tensor([rank == 0, False]),
            "c": torch.tensor([1 + 2j]),
            "h": torch.ones(2, dtype=torch.bfloat16),
        }
    )
    tree.all_reduce()
    other = TensorDict({"i": torch.tensor(rank)})
    other.all_reduce(dist.ReduceOp.MAX)
    return {key: value.tolist() for key, value in tree.items()}, other["i"].item()


def test_all_reduce_strided_and_mixed_dtypes_equals_torch(two: Any) -> None:
    values = {
        "t": [[0, 6], [2, 8], [4, 10]],
        "i": 1,
        "b": [True, False],
        "c": [2 + 4j],
        "h": [2, 2],
    }
    assert two.run(reduce_mixed_dtypes) == [(values, 1)] * 2


def reduce_by_name(rank: int) -> Any:
    found = {}
    for op in ("sum", "mean", "avg", "max", "min", "product", "prod"):
        tree = TensorDict({"a": torch.tensor([rank + 1.0, 4.0]), "n": {"b": torch.tensor(rank * 2.0)}})
        tree.all_reduce(op, bucket_bytes=4)
        found[op] = [tree["a"].tolist(), tree["n", "b"].item()]
    tree = TensorDict({"a": torch.tensor([rank + 1.0])})
    tree.reduce(1, "mean")
    found["reduce"] = tree["a"].item() if rank else None
    works = tree.all_reduce("mean", async_op=True)
    for work in [*works, *works]:
        work.wait()
    found["async"] = tree["a"].item()
    errors = [catch_error(lambda: TensorDict({"i": torch.tensor(rank)}).all_reduce("mean"))]
    return found, [*errors, catch_error(lambda: tree.all_reduce("median"))]


def test_all_reduce_by_name_of_operation_equals_torch(two: Any) -> None:
    wanted = {
        "sum": [[3.0, 8.0], 2.0], "mean": [[1.5, 4.0], 1.0], "avg": [[1.5, 4.0], 1.0], "max": [[2.0, 4.0], 2.0],
        "min": [[1.0, 4.0], 0.0], "product": [[2.0, 16.0], 0.0], "prod": [[2.0, 16.0], 0.0],
    }  # fmt: skip
    first, second = two.run(reduce_by_name)
    assert first[0] == {**wanted, "reduce": None, "async": 1.25}
    assert second[0] == {**wanted, "reduce": 1.5, "async": 1.25}
    for _, (integer, unknown) in (first, second):
        assert "key 'i' is of dtype torch.int64, which has no mean; reduce it by sum" in str(integer)
        assert "op is 'sum', 'mean', 'max', 'min', 'product' or a ReduceOp; got 'median'" in str(unknown)


def reduce_large_leaves(rank: int) -> Any:
    large = torch.full((2, 1 << 18), rank + 1.0)
    tree = TensorDict({"a": torch.ones(2), "l": large, "t": large.clone().t(), "b": torch.ones(2)})
    tree.all_reduce(dist.ReduceOp.MAX)
    tree.reduce(0)
    return [leaf.unique().tolist() for leaf in tree.values()]


def test_all_reduce_large_and_small_leaves_equals_torch(two: Any) -> None:
    reduced, kept = two.run(reduce_large_leaves)
    assert reduced == [[2.0], [4.0], [4.0], [2.0]]
    assert kept == [[1.0], [2.0], [2.0], [1.0]]


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (0, [[0], [1], [4], [2], [3], [5]]),
        (8, [[0, 1], [4], [2], [3], [5]]),
        (12, [[4], [0, 1, 2], [3], [5]]),
        (15, [[4], [0, 1, 2], [3], [5]]),
        (16, [[4], [0, 1, 2], [3, 5]]),
        (None, [[4], [0, 1, 2], [3, 5]]),
    ],
)
def test_all_reduce_groups_leaves_of_one_dtype_in_buckets(limit: int | None, found: list[list[int]]) -> None:
    leaves = [
        torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1 << 18),
        torch.ones(1, dtype=torch.int64),
    ]  # fmt: skip
    places = {id(leaf): i for i, leaf in enumerate(leaves)}
    assert [[places[id(leaf)] for leaf in bucket] for bucket in _buckets(leaves, limit)] == found


def reduce_other_key_order(rank: int) -> Any:
    pairs = {"x": torch.ones(2), "y": torch.full((2,), 10.0)}
    tree = TensorDict(dict(reversed(pairs.items())) if rank else pairs)
    tree.all_reduce()
    return tree["x"].tolist(), tree["y"].tolist()


def test_all_reduce_other_key_order_equals_torch(two: Any) -> None:
    assert two.run(reduce_other_key_order) == [([2, 2], [20, 20])] * 2


def reduce_other_layout(rank: int, leaf: str) -> Any:
    """Reduce collections of the same structure, of which only one has plain leaves."""
    other = {"plain": torch.ones(2, 3), "strided": torch.ones(3, 2).t(), "empty": torch.ones(2, 3)}[leaf]
    more = torch.ones(0) if leaf == "empty" else torch.ones(1)
    td = TensorDict({"z": torch.full((2,), rank), "a": other if rank else torch.ones(2, 3), "m": more})
    td.all_reduce()
    return td["z"].tolist(), td["a"].sum().item(), td["m"].tolist()


@pytest.mark.parametrize("leaf", ["plain", "strided", "empty"])
def test_all_reduce_strided_leaf_on_one_rank_equals_torch(two: Any, leaf: str) -> None:
    assert two.run(reduce_other_layout, leaf) == [([1, 1], 12.0, [] if leaf == "empty" else [2.0])] * 2


def reduce_to_rank(rank: int, dst: int, options: dict[str, Any]) -> Any:
    tree = make_nested(rank + 1)
    works = tree.reduce(dst, **options)
    for work in works or ():
        work.wait()
    return works is None, tree["a"].tolist(), tree["n", "b"][0, 0].item()


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, True),
        ({"async_op": True}, True),
        ({"async_op": True, "return_premature": True}, False),
        ({"return_premature": True}, True),
        ({"bucket_bytes": 1}, True),
    ],
)
def test_reduce_writes_only_on_rank_dst(four: Any, options: dict[str, Any], waits: bool) -> None:
    assert four.run(reduce_to_rank, 1, options) == [
        (waits, [1, 1], 1),
        (waits, [10, 10], 10),
        (waits, [3, 3], 3),
        (waits, [4, 4], 4),
    ]


#: Collections with views, tied leaves or conj and neg bits, and their expected sum over two ranks.
VIEWS: dict[str, tuple[Callable[[int], list[torch.Tensor]], list[complex]]] = {
    "tied": (lambda size: [torch.ones(size)] * 2, [2, 2]),
    "of one tensor": (lambda size: [one := torch.ones(size), one.view(-1, 1)], [2, 2]),
    "that overlap": (lambda size: [one := torch.ones(size + 1), one[1:]], [2, 2]),
    "conjugate": (lambda size: [torch.full((size,), 1 + 2j).conj(), torch.ones(2)], [2 - 4j, 2]),
    "negative": (lambda size: [torch._neg_view(torch.ones(size)), torch.ones(2)], [-2, 2]),
}


def reduce_shared_memory(rank: int, name: str, size: int, call: str) -> Any:
    tree = TensorDict(dict(zip("ab", VIEWS[name][0](size), strict=True)))
    if call == "all_reduce":
        tree.all_reduce()
    else:
        tree.reduce(0, bucket_bytes=1)
    return [{*leaf.flatten().tolist()} for leaf in tree.values()]


@pytest.mark.parametrize("call", ["all_reduce", "reduce"])
@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("name", VIEWS)
def test_all_reduce_leaves_sharing_memory_reduces_once(two: Any, name: str, size: int, call: str) -> None:
    assert two.run(reduce_shared_memory, name, size, call)[0] == [{value} for value in VIEWS[name][1]]


def tie_other_leaves(rank: int) -> str:
    weight = torch.ones(2)
    tree = TensorDict({"a": weight, "b": weight if rank else weight.clone()})
    return catch_error(tree.all_reduce)


def test_all_reduce_ranks_tying_other_leaves_raises(two: Any) -> None:
    one = "torch.float32 of shape [2]"
    message = (
        f"cannot reduce: key 'b' is {one} on rank 0, {one}, the same tensor as key 'a' on rank 1; nothing was changed "
        "on any rank"
    )
    assert two.run(tie_other_leaves) == [f"StructureError: {message}"] * 2


def stack_along_other_dim(rank: int) -> Any:
    return catch_error(
        TensorDict.lazy_stack([TensorDict({"x": torch.ones(2)}, [2]) for _ in range(2)], rank).all_reduce
    )


def test_all_reduce_other_stack_dim_raises(two: Any) -> None:
    message = (
        "cannot reduce: the root is a LazyStackedTensorDict along dim 0 on rank 0, a LazyStackedTensorDict along dim 1 "
        "on rank 1; nothing was changed on any rank"
    )
    assert two.run(stack_along_other_dim) == [f"StructureError: {message}"] * 2


#: The collection of rank 1 instead of ``nested(1)``, and the expected error on every rank.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "key": (
        lambda: make_nested(1).rename_key_("a", "z"),
        "key 'a' is torch.float32 of shape [2] on rank 0, missing on rank 1",
    ),
    "shape": (
        lambda: make_nested(1).set(("n", "b"), torch.ones(2, 4, dtype=torch.int64)),
        "key ('n', 'b') is torch.int64 of shape [2, 3] on rank 0, torch.int64 of shape [2, 4] on rank 1",
    ),
    "dtype": (
        lambda: make_nested(1).set("a", torch.ones(2, dtype=torch.int64)),
        "key 'a' is torch.float32 of shape [2] on rank 0, torch.int64 of shape [2] on rank 1",
    ),
    "batch size": (
        lambda: TensorDict(make_nested(1).to_dict()),
        "the root is a TensorDict of batch size [2] on rank 0, a TensorDict of batch size [] on rank 1",
    ),
}


def reduce_other_structure(rank: int, name: str, call: str) -> Any:
    tree = DIFFERENT[name][0]() if rank == 1 else make_nested(rank)
    before = tree.clone()
    message = catch_error(lambda: tree.all_reduce() if call == "all_reduce" else tree.reduce(0))
    assert bool((tree == before).all())
    again = make_nested(rank)
    again.all_reduce()
    assert again["a"].tolist() == [6.0, 6.0]
    return message


@pytest.mark.parametrize("call", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_all_reduce_other_structure_raises_on_all_ranks(four: Any, name: str, call: str) -> None:
    message = f"StructureError: cannot reduce: {DIFFERENT[name][1]}; nothing was changed on any rank"
    assert four.run(reduce_other_structure, name, call) == [message] * 4


def find_gloo_differences(rank: int) -> list[tuple[str, torch.dtype]]:
    """Return the (operation, dtype) pairs for which gloo and ``_can_gloo_reduce`` disagree."""
    others = {torch.uint16, torch.uint64, torch.int16, torch.float8_e5m2}
    dtypes = sorted(GLOO_DTYPES | others, key=str)
    wrong = []
    for op, dtype in product(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"), dtypes):
        message = catch_error(partial(dist.all_reduce, torch.ones(2).to(dtype), getattr(dist.ReduceOp, op)))
        if _can_gloo_reduce(op, dtype) != (message == "nothing was raised"):
            wrong.append((op, dtype))
    return wrong


def test_can_gloo_reduce_matches_gloo(two: Any) -> None:
    assert two.run(find_gloo_differences) == [[], []]


def reduce_other_rows(rank: int) -> str:
    lengths = (2, 2) if rank else (1, 3)
    rows = torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)
    return catch_error(TensorDict({"x": rows}).all_reduce)


def test_all_reduce_jagged_other_row_lengths_raises(two: Any) -> None:
    own, other = two.run(reduce_other_rows)
    assert own == other
    assert "with rows at [[0, 1, 4]] on rank 0, " in own and "with rows at [[0, 2, 4]] on rank 1" in own


def reduce_expanded_leaf(rank: int) -> str:
    bad = TensorDict({"x": torch.zeros(1).expand(3)})
    return catch_error((bad if rank else TensorDict({"x": torch.zeros(3)})).all_reduce)


def test_all_reduce_expanded_leaf_raises(two: Any) -> None:
    message = "rank 1 could not take part, so no rank did: key 'x' is expanded, so its elements share memory"
    assert [found[: len(message) + 16] for found in two.run(reduce_expanded_leaf)] == [
        f"StructureError: {message}"
    ] * 2


#: Leaves of which gloo cannot reduce the second with the given operation.
UNREDUCED = {
    "AVG": torch.ones(2, dtype=torch.int64),
    "BAND": torch.ones(2),
    "MAX": torch.ones(2, dtype=torch.complex64),
    "SUM": torch.ones(2, dtype=torch.int16),
}


def reduce_unsupported(rank: int, op: str) -> Any:
    good = torch.ones(1 << 18, dtype=torch.float32 if op != "BAND" else torch.int32)
    tree = TensorDict({"a": good, "b": UNREDUCED[op]})
    message = catch_error(lambda: tree.all_reduce(getattr(dist.ReduceOp, op)))
    return message.removesuffix(f" by {op}"), good.unique().item()


@pytest.mark.parametrize("op", UNREDUCED)
def test_all_reduce_gloo_unsupported_raises_and_changes_nothing(two: Any, op: str) -> None:
    message = f"StructureError: key 'b' is of dtype {UNREDUCED[op].dtype}, which gloo cannot reduce"
    assert two.run(reduce_unsupported, op) == [(message, 1)] * 2


def send_structure_text(rank: int, text: str) -> Any:
    """Reduce on rank 0; on rank 1 send an arbitrary text as the description of its structure."""
    tree = TensorDict({"a": torch.ones(2)})
    if rank == 0:
        return catch_error(tree.all_reduce)
    among, message = Group(None), text_to_bytes(text)
    call = "all_reduce with bucket_bytes=None by SUM"
    among.all_numbers(call, 1, 0, 1, 2, 3, 4)  # another digest, as of a structure with another order of keys
    sizes = among.all_numbers(call, 1, len(text), 1, 2, 3, 4)
    return among.all_bytes(message, [size for _, size, *_ in sizes])


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"x": 1}', '{"5": 1}'])
def test_all_reduce_invalid_structure_from_peer_raises(two: Any, text: str) -> None:
    message = "FormatError: what a rank says of its structure is damaged"
    assert message in two.run(send_structure_text, text)[0]
