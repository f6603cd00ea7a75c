"""Methods of all packages through ``td``, in the spellings of users; mypy and pyright check it, nothing runs it."""

# ruff: noqa: F405
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_type

from td import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


@dataclass
class Row:
    """What from_dataclass takes."""

    x: Tensor


def saving(td: TensorDict) -> None:
    """Sizes are any sequences, devices are names too."""
    assert_type(td.memmap("save", True, num_threads=2, checksums=True), TensorDict)
    assert_type(TensorDict.load_memmap("save", "cpu", mode="r", subpath=("a", "b"), verify=True), TensorDict)
    assert_type(td.make_memmap("a", (3, 4), dtype=torch.float32), Tensor)
    td.make_memmap_from_storage(("n", "a"), torch.zeros(3).untyped_storage(), [3])
    td.make_memmap("b", torch.Size([3]))
    load_memmap("save", "cpu")
    append_memmap("save", td)
    MemoryMappedTensor.zeros((3, 4), dtype=torch.float32, filename="file")


def converting() -> None:
    """The same for dataclasses."""
    TensorDict.from_dataclass(Row(torch.zeros(3)), batch_size=[3], device="cpu")
    from_dataclass(Row(torch.zeros(3)), batch_size=3, device="cpu", frozen=True)


def sending(td: TensorDict) -> None:
    """The same for messages."""
    td.consolidate("file", device="cpu")
    td.init_remote(1, device="cpu")
    TensorDict.from_remote_init(0, device="cuda:0")
    td.broadcast(0, device=0)
