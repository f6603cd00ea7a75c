"""``to`` with a collection of TensorAttrs: alone, and combined with every other argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_tensorclass import TensorAttrs, TensorClass


class Sample(TensorClass):
    a: torch.Tensor
    b: torch.Tensor


def dense() -> TensorDict:
    return TensorDict({"a": torch.tensor([1.5, 2.5, 3.5]), "b": torch.zeros(3)}, batch_size=[3])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "lazy": lambda: LazyStackedTensorDict(*dense().unbind(0)),
    "params": lambda: TensorDictParams(dense(), no_convert=True),
    "tensorclass": lambda: Sample.from_tensordict(dense()),
}

SPEC = TensorDict(a=TensorAttrs(tgt_dtype=torch.int32))
ON_META = TensorDict(a=TensorAttrs(tgt_dtype=torch.int32, tgt_device="meta"))
F32, F64, I32 = torch.float32, torch.float64, torch.int32

#: Arguments, then the dtypes of a and b, their devices, and the device of the result.
CASES: dict[str, tuple[Callable[[Any], Any], Any, Any, Any]] = {
    "alone": (lambda x: x.to(SPEC), (I32, F32), "cpu cpu", None),
    "by keyword": (lambda x: x.to(other=SPEC), (I32, F32), "cpu cpu", None),
    "device behind": (lambda x: x.to(SPEC, "cpu"), (I32, F32), "cpu cpu", "cpu"),
    "device before": (lambda x: x.to("cpu", SPEC), (I32, F32), "cpu cpu", "cpu"),
    "device by keyword": (lambda x: x.to(other=SPEC, device="meta"), (I32, F32), "meta meta", "meta"),
    "dtype": (lambda x: x.to(SPEC, F64), (F64, F64), "cpu cpu", None),
    "dtype for some": (
        lambda x: x.to(SPEC, F64, cast_filter=lambda key, leaf: key == ("b",)),
        (F32, F64), "cpu cpu", None,
    ),
    "filter": (lambda x: x.to(SPEC, cast_filter=lambda key, leaf: key == ("b",)), (F32, F32), "cpu cpu", None),
    "device of a leaf": (lambda x: x.to(ON_META), (I32, F32), "meta cpu", None),
    "device of a leaf and of all": (lambda x: x.to(ON_META, "cpu"), (I32, F32), "cpu cpu", "cpu"),
    "device of a leaf and dtype": (lambda x: x.to(ON_META, F64), (F64, F64), "meta cpu", None),
    "non_blocking": (lambda x: x.to(SPEC, True), (I32, F32), "cpu cpu", None),
    "memory format": (
        lambda x: x.to(SPEC, memory_format=torch.contiguous_format), (I32, F32), "cpu cpu", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_to_with_tensor_attrs_casts_each_leaf(case: str, kind: str) -> None:
    call, dtypes, devices, device = CASES[case]
    td = KINDS[kind]()
    result = call(td)
    assert type(result) is type(td)
    a, b = [result.get(key) for key in ("a", "b")] if kind != "lazy" else _leaves_of_lazy(result)
    assert (a.dtype, b.dtype) == dtypes
    assert f"{a.device} {b.device}" == devices
    assert result.device == (None if device is None else torch.device(device))
    if devices == "cpu cpu":
        assert torch.equal(a, torch.tensor([1.5, 2.5, 3.5]).to(dtypes[0]))


def _leaves_of_lazy(stack: Any) -> list[torch.Tensor]:
    return [torch.stack([member[key] for member in stack.tensordicts]) for key in ("a", "b")]


def test_to_tensor_attrs_applies_other_arguments() -> None:
    assert dense().to(SPEC, batch_size=[]).batch_size == ()
    td = dense()
    assert td.to(SPEC, "cpu", inplace=True) is td
    assert td["a"].dtype is I32 and td.device == torch.device("cpu")


def test_to_tensor_attrs_as_context_writes_back() -> None:
    td = dense()
    with td.to(SPEC, "cpu") as there:
        there["a"].fill_(7)
    assert td["a"].tolist() == [7.0, 7.0, 7.0] and td["a"].dtype is F32


def test_to_two_tensor_attrs_raises() -> None:
    with pytest.raises(TypeError, match="another tensor or collection"):
        dense().to(SPEC, SPEC)


@pytest.mark.parametrize(("number", "dtype"), [(bool, torch.bool), (int, torch.int64), (float, F64)])
def test_tensor_attrs_python_type_becomes_dtype(number: type, dtype: torch.dtype) -> None:
    assert TensorAttrs(tgt_dtype=number).tgt_dtype is dtype
    assert dense().to(TensorDict(a=TensorAttrs(tgt_dtype=number)), "cpu")["a"].dtype is dtype
