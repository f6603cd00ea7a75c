"""Fixtures that several test files share: trees, files of users, and processes that are killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._formats import locations as _locations
from td_core._kinds.lazy_stack import LazyStackedTensorDict
from td_core._tree.node import Core
from td_core.errors import FormatError
from td_core.testing import assert_same
from td_memmap import MemoryMappedTensor, _fs
from td_store import _temporary_files


@pytest.fixture
def same() -> Any:
    """Return the function that asserts that two collections are equal."""
    return assert_same


@pytest.fixture
def nest() -> Core:
    """Return a small tree with leaves, nested nodes, an empty leaf and an uneven lazy stack."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(3, 2, generator=generator),
            "n": TensorDict(
                {
                    "i": torch.arange(12).view(3, 4),
                    "empty": torch.zeros(3, 0),
                    "deep": {"b": torch.ones(3, dtype=torch.bool)},
                },
                batch_size=[3],
            ),
            "lazy": LazyStackedTensorDict(*(TensorDict({"x": torch.full((i,), i)}) for i in range(3))),
        },
        batch_size=[3],
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Return a path for a save that does not exist yet, alone in its parent directory."""
    return tmp_path / "save"


#: The functions of ``os`` that access the file system.
FILE_SYSTEM_CALLS = {
    "open", "close", "read", "write", "pwrite", "mkdir", "rmdir", "unlink", "link", "rename", "replace", "stat", "fstat",
    "listdir", "scandir", "fsync", "ftruncate", "posix_fallocate", "fchmod", "makedirs", "access", "dup",
}  # fmt: skip


class WatchedOs:
    """Replacement of the module ``os`` that calls a function before or after each file system call."""

    def __init__(self, see: Callable[[str, tuple[Any, ...], Any], None], after: bool = False) -> None:
        self._see = see
        self._after = after

    def __getattr__(self, name: str) -> Any:
        member = getattr(os, name)
        return self.wrap(name, member) if name in FILE_SYSTEM_CALLS else member

    def wrap(self, name: str, member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._after:
                self._see(name, args, kwargs)
                return member(*args, **kwargs)
            result = member(*args, **kwargs)
            self._see(name, args, kwargs)
            return result

        return call


def watch_calls(
    monkeypatch: pytest.MonkeyPatch,
    see: Callable[[str, tuple[Any, ...], Any], None],
    *,
    after: bool = False,
) -> None:
    """Call ``see`` before every file system call of td-memmap, or after it."""
    watched, rename = WatchedOs(see, after), _temporary_files._find_renameat2()
    if rename is not None:
        rename = watched.wrap("renameat2", rename)
    monkeypatch.setattr(_fs, "os", watched)
    for module in (_locations, _temporary_files):
        monkeypatch.setattr(module, "os", watched)
    monkeypatch.setattr(_temporary_files, "_find_renameat2", lambda: rename)
    monkeypatch.setattr(_fs.fcntl, "flock", watched.wrap("flock", _fs.fcntl.flock))


def make_tree(value: int, *, more: bool = False) -> TensorDict:
    """Return a tree whose leaves all hold ``value``; with ``more`` it has one more node."""
    tied = torch.full((4,), value)
    td = TensorDict(
        {
            "a": torch.full((3, 2), value),
            "n": {"b": torch.full((5,), float(value)), "tied": tied, "deep": {"c": torch.full((2,), value)}},
            "tied": tied,
            "strided": torch.full((4, 3), value).t(),
        }
    )
    if more:
        td["more"] = TensorDict({"d": torch.full((2,), value)})
    return td


def read_value(prefix: Path) -> int | None:
    """Return the value of the :func:`make_tree` that is saved at ``prefix``, None without a save."""
    try:
        loaded = TensorDict.load_memmap(prefix, mode="r")
    except FileNotFoundError:
        return None
    values = {int(value) for leaf in loaded._leaves() for value in leaf.flatten()}
    assert len(values) == 1, f"a mixture: {values}"
    (value,) = values
    wanted = make_tree(value, more=value % 2 == 1)
    assert set(loaded.keys(True)) == set(wanted.keys(True))
    return value


def fork_child(work: Callable[[], Any]) -> int:
    """Start ``work`` in a forked process and return its process id."""
    pid = os.fork()
    if pid == 0:
        # A forked process has none of the threads that torch started in its parent.
        torch.set_num_threads(1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def is_running(pid: int) -> bool:
    """Return True if a forked process still runs, and check the exit status of one that ended."""
    done, status = os.waitpid(pid, os.WNOHANG)
    assert not done or status == 0
    return not done


def run_in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a forked process and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(fork_child(work), 0)[1])


def kill_at_call(n: int, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a process that is killed at file system call ``n``; return False if it ended before."""
    calls = itertools.count()

    def see(name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if next(calls) >= n:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched() -> None:
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, see)
            work()

    end = run_in_child(watched)
    assert end in (0, -signal.SIGKILL)
    return end != 0


