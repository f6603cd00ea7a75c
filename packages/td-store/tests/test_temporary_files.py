"""Files and directories that appear complete or not at all, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from td_core.testing._killed_processes import count_calls, kill_at_call, run_in_child
from td_store import _temporary_files
from td_store.files import NewDirectory, NewFile, read_unreplaced


def write_file(path: Path, text: str) -> None:
    with NewFile(path) as file:
        file.write([text[:1].encode(), b"", text[1:].encode()])
        file.commit(durable=True)


def write_directory(path: Path, text: str) -> None:
    with NewDirectory(path) as folder:
        for name in ("a", "b/c"):
            target = Path(folder.temporary, name)
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
        folder.commit(durable=True)


def read(path: Path) -> str | None:
    """Return the content of a save, None without one; fail for a mixture."""
    if not path.exists():
        return None
    if path.is_file():
        return path.read_text()
    (text,) = {path.joinpath(name).read_text() for name in ("a", "b/c")}
    return text


WRITERS = pytest.mark.parametrize("write", [write_file, write_directory])


@pytest.fixture(params=["exchange", "two renames"])
def renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let directories be replaced in one step, or as on a system that cannot exchange two names."""
    if request.param == "two renames":
        monkeypatch.setattr(_temporary_files, "_exchange", lambda one, other: False)
    return str(request.param)


@WRITERS
def test_commit_replaces_what_was_at_the_path(write: Any, tmp_path: Path, renames: str) -> None:
    for text in ("old", "new"):
        write(tmp_path / "x", text)
        assert read(tmp_path / "x") == text
        assert os.listdir(tmp_path) == ["x"]


@WRITERS
def test_block_without_commit_keeps_old(write: Any, tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    new: Any = NewFile if write is write_file else NewDirectory
    for error in (None, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt), new(tmp_path / "x"):
            raise error or KeyboardInterrupt
    with new(tmp_path / "x"):
        pass
    assert read(tmp_path / "x") == "old"
    assert os.listdir(tmp_path) == ["x"]


@WRITERS
def test_commit_keeps_permissions(write: Any, tmp_path: Path, renames: str) -> None:
    write(tmp_path / "x", "old")
    (tmp_path / "x").chmod(0o700)
    write(tmp_path / "x", "new")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


@WRITERS
def test_commit_through_link_replaces_its_target(write: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "other" / "y")
    for text in ("old", "new"):
        write(tmp_path / "x", text)
        assert (tmp_path / "x").is_symlink()
        assert read(tmp_path / "other" / "y") == text
    assert os.listdir(tmp_path / "other") == ["y"]


@WRITERS
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_call_leaves_old_or_new(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    calls = count_calls(lambda: write(tmp_path / "counted", "text"))
    found = set()
    write(path, "0")
    for number in range(calls + 3):
        old = read(path)
        kill_at_call(lambda number=number: write(path, str(number + 1)), number)
        found.add(read(path) == old)
        assert read(path) in (old, str(number + 1))
        # The next save removes what the killed one left.
        write(path, f"after {number}")
        assert sorted(os.listdir(tmp_path)) == ["counted", "x"]
    assert found == {True, False}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_between_two_renames_is_mended_by_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_temporary_files, "_exchange", lambda one, other: False)
    write_directory(tmp_path / "x", "old")
    missing = 0
    for number in range(count_calls(lambda: write_directory(tmp_path / "y", "y")) + 4):
        kill_at_call(lambda: write_directory(tmp_path / "x", "old"), number)
        missing += read(tmp_path / "x") is None
        NewDirectory(tmp_path / "x").discard()
        assert read(tmp_path / "x") == "old"
        assert sorted(os.listdir(tmp_path)) == ["x", "y"]
    assert missing


@pytest.mark.parametrize("name", ["fsync", "replace", "rename", "chmod"])
@WRITERS
def test_failing_call_keeps_old(
    write: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x", "old")
    original = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if str(args[0]).startswith(str(tmp_path)) or name == "fsync":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)
    try:
        write(tmp_path / "x", "new")
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert read(tmp_path / "x") == "old"
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]


def test_stale_temporaries_of_the_path_alone_are_removed(tmp_path: Path) -> None:
    names = [".x.tmp-00000002", ".x.tmp-z", ".y.tmp-0123abcd", "x.tmp-00000000", ".x.tmp-00000000ef"]
    for name in names:
        (tmp_path / name).touch()
    write_file(tmp_path / "x", "text")
    assert sorted(os.listdir(tmp_path)) == sorted(["x", *names[1:]])
    with NewFile(tmp_path / "x", beside=("y",)):
        assert ".y.tmp-0123abcd" not in os.listdir(tmp_path)


@pytest.mark.parametrize("new", [NewFile, NewDirectory])
def test_temporary_of_running_save_is_kept(new: Any, tmp_path: Path) -> None:
    with new(tmp_path / "x") as running:
        with new(tmp_path / "x") as other:
            other.commit()
        assert os.path.exists(running.temporary)
        running.commit()
    assert os.listdir(tmp_path) == ["x"]


def test_directory_of_running_save_is_not_recovered(tmp_path: Path) -> None:
    with NewDirectory(tmp_path / "x") as running:
        aside = _temporary_files._name_aside(running.path)
        os.rename(running.temporary, aside)
        running.temporary = aside
        with NewDirectory(tmp_path / "x"):
            assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(aside), ".x.tmp-00000000"])
        running.commit()
    assert os.listdir(tmp_path) == ["x"]


