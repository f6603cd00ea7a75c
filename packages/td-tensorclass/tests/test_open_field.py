"""A field may be named ``open``, although every collection has a classmethod of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_core
from td_tensorclass import TypedTensorDict, tensorclass


@tensorclass
class Bar:
    open: Tensor
    close: Tensor


class TypedBar(TypedTensorDict):
    open: Tensor
    close: Tensor


@tensorclass
class Price:
    close: Tensor


@pytest.mark.parametrize("cls", [Bar, TypedBar])
def test_field_named_open_holds_tensor(cls: Any) -> None:
    bar = cls(open=torch.arange(3.0), close=torch.ones(3), batch_size=[3])
    assert bar.open.tolist() == [0.0, 1.0, 2.0]
    bar.open = torch.zeros(3)
    assert bar[1:].open.tolist() == [0.0, 0.0]
    assert (bar + 1).get("open").tolist() == [1.0, 1.0, 1.0]


def test_class_method_open_returns_instance_of_class(tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    td_core.TensorDict({"close": torch.ones(2)}, [2]).save(tmp_path / "save")
    opened = Price.open(tmp_path / "save")  # type: ignore[attr-defined]
    assert (type(opened), opened.close.tolist()) == (Price, [1.0, 1.0])
    bar = Bar(open=torch.ones(2), close=torch.ones(2), batch_size=[2])
    bar.save(tmp_path / "bar")
    assert type(td_core.open(tmp_path / "bar")) is Bar
