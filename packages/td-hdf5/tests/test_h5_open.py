"""Opened collections: nothing but the header is read, modes decide about writes, and other processes open the file again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch.utils.data import DataLoader

import td_core
import td_hdf5
from td_core import (
    FormatError,
    KeyPathError,
    LazyStackedTensorDict,
    LockedError,
    TensorDict,
    UnsupportedOperationError,
    create,
    load,
)
from td_hdf5 import DatasetSource, _dataset_source, save
from td_hdf5 import open as open_h5
from td_hdf5._h5_files import StoreFile
from td_store import StoredTensor

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"chunks": 2, "compression": "gzip"}], ids=["contiguous", "chunks"]
)


@OPTIONS
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_opened_collection_equals_save(
    mode: str, options: Any, path: Path, td: TensorDict, same: Any
) -> None:
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i)}) for i in range(4)))
    td["c"] = torch.ones(4, 2, dtype=torch.complex128)
    td["h"] = torch.arange(4).bfloat16()
    td["e"] = torch.ones(1, 1).expand(4, 500)
    save(td, path, **options)
    opened = TensorDict.open(path, mode=mode)
    assert {type(opened[key]) for key in ("a", ("n", "b"), "c", "h", "e")} == {StoredTensor}
    same(opened.clone(), td)
    same(opened[[2, 0]].clone(), td[[2, 0]])


def test_open_reads_no_dataset(path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch) -> None:
    save(td, path)
    monkeypatch.setattr(_dataset_source, "find_array", lambda *args: pytest.fail("a dataset was opened"))
    opened = td_core.open(path)
    assert (opened["a"].shape, opened[1:3]["n", "b"].dtype) == ((4, 3), torch.int64)


def test_read_rows_reads_only_those(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(TensorDict({"a": torch.arange(100)}, [100]), path, chunks=10)
    parts: list[Any] = []
    read_part, read_positions = _dataset_source.read_part, _dataset_source.read_positions

    def note_part(dataset: Any, part: Any, dtype: Any) -> Any:
        parts.append((part[0].start, part[0].stop))
        return read_part(dataset, part, dtype)

    def note_positions(dataset: Any, part: Any, dim: int, rows: Any, dtype: Any) -> Any:
        parts.append(rows.tolist())
        return read_positions(dataset, part, dim, rows, dtype)

    monkeypatch.setattr(_dataset_source, "read_part", note_part)
    monkeypatch.setattr(_dataset_source, "read_positions", note_positions)
    assert open_h5(path)[[57, 3, 8, 99, 58]]["a"].tolist() == [57, 3, 8, 99, 58]
    assert open_h5(path)[[12, 11, 14]]["a"].tolist() == [12, 11, 14]
    assert load(path, rows=slice(20, 22))["a"].tolist() == [20, 21]
    assert parts == [[3, 8, 57, 58, 99], (11, 15), (20, 22)]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_many_positions_are_read_in_groups(dim: int, path: Path) -> None:
    leaf = torch.arange(3 * 2000 * 4).view(3, 2000, 4).movedim(1, dim).contiguous()
    save(TensorDict({"a": leaf}), path, chunks=(100, 100, 100), compression="gzip")
    rows = torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:700]
    index = (*[slice(None)] * dim, rows)
    assert torch.equal(open_h5(path)["a"][index], leaf[index])


@OPTIONS
def test_mode_decides_where_writes_go(options: Any, path: Path, td: TensorDict, same: Any) -> None:
    save(td, path, **options)
    with pytest.raises(
        LockedError, match=r"data.h5, dataset 'a': it is opened with mode='r'; open it with mode='r\+'"
    ):
        open_h5(path)["a"][0] = 5
    private = open_h5(path, mode="c")
    private["a"][0] = 5
    private["new"] = torch.ones(4)
    assert private["a"][0].tolist() == [5, 5, 5]
    same(load(path), td)
    writable = open_h5(path, mode="r+")
    writable["a"][[3, 0]] = 5.0
    td["a"][[3, 0]] = 5.0
    same(load(path), td)
    with pytest.raises(LockedError):
        writable["new"] = torch.ones(4)


def test_open_keys_selects_and_names_missing_key(path: Path, td: TensorDict) -> None:
    save(td, path)
    assert list(open_h5(path, keys=[("n", "b")]).keys(True, True)) == [("n", "b")]
    with pytest.raises(KeyPathError, match="data.h5: the save has no key 'x'"):
        open_h5(path, keys="x")


def test_open_for_writing_refuses_nested_tensors(path: Path, td: TensorDict) -> None:
    td["j"] = torch.nested.nested_tensor([torch.ones(i) for i in range(4)], layout=torch.jagged)
    save(td, path)
    assert open_h5(path)["j"].is_nested
    with pytest.raises(UnsupportedOperationError, match="key 'j' is a nested tensor"):
        open_h5(path, mode="r+")
    open_h5(path, mode="r+", keys="a")["a"].zero_()
    assert load(path)["a"].sum() == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write every file")
def test_open_read_only_file_for_writing_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    path.chmod(0o400)
    with pytest.raises(PermissionError, match="cannot be opened for writing"):
        open_h5(path, mode="r+")


@OPTIONS
def test_pickle_has_names_instead_of_elements(options: Any, path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(1 << 16), "n": {"c": torch.ones(1 << 12, dtype=torch.bfloat16)}})
    save(td, path, **options)
    data = pickle.dumps(open_h5(path)["a"][10:])
    assert b"td_hdf5._" not in data
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data).clone(), td["a"][10:])
    assert b"td_hdf5" in data


@OPTIONS
def test_leaf_of_replaced_file_raises(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    opened = open_h5(path)
    data = pickle.dumps(opened)
    save(td + 1, path, **options)
    for old in (opened, pickle.loads(data)):
        with pytest.raises(FormatError, match="was replaced since it was opened: open it again"):
            old["a"].clone()


def test_source_is_described_for_messages(path: Path, td: TensorDict) -> None:
    save(td, path)
    assert repr(DatasetSource(str(path), None, "n/b", [4], torch.int64)) == f"{path}, dataset 'n/b'"
    with pytest.raises(FormatError, match=r"expected torch.int64 and \[5\]: open the file again"):
        DatasetSource(str(path), None, "n/b", [5], torch.int64).read((slice(0, 5, 1),))


@pytest.mark.parametrize("options", [{}, {"chunks": 1}, {"compression": "gzip"}], ids=str)
def test_create_returns_zeros_to_fill(options: Any, path: Path, td: TensorDict, same: Any) -> None:
    td["h"] = torch.ones(4).bfloat16()
    td["big"] = torch.ones(4, 1 << 18)
    created = create(td.to("meta"), path, format="hdf5", **options)
    same(created.clone(), td.clone().zero_())
    for i in range(4):
        created[i] = td[i]
    same(load(path), td)
    with pytest.raises(FileExistsError, match="it exists"):
        create(td, path, format="hdf5")


def test_from_schema_creates_a_file(path: Path) -> None:
    created = td_core.from_schema({"a": ([3], torch.float32)}, batch_size=[2], storage="hdf5", filename=path)
    created["a"][1] = 1.0
    assert load(path)["a"].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_h5py_reads_a_file_that_is_open(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    opened = open_h5(path, mode="r+")
    opened["a"][0] = 9.0
    with h5py.File(path) as file:
        assert file["a"][0].tolist() == [9, 9, 9]
    assert opened["a"][0].tolist() == [9, 9, 9]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_file_that_another_program_keeps_open_for_writing_raises(
    path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_hdf5._h5_files._PATIENCE", 0.05)
    save(td, path, chunks=2)
    opened = open_h5(path)
    assert opened["a"].sum() == 66
    (ready, done), (wait, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with h5py.File(path, "r+"):
                os.write(done, b"x")
                os.read(wait, 1)
        finally:
            os._exit(0)
    os.read(ready, 1)
    try:
        for use in (lambda: opened["a"].clone(), lambda: load(path)):
            with pytest.raises(
                BlockingIOError, match="data.h5 is in use: another program.* has it open for writing"
            ):
                use()
    finally:
        os.write(end, b"x")
        os.waitpid(pid, 0)
    assert opened["a"].sum() == 66


@OPTIONS
def test_threads_write_and_read_their_rows(options: Any, path: Path) -> None:
    save(TensorDict({"a": torch.zeros(16, 3), "b": torch.zeros(16)}, [16]), path, **options)
    opened = open_h5(path, mode="r+")
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for k in range(10):
                opened[i] = TensorDict({"a": torch.full((3,), i + k), "b": torch.tensor(i + k)})
                assert opened[i]["a"].tolist() == [i + k] * 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert load(path)["b"][:8].tolist() == [i + 9 for i in range(8)]


def test_load_of_file_that_is_replaced_while_it_is_found_reads_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(TensorDict({"a": torch.zeros(4)}), path)
    keep_inode = StoreFile._keep_inode

    def replace_first(file: StoreFile) -> None:
        monkeypatch.undo()
        save(TensorDict({"b": torch.ones(2)}), path)
        keep_inode(file)

    monkeypatch.setattr(StoreFile, "_keep_inode", replace_first)
    assert load(path).to_dict().keys() == {"b"}


def test_second_mapping_leaves_the_descriptor_of_the_first_open(path: Path) -> None:
    save(TensorDict({"a": torch.zeros(4)}), path)
    file = StoreFile.at(path)
    file.map(32, shared=False)
    watched = file._map_fd  # a thread may be about to ask for its status
    file.map(32, shared=True)
    file.map(file.map(32, shared=True).nbytes(), shared=False)
    assert os.path.samestat(os.fstat(watched), os.stat(path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@OPTIONS
def test_forked_processes_write_and_see_writes(options: Any, path: Path) -> None:
    save(TensorDict({"a": torch.zeros(8, 3)}, [8]), path, **options)
    opened = open_h5(path, mode="r+")
    assert opened["a"].sum() == 0  # the file is open when the process forks
    for i in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = int(opened["a"].sum() != 3 * i * (i + 1) / 2)
                opened["a"][i] = float(i + 1)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert opened["a"][i].tolist() == [i + 1] * 3
        opened["a"][7] = 0.0  # the parent writes between
    assert load(path)["a"].sum() == 30


@pytest.mark.once
@pytest.mark.parametrize(
    ("start", "options"),
    [("fork", {}), ("fork", {"chunks": 2}), ("spawn", {"chunks": 2, "compression": "gzip"})],
    ids=str,
)
def test_opened_collection_is_read_by_workers(start: str, options: Any, path: Path) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} on this system")
    td = TensorDict({"x": torch.arange(40.0).view(20, 2), "n": {"y": torch.arange(20)}}, [20])
    save(td, path, **options)
    data = TensorDict({"opened": td_core.open(path), "persistent": td_hdf5.from_h5(path)}, [20])
    assert data["opened", "x"].sum() == td["x"].sum()
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=1 + (start == "fork"),
        multiprocessing_context=start,
        collate_fn=td_core.collate,
    )
    rows = torch.cat(list(loader))
    for key in data.keys():
        assert torch.equal(rows[key, "x"], td["x"])
        assert torch.equal(rows[key, "n", "y"], td["n", "y"])
