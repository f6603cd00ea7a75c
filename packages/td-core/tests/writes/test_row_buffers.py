"""Rows of one collection in another: strict comparison, and gathers into kept memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import KeyMismatchError, StructureError, TensorCollection, TensorDict, lazy_stack
from td_core.spi import check_rows, take_into


def make_rows(count: int) -> TensorDict:
    return TensorDict(
        {"a": torch.arange(count * 2.0).view(count, 2), "n": {"b": torch.arange(count)}}, batch_size=[count]
    )


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda rows: rows.exclude("a"), KeyMismatchError, r"missing keys \['a'\]"),
        (lambda rows: rows.set("c", rows["a"]), KeyMismatchError, r"extra keys \['c'\]"),
        (lambda rows: rows.set("a", rows["n"]), StructureError, "'a'"),
        (lambda rows: rows.double(), StructureError, "key 'a' has dtype torch.float32 .* have torch.float64"),
        (lambda rows: rows.set("a", rows["a"][:, :1]), StructureError, r"rows of shape \[2\]; .* \[1\]"),
        (
            lambda rows: rows.unsqueeze(1),
            StructureError,
            r"batch size \['n'\]; that of the other rows is \[3, 1\]",
        ),
        (lambda rows: rows[0], StructureError, r"that of the other rows is \[\]"),
    ],
)
def test_check_rows_of_another_form_raises(change: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_rows(make_rows(9), change(make_rows(3)))


@pytest.mark.parametrize("count", [0, 3, 20])
def test_check_rows_of_same_form_accepts_any_number(count: int) -> None:
    check_rows(make_rows(9), make_rows(count))


def make_lazy(data: TensorDict) -> TensorCollection:
    return lazy_stack(list(data.unbind(0)))


def make_nested_lazy(data: TensorDict) -> TensorCollection:
    return data.set("n", make_lazy(data["n"])) if len(data) else data


@pytest.mark.parametrize("count", [3, 9, 20])
@pytest.mark.parametrize("storage", [make_lazy, make_nested_lazy, lambda data: data])
@pytest.mark.parametrize("rows", [make_lazy, make_nested_lazy, lambda data: data])
def test_check_rows_of_lazy_stacks_accepts_any_number(storage: Any, rows: Any, count: int) -> None:
    check_rows(storage(make_rows(9)), rows(make_rows(count)))
    with pytest.raises(StructureError, match="dtype torch.float32 .* have torch.float64"):
        check_rows(storage(make_rows(9)), rows(make_rows(count).double()))
    with pytest.raises(KeyMismatchError, match=r"missing keys \['a'\]"):
        check_rows(storage(make_rows(9)), rows(make_rows(count).exclude("a")))


def make_strided(data: TensorDict) -> TensorDict:
    return data.apply(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0])


KINDS: dict[str, Any] = {
    "dense": lambda data: data,
    "locked": lambda data: data.lock_(),
    "strided": make_strided,
    "requires grad": lambda data: data.set("a", data["a"].requires_grad_()),
    "lazy": lambda data: lazy_stack(list(data.unbind(0))),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("positions", [[5, 0, 5], [], [8, 7, 6, 5, 4, 3, 2, 1, 0]])
def test_take_into_equals_index(name: str, positions: list[int]) -> None:
    data: TensorCollection = KINDS[name](make_rows(9))
    index = torch.tensor(positions, dtype=torch.int64)
    out = make_rows(len(positions)).zero_()
    kept = [leaf.data_ptr() for leaf in out.values(True, True)]
    take_into(data, index, out)
    assert bool((out == make_rows(9)[index]).all())
    assert kept == [leaf.data_ptr() for leaf in out.values(True, True)]


def test_take_into_members_writes_rows() -> None:
    out = lazy_stack([*make_rows(9).zero_().unbind(0)])
    take_into(lazy_stack([*make_rows(9).unbind(0)]), torch.arange(9).flip(0), out)
    assert out["n", "b"].tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_take_into_strided_buffer_writes_its_rows() -> None:
    buffer = TensorDict(
        {"a": torch.zeros(4, 2, 2)[..., 0], "n": {"b": torch.zeros(4, dtype=torch.int64)}}, [4]
    )
    take_into(make_rows(9), torch.tensor([1, 2, 3, 8]), buffer)
    assert buffer["n", "b"].tolist() == [1, 2, 3, 8]
    assert buffer["a"].equal(make_rows(9)["a"][[1, 2, 3, 8]])


def test_take_into_wrong_number_of_rows_raises_before_a_write() -> None:
    out = make_rows(2).zero_()
    with pytest.raises(StructureError, match=r"out has the batch size \[2\], for 3 positions"):
        take_into(make_rows(9), torch.tensor([0, 1, 2]), out)
    with pytest.raises(StructureError):
        take_into(make_rows(9).double(), torch.tensor([8, 7]), out)
    assert not bool(out.any())


def test_take_into_position_out_of_range_raises() -> None:
    with pytest.raises(IndexError):
        take_into(make_rows(3), torch.tensor([3]), make_rows(1))
