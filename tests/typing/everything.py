"""Methods of all packages through ``td``. mypy and pyright check this file; no test runs it."""

# ruff: noqa: F405
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_type

from td import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


@dataclass
class Row:
    """A dataclass for from_dataclass."""

    x: Tensor


def saving(td: TensorDict) -> None:
    """Pass batch sizes as lists and tuples, and devices as strings."""
    assert_type(td.memmap("save", True, num_threads=2, checksums=True), TensorDict)
    assert_type(TensorDict.load_memmap("save", "cpu", mode="r", subpath=("a", "b"), verify=True), TensorDict)
    assert_type(td.make_memmap("a", (3, 4), dtype=torch.float32), Tensor)
    td.make_memmap_from_storage(("n", "a"), torch.zeros(3).untyped_storage(), [3])
    td.make_memmap("b", torch.Size([3]))
    load_memmap("save", "cpu")
    append_memmap("save", td)
    MemoryMappedTensor.zeros((3, 4), dtype=torch.float32, filename="file")


def converting() -> None:
    """Convert from and to dataclasses."""
    TensorDict.from_dataclass(Row(torch.zeros(3)), batch_size=[3], device="cpu")
    from_dataclass(Row(torch.zeros(3)), batch_size=3, device="cpu", frozen=True)


def sending(td: TensorDict) -> None:
    """Send and receive collections."""
    td.consolidate("file", device="cpu")
    td.init_remote(1, device="cpu")
    TensorDict.from_remote_init(0, device="cuda:0")
    td.broadcast(0, device=0)
