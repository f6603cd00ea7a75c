"""Tied leaves of a save have one file, and in-place operations change it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict


def make_tied() -> TensorDict:
    leaf = torch.arange(4.0)
    return TensorDict({"a": leaf, "n": {"b": leaf}, "c": torch.arange(4.0)})


def save(path: Path) -> Path:
    make_tied().memmap(path)
    return path


def save_archive(path: Path) -> Path:
    make_tied().memmap(path.with_suffix(".tdz"))
    return path.with_suffix(".tdz")


MAPPED: dict[str, Callable[[Path], Any]] = {
    "memmap": lambda path: make_tied().memmap(path),
    "memmap_": lambda path: make_tied().memmap_(path),
    "memmap_like": lambda path: (
        make_tied().memmap(path).memmap_like(path.with_name("like")).copy_(make_tied())
    ),
    "load": lambda path: TensorDict.load_memmap(save(path)),
    "load with mode r+": lambda path: TensorDict.load_memmap(save(path), mode="r+"),
    "load with mode r": lambda path: TensorDict.load_memmap(save(path), mode="r"),
    "archive": lambda path: TensorDict.load_memmap(save_archive(path)),
}


@pytest.mark.parametrize("kind", MAPPED)
@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.mul_(2),
        lambda td: td.add_(td.clone()),
        lambda td: td.apply_(lambda leaf: leaf.mul_(2)),
        lambda td: td.data.mul_(2),
    ],
)
def test_inplace_op_on_tied_leaves_applies_once(
    kind: str, change: Callable[[Any], Any], tmp_path: Path
) -> None:
    td = MAPPED[kind](tmp_path / "td")
    change(td)
    for key in ("a", ("n", "b"), "c"):
        assert td[key].tolist() == [0, 2, 4, 6]


def test_set_tied_leaf_inplace_changes_other_key(tmp_path: Path) -> None:
    make_tied().memmap(tmp_path / "td")
    for mode in (None, "r", "r+"):
        td = TensorDict.load_memmap(tmp_path / "td", mode=mode)
        td["a"].fill_(7)
        assert td["n", "b"].tolist() == [7] * 4 and td["c"].tolist() == [0, 1, 2, 3]