@WRITERS
def test_temporary_committed_before_it_is_locked_is_kept(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / ".x.tmp-00000000"
    write(tmp_path / "stale", "committed")
    os.rename(tmp_path / "stale", stale)
    lock = _temporary_files.lock

    def commit_then_lock(fd: int, **options: Any) -> bool:
        if not (tmp_path / "x").exists():
            os.rename(stale, tmp_path / "x")
            os.mkdir(stale)  # of a third save
        return lock(fd, **options)

    monkeypatch.setattr(_temporary_files, "lock", commit_then_lock)
    _temporary_files._remove_if_stale(str(stale))
    assert read(tmp_path / "x") == "committed"
    assert stale.is_dir()


@WRITERS
def test_saves_in_threads_leave_one(write: Any, tmp_path: Path, renames: str) -> None:
    errors: list[BaseException] = []

    def work(text: str) -> None:
        try:
            for _ in range(20):
                write(tmp_path / "x", text)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert read(tmp_path / "x") in {"0", "1", "2", "3"}
    assert os.listdir(tmp_path) == ["x"]


def test_directory_over_file_raises(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("text")
    with pytest.raises(NotADirectoryError, match="'.*x', which is a file: remove it"):
        NewDirectory(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "text"


def test_write_at_position_reports_bytes(tmp_path: Path) -> None:
    done: list[int] = []
    with NewFile(tmp_path / "x") as file:
        file.extend(6)
        file.write([b"ab", b"c"], 2, done.append)
        file.commit()
    assert (tmp_path / "x").read_bytes() == b"\0\0abc\0"
    assert sum(done) == 3


def test_read_unreplaced_repeats_after_a_save(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", "old")
    tries = []

    def read_while_saving() -> list[str]:
        first = (tmp_path / "x" / "a").read_text()
        tries.append(first)
        if len(tries) == 1:
            write_directory(tmp_path / "x", "new")
        if len(tries) == 2:
            write_directory(tmp_path / "x", "newer")
            raise FileNotFoundError("a file of the old save")
        return [first, (tmp_path / "x" / "b" / "c").read_text()]

    assert read_unreplaced(tmp_path / "x", read_while_saving) == ["newer", "newer"]
    assert tries == ["old", "new", "newer"]


def test_read_unreplaced_keeps_errors_of_damage(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", "text")
    with pytest.raises(ZeroDivisionError):
        read_unreplaced(tmp_path / "x", lambda: 1 / 0)
    with pytest.raises(FileNotFoundError, match="missing"):
        read_unreplaced(tmp_path / "missing", lambda: 1)


def test_new_file_beside_others_lets_one_in(tmp_path: Path) -> None:
    order: list[str] = []
    with NewFile(tmp_path / "a.x", beside=(".x",)):
        thread = threading.Thread(target=lambda: _enter(tmp_path / "b.x", order))
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def _enter(path: Path, order: list[str]) -> None:
    with NewFile(path, beside=(".x",)):
        order.append("second")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_fork_in_locked_block_does_not_keep_lock(kind: str, tmp_path: Path) -> None:
    """Another thread can fork while a save is written; its child can live longer than the save."""
    fcntl = pytest.importorskip("fcntl")
    ended = tmp_path / "ended"

    def wait() -> None:
        while not ended.exists():
            time.sleep(0.01)

    with ExitStack() as stack:
        with ExitStack() as block:
            new = block.enter_context(NewFile(tmp_path / "a", beside=(".x",) if kind == "directory" else ()))
            stack.enter_context(run_in_child(wait))
            stack.callback(ended.touch)
            if kind == "file":
                new.commit()
        fd = os.open(tmp_path if kind == "directory" else tmp_path / "a", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the child keeps the lock
        os.close(fd)


def test_new_file_without_replace_raises_over_existing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with NewFile(path, replace=False) as new:
        new.write([b"first"])
        new.commit()
    with pytest.raises(FileExistsError):
        NewFile(path, replace=False)
    with NewFile(tmp_path / "y", replace=False) as late:
        (tmp_path / "y").write_bytes(b"other")
        with pytest.raises(FileExistsError):
            late.commit()
    assert [path.read_bytes(), (tmp_path / "y").read_bytes()] == [b"first", b"other"]
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_new_file_in_directory_that_another_save_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, create = tmp_path / "new", NewFile._create

    def create_later(self: NewFile) -> int:
        try:
            return create(self)
        except FileNotFoundError:
            folder.mkdir()  # by another save, before this one looks
            raise

    monkeypatch.setattr(NewFile, "_create", create_later)
    write_file(folder / "x", "text")
    assert read(folder / "x") == "text"


def test_new_file_in_directory_that_takes_no_name_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NewFile) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.temporary)

    monkeypatch.setattr(NewFile, "_create", refuse)
    with pytest.raises(FileNotFoundError, match="cannot write it") as caught:
        NewFile(tmp_path / "x")
    assert caught.value.filename == str(tmp_path / "x")


def test_new_file_accepts_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("k" * 255)
    write_file(path, "text")
    assert path.read_text() == "text"
    assert os.listdir(tmp_path) == [path.name]


def test_new_file_error_of_full_disk_names_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="cannot write it: No space left on device: '.*/x'") as caught:
        write_file(tmp_path / "x", "text")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
