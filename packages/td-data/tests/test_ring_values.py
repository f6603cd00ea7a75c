"""Values of rings that other processes read: rule R9 for strings, which memory does not share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict, lazy_stack
from td_data import ReplayBuffer

pytest.importorskip("td_memmap")
pytest.importorskip("td_tensorclass")


def make_tasks(first: int, stop: int) -> TensorDict:
    """Return rows whose values have their numbers."""
    names = [f"t{i}" for i in range(first, stop)]
    return TensorDict({"x": torch.arange(first, stop), "task": names, "n": {"task": names}}, [stop - first])


def check_tasks(rows: Any) -> None:
    names = [f"t{i}" for i in rows["x"].tolist()]
    assert rows["task"] == names
    assert rows["n", "task"] == names


OPENED: dict[str, Any] = {
    "open": lambda path: td_core.open(path),
    "open r+": lambda path: td_core.open(path, mode="r+"),
    "open keys": lambda path: td_core.open(path, keys=["x", "task", "n"]),
    "load": TensorDict.load_memmap,
    "mapped": lambda path: TensorDict.load_memmap(path).memmap_(),
}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("options", [{}, {"share_non_tensor": True}, {"compatible": True}], ids=str)
@pytest.mark.parametrize("kind", ["value", "column"])
def test_r9_reader_of_a_mapped_ring_sees_values_of_the_writer(
    name: str, options: Any, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "counters"
    example = make_tasks(90, 91)[0].expand(8) if kind == "value" else make_tasks(90, 98)
    writer = ReplayBuffer(example.memmap_like(tmp_path / "ring", **options), path=path)
    early = ReplayBuffer(OPENED[name](tmp_path / "ring"), path=path)
    readers = [early]
    for first, stop in ((0, 3), (3, 6), (6, 7), (7, 15), (15, 40), (40, 42)):
        writer.extend(make_tasks(first, stop))
        readers.append(ReplayBuffer(OPENED[name](tmp_path / "ring"), path=path))
        for reader in readers:
            check_tasks(reader.sample(20))
            check_tasks(reader[:])
            assert reader[:]["x"].equal(torch.arange(max(stop - 8, 0), stop))
            assert reader[stop - 1]["task"] == f"t{stop - 1}"
    check_tasks(writer[:])
    check_tasks(TensorDict.load_memmap(tmp_path / "ring"))
    writer._counters.close()
    if name not in ("open", "open keys"):  # a reader that becomes the writer
        early.extend(make_tasks(42, 45))
        check_tasks(readers[-1][:])


def stack_lazily(rows: TensorDict) -> Any:
    return lazy_stack(list(rows.unbind(0)))


def nest_lazily(rows: TensorDict) -> Any:
    return rows.set("n", stack_lazily(rows["n"]))


@pytest.mark.parametrize("nest", [stack_lazily, nest_lazily])
def test_r9_reader_of_a_mapped_lazy_stack_sees_values_of_the_writer(nest: Any, tmp_path: Path) -> None:
    path = tmp_path / "counters"
    writer = ReplayBuffer(nest(make_tasks(90, 98)).memmap_like(tmp_path / "ring"), path=path)
    reader = ReplayBuffer(td_core.open(tmp_path / "ring"), path=path)
    for first, stop in ((0, 3), (3, 12)):
        writer.extend(make_tasks(first, stop))
        check_tasks(reader.sample(20))
        check_tasks(reader[:])


def test_r9_writer_that_starts_again_keeps_values(tmp_path: Path) -> None:
    reader = None
    for first, stop in ((0, 3), (3, 7), (7, 12), (12, 14)):
        storage = make_tasks(90, 91)[0].expand(8).memmap_like(tmp_path / "ring")
        writer = ReplayBuffer(storage, path=tmp_path / "counters")
        reader = reader or ReplayBuffer(td_core.open(tmp_path / "ring"), path=tmp_path / "counters")
        for buffer in (writer, reader):
            assert len(buffer) == min(first, 8)
            if first:
                check_tasks(buffer[:])
        writer.extend(make_tasks(first, stop))
        for buffer in (writer, reader):
            check_tasks(buffer[:])
        writer._counters.close()


@pytest.mark.filterwarnings("ignore:the values of key .* are not shared")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the reader is forked")
@pytest.mark.parametrize("is_shared", [False, True])
def test_r9_forked_reader_sees_values_or_an_error(is_shared: bool, tmp_path: Path) -> None:
    rows = make_tasks(90, 98)
    buffer = ReplayBuffer(rows.share_memory_() if is_shared else rows.memmap_like(tmp_path / "ring"))
    buffer.extend(make_tasks(0, 3))
    go, answer = os.pipe(), os.pipe()
    reader = os.fork()
    if not reader:
        text = b"failed"
        with contextlib.suppress(BaseException):
            os.read(go[0], 1)
            try:
                check_tasks(buffer[:])
                text = b"seen"
            except RuntimeError as error:
                text = str(error).encode()
        os.write(answer[1], text)
        os._exit(0)
    buffer.extend(make_tasks(3, 12))
    os.write(go[1], b"x")
    found = os.read(answer[0], 1000).decode()
    os.waitpid(reader, 0)
    check_tasks(buffer[:])
    if is_shared:
        assert (
            "another process has written rows, whose values of 'task' this storage does not get: use rows.memm"
            in found
        )
    else:
        assert found == "seen"


@pytest.mark.filterwarnings("ignore:the values of key .* are not shared")
@pytest.mark.parametrize("share", [lambda rows: rows.share_memory_(), lambda rows: rows.memmap_like()])
def test_r9_values_in_memory_that_is_shared_by_a_path_are_refused(share: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"do not get the values of 'task' .*: use rows\.memmap_like\(directory\)"
    ):
        ReplayBuffer(share(make_tasks(90, 98)), path=tmp_path / "counters")
    buffer = ReplayBuffer(share(make_tasks(90, 98)))
    buffer.extend(make_tasks(0, 11))
    check_tasks(buffer[:])
