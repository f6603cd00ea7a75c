"""Levels that are joined: keys in any order, dense items beside lazy stacks, and errors that name what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._functions.join_levels import zip_entries
from td_core.errors import KeyMismatchError, StructureError

JOINS: dict[str, Callable[[list[Any]], Any]] = {
    "stack": torch.stack,
    "cat": torch.cat,
    "stack 1": lambda items: torch.stack(items, 1),
}


def make(start: float, names: str = "abc") -> TensorDict:
    """Build a tree with the entries of the root in the order of ``names``."""
    entries: dict[str, Any] = {
        "a": torch.full((2,), start),
        "b": torch.full((2, 3), start + 0.5),
        "c": {"d": torch.full((2,), -start)},
    }
    return TensorDict({name: entries[name] for name in names}, [2])


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
@pytest.mark.parametrize("join", JOINS)
def test_join_keys_in_any_order_pairs_by_key(join: str, order: str) -> None:
    result = JOINS[join]([make(1), make(2, order), make(3)])
    assert list(result.keys()) == ["a", "b", "c"]
    for key in ("a", "b", ("c", "d")):
        assert torch.equal(result[key], JOINS[join]([make(1)[key], make(2)[key], make(3)[key]]))


def test_zip_entries_pairs_values_by_key() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    same = zip_entries([{"a": one, "b": two}, {"a": two, "b": one}], ())
    other = zip_entries([{"a": one, "b": two}, {"b": one, "a": two}], ())
    for found in (same, other):
        assert [(key, *map(float, values)) for key, values in found] == [("a", 0, 1), ("b", 1, 0)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["ab", "a"], r"missing keys \['b'\], extra keys \[\]"),
        (["a", "ab"], r"missing keys \[\], extra keys \['b'\]"),
        (["ab", "ab", "ac"], r"missing keys \['b'\], extra keys \['c'\]"),
    ],
)
def test_zip_entries_of_other_keys_raises(columns: list[str], message: str) -> None:
    with pytest.raises(KeyMismatchError, match=rf"differ at key \('n', 'm'\): {message}"):
        zip_entries([{key: torch.zeros(1) for key in keys} for keys in columns], ("n", "m"))


@pytest.mark.parametrize(
    "stacked", [(True, False), (False, True), (True, True), (False, False, True)], ids=str
)
@pytest.mark.parametrize("dim", [0, 1])
def test_cat_dense_beside_lazy_equals_torch(stacked: tuple[bool, ...], dim: int) -> None:
    items = [
        TensorDict({"a": torch.full((2, 3), float(i)), "n": {"b": torch.full((2, 3, 4), -float(i))}}, [2, 3])
        for i in range(len(stacked))
    ]
    for stack_dim in (0, 1):
        given = [
            item.to_lazystack(stack_dim) if lazy else item for item, lazy in zip(items, stacked, strict=True)
        ]
        result = torch.cat(given, dim)
        assert isinstance(result, LazyStackedTensorDict)
        for key in ("a", ("n", "b")):
            assert torch.equal(result[key], torch.cat([item[key] for item in items], dim))


def test_cat_dense_beside_uneven_members_keeps_their_shapes() -> None:
    uneven = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
    dense = TensorDict({"a": torch.zeros(2, 3)}, [2])
    for items, sizes in (([uneven, dense], [1, 2, 3, 3]), ([dense, uneven], [3, 3, 1, 2])):
        for put in (lambda item: item, lambda item: TensorDict({"in": item}, [2])):
            result = torch.cat([put(item) for item in items])
            result = result["in"] if "in" in result.keys() else result
            assert [len(member["a"]) for member in result.tensordicts] == sizes


def test_cat_lazy_along_other_dims_and_dense_is_dense() -> None:
    def make_rows(start: float) -> TensorDict:
        return TensorDict({"a": torch.full((2, 3), start)}, [2, 3])

    items = [make_rows(0).to_lazystack(0), make_rows(1).to_lazystack(1), make_rows(2)]
    for given in (items, items[::-1]):
        result = torch.cat(given)
        assert type(result) is TensorDict
        assert torch.equal(result["a"], torch.cat([item["a"] for item in given]))


@pytest.mark.parametrize("first", ["dense", "params"])
def test_cat_of_params_and_dense_equals_torch(first: str) -> None:
    items: list[Any] = [TensorDictParams(make(1), no_convert=True), make(2)]
    items = items if first == "params" else items[::-1]
    result = torch.cat(items)
    assert torch.equal(result["c", "d"], torch.cat([item["c", "d"] for item in items]))


@pytest.mark.parametrize("join", ["stack", "cat"])
@pytest.mark.parametrize(
    "place", [lambda leaf: {"x": leaf}, lambda leaf: {"n": {"x": leaf}}], ids=["root", "nested"]
)
@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2, 4)),
            r"has shape \(2, 3\) in item 0 and \(2, 4\) in item 2; use lazy_stack",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3, 1)), r"has shape \(2, 3\) in item 0 and \(2, 3, 1\) in item 2"),
        (
            (torch.ones(2), torch.ones(2, device="meta")),
            r"has device cpu in item 0 and meta in item 2; use lazy_stack",
        ),
    ],
    ids=["shape", "dims", "device"],
)
def test_join_leaves_that_differ_names_both(
    join: str, place: Any, leaves: tuple[Tensor, Tensor], message: str
) -> None:
    items = [TensorDict(place(leaf), [2]) for leaf in (leaves[0], *leaves)]
    with pytest.raises(StructureError, match=rf"cannot join: key .*'x'\)? {message}") as caught:
        JOINS[join](items)
    assert ("densify()" in str(caught.value)) is ("shape" in message)


@pytest.mark.parametrize("join", ["stack", "cat"])
@pytest.mark.parametrize("flipped", [False, True])
def test_join_leaf_with_level_names_key(join: str, flipped: bool) -> None:
    items = [
        TensorDict({"n": {"x": torch.ones(2)}}, [2]),
        TensorDict({"n": {"x": {"y": torch.ones(2)}}}, [2]),
    ]
    with pytest.raises(
        StructureError,
        match=r"the structures differ at key \('n', 'x'\): a (tensor .*TensorDict|TensorDict .*tensor)",
    ):
        JOINS[join](items[::-1] if flipped else items)


@pytest.mark.parametrize(("join", "sizes"), [("stack", [(2, 3), (2, 4)]), ("cat", [(2, 3), (2, 4)])])
def test_join_levels_of_other_batch_sizes_names_both(join: str, sizes: list[tuple[int, ...]]) -> None:
    items = [TensorDict({"n": TensorDict(batch_size=size)}, [2]) for size in sizes]
    with pytest.raises(
        StructureError,
        match=r"cannot join: key 'n' has batch size \[2, 3\] in item 0 and \[2, 4\] in item 1; use lazy_stack\(\)",
    ):
        JOINS[join](items)


def test_join_components_of_nested_tensors() -> None:
    def make_ragged(*sizes: int) -> TensorDict:
        parts = [torch.full((size,), float(size)) for size in sizes]
        return TensorDict({"r": torch.nested.nested_tensor(parts, layout=torch.jagged)}, [len(sizes)])

    result = torch.cat([make_ragged(2, 1), make_ragged(3)])
    assert [part.tolist() for part in result["r"].unbind()] == [[2, 2], [1], [3, 3, 3]]
    with pytest.raises(StructureError, match="key 'r'"):
        torch.stack([make_ragged(1), make_ragged(2)])
