"""Code as users write it. pyright checks this file; no test runs it."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from td_core import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    pad_sequence,
    stack,
)
from td_distributed import broadcast, consolidate
from td_memmap import memmap
from td_tensorclass import NonTensorStack, TensorClass


class Digits(TensorClass):
    """Images of digits with labels."""

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


def pointwise(td: TensorDict, digits: Digits) -> None:
    """Compute new values, and values in place: the result has the type of the collection."""
    assert_type(td.exp(), TensorDict)
    assert_type(digits.sqrt_(), Digits)
    assert_type(td.div(2, default=0.0), TensorDict)
    assert_type(digits.maximum_(0.5), Digits)
    assert_type(-td % 2, TensorDict)
    assert_type(1 - digits, Digits)
    td += 1
    assert_type(td.lerp(td, 0.5).add(1, alpha=2), TensorDict)


def ensemble(members: list[TensorDict]) -> TensorDict:
    """Stack collections along a new leading dim."""
    lazy = LazyStackedTensorDict(*members, stack_dim=0)
    assert_type(lazy.stack_dim, int)
    stacked: TensorDict = TensorDict.stack(members)
    assert_type(stack(members), TensorDict)
    assert_type(cat([stacked, stacked], 0), TensorDict)
    return stacked


def store(data: TensorDict, folder: Path) -> TensorDict:
    """Save a collection and map it back."""
    assert_type(data.memmap(folder, True, num_threads=2), TensorDict)
    assert_type(data.memmap_like(prefix=folder, existsok=False), TensorDict)
    assert_type(data.save(folder, checksums=True), TensorDict)
    assert_type(data.save(folder, format="other", level=3), TensorDict)
    assert_type(data.consolidate(folder / "one", metadata=True), TensorDict)
    print(
        memmap(data, folder, durable=True)["a"], broadcast(data, 0)["a"], consolidate(data, inplace=True)["a"]
    )
    memmap(data, folder, color=1)  # type: ignore[call-arg]
    data.memmap(folder, color=1)  # type: ignore[call-arg]
    data.memmap_(archive=True)  # type: ignore[call-arg]
    data.save(folder, num_threads="2")  # type: ignore[arg-type]
    TensorDict.load_memmap(folder, verify="yes")  # type: ignore[arg-type]
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


def entries(td: TensorDict, digits: Digits) -> dict[str, float]:
    """Iterate over keys and entries; the keys of one node are strings."""
    assert_type(td.keys(), KeysView[str])
    assert_type(td.keys(sort=True), KeysView[str])
    assert_type(td.keys(True, True), KeysView[NestedKey])
    assert_type(td.items(), ItemsView[str, Any])
    assert_type(td.items(include_nested=True), ItemsView[NestedKey, Any])
    assert_type(td.values(True, leaves_only=True), ValuesView[Any])
    assert_type(digits.keys(), KeysView[str])
    assert_type(LazyStackedTensorDict(td).items(), ItemsView[str, Any])
    for key, value in td.items():
        td[key.lower()] = value + 1
    for name in sorted(td.keys() - {"done"}):
        print(name.upper(), td[name] + 1)
    for path in td.keys(True, True):
        td.set(path, td[path] * 2)
    torch.optim.SGD(td.values(True, True), lr=0.1)
    total: Tensor = td["a"].mean() + td["a", "b"].sum()
    td.update({key: value.clone() for key, value in td.items()})
    return {"total": total.item(), **{key: value.item() for key, value in td.sum(0).items()}}


def halved(td: TensorDictBase) -> None:
    """Distinguish leaves from nodes."""
    for value in td.values():
        if isinstance(value, Tensor):
            value.mul_(0.5)
        else:
            halved(value)


def rows(td: TensorDict, digits: Digits, texts: NonTensorStack) -> list[Tensor]:
    """Make batches of rows, and rows of batches."""
    assert_type(list(td), list[TensorDict])
    assert_type(list(digits), list[Digits])
    assert_type(TensorDict.stack([td, td]), TensorDict)
    TensorDict.lazy_stack(td.unbind(0), 1).append(td)  # a lazy stack has methods that its members lack
    assert_type(TensorDict.maybe_dense_stack([td, td]), TensorDict)
    assert_type(Digits.cat([digits, digits]), Digits)
    lazy_stack([digits, digits]).append(digits)
    assert_type(pad_sequence([td, td]), TensorDict)
    assert_type(td.where(td["mask"], td.gather(0, td["order"])), TensorDict)
    assert_type(NonTensorStack.from_list(["a", "b"]), NonTensorStack)
    print(", ".join(text.data for text in texts))
    return [row["a"] for row in td]
