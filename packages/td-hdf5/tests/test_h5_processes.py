"""Several processes and threads use one file in turn: nothing is lost, and every read has what is in the file now."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import FormatError
from td_hdf5 import PersistentTensorDict
from td_hdf5._h5_files import close_file, open_by_path

OPTIONS: list[dict[str, Any]] = [{}, {"chunks": 4}, {"chunks": 4, "compression": "gzip"}]
_SERVER = """
import sys, traceback
import torch, td_core, td_hdf5, h5py
from td_core import TensorDict
names = {}
for line in sys.stdin:
    try:
        exec(eval(line), globals(), globals())
        print("done", flush=True)
    except BaseException:
        print(repr(traceback.format_exc()), flush=True)
"""


@pytest.fixture(scope="module")
def other() -> Iterator[Callable[[str], None]]:
    """Return a function that runs code in another process, which keeps its variables."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout

        def run(code: str) -> None:
            print(repr(code), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer == "done\n", answer

        yield run
        process.stdin.close()


@pytest.fixture(params=OPTIONS, ids=str)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the path of a save with two leaves, in one of the layouts of datasets."""
    place = str(tmp_path / "data.h5")
    data = TensorDict({"a": torch.zeros(12, 3), "n": {"b": torch.arange(12)}}, [12])
    td_core.save(data, place, format="hdf5", **request.param)
    return place


def test_write_elements_in_turn_keeps_all_of_them(path: str, other: Callable[[str], None]) -> None:
    opened = td_core.open(path, mode="r+")
    other(f"opened = td_core.open({path!r}, mode='r+')")
    expected = torch.zeros(12, 3)
    for row in range(0, 12, 2):
        opened["a"][row] = expected[row] = torch.randn(3)
        other(f"opened['a'][{row + 1}] = {row + 1}.5")
        expected[row + 1] = row + 1.5
        assert torch.equal(opened["a"].clone(), expected)
    other("del opened")
    assert torch.equal(td_core.load(path)["a"], expected)
    assert td_core.load(path)["n", "b"].tolist() == list(range(12))
    assert td_core.verify(path).ok


def test_change_entries_in_turn_keeps_all_changes(path: str, other: Callable[[str], None]) -> None:
    stored: Any = TensorDict.from_h5(path, mode="r+")
    other(f"stored = TensorDict.from_h5({path!r}, mode='r+')")
    stored["one"] = torch.ones(12)
    other("stored['two'] = torch.full((12, 2), 2.0)")
    stored["n", "three"] = torch.full((12,), 3)
    other("stored.rename_key_('a', 'first')")
    stored.names = ["time"]
    other("del stored['n', 'b']")
    stored["last"] = torch.zeros(12)
    other("stored['two'][3] = 7.0; stored['first'][0] = 5.0; del stored")
    loaded = td_core.load(path)
    assert set(loaded.keys(True, True)) == {("n", "three"), "first", "one", "two", "last"}
    assert loaded["first"][0].tolist() == [5.0, 5.0, 5.0]
    assert loaded["two"][2:4].tolist() == [[2.0, 2.0], [7.0, 7.0]]
    assert loaded.names == ["time"]
    assert td_core.verify(path).ok


def test_append_in_turn_with_an_open_collection_keeps_all_rows(
    path: str, other: Callable[[str], None]
) -> None:
    for turn in range(3):
        opened = td_core.open(path, mode="r+")
        opened["a"][turn] = turn + 1.0
        other(f"td_core.append(td_core.load({path!r})[:2], {path!r})")
        td_core.append(td_core.load(path)[:1], path)
    assert td_core.load(path)["a"][:, 0].tolist() == [1, 2, 3, *[0] * 9, *[1, 0, 1], *[1, 2, 1], *[1, 2, 1]]


def _close(stored: Any) -> Any:
    stored.close()
    return stored


def _fork(stored: Any) -> Any:
    pid = os.fork()
    if pid == 0:
        os._exit(int(stored["n", "b"].sum() != 66))
    assert os.waitpid(pid, 0)[1] == 0
    return stored


_NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
_ENDS = [
    pytest.param(_close, id="close"),
    pytest.param(lambda stored: None, id="collect"),
    pytest.param(_fork, id="fork", marks=_NEEDS_FORK),
]


@pytest.mark.parametrize("end", _ENDS)
def test_end_a_handle_after_writes_of_another_process_keeps_them(
    end: Callable[[Any], Any], path: str, other: Callable[[str], None]
) -> None:
    stored: Any = TensorDict.from_h5(path, mode="r+")
    stored["a"][0] = 1.0
    stored["new"] = torch.arange(12)
    other(f"stored = TensorDict.from_h5({path!r}, mode='r+')")
    other("stored['more'] = torch.ones(12, 500); stored['a'][1] = 2.0; del stored")
    stored = end(stored)
    gc.collect()
    loaded = td_core.load(path)
    assert loaded["a"][:2].tolist() == [[1.0] * 3, [2.0] * 3]
    assert loaded["more"].sum() == 6000
    assert loaded["new"].tolist() == list(range(12))
    if stored is not None:
        stored["a"][2] = 3.0
        assert td_core.load(path)["a"][:3, 0].tolist() == [1.0, 2.0, 3.0]


def test_exit_after_writes_of_another_process_keeps_them(tmp_path: Path) -> None:
    path = str(tmp_path / "data.h5")
    td_core.save(TensorDict({"a": torch.zeros(12)}, [12]), path, format="hdf5", chunks=4)
    code = """
import sys, torch
from td_core import TensorDict
stored = TensorDict.from_h5(sys.argv[1], mode="r+")
stored["new"] = torch.zeros(12)
print("ready", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        stored: Any = TensorDict.from_h5(path, mode="r+")
        stored["more"] = torch.ones(12, 500)
        print(file=process.stdin, flush=True)
    assert process.returncode == 0
    assert set(td_core.load(path).keys()) == {"a", "new", "more"}
    assert td_core.verify(path).ok


def test_use_a_leaf_that_another_process_removed_raises(path: str, other: Callable[[str], None]) -> None:
    opened = td_core.open(path, mode="r+")
    leaf = opened["a"]
    assert leaf.clone().sum() == leaf[torch.tensor([1, 2])].sum() == 0
    other(f"stored = TensorDict.from_h5({path!r}, mode='r+')")
    other("del stored['a']; stored['c'] = torch.ones(12, 3); del stored")
    with pytest.raises(FormatError, match="missing"):
        leaf[0] = 9.0
    with pytest.raises(FormatError, match="missing"):
        leaf.clone()
    with pytest.raises(FormatError, match="missing"):
        leaf[torch.tensor([1, 2])]
    assert td_core.load(path)["c"].sum() == 36


def test_read_after_another_process_changed_the_file_is_current(
    path: str, other: Callable[[str], None]
) -> None:
    reader: Any = TensorDict.from_h5(path)
    opened = td_core.open(path)
    assert reader["a"].clone().sum() == opened["a"].clone().sum() == 0
    other(f"stored = TensorDict.from_h5({path!r}, mode='r+')")
    other("stored['new'] = torch.ones(12); stored['a'][0] = 1.0; stored.names = ['time']; del stored")
    assert set(td_core.load(path).keys()) == {"a", "n", "new"}
    assert set(td_core.inspect(path).children) == {"a", "n", "new"}
    assert set(td_core.open(path).keys()) == {"a", "n", "new"}
    assert td_core.open(path).names == ["time"]
    assert td_core.load(path, keys="new", rows=slice(2))["new"].tolist() == [1.0, 1.0]
    assert reader["a"][0].tolist() == opened["a"][torch.tensor([0])][0].tolist() == [1.0] * 3


def test_write_while_others_have_the_file_open_does_not_wait(path: str, other: Callable[[str], None]) -> None:
    stored: Any = TensorDict.from_h5(path, mode="r+")
    other(f"seen = td_core.load({path!r}); opened = td_core.open({path!r}); x = opened['a'].clone()")
    seen, opened = td_core.load(path), td_core.open(path)
    assert opened["a"].clone().sum() == seen["a"].sum() == 0
    stored["new"] = torch.ones(12)
    stored["a"] += 1
    seen_later = td_core.load(path)
    stored["n", "b"].zero_()
    assert seen_later["a"].sum() == 36
    other("assert opened['a'].sum() == 36 and opened['n', 'b'].sum() == 0; del seen, opened, x")


def test_file_of_the_newest_layout_is_used_by_two_processes(
    tmp_path: Path, other: Callable[[str], None]
) -> None:
    path = str(tmp_path / "latest.h5")
    with h5py.File(path, "w", libver="v110") as file:
        file.create_dataset("a", (12, 3), "f4", chunks=(4, 3))
    opened = td_core.open(path, mode="r+")
    opened["a"][0] = 1.0
    other(f"opened = td_core.open({path!r}, mode='r+'); opened['a'][1] = 2.0")
    opened["a"][2] = 3.0
    other(f"assert td_core.load({path!r})['a'][:3, 0].tolist() == [1.0, 2.0, 3.0]; del opened")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_append_by_threads_adds_all_rows(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    td_core.save(TensorDict({"a": torch.zeros(2)}, [2]), path, format="hdf5", **options)
    errors: list[Exception] = []

    def work(worker: int) -> None:
        try:
            for step in range(6):
                td_core.append(TensorDict({"a": torch.full((2,), 100.0 * worker + step)}, [2]), path)
                assert td_core.load(path).batch_size[0] >= 2 * step + 4
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = [0.0, *(100.0 * worker + step for worker in (1, 2, 3) for step in range(6))]
    assert sorted(td_core.load(path)["a"].tolist()) == sorted(2 * expected)


def test_append_waits_until_another_thread_has_closed_the_file(path: str) -> None:
    file = open_by_path(path)
    timer = threading.Timer(0.1, close_file, [file])
    timer.start()
    td_core.append(td_core.load(path)[:1], path)
    timer.join()
    assert td_core.load(path).batch_size == (13,)


def test_append_by_two_processes_at_once_adds_all_rows(path: str, other: Callable[[str], None]) -> None:
    code = f"""
for _ in range(6):
    td_core.append(td_core.load({path!r})[:1].apply(torch.ones_like), {path!r})
"""
    thread = threading.Thread(target=other, args=(code,))
    thread.start()
    rows = td_core.load(path)[:2].apply(lambda leaf: torch.full_like(leaf, 2))
    for _ in range(6):
        td_core.append(rows, path)
    thread.join()
    assert sorted(td_core.load(path)["a"][12:, 0].tolist()) == [1.0] * 6 + [2.0] * 12


def test_write_rows_by_threads_at_positions_keeps_all_rows(path: str) -> None:
    opened = td_core.open(path, mode="r+")

    def work(worker: int) -> None:
        leaf = opened["a"] if worker % 2 else td_core.open(path, mode="r+")["a"]
        for row in range(worker, 12, 4):
            leaf[[row, (row + 4) % 12]] = worker + 1.0
            leaf.t()[::2, row] = -worker - 1.0

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(4):
        rows = td_core.load(path)["a"][worker::4]
        assert rows[-1].tolist() == [-worker - 1.0, worker + 1.0, -worker - 1.0]
        assert rows[1:, 1].tolist() == [worker + 1.0] * 2


def test_operations_in_place_by_threads_keep_all_rows(path: str) -> None:
    opened = td_core.open(path, mode="r+")

    def work(worker: int) -> None:
        leaf = opened["a"] if worker % 2 else td_core.open(path, mode="r+")["a"]
        for row in range(worker, 12, 4):
            leaf.index_add_(0, torch.tensor([row]), torch.ones(1, 3))
            leaf.masked_scatter_((torch.arange(12) == row)[:, None], torch.full((3,), worker + 1.0))
            leaf.index_fill_(0, torch.tensor([row]), worker + 2.0)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert td_core.load(path)["a"][:, 0].tolist() == [2.0, 3.0, 4.0, 5.0] * 3


def _use(opened: Any) -> None:
    opened["a"].clone()


def _gather(opened: Any) -> None:
    opened[torch.tensor([1, 2])].clone()


def _write(opened: Any) -> None:
    opened["a"][0] = 9.0


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("use", [_use, _gather, _write])
def test_use_a_leaf_after_the_file_was_replaced_raises(
    use: Callable[[Any], None], is_used: bool, path: str
) -> None:
    inode = os.stat(path).st_ino
    opened = td_core.open(path, mode="r+")
    sent = pickle.dumps(opened)
    if is_used:
        for first in (_use, _gather, _write):
            first(opened)
    for _ in range(5):
        td_core.save(
            TensorDict({"n": {"b": torch.ones(12)}, "a": torch.ones(12, 3)}, [12]), path, format="hdf5"
        )
        assert os.stat(path).st_ino != inode
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        use(opened)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        use(pickle.loads(sent))
    assert td_core.load(path)["a"].sum() == 36


def test_unpickle_after_the_inode_was_used_again_raises(tmp_path: Path) -> None:
    path = str(tmp_path / "data.h5")
    stored: Any = TensorDict({"a": torch.ones(3)}, [3]).to_h5(path)
    identity = stored._store.file.identity
    sent = pickle.dumps(stored)
    leaf = pickle.dumps(stored["a"])
    assert pickle.loads(sent)["a"].sum() == pickle.loads(leaf).sum() == 3
    del stored
    gc.collect()
    if identity[2] is None:
        pytest.skip("the file system has no times of birth")
    # That of a file which was made at another time, and was given the same inode.
    born, earlier = (time.to_bytes(8, "little") for time in (identity[2], identity[2] - 10**9))
    sent, leaf = sent.replace(born, earlier), leaf.replace(born, earlier)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickle.loads(sent)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickle.loads(leaf).clone()


def test_write_with_a_file_of_h5py_in_this_process_keeps_writes_of_both(path: str) -> None:
    with h5py.File(path, "r+") as file:
        file["a"][1] = 2.0
        stored = PersistentTensorDict(filename=path, mode="r+")
        stored["a"][0] = 1.0
        assert stored["a"][:2, 0].tolist() == [1.0, 2.0]
        assert td_core.load(path)["a"][:2, 0].tolist() == [1.0, 2.0]
        stored["new"] = torch.ones(12)
        stored.close()
        file["a"][2] = 3.0
    assert stored["a"][:3, 0].tolist() == td_core.load(path)["a"][:3, 0].tolist() == [1.0, 2.0, 3.0]
    assert stored["new"].sum() == 12


def test_write_through_the_h5py_file_of_a_collection_is_kept(path: str, other: Callable[[str], None]) -> None:
    stored = PersistentTensorDict(filename=path, mode="r+")
    stored.file["a"][3] = 4.0
    assert stored["a"][3].tolist() == [4.0] * 3
    other(f"td_core.open({path!r}, mode='r+')['a'][4] = 5.0")
    stored.file["a"][5] = 6.0
    stored.close()
    other(f"assert td_core.load({path!r})['a'][3:6, 0].tolist() == [4.0, 5.0, 6.0]")
    assert td_core.load(path)["a"][3:6, 0].tolist() == [4.0, 5.0, 6.0]


def test_h5py_file_of_a_collection_in_the_newest_layout_is_open(
    tmp_path: Path, other: Callable[[str], None]
) -> None:
    path = str(tmp_path / "latest.h5")
    with h5py.File(path, "w", libver="v110") as file:
        file.create_dataset("a", (12, 3), "f4", chunks=(4, 3))
    stored = PersistentTensorDict(filename=path, mode="r+")
    stored.file["a"][3] = 4.0
    assert stored["a"][3].tolist() == [4.0] * 3
    other(f"td_core.open({path!r}, mode='r+')['a'][4] = 5.0")
    assert stored["a"][3:5, 0].tolist() == [4.0, 5.0]
