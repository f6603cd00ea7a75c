"""Register the plugin if it is not installed, and fixtures that several test files share."""

from __future__ import annotations

import itertools
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_core
from td_core import TensorDict, _temporary_files
from td_core.testing import installed
from td_safetensors import _files, _write_save, plugin


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    if any(record.id == "safetensors" for record in td_core.plugins()):
        yield
        return
    with installed(plugin, id="safetensors", distribution="td-safetensors"):
        yield


def assert_same(found: Any, wanted: Any, where: str = "root") -> None:
    """Check that two collections have equal classes, keys in order, batch sizes, names, locks, dtypes and bytes."""
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.layout, found.is_nested) == (
            wanted.dtype,
            wanted.layout,
            wanted.is_nested,
        ), where
        if wanted.is_nested:
            for i, (one, other) in enumerate(zip(found.unbind(), wanted.unbind(), strict=True)):
                assert_same(one, other, f"{where}[{i}]")
            return
        assert found.shape == wanted.shape, where
        one, other = (
            x.detach().resolve_conj().resolve_neg().view(-1) if x.dim() == 0 else x.detach()
            for x in (found, wanted)
        )
        assert read_bytes(found) == read_bytes(wanted), f"{where}: {one} {other}"
        return
    assert type(found) is type(wanted), where
    assert (found.batch_size, list(found.names)) == (wanted.batch_size, list(wanted.names)), where
    assert found.is_locked == wanted.is_locked, where
    if hasattr(wanted, "tensordicts"):
        assert found.stack_dim == wanted.stack_dim, where
        assert len(found.tensordicts) == len(wanted.tensordicts), where
        for i, (one, other) in enumerate(zip(found.tensordicts, wanted.tensordicts, strict=True)):
            assert_same(one, other, f"{where}/{i}")
        return
    assert list(found.keys()) == list(wanted.keys()), where
    for key in wanted.keys():
        assert_same(found.get(key), wanted.get(key), f"{where}/{key!r}")


def read_bytes(leaf: Tensor) -> bytes:
    """Return the elements of a dense tensor as bytes, for dtypes that torch cannot compare."""
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    if leaf.dim() == 0:
        leaf = leaf.reshape(1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.dtype.itemsize]
    return leaf.view(width).contiguous().numpy().tobytes()


@pytest.fixture
def same() -> Callable[..., None]:
    """Return the function that asserts that two collections are equal."""
    return assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet, alone in its directory."""
    return tmp_path / "data.safetensors"


@pytest.fixture
def td() -> TensorDict:
    """Return a small collection with two levels, and leaves of two dtypes."""
    return TensorDict(
        {"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4), "c": torch.ones(4, 2)}},
        batch_size=[4],
    )


def read_file_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a file."""
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def edit_file_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the JSON header of a file after ``change`` edited it, or with what it returned."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.fixture(name="read_header")
def provide_read_header() -> Any:
    return read_file_header


@pytest.fixture(name="edit_header")
def provide_edit_header() -> Any:
    return edit_file_header


#: The functions of ``os`` that access the file system.
CALLS = {
    "open",
    "close",
    "pread",
    "preadv",
    "pwritev",
    "replace",
    "unlink",
    "listdir",
    "fsync",
    "fstat",
    "stat",
    "makedirs",
    "chmod",
    "ftruncate",
}


class WatchedOs:
    """Replacement of the module ``os`` that calls a function before each file system call."""

    def __init__(self, see: Callable[[str], None]) -> None:
        self._see = see

    def __getattr__(self, name: str) -> Any:
        member = getattr(os, name)
        if name not in CALLS:
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            self._see(name)
            return member(*args, **kwargs)

        return call


def kill_at_call(n: int, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a process that is killed at file system call ``n``; return False if it ended before."""
    pid = os.fork()
    if pid:
        end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert end in (0, -signal.SIGKILL)
        return end != 0
    try:
        # A forked process has none of the threads that torch started in its parent.
        torch.set_num_threads(1)
        calls = itertools.count()

        def see(name: str) -> None:
            if next(calls) >= n:
                os.kill(os.getpid(), signal.SIGKILL)

        watch_calls(see)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def watch_calls(see: Callable[[str], None], patch: pytest.MonkeyPatch | None = None) -> None:
    """Call ``see`` before every file system call of the package."""
    watched = WatchedOs(see)
    for module in (_files, _temporary_files, _write_save):
        if patch is None:
            module.os = watched
        else:
            patch.setattr(module, "os", watched)


@pytest.fixture(name="kill_at_call")
def provide_kill_at_call() -> Any:
    return kill_at_call


@pytest.fixture(name="watch_calls")
def provide_watch_calls() -> Any:
    return watch_calls
