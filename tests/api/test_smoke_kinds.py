"""Each kind is indexed, computed with, stacked, cloned and pickled once: what fails here fails everywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("td", reason="the samples are of every package")

import td as library
from td_core._encode.node_kinds import KINDS
from td_core.testing import assert_same
from td_store.arrays import LiveCollection


class Record(library.TensorClass):
    """A tensorclass with a tensor and a value."""

    a: torch.Tensor
    name: str = "none"


class Typed(library.TypedTensorDict):
    """A TypedTensorDict with one key."""

    a: torch.Tensor


def make_plain() -> Any:
    return library.TensorDict({"a": torch.arange(6.0).view(2, 3), "n": {"b": torch.ones(2)}}, [2])


def make_persistent(folder: Path) -> Any:
    module = pytest.importorskip("td_hdf5")
    pytest.importorskip("h5py")
    return module.PersistentTensorDict.from_dict(make_plain(), folder / "data.h5")


def make_zarr(folder: Path) -> Any:
    module = pytest.importorskip("td_zarr")
    pytest.importorskip("zarr")
    return module.to_zarr(make_plain(), folder / "data.zarr")


def make_values(node: Callable[[], Any]) -> Any:
    return library.TensorDict({"v": node(), "a": torch.ones(2)}, [2])


#: By kind: a collection of batch size [2], of this kind or with a node of it.
SAMPLES: dict[str, Callable[[Path], Any]] = {
    "TensorDict": lambda folder: make_plain(),
    "LazyStackedTensorDict": lambda folder: library.lazy_stack(
        [library.TensorDict({"a": torch.ones(i + 1)}) for i in range(2)]
    ),
    "TensorDictParams": lambda folder: library.TensorDictParams(make_plain()),
    "tensorclass": lambda folder: Record(a=torch.ones(2, 3), batch_size=[2]),
    "TypedTensorDict": lambda folder: Typed(a=torch.ones(2, 3), batch_size=[2]),
    "NonTensorData": lambda folder: make_values(lambda: library.NonTensorData("x", batch_size=[2])),
    "NonTensorStack": lambda folder: make_values(lambda: library.NonTensorStack("x", "y")),
    "MetaData": lambda folder: make_values(lambda: library.MetaData("x", batch_size=[2])),
    "UnbatchedTensor": lambda folder: make_values(lambda: library.UnbatchedTensor(torch.ones(5))),
    "PersistentTensorDict": make_persistent,
    "ZarrTensorDict": make_zarr,
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", SAMPLES)
def test_kind_is_indexed_stacked_cloned_and_pickled(kind: str, tmp_path: Path) -> None:
    collection = SAMPLES[kind](tmp_path)
    assert collection[1].batch_size == ()
    assert (collection + 1)[1:].batch_size == (1,)
    assert torch.stack([collection, collection]).batch_size == (2, 2)
    expected = make_plain() if isinstance(collection, LiveCollection) else collection
    assert_same(collection.clone(), expected)
    assert_same(pickle.loads(pickle.dumps(collection)).clone(), expected)
    assert "2" in repr(collection)


def test_each_registered_kind_has_a_smoke_case() -> None:
    # A first-class dim lives as long as a block, and a checkpoint as long as a save or load of a mapping.
    # Tensorclasses are one kind under the names of their classes.
    tags = {tag for tag in KINDS._by_tag if ":" not in tag} - {"td_core.DimEntry", "Checkpoint"}
    assert tags - set(SAMPLES) == set()
