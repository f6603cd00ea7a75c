"""Collections of every kind that a rank makes, and helpers of functions that run on ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from td_core import TensorDict, TensorDictParams
from td_distributed import _wire

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def make_jagged(value: float) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.full((2, 3), value), torch.full((4, 3), 2.0)], layout=torch.jagged
    )


def make_nested(rank: float) -> Any:
    leaves = {"a": torch.full((2,), float(rank)), "n": {"b": torch.full((2, 3), int(rank))}}
    return TensorDict(leaves, batch_size=[2], names=["t"])


TREES: dict[str, Callable[[float], Any]] = {
    "nested": make_nested,
    "lazy": lambda rank: TensorDict.lazy_stack(
        [TensorDict({"a": torch.full((i + 1,), rank)}) for i in range(2)]
    ),
    "jagged": lambda rank: TensorDict({"n": make_jagged(float(rank))}, [2]),
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
    "consolidated": lambda rank: make_nested(rank).consolidate(),
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


def assert_same(found: Any, wanted: Any) -> None:
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


def catch_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def send_in_parts(always: bool) -> Iterator[None]:
    """Send collections in parts if ``always`` is True, also small ones."""
    with pytest.MonkeyPatch.context() as patch:
        if always:
            patch.setattr(_wire, "APART", 0)
        yield


#: Run a test with each collection sent in one message, and sent in parts.
PARTS = pytest.mark.parametrize("parts", [False, True], ids=["in one", "in parts"])