#: Files that a user keeps in the directory of a save, by path.
USER_FILES = {"README.md": "mine", "logs/today.txt": "mine too", "n/notes.txt": "mine as well"}


def put_user_files(prefix: Path) -> None:
    """Write the files of a user into a save."""
    for name, text in USER_FILES.items():
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(text)


def has_user_files(prefix: Path) -> bool:
    """Return True if all files of the user are unchanged in the save."""
    return all((prefix / name).read_text() == text for name, text in USER_FILES.items())


def find_user_files(folder: Path) -> set[str]:
    """Return the paths of the user files that still exist at any place below ``folder``."""
    return {
        name
        for name in USER_FILES
        if any(file.read_text() == USER_FILES[name] for file in folder.rglob(Path(name).name))
    }


@pytest.fixture(name="make_tree")
def provide_make_tree() -> Any:
    return make_tree


@pytest.fixture(name="read_value")
def provide_read_value() -> Any:
    return read_value


@pytest.fixture(name="watch_calls")
def provide_watch_calls() -> Any:
    return watch_calls


@pytest.fixture(name="fork_child")
def provide_fork_child() -> Any:
    return fork_child


@pytest.fixture(name="is_running")
def provide_is_running() -> Any:
    return is_running


@pytest.fixture(name="run_in_child")
def provide_run_in_child() -> Any:
    return run_in_child


@pytest.fixture(name="kill_at_call")
def provide_kill_at_call() -> Any:
    return kill_at_call


@pytest.fixture(name="put_user_files")
def provide_put_user_files() -> Any:
    return put_user_files


@pytest.fixture(name="has_user_files")
def provide_has_user_files() -> Any:
    return has_user_files


@pytest.fixture(name="find_user_files")
def provide_find_user_files() -> Any:
    return find_user_files


@pytest.fixture
def user_files() -> dict[str, str]:
    """Return the text of each file of the user by path."""
    return USER_FILES


@pytest.fixture
def source() -> Tensor:
    """Return a (3, 4) float32 tensor."""
    return torch.arange(12.0).view(3, 4)


@pytest.fixture
def mapped(source: Tensor, tmp_path: Path) -> MemoryMappedTensor:
    """Return the tensor of the fixture ``source``, mapped to the file "t"."""
    return MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """Return the path of a save with the leaf "a", the nested node "n" and the lazy stack "stack"."""
    stack = LazyStackedTensorDict(
        *(TensorDict({"x": torch.ones(3)}, batch_size=[3]) for _ in range(3)), stack_dim=1
    )
    td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}, "stack": stack}, batch_size=[3])
    td.memmap(tmp_path / "save")
    return tmp_path / "save"


def edit_metadata(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file with what ``change`` returns, or with the object that it changed in place."""
    meta = json.loads(path.read_text())
    result = change(meta)
    path.write_text(json.dumps(result if isinstance(result, (dict, list)) else meta))


def assert_load_fails(place: Path, message: str, **options: Any) -> None:
    """Check that loading raises a FormatError with ``message`` and with the path."""
    with pytest.raises(FormatError, match=message) as found:
        TensorDict.load_memmap(place, **options)
    assert str(place) in str(found.value)


def list_stats(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, time of change and inode of every file below ``folder``, by path."""
    return {
        str(file.relative_to(folder)): (
            os.lstat(file).st_size,
            os.lstat(file).st_mtime_ns,
            os.lstat(file).st_ino,
        )
        for file in folder.rglob("*")
    }


def list_files(path: Path) -> set[str]:
    """Return the paths of all files below ``path``, relative to it."""
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.fixture(name="edit_metadata")
def provide_edit_metadata() -> Any:
    return edit_metadata


@pytest.fixture(name="assert_load_fails")
def provide_assert_load_fails() -> Any:
    return assert_load_fails


@pytest.fixture(name="list_stats")
def provide_list_stats() -> Any:
    return list_stats


@pytest.fixture(name="list_files")
def provide_list_files() -> Any:
    return list_files
