"""First-class dims of torch as an index: each entry is what torch returns for the leaf."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from td_core import CollectionIndexError, StructureError, TensorDict, TensorDictParams, lazy_stack

functorch_dim = pytest.importorskip("functorch.dim")

A = torch.arange(60.0).view(4, 3, 5)
B = torch.arange(12.0).view(4, 3)


def make_dims(count: int) -> list[Any]:
    made = functorch_dim.dims(count)
    return list(made) if isinstance(made, tuple) else [made]


def make_dense() -> TensorDict:
    return TensorDict({"a": A.clone(), "n": {"b": B.clone()}}, [4, 3], names=["x", "y"])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_dense,
    "stack along 0": lambda: lazy_stack(list(make_dense().unbind(0)), 0),
    "stack along 1": lambda: lazy_stack(list(make_dense().unbind(1)), 1),
    "parameters": lambda: TensorDictParams(make_dense()),
    "nested stack": lambda: TensorDict(
        {"a": A, "n": lazy_stack([TensorDict({"b": row}, [3]) for row in B])}, [4, 3], names=["x", "y"]
    ),
}

#: Index of two first-class dims, the batch size of the result, and the dims that keep their names.
INDICES: dict[str, tuple[Callable[[Any, Any], Any], list[int], list[int | None]]] = {
    "d": (lambda d, e: d, [3], [1]),
    "d, e": (lambda d, e: (d, e), [], []),
    "e, d": (lambda d, e: (e, d), [], []),
    ":, d": (lambda d, e: (slice(None), d), [4], [0]),
    "..., d": (lambda d, e: (..., d), [4], [0]),
    "d, ...": (lambda d, e: (d, ...), [3], [1]),
    "0, d": (lambda d, e: (0, d), [], []),
    "d, 1": (lambda d, e: (d, 1), [], []),
    "d, 1:": (lambda d, e: (d, slice(1, None)), [2], [1]),
    "None, d": (lambda d, e: (None, d), [1, 3], [None, 1]),
    "d, None": (lambda d, e: (d, None), [1, 3], [None, 1]),
    "d, rows": (lambda d, e: (d, torch.tensor([2, 0])), [2], [1]),
    "d, all rows": (lambda d, e: (d, torch.tensor([2, 0, 1])), [3], [1]),
    "d, mask": (lambda d, e: (d, torch.tensor([True, False, True])), [2], [1]),
    "rows[d]": (lambda d, e: torch.tensor([3, 0, 0])[d], [3], [1]),
}


def as_plain(entry: Any) -> torch.Tensor:
    """Give the dims of an entry the first positions, in the order of their names."""
    return entry.order(*sorted(entry.dims, key=str)) if hasattr(entry, "dims") else entry


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("kind", KINDS)
def test_index_with_dims_returns_entries_of_torch(kind, name):
    make_index, size, kept = INDICES[name]
    d, e = make_dims(2)
    data = KINDS[kind]()
    found = data[make_index(d, e)]
    assert list(found.batch_size) == size
    if not kind.startswith("stack"):
        assert found.names == [None if dim is None else ["x", "y"][dim] for dim in kept]
    for key, leaf in (("a", A), (("n", "b"), B)):
        index = make_index(d, e)
        # An ellipsis stands for batch dims only.
        wanted = leaf[
            tuple(slice(None) if item is ... else item for item in index) if type(index) is tuple else index
        ]
        for entry in (found[key], found.get(key)):
            assert type(entry) is type(wanted)
            assert list(entry.shape) == list(wanted.shape) and set(entry.dims) == set(wanted.dims)
            torch.testing.assert_close(as_plain(entry), as_plain(wanted), check_stride=False)


#: Operations on a result, and the same for one of its leaves.
OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda td: td + 1, lambda v: v + 1),
    "collection": (lambda td: td * td, lambda v: v * v),
    "method": (lambda td: td.exp(), lambda v: v.exp()),
    "function": (torch.sqrt, torch.sqrt),
    "in place": (lambda td: td.clone().mul_(2), lambda v: v * 2),
    "apply": (lambda td: td.apply(lambda v: v - 1), lambda v: v - 1),
    "tree_map": (lambda td: pytree.tree_map(lambda v: v - 1, td), lambda v: v - 1),
    "sum": (lambda td: td.sum(0), lambda v: v.sum(0)),
    "cast": (lambda td: td.double(), lambda v: v.double()),
    "comparison": (lambda td: td == td, lambda v: v == v),
    "index": (lambda td: td[1], lambda v: v[1]),
    "rows": (lambda td: td[[2, 0]], lambda v: v[[2, 0]]),
    "view": (lambda td: td.view(1, 3), lambda v: v[None]),
    "unbind": (lambda td: td.unbind(0)[2], lambda v: v.unbind(0)[2]),
    "split": (lambda td: td.split(2)[0], lambda v: v[:2]),
    "cat": (lambda td: torch.cat([td, td]), lambda v: v[[0, 1, 2, 0, 1, 2]]),
    "stack": (lambda td: torch.stack([td, td]), lambda v: v[None].expand(2, *v.shape)),
    "clone": (lambda td: td.clone(), lambda v: v),
    "update": (lambda td: TensorDict(batch_size=[3]).update(td), lambda v: v),
    "construct": (lambda td: TensorDict(td.to_dict(), [3]), lambda v: v),
    "sum of dims": (lambda td: td.apply(lambda v: v.sum(v.dims)), lambda v: v.sum(v.dims)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_dims_equals_torch_on_leaves(name):
    of_collection, of_leaf = OPERATIONS[name]
    [d] = make_dims(1)
    found = of_collection(make_dense()[d])
    for key, leaf in (("a", A), (("n", "b"), B)):
        torch.testing.assert_close(as_plain(found[key]), as_plain(of_leaf(leaf[d])), check_stride=False)


def test_product_of_two_dims_has_both():
    d, e = make_dims(2)
    found = make_dense()[d] * make_dense()[e]
    wanted = B[:, None] * B[None]
    torch.testing.assert_close(found["n", "b"].order(d, e), wanted)


def test_order_gives_dims_positions():
    d, e = make_dims(2)
    found = make_dense()[d, e].apply(lambda v: v.order(e, d), batch_size=[3, 4])
    assert type(found["a"]) is torch.Tensor
    torch.testing.assert_close(found["a"], A.transpose(0, 1))


def test_entry_with_dims_shows_dims_and_keys():
    rows, _ = make_dims(2)
    found = make_dense()[rows]
    shown = "with dims (d0,)"
    assert repr(found).replace("\n    ", " ").replace("{ ", "{") == (
        f"TensorDict(batch_size=[3], fields={{a: {shown}, n: {{b: {shown}}}}})"
    )
    assert list(found.keys(True, True)) == ["a", ("n", "b")]
    assert found.flatten_keys().select("n.b")["n.b"].dims == (rows,)
    assert set(found.state_dict()) == {"a", "n.b"}


def test_number_is_written_through_dims():
    [d] = make_dims(1)
    data = make_dense()
    data[d] = TensorDict({"a": torch.ones(3, 5), "n": {"b": torch.ones(3)}}, [3])
    assert (data == 1).all()


@pytest.mark.parametrize(
    "use",
    [pickle.dumps, copy.deepcopy, lambda td: td.to_dict() and pickle.dumps(td[0])],
    ids=["dumps", "deepcopy", "dumps of a member"],
)
def test_pickle_entry_with_dims_raises(use):
    [d] = make_dims(1)
    with pytest.raises(StructureError, match="cannot be stored, sent, copied or pickled.*order"):
        use(make_dense()[d])


def test_too_many_dims_raise():
    with pytest.raises(CollectionIndexError, match="too many indices"):
        make_dense()[tuple(make_dims(3))]


def test_dim_on_uneven_members_raises_or_keeps_them():
    [d] = make_dims(1)
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, size)}, [2]) for size in (1, 2)])
    assert [member["a"].shape for member in stack[:, d].tensordicts] == [(1,), (2,)]
    with pytest.raises(CollectionIndexError, match="stack dim of members of different shapes"):
        stack[d]


def test_write_entry_with_dims_raises_naming_key():
    d, e = make_dims(2)
    data = make_dense()
    with pytest.raises(StructureError, match="key 'a' at an index: the value has first-class dims.*order"):
        data[d] = data[e]
    for value in (TensorDict({"new": data["a"][d]}, [3]), {"new": data["a"][d]}):
        with pytest.raises(StructureError, match="key 'new' at an index: the value has first-class dims"):
            data[d] = value
    assert torch.equal(data["a"], A) and "new" not in data
    with pytest.raises(StructureError, match="key 'a'"):
        data[d] + data[0]


@pytest.mark.parametrize("kind", KINDS)
def test_describe_first_class_dims_lists_every_entry(kind: str) -> None:
    (i,) = make_dims(1)
    rows = {row.key: (row.dtype, row.shape) for row in KINDS[kind]()[:, i].describe()}
    assert rows == {("a",): ("f32", (4, 5)), ("n", "b"): ("f32", (4,))}
    assert "a" in repr(KINDS[kind]()[:, i].describe())
