"""Processes that save while another one loads, and saves that are killed at a file-system call."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

__all__ = [
    "WatchedOs", "copy_at_os_calls", "count_calls", "kill_after", "kill_at_call", "kill_at_os_call", "kill_at_size",
    "run_in_child", "watch_os",
]  # fmt: skip

#: Events of :func:`sys.addaudithook` that change files or open them.
_EVENTS = frozenset(
    {
        "open",
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "os.chmod",
    }
)

#: The functions of ``os`` that access the file system.
_OS_CALLS = frozenset(
    {
        "chmod", "close", "fstat", "fsync", "ftruncate", "listdir", "makedirs", "mkdir", "open", "pread", "preadv", "pwritev",
        "rename", "replace", "rmdir", "stat", "truncate", "unlink", "utime",
    }
)  # fmt: skip

_KILLED = 77

#: Seconds after which a child process that has not ended prints where it is, and ends.
_LONGEST = 120


class WatchedOs:
    """Replacement of the module ``os`` in another module: it calls a function before each file-system call.

    >>> import os
    >>> WatchedOs(print).listdir(os.curdir) == os.listdir()
    listdir
    True
    """

    def __init__(self, see: Callable[[str], object]) -> None:
        self._see = see

    def __getattr__(self, name: str) -> Any:
        member = getattr(os, name)
        if name not in _OS_CALLS:
            return member

        def call(*args: object, **kwargs: object) -> Any:
            self._see(name)
            return member(*args, **kwargs)

        setattr(self, name, call)  # shutil compares the calls by identity
        return call


def watch_os(patch: pytest.MonkeyPatch, see: Callable[[str], object], *modules: ModuleType) -> None:
    """Call ``see`` with the name of each file-system call of some modules, before it."""
    for module in modules:
        patch.setattr(module, "os", WatchedOs(see))


def copy_at_os_calls(
    work: Callable[[], object], folder: Path, into: Path, *modules: ModuleType
) -> list[Path]:
    """Run ``work``, and copy a folder before each file-system call of some modules, and at the end.

    A copy is what another process finds if this one is killed there, except that no file is locked. ``work`` must do its
    calls in one thread.
    """
    copies: list[Path] = []

    def see(name: str) -> None:
        copies.append(into / str(len(copies)))
        shutil.copytree(folder, copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        watch_os(patch, see, *modules)
        work()
    see("end")
    return copies


def kill_at_os_call(work: Callable[[], object], number: int, *modules: ModuleType) -> bool:
    """Run ``work`` in a child process that is killed before file-system call ``number`` of some modules.

    Return False if the process ended before.
    """
    calls = 0

    def see(name: str) -> None:
        nonlocal calls
        if calls >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            watch_os(patch, see, *modules)
            work()

    code = _run_forked(run)
    assert code in (0, -signal.SIGKILL), "the save failed in a child process"
    return code != 0


def count_calls(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process, and return the number of its file-system calls."""
    reader, writer = os.pipe()

    def count() -> None:
        calls = 0

        def note(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal calls
            calls += event in _EVENTS

        sys.addaudithook(note)
        work()
        os.write(writer, str(calls).encode())

    code = _run_forked(count)
    os.close(writer)
    with os.fdopen(reader) as file:
        content = file.read()
    assert code == 0, "the save failed in a child process; its traceback is in the captured output"
    return int(content)


def kill_at_call(work: Callable[[], object], number: int) -> None:
    """Run ``work`` in a child process that ends at its file-system call ``number``, without any cleanup."""

    def run() -> None:
        calls = -1

        def note(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal calls
            calls += event in _EVENTS
            if event in _EVENTS and calls == number:
                os._exit(_KILLED)

        sys.addaudithook(note)
        work()

    code = _run_forked(run)
    assert code in (0, _KILLED), f"the save failed with the exit code {code} before it was killed"


def kill_after(work: Callable[[], object], seconds: float) -> bool:
    """Run ``work`` in a child process that is killed after some time. Return False if the process ended before."""
    pid = _fork(work)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "the save failed in a child process"
    return code != 0


def kill_at_size(work: Callable[[], object], nbytes: int) -> None:
    """Run ``work`` in a child process that ends when it makes a file longer than ``nbytes``, also from native code."""

    def run() -> None:
        import resource  # Windows lacks it, and fork()

        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        work()

    code = _run_forked(run)
    assert code in (0, -signal.SIGXFSZ), f"the save failed with the exit code {code} before it was killed"


@contextmanager
def run_in_child(work: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Run ``work`` in a child process during a ``with`` block, which receives a function that returns whether it runs."""
    pid, code = _fork(work), None

    def is_running() -> bool:
        nonlocal code
        if code is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
        return code is None

    try:
        yield is_running
    finally:
        while is_running():
            time.sleep(0.01)
    assert code == 0, "the save failed in a child process; its traceback is in the captured output"


def _run_forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(_fork(work), 0)[1])


def _fork(work: Callable[[], object]) -> int:
    """Start ``work`` in a child process, and return its process id."""
    if not hasattr(os, "fork"):
        pytest.skip("this platform has no fork()")
    pid = os.fork()
    if pid == 0:
        _run_and_exit(work)
    return pid


def _run_and_exit(work: Callable[[], object]) -> NoReturn:
    """Run ``work``, and end this process without the handlers of the parent, such as those of pytest."""
    code = 1
    faulthandler.dump_traceback_later(_LONGEST, exit=True)  # a child that hangs would stop the test run
    try:
        torch.set_num_threads(1)  # a forked process has none of the threads that torch started in its parent
        work()
        code = 0
    except BaseException:  # the child must never return to the test runner
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
