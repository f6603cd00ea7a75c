"""Writes of rows at positions give what torch writes, for each dtype, form of positions and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import TensorDict
from td_core._writes import positions as rows_at

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.int32, torch.int16,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(autouse=True)
def write_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write rows of any size with numpy."""
    monkeypatch.setattr(rows_at, "_LEAST", 0)
    monkeypatch.setattr(rows_at, "_LEAST_EACH", 0)


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 50, shape, generator=generator).to(dtype)


def as_bits(leaf: Tensor) -> Tensor:
    return leaf.contiguous().view(torch.uint8) if leaf.dtype is torch.float8_e5m2 else leaf


@settings(max_examples=150, deadline=None, database=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tail=st.sampled_from([(), (3,), (2, 4), (0,)]),
    positions=st.lists(st.integers(-6, 5), min_size=0, max_size=8),
    shape=st.sampled_from(["flat", "two dims", "range"]),
    strided=st.booleans(),
)
def test_write_at_positions_equals_torch(
    dtype: torch.dtype, tail: tuple[int, ...], positions: list[int], shape: str, strided: bool
) -> None:
    if shape == "range":
        positions = [*range(abs(positions[0]) if positions else 0, 6)]
    index = torch.tensor(positions, dtype=torch.int64)
    if shape == "two dims" and len(positions) % 2 == 0:
        index = index.view(2, -1)
    leaf = make((6, *tail), dtype, 1)
    expected = [row.clone() for row in leaf.unbind()]
    value = make((*index.shape, *tail), dtype, 2)
    if strided:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    for position, row in zip(positions, value.reshape(len(positions), *tail).unbind() if positions else ()):
        expected[position] = row  # the last one of equal positions
    td, other = TensorDict({"a": leaf}, [6]), TensorDict({"a": leaf.clone()}, [6])
    td[index] = TensorDict({"a": value}, index.shape)
    assert torch.equal(as_bits(td["a"]), as_bits(torch.stack(expected)))
    other.set_at_("a", value, index)
    assert torch.equal(as_bits(other["a"]), as_bits(td["a"]))


WRITES: dict[str, Callable[[TensorDict, Tensor, Any], object]] = {
    "setitem": lambda td, index, value: td.__setitem__(index, TensorDict({"a": value}, index.shape)),
    "update_at_": lambda td, index, value: td.update_at_(TensorDict({"a": value}, index.shape), index),
    "set_at_": lambda td, index, value: td.set_at_("a", value, index),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_write_uses_numpy_and_raises_version(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Tensor] = []
    original = rows_at.increase_versions
    monkeypatch.setattr(
        rows_at, "increase_versions", lambda leaves: (written.extend(leaves), original(leaves))
    )
    leaf = torch.zeros(5, 3)
    td = TensorDict({"a": leaf}, [5])
    WRITES[write](td, torch.tensor([3, -5]), torch.ones(2, 3))
    assert written and leaf._version == 1
    assert leaf[:, 0].tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("write", WRITES)
def test_write_range_is_one_slice(write: str) -> None:
    leaf = torch.zeros(5)
    WRITES[write](TensorDict({"a": leaf}, [5]), torch.arange(1, 4), torch.arange(1.0, 4))
    assert leaf.tolist() == [0, 1, 2, 3, 0] and leaf._version == 1


@pytest.mark.parametrize("write", WRITES)
def test_write_out_of_range_raises_and_writes_nothing(write: str) -> None:
    for positions in ([0, 5], [0, -6], [4, 5]):
        td = TensorDict({"a": torch.zeros(5, 2)}, [5])
        with pytest.raises((IndexError, RuntimeError), match="out of|range"):
            WRITES[write](td, torch.tensor(positions), torch.ones(2, 2))
        assert not td["a"].any()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(1, 3),
        torch.ones(3),
        torch.ones(2, 3).to_sparse().to_dense(),
    ],
    ids=["cast", "one row", "row", "fitting"],
)
def test_write_casts_and_broadcasts_as_torch(value: Tensor) -> None:
    td = TensorDict({"a": torch.zeros(5, 3)}, [5])
    td.set_at_("a", value, torch.tensor([3, 0]))
    assert td["a"][:, 0].tolist() == [1, 0, 0, 1, 0]


def test_write_from_the_same_memory_reads_old_rows() -> None:
    leaf = torch.arange(6.0).view(6, 1)
    td = TensorDict({"a": leaf}, [6])
    td.set_at_("a", leaf[:3], torch.tensor([1, 2, 3]))
    assert leaf.flatten().tolist() == [0, 0, 1, 2, 4, 5]


def test_write_with_gradients_is_recorded() -> None:
    value = torch.ones(2, 3, requires_grad=True)
    td = TensorDict({"a": torch.zeros(5, 3)}, [5])
    td.set_at_("a", value, torch.tensor([3, 0]))
    td["a"].sum().backward()
    assert torch.equal(value.grad, torch.ones(2, 3))
    saved, weight = torch.ones(5, 3), torch.ones(5, 3, requires_grad=True)
    loss = (saved * weight).sum()
    TensorDict({"a": saved}, [5])[torch.tensor([1, 1])] = TensorDict({"a": torch.zeros(2, 3)}, [2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_write_parameter_without_recording() -> None:
    leaf = torch.nn.Parameter(torch.zeros(5, 3))
    with torch.no_grad():
        TensorDict({"a": leaf}, [5])[torch.tensor([3, 0])] = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert leaf[:, 0].tolist() == [1, 0, 0, 1, 0]


def test_write_under_vmap_and_trace_equals_torch() -> None:
    def write(base: Tensor) -> Tensor:
        td = TensorDict({"a": base.clone()}, [5])
        td[torch.tensor([3, 0])] = TensorDict({"a": torch.ones(2)}, [2])
        return td["a"]

    expected = torch.tensor([[1.0, 0, 0, 1, 0]] * 2)
    assert torch.equal(torch.vmap(write)(torch.zeros(2, 5)), expected)
    traced = torch.fx.experimental.proxy_tensor.make_fx(write)(torch.zeros(5))
    assert torch.equal(traced(torch.zeros(5)), expected[0])


def test_write_strided_leaf_and_conjugate_equals_torch() -> None:
    leaf = torch.zeros(3, 5).T
    TensorDict({"a": leaf}, [5])[torch.tensor([3, 0])] = TensorDict({"a": torch.ones(2, 3)}, [2])
    assert leaf[:, 0].tolist() == [1, 0, 0, 1, 0]
    value = torch.tensor([1 + 2j, 3 + 4j]).conj()
    td = TensorDict({"a": torch.zeros(5, dtype=torch.complex64)}, [5])
    td.set_at_("a", value, torch.tensor([3, 0]))
    assert td["a"][3] == 1 - 2j
