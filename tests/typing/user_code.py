"""Code such as users write; pyright checks it, nothing runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from td_core import LazyStackedTensorDict, TensorDict, cat, stack
from td_tensorclass import TensorClass


class Digits(TensorClass):
    """Images of digits and what they show."""

    image: Tensor
    label: Tensor
    source: str = "scanner"


def batches(data: TensorDict, size: int) -> list[TensorDict]:
    """Return the full batches of a data set in random order."""
    order = torch.randperm(len(data))
    assert_type(data.batch_size, torch.Size)
    return list(data[order].split(size))


def train(model: nn.Module, data: TensorDict) -> TensorDict:
    """Return the parameters after one step."""
    params: TensorDict = TensorDict.from_module(model)
    with params.to_module(model):
        loss: Tensor = model(data["image"]).sum()
    loss.backward()
    assert_type(params.clone(), TensorDict)
    assert_type(params.detach().to("cpu", torch.float64), TensorDict)
    assert_type((params * 2 + params).exp(), TensorDict)
    return params.detach()


def ensemble(members: list[TensorDict]) -> TensorDict:
    """Return the members as one collection with a leading dim."""
    lazy = LazyStackedTensorDict(*members, stack_dim=0)
    assert_type(lazy.stack_dim, int)
    stacked: TensorDict = TensorDict.stack(members)
    assert_type(stack(members), TensorDict)
    assert_type(cat([stacked, stacked], 0), TensorDict)
    return stacked


def store(data: TensorDict, folder: Path) -> TensorDict:
    """Save a collection and map it back."""
    assert_type(data.memmap(folder, num_threads=2), TensorDict)
    data.lock_()
    data.set(("nested", "key"), torch.zeros(3)).update({"other": torch.ones(3)})
    loaded: TensorDict = TensorDict.load_memmap(folder)
    return loaded


def classes(digits: Digits) -> Tensor:
    """Read fields with their declared types."""
    assert_type(digits.image, Tensor)
    assert_type(digits.source, str)
    assert_type(digits[0], Digits)
    assert_type(digits.to("cpu"), Digits)
    assert_type(cat([digits, digits]), Digits)
    assert_type(Digits.from_dict({"image": torch.zeros(2), "label": torch.zeros(1)}), Digits)
    assert_type(TensorDict.from_dict({"image": torch.zeros(2)}), TensorDict)
    return Digits(image=torch.zeros(1, 2), label=torch.zeros(1), batch_size=[1]).label
