"""Tied leaves of a save: one file under several names, mapped once, and changed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict


def tied() -> TensorDict:
    leaf = torch.arange(4.0)
    return TensorDict({"a": leaf, "n": {"b": leaf}, "c": torch.arange(4.0)})


def saved(path: Path) -> Path:
    tied().memmap(path)
    return path


def packed(path: Path) -> Path:
    tied().memmap(path.with_suffix(".tdz"))
    return path.with_suffix(".tdz")


MAPPED: dict[str, Callable[[Path], Any]] = {
    "memmap": lambda path: tied().memmap(path),
    "memmap_": lambda path: tied().memmap_(path),
    "memmap_like": lambda path: tied().memmap(path).memmap_like(path.with_name("like")).copy_(tied()),
    "load": lambda path: TensorDict.load_memmap(saved(path)),
    "load to write": lambda path: TensorDict.load_memmap(saved(path), mode="r+"),
    "load to keep": lambda path: TensorDict.load_memmap(saved(path), mode="r"),
    "archive": lambda path: TensorDict.load_memmap(packed(path)),
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
    tied().memmap(tmp_path / "td")
    for mode in (None, "r", "r+"):
        td = TensorDict.load_memmap(tmp_path / "td", mode=mode)
        td["a"].fill_(7)
        assert td["n", "b"].tolist() == [7] * 4 and td["c"].tolist() == [0, 1, 2, 3]
