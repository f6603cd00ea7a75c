"""Saving and loading deep nests: what is done grows as the depth does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack

td_memmap: Any = pytest.importorskip("td_memmap")
pytest.importorskip("td_distributed")
TensorClass: Any = pytest.importorskip("td_tensorclass").TensorClass


class Link(TensorClass):
    """One link of a chain of instances."""

    x: Tensor
    below: Any = None


def nest(depth: int) -> Any:
    made = TensorDict({"x": torch.ones(2)})
    for _ in range(depth):
        made = TensorDict({"n": made, "x": torch.ones(2)})
    return made


def chain(depth: int) -> Any:
    made = Link(x=torch.ones(2))
    for _ in range(depth // 2):  # each has two directories
        made = Link(x=torch.ones(2), below=made)
    return made


def stacks(depth: int) -> Any:
    made = TensorDict({"x": torch.ones(2)})
    for _ in range(depth // 2):
        made = TensorDict({"n": lazy_stack([made])})
    return made


def save(data: Any, path: Path) -> None:
    data.memmap(path / "save")
    data.memmap(path / "save.tdz")
    data.consolidate(path / "file")


#: What is prepared, and what is counted.
WAYS: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, Path], Any]]] = {
    "memmap": (lambda data, path: None, lambda data, path: data.memmap(path / "save")),
    "checksums": (lambda data, path: None, lambda data, path: data.memmap(path / "save", checksums=True)),
    "replace": (save, lambda data, path: data.memmap(path / "save")),
    "shorten": (save, lambda data, path: TensorDict({"x": torch.ones(2)}).memmap(path / "save")),
    "memmap_like": (lambda data, path: None, lambda data, path: data.memmap_like(path / "save")),
    "load": (save, lambda data, path: TensorDict.load_memmap(path / "save")),
    "verify": (save, lambda data, path: td_memmap.verify(path / "save")),
    "inspect": (save, lambda data, path: str(td_memmap.inspect(path / "save"))),
    "archive": (lambda data, path: None, lambda data, path: data.memmap(path / "save.tdz")),
    "load archive": (save, lambda data, path: TensorDict.load_memmap(path / "save.tdz")),
    "verify archive": (save, lambda data, path: td_memmap.verify(path / "save.tdz")),
    "inspect archive": (save, lambda data, path: str(td_memmap.inspect(path / "save.tdz"))),
    "pack": (save, lambda data, path: td_memmap.pack_memmap(path / "save", path / "packed.tdz")),
    "unpack": (save, lambda data, path: td_memmap.unpack_memmap(path / "save.tdz", path / "unpacked")),
    "consolidate": (lambda data, path: None, lambda data, path: data.consolidate(path / "file")),
    "from_consolidated": (save, lambda data, path: TensorDict.from_consolidated(path / "file")),
}


def count_calls(work: Callable[[], Any]) -> int:
    """Return how many calls some work makes, of Python and of C."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("prepare", "work"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("make", [nest, chain, stacks])
def test_calls_grow_as_the_depth_does(make: Any, prepare: Any, work: Any, tmp_path: Path) -> None:
    found = []
    for depth in (150, 300):
        path = tmp_path / str(depth)
        path.mkdir()
        data = make(depth)
        prepare(data, path)
        found.append(count_calls(partial(work, data, path)))
    assert found[1] < 2.7 * found[0]


@pytest.mark.slow
def test_a_nest_of_2000_levels_is_saved_and_loaded(tmp_path: Path) -> None:
    data = nest(2000)
    save(data, tmp_path)
    td_memmap.pack_memmap(tmp_path / "save", tmp_path / "packed.tdz")
    td_memmap.unpack_memmap(tmp_path / "packed.tdz", tmp_path / "unpacked")
    assert td_memmap.verify(tmp_path / "unpacked").ok and td_memmap.verify(tmp_path / "save.tdz").ok
    for loaded in (
        TensorDict.load_memmap(tmp_path / "unpacked"),
        TensorDict.load_memmap(tmp_path / "save.tdz"),
        TensorDict.from_consolidated(tmp_path / "file"),
    ):
        for _ in range(2000):
            assert loaded["x"].tolist() == [1, 1]
            loaded = loaded["n"]
    subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)  # deeper than shutil can go
