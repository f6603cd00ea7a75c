"""Saves of every format that are interrupted at a system call, or by a signal at any moment: the old save or the new one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

pytestmark = [
    pytest.mark.once,
    # A file that is opened when the interrupt comes is closed without a statement.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool uses the hook"),
]

#: The functions of the system that change files, or the names of files.
CHANGES = frozenset(
    {
        "chmod", "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite", "pwritev", "rename", "replace",
        "rmdir", "truncate", "unlink", "write",
    }
)  # fmt: skip

#: A format and its options, by the name of the save.
SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "x.safetensors": ("safetensors", {}),
    "durable.safetensors": ("safetensors", {"durable": True}),
    "shards": ("safetensors", {"max_shard_size": 40}),
    "directory": ("memmap", {}),
    "x.tdz": ("memmap", {}),
    "x.zarr": ("zarr", {}),
    "x.zarr.zip": ("zarr", {}),
    "x.h5": ("hdf5", {}),
    "consolidated": ("", {}),
}
GROWING = ("directory", "x.zarr", "x.h5")
CREATED = ("x.safetensors", "directory", "x.zarr", "x.h5")
WORK = [
    *(("save", name) for name in SAVES),
    *(("append", name) for name in GROWING),
    *(("create", name) for name in CREATED),
]


def make(value: int, rows: int = 4) -> TensorDict:
    leaf = torch.full((rows, 30), float(value))
    return TensorDict(
        {"a": leaf, "n": {"b": torch.full((rows,), value), "c": leaf.to(torch.complex64)}}, [rows]
    )


def write(path: Path, value: int) -> None:
    name, options = SAVES[path.name]
    if not name:
        make(value).consolidate(path)
    else:
        td_core.save(make(value), path, format=name, **options)


def read(path: Path) -> list[list[int]] | None:
    """Return the numbers of each leaf, None without a save; an error for damage."""
    name = SAVES[path.name][0]
    try:
        data: Any = td_core.load(path, format=name) if name else TensorDict.from_consolidated(path)
    except FileNotFoundError:
        return None
    leaves = [data[key].real.reshape(len(data), -1) for key in ("a", ("n", "b"), ("n", "c"))]
    found = [leaf.to(torch.int64)[:, 0].tolist() for leaf in leaves]
    assert all(bool((leaf == leaf[:, :1]).all()) for leaf in leaves)
    return found


def act(operation: str, path: Path) -> None:
    if operation == "save":
        write(path, 2)
    elif operation == "append":
        td_core.append(make(2, 2), path, format=SAVES[path.name][0])
    else:
        td_core.create(make(0), path, format=SAVES[path.name][0])


def prepare(operation: str, path: Path) -> None:
    if SAVES[path.name][0]:
        pytest.importorskip(f"td_{SAVES[path.name][0]}")
    else:
        pytest.importorskip("td_distributed")
    path.parent.mkdir(exist_ok=True)
    if operation != "create":
        write(path, 1)


def interrupt(work: Callable[[], None], number: int, error: BaseException, after: bool) -> bool:
    """Run ``work``, and raise an error before or after its call ``number`` that changes a file; False if it ended before."""
    count = 0

    def see(frame: object, event: str, function: Any) -> None:
        nonlocal count
        if event != ("c_return" if after else "c_call") or function.__name__ not in CHANGES:
            return
        if getattr(function, "__module__", None) not in ("posix", "_io", "io"):
            return
        count += 1
        if count > number:
            sys.setprofile(None)
            raise error

    sys.setprofile(see)
    try:
        work()
    except type(error):
        assert count > number  # the error of this function
    finally:
        sys.setprofile(None)
    return count > number


@pytest.mark.parametrize(
    ("error", "after"),
    [(KeyboardInterrupt(), True), (SystemExit(), True), (OSError(errno.EIO, "I/O error"), False)],
    ids=repr,
)
@pytest.mark.parametrize(("operation", "name"), WORK)
def test_error_at_any_system_call_leaves_old_or_new(
    operation: str, name: str, error: BaseException, after: bool, tmp_path: Path
) -> None:
    path = tmp_path / "kept" / name
    prepare(operation, path)
    old = read(path)
    shutil.copytree(path.parent, tmp_path / "new")
    act(operation, tmp_path / "new" / name)
    new = read(tmp_path / "new" / name)
    assert old != new
    found = []
    for number in range(1000):
        place = tmp_path / str(number) / name
        shutil.copytree(path.parent, place.parent)
        interrupted = interrupt(lambda place=place: act(operation, place), number, error, after)  # type: ignore[misc]
        found.append(read(place))
        assert found[-1] in (old, new), f"call {number}"
        if operation == "save" and number % 5 == 0:
            write(place, 2)  # the next save removes what this one has left
            assert sorted(os.listdir(place.parent)) == sorted(os.listdir(tmp_path / "new"))
        shutil.rmtree(place.parent)
        if not interrupted:
            break
    assert old in found
    assert found[-1] == new


def send_signals(operation: str, path: Path, count: int, seed: int) -> tuple[int, int]:
    """Interrupt an operation at random moments by SIGKILL, KeyboardInterrupt and SystemExit.

    Returns:
        how often it left the old save, and how often the new one.
    """
    prepare(operation, path)
    old, kept = read(path), path.parent.with_name("kept")
    shutil.copytree(path.parent, kept)
    begin = time.perf_counter()
    act(operation, path)
    duration, new = time.perf_counter() - begin, read(path)
    chance, found = random.Random(seed), []
    for i in range(count):
        shutil.rmtree(path.parent)
        shutil.copytree(kept, path.parent)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit())
                torch.set_num_threads(1)
                act(operation, path)
                code = 0
            finally:
                os._exit(code)
        time.sleep(chance.random() * 1.5 * duration)
        os.kill(pid, (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[i % 3])
        os.waitpid(pid, 0)
        found.append(read(path))
        assert found[-1] in (old, new), f"signal {i}"
    return found.count(old), found.count(new)


@pytest.mark.parametrize(("operation", "name"), WORK)
def test_signal_at_any_moment_leaves_old_or_new(operation: str, name: str, tmp_path: Path) -> None:
    assert sum(send_signals(operation, tmp_path / "work" / name, 3, seed=0)) == 3
