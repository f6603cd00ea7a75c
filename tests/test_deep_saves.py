"""Saving and loading deep trees: the number of function calls is linear in the depth."""

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
    """A tensorclass that contains another instance."""

    x: Tensor
    below: Any = None


def make_nested(depth: int) -> Any:
    made = TensorDict({"x": torch.ones(2)})
    for _ in range(depth):
        made = TensorDict({"n": made, "x": torch.ones(2)})
    return made


def make_chain(depth: int) -> Any:
    made = Link(x=torch.ones(2))
    for _ in range(depth // 2):  # each instance is two nested directories
        made = Link(x=torch.ones(2), below=made)
    return made


def make_stacks(depth: int) -> Any:
    made = TensorDict({"x": torch.ones(2)})
    for _ in range(depth // 2):
        made = TensorDict({"n": lazy_stack([made])})
    return made


def save_all_formats(data: Any, path: Path) -> None:
    data.memmap(path / "save")
    data.memmap(path / "save.tdz")
    data.consolidate(path / "file")


#: A preparation, and the work whose calls are counted.
WORK: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, Path], Any]]] = {
    "memmap": (lambda data, path: None, lambda data, path: data.memmap(path / "save")),
    "checksums": (lambda data, path: None, lambda data, path: data.memmap(path / "save", checksums=True)),
    "replace": (save_all_formats, lambda data, path: data.memmap(path / "save")),
    "shorten": (save_all_formats, lambda data, path: TensorDict({"x": torch.ones(2)}).memmap(path / "save")),
    "memmap_like": (lambda data, path: None, lambda data, path: data.memmap_like(path / "save")),
    "load": (save_all_formats, lambda data, path: TensorDict.load_memmap(path / "save")),
    "verify": (save_all_formats, lambda data, path: td_memmap.verify(path / "save")),
    "inspect": (save_all_formats, lambda data, path: str(td_memmap.inspect(path / "save"))),
    "archive": (lambda data, path: None, lambda data, path: data.memmap(path / "save.tdz")),
    "load archive": (save_all_formats, lambda data, path: TensorDict.load_memmap(path / "save.tdz")),
    "verify archive": (save_all_formats, lambda data, path: td_memmap.verify(path / "save.tdz")),
    "inspect archive": (save_all_formats, lambda data, path: str(td_memmap.inspect(path / "save.tdz"))),
    "pack": (save_all_formats, lambda data, path: td_memmap.pack_memmap(path / "save", path / "packed.tdz")),
    "unpack": (
        save_all_formats,
        lambda data, path: td_memmap.unpack_memmap(path / "save.tdz", path / "unpacked"),
    ),
    "consolidate": (lambda data, path: None, lambda data, path: data.consolidate(path / "file")),
    "from_consolidated": (save_all_formats, lambda data, path: TensorDict.from_consolidated(path / "file")),
}


def count_calls(work: Callable[[], Any]) -> int:
    """Return the number of calls of Python and C functions while ``work`` runs."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("prepare", "work"), WORK.values(), ids=WORK.keys())
@pytest.mark.parametrize("make", [make_nested, make_chain, make_stacks])
def test_number_of_calls_is_linear_in_depth(make: Any, prepare: Any, work: Any, tmp_path: Path) -> None:
    found = []
    for depth in (150, 300):
        path = tmp_path / str(depth)
        path.mkdir()
        data = make(depth)
        prepare(data, path)
        found.append(count_calls(partial(work, data, path)))
    assert found[1] < 2.7 * found[0]


@pytest.mark.once
def test_save_and_load_depth_2000_keeps_leaves(tmp_path: Path) -> None:
    data = make_nested(2000)
    save_all_formats(data, tmp_path)
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
    subprocess.run(
        ["rm", "-rf", *map(str, tmp_path.iterdir())], check=True
    )  # shutil.rmtree exceeds the recursion limit
