"""Collectives among two and four processes: results, and the errors that each rank raises."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from td_core import TensorDict, TensorDictParams
from td_core.errors import FormatError, StructureError
from td_distributed import _consolidated_file, _storage, _wire
from td_distributed._collectives import Payload, receive, unpack
from td_distributed._group import FAILED, MARK, Group, text_to_bytes
from td_distributed._p2p import Channel
from td_distributed._reduce import GLOO_DTYPES, _buckets, _can_gloo_reduce

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def jagged(value: float) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.full((2, 3), value), torch.full((4, 3), 2.0)], layout=torch.jagged
    )


def nested(rank: float) -> Any:
    leaves = {"a": torch.full((2,), float(rank)), "n": {"b": torch.full((2, 3), int(rank))}}
    return TensorDict(leaves, batch_size=[2], names=["t"])


TREES: dict[str, Callable[[float], Any]] = {
    "nested": nested,
    "lazy": lambda rank: TensorDict.lazy_stack(
        [TensorDict({"a": torch.full((i + 1,), rank)}) for i in range(2)]
    ),
    "jagged": lambda rank: TensorDict({"n": jagged(float(rank))}, [2]),
    "params": lambda rank: TensorDictParams(TensorDict({"w": torch.full((3,), float(rank))})),
    "dtypes": lambda rank: TensorDict(
        {
            str(d): torch.full((3,), rank).to(d)
            for d in (torch.float8_e5m2, torch.int16, torch.complex64, torch.bool)
        }
    ),
    "empty": lambda rank: TensorDict({"e": {}, "z": torch.zeros(0, 3)}),
    "large": lambda rank: TensorDict(
        {f"l{i}": torch.full((1 << 14 if i % 3 else 2,), float(rank)) for i in range(5)}
    ),
    "consolidated": lambda rank: nested(rank).consolidate(),
    "one for each rank": lambda rank: TensorDict({f"k{int(rank)}": torch.ones(int(rank) + 1)}),
}
if HAS_TENSORCLASS:
    from td_tensorclass import NonTensorStack, tensorclass

    @tensorclass
    class Sample:
        x: torch.Tensor
        y: str = "none"

    @tensorclass(frozen=True)
    class Frozen:
        x: torch.Tensor

    TREES["frozen"] = lambda rank: Frozen(x=torch.full((2,), float(rank))).consolidate()
    TREES["values"] = lambda rank: TensorDict({"s": str(rank), "l": NonTensorStack("x", (1, rank))}, [2])
    TREES["tensorclass"] = lambda rank: Sample(x=torch.full((2,), float(rank)), y="text", batch_size=[2])


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.batch_size == wanted.batch_size and found.names == wanted.names
    assert list(found.keys(True)) == list(wanted.keys(True))
    for one, other in zip(found._leaves(), wanted._leaves(), strict=True):
        assert one.dtype == other.dtype and isinstance(one, Parameter) == isinstance(other, Parameter)
        for a, b in zip(one.unbind(), other.unbind(), strict=True) if other.is_nested else [(one, other)]:
            assert a.shape == b.shape and a.tolist() == b.tolist()
    for key in ("s", "l"):
        if key in wanted.keys():
            assert found[key] == wanted[key]


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def apart(always: bool) -> Iterator[None]:
    """Send every collection in parts, also small ones."""
    with pytest.MonkeyPatch.context() as patch:
        if always:
            patch.setattr(_wire, "APART", 0)
        yield


def broadcasts(rank: int, name: str, src: int, parts: bool) -> None:
    mine = TREES[name](rank + 10) if rank == src else TensorDict({"other": torch.ones(1)})
    with apart(parts):
        result = mine.broadcast(src)
    same(result, TREES[name](src + 10))
    assert result.is_locked == (name == "frozen") or rank == src
    assert (result is mine) == (rank == src)
    assert list(mine.keys()) == ["other"] or rank == src


PARTS = pytest.mark.parametrize("parts", [False, True], ids=["in one", "in parts"])


@PARTS
@pytest.mark.parametrize("src", [0, 1])
@pytest.mark.parametrize("name", TREES)
def test_broadcast_every_kind_returns_equal_collection(two: Any, name: str, src: int, parts: bool) -> None:
    assert two.run(broadcasts, name, src, parts) == [None, None]


def scatters(rank: int, name: str, src: int) -> None:
    items = [TREES[name](i) for i in range(dist.get_world_size())] if rank == src else None
    for parts in (False, True):
        with apart(parts):
            same(TensorDict().scatter(src, items), TREES[name](rank))


@pytest.mark.parametrize("name", TREES)
def test_scatter_every_kind_returns_item_of_rank(four: Any, name: str) -> None:
    assert four.run(scatters, name, 2) == [None] * 4


def gathers_all(rank: int, name: str, parts: bool) -> None:
    with apart(parts):
        result = TREES[name](rank).all_gather()
    assert len(result) == dist.get_world_size()
    for i, item in enumerate(result):
        same(item, TREES[name](i))
        assert item.is_locked == (name == "frozen")


@PARTS
@pytest.mark.parametrize("name", TREES)
def test_all_gather_every_kind_returns_all_ranks(four: Any, name: str, parts: bool) -> None:
    assert four.run(gathers_all, name, parts) == [None] * 4


def gathers(rank: int, dst: int, lazy: bool) -> Any:
    if rank != dst:
        with apart(lazy):
            return nested(rank).gather_and_stack(dst)
    room = [nested(-1) for _ in range(dist.get_world_size() - 1)]
    target = TensorDict.lazy_stack(room) if lazy else TensorDict.stack(room)
    before = target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr()
    with apart(lazy):
        assert target.gather_and_stack(dst) is target
    assert before == (target["a"].data_ptr() if not lazy else target[0]["a"].data_ptr())
    return target["a"][:, 0].tolist(), target["n", "b"][:, 0, 0].tolist()


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_writes_items_of_other_ranks(four: Any, lazy: bool) -> None:
    assert four.run(gathers, 2, lazy) == [None, None, ([0.0, 1.0, 3.0], [0, 1, 3]), None]


def gathers_parameters(rank: int) -> Any:
    if rank:
        return TensorDict({"w": torch.full((3,), 5.0)}).gather_and_stack(0)
    target = TensorDictParams(TensorDict({"w": torch.zeros(1, 3)}, [1]))
    parameter = target["w"]
    assert target.gather_and_stack(0) is target
    assert target["w"] is parameter and parameter.requires_grad
    return parameter.tolist()


def test_gather_and_stack_into_parameters_writes_them(two: Any) -> None:
    assert two.run(gathers_parameters) == [[[5.0, 5.0, 5.0]], None]


def gathers_what_does_not_fit(rank: int, lazy: bool) -> Any:
    tree = nested(rank) if rank < 3 else nested(rank).set("a", torch.ones(2, 5))
    if rank:
        return tree.gather_and_stack(0)
    target = (TensorDict.lazy_stack if lazy else TensorDict.stack)([nested(-1) for _ in range(3)])
    before = target.clone()
    message = caught(lambda: target.gather_and_stack(0))
    same(target, before)
    return message.partition(":")[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_gather_and_stack_misfit_raises_and_changes_nothing(four: Any, lazy: bool) -> None:
    assert four.run(gathers_what_does_not_fit, lazy) == ["StructureError", None, None, None]


def gathers_into_another_number(rank: int) -> Any:
    target = TensorDict({"a": torch.zeros(2 if rank else (2, 2))})
    message = caught(lambda: target.gather_and_stack(0))
    return message, target["a"].tolist()


def test_gather_and_stack_wrong_first_dim_raises(four: Any) -> None:
    message, kept = four.run(gathers_into_another_number)[0]
    assert message == "BatchSizeError: cannot take 3 items: key 'a' has shape [2, 2]"
    assert kept == [[0, 0], [0, 0]]


def gathers_into_nothing(rank: int) -> Any:
    target = nested(rank) if rank else TensorDict({}, [3])
    result = target.gather_and_stack(0)
    return None if result is None else result["a"].tolist()


def test_gather_and_stack_adds_missing_entries(four: Any) -> None:
    assert four.run(gathers_into_nothing)[0] == [[1, 1], [2, 2], [3, 3]]


def reduces_all(rank: int, name: str, options: dict[str, Any], early: bool) -> None:
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
    same(tree, wanted)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 8}])
@pytest.mark.parametrize("name", ["nested", "lazy", "jagged", "params", "empty", "consolidated"])
def test_all_reduce_every_kind_equals_torch(
    four: Any, name: str, options: dict[str, Any], early: bool
) -> None:
    assert four.run(reduces_all, name, options, early) == [None] * 4


def reduces_kinds(rank: int) -> Any:
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
    assert two.run(reduces_kinds) == [(values, 1)] * 2


def reduces_large(rank: int) -> Any:
    large = torch.full((2, 1 << 18), rank + 1.0)
    tree = TensorDict({"a": torch.ones(2), "l": large, "t": large.clone().t(), "b": torch.ones(2)})
    tree.all_reduce(dist.ReduceOp.MAX)
    tree.reduce(0)
    return [leaf.unique().tolist() for leaf in tree.values()]


def test_all_reduce_large_and_small_leaves_equals_torch(two: Any) -> None:
    reduced, kept = two.run(reduces_large)
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


def order(rank: int) -> Any:
    pairs = {"x": torch.ones(2), "y": torch.full((2,), 10.0)}
    tree = TensorDict(dict(reversed(pairs.items())) if rank else pairs)
    tree.all_reduce()
    return tree["x"].tolist(), tree["y"].tolist()


def test_all_reduce_other_key_order_equals_torch(two: Any) -> None:
    assert two.run(order) == [([2, 2], [20, 20])] * 2


def looks_again(rank: int, leaf: str) -> Any:
    """Reduce collections of the same structure, of which only one has plain leaves."""
    other = {"plain": torch.ones(2, 3), "strided": torch.ones(3, 2).t(), "empty": torch.ones(2, 3)}[leaf]
    more = torch.ones(0) if leaf == "empty" else torch.ones(1)
    td = TensorDict({"z": torch.full((2,), rank), "a": other if rank else torch.ones(2, 3), "m": more})
    td.all_reduce()
    return td["z"].tolist(), td["a"].sum().item(), td["m"].tolist()


@pytest.mark.parametrize("leaf", ["plain", "strided", "empty"])
def test_all_reduce_plain_and_other_leaves_agree_by_key(two: Any, leaf: str) -> None:
    assert two.run(looks_again, leaf) == [([1, 1], 12.0, [] if leaf == "empty" else [2.0])] * 2


def reduces(rank: int, dst: int, options: dict[str, Any]) -> Any:
    tree = nested(rank + 1)
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
def test_reduce_writes_only_dst(four: Any, options: dict[str, Any], waits: bool) -> None:
    assert four.run(reduces, 1, options) == [
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


def reduces_views(rank: int, name: str, size: int, call: str) -> Any:
    tree = TensorDict(dict(zip("ab", VIEWS[name][0](size), strict=True)))
    if call == "all_reduce":
        tree.all_reduce()
    else:
        tree.reduce(0, bucket_bytes=1)
    return [{*leaf.flatten().tolist()} for leaf in tree.values()]


@pytest.mark.parametrize("call", ["all_reduce", "reduce"])
@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("name", VIEWS)
def test_all_reduce_views_reduces_once(two: Any, name: str, size: int, call: str) -> None:
    assert two.run(reduces_views, name, size, call)[0] == [{value} for value in VIEWS[name][1]]


def ties_other_leaves(rank: int) -> str:
    weight = torch.ones(2)
    tree = TensorDict({"a": weight, "b": weight if rank else weight.clone()})
    return caught(tree.all_reduce)


def test_all_reduce_other_tied_leaves_raises(two: Any) -> None:
    one = "torch.float32 of shape [2]"
    message = (
        f"cannot reduce: key 'b' is {one} on rank 0, {one}, the same tensor as key 'a' on rank 1; nothing was changed "
        "on any rank"
    )
    assert two.run(ties_other_leaves) == [f"StructureError: {message}"] * 2


def stacks_along_another_dim(rank: int) -> Any:
    return caught(
        TensorDict.lazy_stack([TensorDict({"x": torch.ones(2)}, [2]) for _ in range(2)], rank).all_reduce
    )


def test_all_reduce_other_stack_dim_raises(two: Any) -> None:
    message = (
        "cannot reduce: the root is a LazyStackedTensorDict along dim 0 on rank 0, a LazyStackedTensorDict along dim 1 "
        "on rank 1; nothing was changed on any rank"
    )
    assert two.run(stacks_along_another_dim) == [f"StructureError: {message}"] * 2


#: The collection of rank 1 instead of ``nested(1)``, and the expected error on every rank.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "key": (
        lambda: nested(1).rename_key_("a", "z"),
        "key 'a' is torch.float32 of shape [2] on rank 0, missing on rank 1",
    ),
    "shape": (
        lambda: nested(1).set(("n", "b"), torch.ones(2, 4, dtype=torch.int64)),
        "key ('n', 'b') is torch.int64 of shape [2, 3] on rank 0, torch.int64 of shape [2, 4] on rank 1",
    ),
    "dtype": (
        lambda: nested(1).set("a", torch.ones(2, dtype=torch.int64)),
        "key 'a' is torch.float32 of shape [2] on rank 0, torch.int64 of shape [2] on rank 1",
    ),
    "batch size": (
        lambda: TensorDict(nested(1).to_dict()),
        "the root is a TensorDict of batch size [2] on rank 0, a TensorDict of batch size [] on rank 1",
    ),
}


def disagrees(rank: int, name: str, call: str) -> Any:
    tree = DIFFERENT[name][0]() if rank == 1 else nested(rank)
    before = tree.clone()
    message = caught(lambda: tree.all_reduce() if call == "all_reduce" else tree.reduce(0))
    assert bool((tree == before).all())
    again = nested(rank)
    again.all_reduce()
    assert again["a"].tolist() == [6.0, 6.0]
    return message


@pytest.mark.parametrize("call", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_all_reduce_other_structure_raises_on_all_ranks(four: Any, name: str, call: str) -> None:
    message = f"StructureError: cannot reduce: {DIFFERENT[name][1]}; nothing was changed on any rank"
    assert four.run(disagrees, name, call) == [message] * 4


UNSENDABLE = {
    "sparse": lambda: TensorDict({"x": torch.eye(2).to_sparse()}),
    "meta": lambda: TensorDict({"x": torch.zeros(2, device="meta")}),
}
if HAS_TENSORCLASS:
    UNSENDABLE["value"] = lambda: TensorDict({"x": object()})


def exchanges(rank: int, mine: Any, item: Any) -> dict[str, Callable[[], Any]]:
    """Return all calls in which rank 1 sends ``mine``, or a list with ``item``."""
    everyone = {"use_broadcast": True}
    return {
        "broadcast": lambda: mine.broadcast(1),
        "scatter": lambda: mine.scatter(1, [nested(0), item] if rank == 1 else None),
        "all_gather": lambda: mine.all_gather(),
        "gather_and_stack": lambda: mine.gather_and_stack(0),
        "all_reduce": lambda: mine.all_reduce(),
        "init_remote": lambda: mine.init_remote(0) if rank == 1 else TensorDict.from_remote_init(1),
        "init_remote to all": lambda: (
            mine.init_remote(**everyone) if rank == 1 else TensorDict.from_remote_init(1, **everyone)
        ),
    }


def cannot(rank: int, what: str, call: str) -> Any:
    bad = UNSENDABLE[what]()
    message = caught(exchanges(rank, bad if rank == 1 else nested(rank), bad)[call])
    assert nested(rank).all_gather()[0]["a"].tolist() == [0.0, 0.0]
    return message


@pytest.mark.parametrize("call", exchanges(0, None, None))
@pytest.mark.parametrize("what", UNSENDABLE)
def test_collective_unsendable_collection_raises_on_all_ranks(two: Any, what: str, call: str) -> None:
    if what == "value" and call == "all_reduce":
        pytest.skip("values are not reduced")
    other, own = two.run(cannot, what, call)
    assert other.startswith("StructureError: rank 1 could not take part, so no rank did: ")
    assert "key 'x'" in own and other.endswith(own)
    assert (own == other) == (call == "all_reduce")


def tries_to_reduce(rank: int) -> list[tuple[str, torch.dtype]]:
    """Return the (operation, dtype) pairs for which gloo and ``_can_gloo_reduce`` disagree."""
    others = {torch.uint16, torch.uint64, torch.int16, torch.float8_e5m2}
    dtypes = sorted(GLOO_DTYPES | others, key=str)
    wrong = []
    for op, dtype in product(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"), dtypes):
        message = caught(partial(dist.all_reduce, torch.ones(2).to(dtype), getattr(dist.ReduceOp, op)))
        if _can_gloo_reduce(op, dtype) != (message == "nothing was raised"):
            wrong.append((op, dtype))
    return wrong


def test_can_gloo_reduce_matches_gloo(two: Any) -> None:
    assert two.run(tries_to_reduce) == [[], []]


def reduces_other_rows(rank: int) -> str:
    lengths = (2, 2) if rank else (1, 3)
    rows = torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)
    return caught(TensorDict({"x": rows}).all_reduce)


def test_all_reduce_jagged_other_row_lengths_raises(two: Any) -> None:
    own, other = two.run(reduces_other_rows)
    assert own == other
    assert "with rows at [[0, 1, 4]] on rank 0, " in own and "with rows at [[0, 2, 4]] on rank 1" in own


def reduces_expanded(rank: int) -> str:
    bad = TensorDict({"x": torch.zeros(1).expand(3)})
    return caught((bad if rank else TensorDict({"x": torch.zeros(3)})).all_reduce)


def test_all_reduce_expanded_leaf_raises(two: Any) -> None:
    message = "rank 1 could not take part, so no rank did: key 'x' is expanded, so its elements share memory"
    assert [found[: len(message) + 16] for found in two.run(reduces_expanded)] == [
        f"StructureError: {message}"
    ] * 2


def cannot_read(rank: int, call: str, parts: bool) -> str:
    """Exchange a collection with a dtype that the torch of the receiver does not have."""

    def unknown(name: str) -> Any:
        raise FormatError(f"unknown dtype {name!r}")

    tree = TREES["large"](rank)
    with apart(parts), pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(_storage, "parse_dtype", unknown)
        message = caught(exchanges(rank, tree, tree)[call])
    assert nested(rank).all_gather()[0]["a"].tolist() == [0.0, 0.0]
    return message


@PARTS
@pytest.mark.parametrize("call", [call for call in exchanges(0, None, None) if call != "all_reduce"])
def test_broadcast_unreadable_message_raises_and_next_works(two: Any, call: str, parts: bool) -> None:
    assert two.run(cannot_read, call, parts, limit=20) == [
        "FormatError: the header of a message is damaged: unknown dtype 'torch.float32'",
        "nothing was raised",
    ]


def cannot_move(rank: int) -> str:
    if rank == 1:
        return caught(lambda: nested(0).init_remote(0, device=torch.device("cuda", 99)))
    return caught(lambda: TensorDict.from_remote_init(1))


def test_collective_torch_error_raises_on_all_ranks(two: Any) -> None:
    other, own = two.run(cannot_move)
    # The class of the error depends on the build of torch.
    assert own != "nothing was raised"
    assert other == f"StructureError: rank 1 could not take part, so no rank did: {own}"


def outside(rank: int) -> list[str]:
    group: Any = dist.GroupMember.NON_GROUP_MEMBER
    tree = nested(rank)
    calls = (tree.all_gather, tree.all_reduce, partial(tree.broadcast, 0), partial(tree.init_remote, 1))
    return [caught(partial(call, group=group)) for call in calls]


def test_collective_outside_group_raises(two: Any) -> None:
    assert two.run(outside, ranks=[0]) == [["ValueError: this process is not part of the group"] * 4]


def too_few(rank: int, items: int | None) -> Any:
    return caught(
        lambda: nested(0).scatter(0, None if rank or items is None else [nested(0) for _ in range(items)])
    )


@pytest.mark.parametrize("items", [1, 3, None])
def test_scatter_wrong_number_of_items_raises(two: Any, items: int | None) -> None:
    own, other = two.run(too_few, items)
    assert own == f"ValueError: scatter() takes one collection for each of the 2 ranks; got {items}"
    assert other.endswith(f"so no rank did: {own}")


def remote(rank: int, name: str, use_broadcast: bool, parts: bool, dst: int | None = 1) -> None:
    with apart(parts):
        if rank == 0:
            return TREES[name](5).init_remote(dst, use_broadcast=use_broadcast)
        found = TensorDict.from_remote_init(0, use_broadcast=use_broadcast)
    return same(found, TREES[name](5))


@PARTS
@pytest.mark.parametrize("use_broadcast", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_from_remote_init_every_kind_returns_equal_collection(
    two: Any, name: str, use_broadcast: bool, parts: bool
) -> None:
    assert two.run(remote, name, use_broadcast, parts) == [None, None]


@pytest.mark.parametrize("dst", [None, 0])
def test_init_remote_broadcast_ignores_dst(two: Any, dst: int | None) -> None:
    assert two.run(remote, "nested", True, False, dst) == [None, None]


def no_such_rank(rank: int, other: int) -> Any:
    td = nested(0)
    calls: list[Callable[[int], Any]] = [td.broadcast, td.scatter, td.gather_and_stack, td.reduce]
    return [
        *(caught(partial(call, other)) for call in calls),
        caught(lambda: td.init_remote(other, use_broadcast=True)),
        *(caught(partial(call, other)) for call in (td.send, td.recv, td.init_remote, td.from_remote_init)),
    ]


@pytest.mark.parametrize("other", [2, 9, -1])
def test_init_remote_unknown_rank_raises(two: Any, other: int) -> None:
    message = f"ValueError: there is no rank {other} in a group of 2"
    assert two.run(no_such_rank, other, limit=20) == [[message] * 9] * 2


def saves_what_arrives(rank: int) -> list[float]:
    found = []
    for length in range(1, 5):  # vary the size of the header
        tree = TensorDict({"k" * length: torch.ones(3)})
        for each in (
            *tree.all_gather(),
            tree.broadcast(0),
            tree.scatter(0, [tree] * 2 if rank == 0 else None),
        ):
            torch.save(each, file := io.BytesIO())
            file.seek(0)
            found.append(torch.load(file)["k" * length].sum().item())
    return found


def test_from_remote_init_result_survives_torch_save_and_load(two: Any) -> None:
    assert two.run(saves_what_arrives) == [[3.0] * 16] * 2


def limited(rank: int, use_broadcast: bool) -> Any:
    tree = TensorDict({"a": torch.ones(1000)})
    if rank == 0:
        return caught(lambda: tree.init_remote(None if use_broadcast else 1, use_broadcast=use_broadcast))
    return caught(lambda: TensorDict.from_remote_init(0, use_broadcast=use_broadcast, limit=1000))


@pytest.mark.parametrize("use_broadcast", [False, True])
def test_from_remote_init_over_limit_raises_on_both_ranks(two: Any, use_broadcast: bool) -> None:
    sender, receiver = two.run(limited, use_broadcast)
    assert sender.startswith("StructureError: the receiver refused 4")
    assert receiver.startswith("FormatError: rank 0 announced 4") and "limit= allows 1000" in receiver
    assert two.run(remote, "nested", use_broadcast, False) == [None, None]


def announces(rank: int, length: int, size: int) -> Any:
    """Send invalid sizes to a receiver, and return its error."""
    if rank == 1:
        return caught(lambda: TensorDict.from_remote_init(0))
    peer, among = Channel(1, None, None, iter(range(9))), Group(None)
    peer.send(among.numbers(MARK, length, size))
    return None if length == FAILED else peer.recv(among.numbers(7)).item()


@pytest.mark.parametrize(
    ("length", "size", "message"),
    [
        *(
            (length, size, f"rank 0 announced {size} bytes, limit= allows {1 << 36} of this rank")
            for length, size in ((9, 8), (0, 8), (-7, 8), ((1 << 28) + 1, 1 << 30), (8, (1 << 36) + 1))
        ),
        *(
            (FAILED, size, f"rank 0 announced {size} bytes, {FAILED} of them a header")
            for size in (0, -8, 1 << 45)
        ),
    ],
)
def test_from_remote_init_invalid_sizes_raise(two: Any, length: int, size: int, message: str) -> None:
    answer = None if length == FAILED else 0
    assert two.run(announces, length, size, limit=20) == [answer, f"FormatError: {message}"]


def in_a_group(rank: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    tree = nested(rank)
    tree.all_reduce(group=group)
    other = TensorDict().scatter(3, [nested(i) for i in (7, 8)] if rank == 3 else None, group=group)
    gathered = nested(rank).all_gather(group=group)
    result = nested(rank).broadcast(1, group=group)
    return (
        tree["a"][0].item(),
        other["a"][0].item(),
        [t["a"][0].item() for t in gathered],
        result["a"][0].item(),
    )


def test_collective_in_subgroup_uses_ranks_of_group(four: Any) -> None:
    results = four.run(in_a_group)
    assert results[0] is results[2] is None
    assert results[1] == (4.0, 7.0, [1.0, 3.0], 1.0)
    assert results[3] == (4.0, 8.0, [1.0, 3.0], 1.0)


#: Calls that rank 0 makes while rank 1 is missing.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast": lambda tree, group: tree.broadcast(1, group=group),
    "scatter": lambda tree, group: tree.scatter(1, group=group),
    "all_gather": lambda tree, group: tree.all_gather(group=group),
    "gather_and_stack": lambda tree, group: tree.gather_and_stack(0, group=group),
    "all_reduce": lambda tree, group: tree.all_reduce(group=group),
    "async all_reduce": lambda tree, group: [
        work.wait() for work in tree.all_reduce(group=group, async_op=True)
    ],
    "reduce": lambda tree, group: tree.reduce(0, group=group),
    "init_remote": lambda tree, group: tree.init_remote(1, group=group),
    "from_remote_init": lambda tree, group: tree.from_remote_init(1, group=group),
    "from_remote_init of all": lambda tree, group: tree.from_remote_init(1, group=group, use_broadcast=True),
}


def alone(rank: int, dies: bool) -> Any:
    """Return per call the error on rank 0, and whether its collection is unchanged."""
    # The timeout must be long enough for the ranks to connect on a busy machine.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in CALLS]
    if rank == 1:
        return os._exit(3) if dies else None
    tree = nested(0)
    results = {name: caught(partial(call, tree, group)) for (name, call), group in zip(CALLS.items(), groups)}
    assert bool((tree == nested(0)).all())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, False], ids=["dead", "absent"])
def test_collective_missing_rank_raises_within_timeout(fragile: Any, dies: bool) -> None:
    messages, _ = fragile.run(alone, dies)
    for name, message in messages.items():
        assert message.startswith(("RuntimeError", "DistBackendError")), (name, message)
        assert "onnect" in message if dies else "imed out" in message, (name, message)


def dies_within(rank: int, call: str, after: int) -> Any:
    tree = nested(rank)
    if rank == 1:
        for name in ("broadcast", "scatter", "all_gather", "gather", "all_reduce", "reduce"):
            setattr(dist, name, mortal(getattr(dist, name), after))
    message = caught(lambda: CALLS[call](tree, None))
    assert bool((tree == nested(rank)).all())
    return message


def mortal(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        COUNTED.append(function)
        if len(COUNTED) > after:
            os._exit(3)
        return function(*args, **kwargs)

    return call


COUNTED: list[Any] = []


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["broadcast", "scatter", "all_gather", "gather_and_stack", "all_reduce", "reduce"]
)
def test_collective_peer_dies_midway_raises(fragile: Any, call: str) -> None:
    message, dead = fragile.run(dies_within, call, 1)
    assert dead.kind == "Exit"
    assert message.startswith(("RuntimeError", "DistBackendError")) and "onnect" in message, message


ANOTHER = (
    "FormatError: what arrived belongs to another exchange; do all ranks make the same calls, with the same arguments, "
    "in one order?"
)


def out_of_step(rank: int) -> Any:
    if rank == 0:
        dist.broadcast(torch.zeros(3, dtype=torch.int64), 0)
        return None
    return caught(lambda: nested(0).broadcast(0))


def test_collective_foreign_message_raises(two: Any) -> None:
    assert two.run(out_of_step)[1] == ANOTHER


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda td: td.all_gather(),
    "gather_and_stack": lambda td: td.gather_and_stack(0),
    "gather_and_stack elsewhere": lambda td: td.gather_and_stack(1),
    "all_reduce": lambda td: td.all_reduce(),
    "all_reduce otherwise": lambda td: td.all_reduce(dist.ReduceOp.MAX),
    "all_reduce in small buckets": lambda td: td.all_reduce(bucket_bytes=1),
    "reduce": lambda td: td.reduce(0),
    "reduce elsewhere": lambda td: td.reduce(1),
}


def makes_another_call(rank: int) -> Any:
    tree, found = nested(rank), []
    for pair in combinations(VARIANTS.values(), 2):
        found.append(caught(lambda: pair[rank](tree)))  # noqa: B023
    same(tree, nested(rank))
    return {*found}


def test_collective_different_calls_raise_on_all_ranks(two: Any) -> None:
    assert two.run(makes_another_call) == [{ANOTHER}] * 2


#: Leaves of which gloo cannot reduce the second with the given operation.
UNREDUCED = {
    "AVG": torch.ones(2, dtype=torch.int64),
    "BAND": torch.ones(2),
    "MAX": torch.ones(2, dtype=torch.complex64),
    "SUM": torch.ones(2, dtype=torch.int16),
}


def reduces_wrongly(rank: int, op: str) -> Any:
    good = torch.ones(1 << 18, dtype=torch.float32 if op != "BAND" else torch.int32)
    tree = TensorDict({"a": good, "b": UNREDUCED[op]})
    message = caught(lambda: tree.all_reduce(getattr(dist.ReduceOp, op)))
    return message.removesuffix(f" by {op}"), good.unique().item()


@pytest.mark.parametrize("op", UNREDUCED)
def test_all_reduce_gloo_unsupported_raises_and_changes_nothing(two: Any, op: str) -> None:
    message = f"StructureError: key 'b' is of dtype {UNREDUCED[op].dtype}, which gloo cannot reduce"
    assert two.run(reduces_wrongly, op) == [(message, 1)] * 2


def test_receive_contradictory_header_raises_and_drains() -> None:
    length, size, messages = _wire.split_message(
        TensorDict({"a": torch.zeros(1 << 18)}), torch.device("cpu"), True
    )

    def take(*rooms: torch.Tensor) -> None:
        for room in rooms:
            room.copy_(messages.pop(0))

    group: Any = SimpleNamespace(bytes=lambda count: torch.empty(count, dtype=torch.uint8))
    with pytest.raises(FormatError, match=f"rank 1 announced {size + 1} bytes, its header {size}"):
        receive([MARK, length, size + 1], 1, None, group, take)
    assert not messages


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([], "IndexError"),
        ([1], r"1 parts of \[\]"),
        ([-1, 3], r"-1 parts of \[\]"),
        ([1 << 60, 3], "parts of"),
        ([1, -3], r"1 parts of \[-3\]"),
        ([2, 3, 0], r"2 parts of \[3, 0\]"),
        ([1, 9], r"1 parts of \[9\]"),
        ([2, 5, 5], r"2 parts of \[5, 5\] bytes, of 8 at most"),
    ],
)
def test_receive_invalid_part_sizes_raise(
    numbers: list[int], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = torch.tensor(numbers).numpy().tobytes()
    with pytest.raises(FormatError, match=f"the header of a message is damaged: .*{found}"):
        _wire.parts_of(header, 8)
    assert _wire.parts_of(torch.tensor([2, 3, 5]).numpy().tobytes() + b"{}", 8) == ([3, 5], b"{}")
    monkeypatch.setattr(_wire, "PIECE", 4)
    with pytest.raises(FormatError, match=r"2 parts of \[3, 5\]"):
        _wire.parts_of(torch.tensor([2, 3, 5]).numpy().tobytes(), 8)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_broadcast_around_part_limit_arrives(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TensorDict({"a": torch.arange(5), "b": torch.ones(1)})
    _, size, _ = _wire.split_message(tree, torch.device("cpu"), True)
    monkeypatch.setattr(_wire, "APART", size + more)
    length, size, messages = _wire.split_message(tree, torch.device("cpu"), True)
    assert len(messages) == (1 if more > 0 else 2)

    def take(*rooms: torch.Tensor) -> None:
        for room in rooms:
            room.copy_(messages.pop(0))

    group: Any = SimpleNamespace(bytes=lambda count: torch.empty(count, dtype=torch.uint8))
    same(receive([MARK, length, size], 1, None, group, take), tree)
    assert not messages


@pytest.mark.parametrize(
    ("length", "size"),
    [(FAILED, 1 << 45), (FAILED, 0), (FAILED, -3), (5, -3), (9, 8), (0, 8), (-7, 8), (1 << 40, 1 << 41)],
)
def test_receive_invalid_sizes_raise_before_allocating(length: int, size: int) -> None:
    with pytest.raises(FormatError, match=f"rank 1 announced {size} bytes, {length} of them a header"):
        receive([MARK, length, size], 1, None, None, None)  # type: ignore[arg-type]


def test_send_error_text_is_truncated_and_encodable() -> None:
    def make() -> Any:
        raise ValueError("\ud800" + "x" * (1 << 17))

    parcel = Payload(make, torch.device("cpu"))
    assert parcel.front == (FAILED, 1 << 16)
    with pytest.raises(
        StructureError, match=r"rank 1 could not take part, so no rank did: ValueError: \?x+$"
    ):
        unpack(list(parcel.front), parcel.data, 1)


def test_check_length_too_long_structure_raises_on_sender(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    td = TensorDict({str(i): torch.zeros(1) for i in range(100)})
    monkeypatch.setattr(_wire, "LARGEST_HEADER", 1000)
    monkeypatch.setattr(_consolidated_file, "LARGEST_JSON", 1000)
    with pytest.raises(
        StructureError, match=r"structure and values take \d+ bytes as JSON; a reader takes 1000"
    ):
        _wire.make_message(td, False)
    with pytest.raises(StructureError, match="a reader takes 1000"):
        td.consolidate(tmp_path / "td")
    assert not list(tmp_path.iterdir())


def says(rank: int, text: str) -> Any:
    """Reduce on rank 0; on rank 1 send an arbitrary text as the description of its structure."""
    tree = TensorDict({"a": torch.ones(2)})
    if rank == 0:
        return caught(tree.all_reduce)
    among, message = Group(None), text_to_bytes(text)
    call = "all_reduce with bucket_bytes=None by SUM"
    among.all_numbers(call, 1, 0, 1, 2, 3, 4)  # another digest, as of a structure with another order of keys
    sizes = among.all_numbers(call, 1, len(message), 1, 2, 3, 4)
    return among.all_bytes(message, [size for _, size, *_ in sizes])


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"x": 1}', '{"5": 1}'])
def test_all_reduce_invalid_structure_text_raises(two: Any, text: str) -> None:
    message = "FormatError: what a rank says of its structure is damaged"
    assert message in two.run(says, text)[0]
