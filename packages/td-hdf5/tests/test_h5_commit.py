"""A save that is killed or fails leaves the complete old save or the complete new one, and no files that stay."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch

import td_core
from td_core import CodecError, TensorDict, append, load
from td_core.testing import kill_after, kill_at_os_call, watch_os
from td_hdf5 import save
from td_store import _temporary_files

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def make_collection(value: int) -> TensorDict:
    return TensorDict(
        {
            "a": torch.full((20_000,), value),
            "n": {"b": torch.full((5,), float(value)), "c": torch.full((2, value + 1), value).t()},
        }
    )


def read_value(path: Path) -> int | None:
    """Return the number of the :func:`make_collection` at a path, None if there is none; fail for a mixture."""
    try:
        found = load(path, format="hdf5")
    except FileNotFoundError:
        return None
    found = TensorDict(found)  # of a checkpoint, too
    values = {int(value) for leaf in found.values(True, True) for value in leaf.flatten()}
    assert len(values) == 1, f"a mixture: {values}"
    (value,) = values
    assert found["n", "c"].shape == (value + 1, 2)
    return value


@pytest.mark.parametrize("as_checkpoint", [False, True], ids=["collection", "checkpoint"])
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_save_killed_at_any_call_leaves_complete_save(
    over: bool, as_checkpoint: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if over:
        save(make_collection(1), path)
    seen = set()
    for n in range(1000):

        def work() -> None:
            data = make_collection(2)
            new = dict(data.items()) if as_checkpoint else data
            td_core.save(new, path, format="hdf5", durable=True, checksums=True)

        killed = kill_at_os_call(work, n, _temporary_files)
        found = read_value(path)
        seen.add(found)
        assert found in (1 if over else None, 2), f"killed at call {n}"
        if not killed:
            break
        if found == 2:
            save(make_collection(1), path) if over else path.unlink()
    assert n >= 6
    assert seen == {1 if over else None, 2}
    save(make_collection(3), path)
    assert [item.name for item in path.parent.iterdir()] == ["data.h5"]


@pytest.mark.once
def test_save_killed_at_50_moments_leaves_complete_save(path: Path) -> None:
    save(make_collection(1), path)

    def work() -> None:
        for value in itertools.cycle((2, 1)):
            save(make_collection(value), path, compression="gzip", chunks=100)

    for moment in range(50):
        assert kill_after(work, 0.02 + 0.001 * moment)
        assert read_value(path) in (1, 2), moment
    save(make_collection(3), path)
    assert [item.name for item in path.parent.iterdir()] == ["data.h5"]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_save_failing_call_keeps_old_save(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_collection(1), path)
    for n in range(100):
        count = 0

        def see(name: str, n: int = n) -> None:
            nonlocal count
            count += name == call
            if name == call and count == n + 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            watch_os(patch, see, _temporary_files)
            try:
                save(make_collection(2), path, durable=True)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        assert [item.name for item in path.parent.iterdir()] == ["data.h5"]
        assert read_value(path) in (1, 2)
    assert n > 0


def test_save_above_largest_size_of_files_is_an_os_error(path: Path) -> None:
    resource = pytest.importorskip("resource")
    save(make_collection(1), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save(TensorDict({"a": torch.ones(5000)}, [5000]), path, chunks=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert [item.name for item in path.parent.iterdir()] == ["data.h5"] and read_value(path) == 1


def test_save_of_value_that_fails_writes_nothing(path: Path) -> None:
    save(make_collection(1), path)
    before = path.read_bytes()
    with pytest.raises(CodecError):
        save(make_collection(2).set("x", torch.ones(3).to_sparse()), path)
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["data.h5"]


@pytest.mark.once
def test_append_killed_leaves_file_that_loads_or_says_what_is_wrong(path: Path) -> None:
    data = TensorDict({"a": torch.arange(2000).view(1000, 2), "b": torch.arange(1000)}, [1000])
    for moment in range(10):
        save(data, path, chunks=100)

        def work() -> None:
            while True:
                append(data[:100], path)

        kill_after(work, 0.03 + 0.003 * moment)
        try:
            found = load(path)
        except ValueError:  # FormatError: HDF5 itself cannot recover what it had not flushed
            continue
        assert torch.equal(found["a"][:1000], data["a"])
        assert found["a"].shape[0] == found["b"].shape[0] == found.batch_size[0]
