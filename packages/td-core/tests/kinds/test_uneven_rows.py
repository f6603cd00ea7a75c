"""Lists of uneven tensors, set on a lazy stack: each member gets its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_core.errors import BatchSizeError, KeyPathError, LockedError

ROWS = [torch.full((2,), 2.0), torch.ones(1)]


def make_stack() -> Any:
    return lazy_stack([TensorDict({"n": {"z": i}}) for i in range(2)])


def set_item(td: Any, key: Any, value: Any) -> Any:
    td[key] = value
    return td


SETS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "setitem": ("b", lambda td, rows: set_item(td, "b", rows)),
    "set": ("b", lambda td, rows: td.set("b", rows)),
    "update": ("b", lambda td, rows: td.update({"b": rows})),
    "update by keyword": ("b", lambda td, rows: td.update(b=rows)),
    "replace": ("b", lambda td, rows: td.replace({"b": rows})),
    "setdefault": ("b", lambda td, rows: (td.set("b", rows), td)[1]),
    "nested": (("n", "b"), lambda td, rows: set_item(td, ("n", "b"), rows)),
    "nested, a new level": (("m", "b"), lambda td, rows: set_item(td, ("m", "b"), rows)),
    "update of a level": (("n", "b"), lambda td, rows: td.update({"n": {"b": rows}})),
    "update of a nested key": (("n", "b"), lambda td, rows: td.update({("n", "b"): rows})),
    "below": (
        ("s", "b"), lambda td, rows: set_item(TensorDict({"s": td}, [2]), ("s", "b"), rows),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "rows", [ROWS, tuple(ROWS), [row.numpy() for row in ROWS]], ids=["list", "tuple", "arrays"]
)
@pytest.mark.parametrize("way", SETS)
def test_set_uneven_rows_stores_row_in_each_member(way: str, rows: Any) -> None:
    key, write = SETS[way]
    td = write(make_stack(), rows)
    assert td.get(key, as_padded_tensor=True).tolist() == [[2, 2], [1, 0]]
    assert [leaf.tolist() for leaf in td.get(key, as_list=True)] == [[2, 2], [1]]
    assert all(isinstance(leaf, Tensor) for leaf in td.get(key, as_list=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_set_uneven_rows_in_nested_stacks_stores_rows(dim: int) -> None:
    sizes = (2, 3)
    members = [lazy_stack([TensorDict() for _ in range(sizes[1 - dim])]) for _ in range(sizes[dim])]
    td = lazy_stack(members, dim)
    assert td.batch_size == sizes
    td["a"] = [[torch.ones(3 * i + j + 1) for j in range(3)] for i in range(2)]
    for i in range(2):
        for j in range(3):
            assert td[i, j]["a"].shape == (3 * i + j + 1,)


def test_set_uneven_rows_members_with_batch_dims_stores_rows() -> None:
    td = lazy_stack([TensorDict(batch_size=[3]) for _ in range(2)])
    td["a"] = [torch.zeros(3, 2), torch.ones(3, 4)]
    assert [member["a"].shape for member in td.tensordicts] == [(3, 2), (3, 4)]
    with pytest.raises(
        BatchSizeError, match=r"key 'b' has shape \[2\], which does not start with the batch size \[3\]"
    ):
        td["b"] = [torch.zeros(3, 2), torch.ones(2)]
    assert all("b" not in member for member in td.tensordicts), "nothing was stored"


@pytest.mark.parametrize(
    "write",
    [
        lambda td, rows: td.set_("b", rows),
        lambda td, rows: td.set("b", rows, inplace=True),
        lambda td, rows: td.update_({"b": rows}),
        lambda td, rows: td.update({"b": rows}, inplace=True),
    ],
)
def test_set_inplace_uneven_rows_writes_members(write: Any) -> None:
    td = make_stack()
    td["b"] = ROWS
    leaves = [member["b"] for member in td.tensordicts]
    write(td.lock_(), [torch.tensor([5.0, 6.0]), torch.tensor([7.0])])
    assert [leaf.tolist() for leaf in leaves] == [[5, 6], [7]]
    assert all(member["b"] is leaf for member, leaf in zip(td.tensordicts, leaves, strict=True))


def test_set_uneven_rows_locked_or_missing_raises() -> None:
    td = make_stack()
    with pytest.raises(KeyPathError, match="'b'"):
        td.update_({"b": ROWS})
    with pytest.raises(LockedError):
        td.lock_()["b"] = ROWS


def test_set_even_rows_stacks_them() -> None:
    td = make_stack()
    td["b"] = [torch.ones(2), torch.zeros(2)]
    assert td["b"].tolist() == [[1, 1], [0, 0]]
    td["c"] = [np.ones(2), np.zeros(2)]
    assert td["c"].tolist() == [[1, 1], [0, 0]]
