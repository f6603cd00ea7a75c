"""Archives: a save in one zip file, whose leaves are mapped in place."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_memmap
from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError
from td_memmap import FileTakenError, pack_memmap
from td_store.files import NewFile


def test_load_archive_returns_saved_values(nest: Any, tmp_path: Path, same: Any) -> None:
    path = tmp_path / "new" / "save.tdz"
    saved = nest.memmap(path)
    same(saved, nest)
    assert type(saved["a"]) is Tensor
    assert not saved.is_memmap()
    same(TensorDict.load_memmap(path), nest)
    same(TensorDict.load(path), nest)
    same(td_memmap.load(path, subpath="n/deep"), nest["n", "deep"])
    with pytest.raises(ValueError, match="no collection is saved under the subpath 'x'"):
        TensorDict.load_memmap(path, subpath="x")
    assert os.listdir(path.parent) == ["save.tdz"]


def test_memmap_archive_writes_metadata_first_and_aligns_leaves(nest: Any, tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    nest.memmap(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            "meta.json",
            "a.memmap",
            "lazy/meta.json",
            "lazy/0/meta.json",
            "lazy/1/meta.json",
            "lazy/1/x.memmap",
            "lazy/2/meta.json",
            "lazy/2/x.memmap",
            "n/meta.json",
            "n/i.memmap",
            "n/deep/meta.json",
            "n/deep/b.memmap",
        ]
        content = path.read_bytes()
        for info in archive.infolist():
            header = content[info.header_offset : info.header_offset + 30]
            name_length, extra_length = struct.unpack("<HH", header[26:30])
            start = info.header_offset + 30 + name_length + extra_length
            assert header[4:6] == b"\x2d\x00", "zip64"
            assert content[start - 20 : start - 16] == b"\x01\x00\x10\x00", "the block of sizes is last"
            assert info.flag_bits & 8 == 0, "no data descriptor"
            if info.filename.endswith(".memmap"):
                assert start % 64 == 0


@pytest.mark.parametrize(
    "compression", ["stored", "deflate", "deflated", "bzip2", "lzma", zipfile.ZIP_DEFLATED]
)
def test_memmap_archive_compresses_only_leaves(
    compression: Any, nest: Any, tmp_path: Path, same: Any
) -> None:
    path = tmp_path / "save"
    nest.memmap(path, archive=True, compression=compression)
    same(TensorDict.load_memmap(path), nest)
    with zipfile.ZipFile(path) as archive:
        kinds = {info.filename: info.compress_type for info in archive.infolist()}
        assert kinds["meta.json"] == zipfile.ZIP_STORED
        assert (kinds["a.memmap"] == zipfile.ZIP_STORED) == (compression == "stored")
    with pytest.raises(ValueError, match="unknown compression 'zz'"):
        nest.memmap(path, archive=True, compression="zz")
    same(TensorDict.load_memmap(path), nest)


def test_load_archive_mode_decides_whether_writes_reach_file(tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    TensorDict({"a": torch.zeros(4)}).memmap(path)
    for mode in (None, "r"):
        TensorDict.load_memmap(path, mode=mode)["a"].fill_(7)
        assert TensorDict.load_memmap(path)["a"].tolist() == [0] * 4
    TensorDict.load_memmap(path, mode="r+")["a"].fill_(7)
    assert TensorDict.load_memmap(path)["a"].tolist() == [7] * 4
    assert [problem.file for problem in td_memmap.verify(path).problems] == ["a.memmap"]
    td_memmap.refresh_archive_checksums(path)
    assert td_memmap.verify(path).ok
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_memmap_suffix_or_argument_selects_archive(nest: Any, tmp_path: Path) -> None:
    nest.memmap(tmp_path / "directory.tdz", archive=False)
    assert (tmp_path / "directory.tdz").is_dir()
    with pytest.raises(FileTakenError, match="it is a directory; memmap\\(archive=False"):
        nest.memmap(tmp_path / "directory.tdz")
    nest.memmap(tmp_path / "archive", archive=True)
    assert td_memmap.is_memmap_archive(tmp_path / "archive")
    nest.memmap(tmp_path / "name.zip")
    assert (tmp_path / "name.zip").is_dir()
    assert not td_memmap.is_memmap_archive(tmp_path / "name.zip")
    nest.memmap(f"{tmp_path}/closed.tdz/")
    assert td_memmap.is_memmap_archive(tmp_path / "closed.tdz")
    nest.memmap(tmp_path / ".tdz")
    assert (tmp_path / ".tdz").is_dir()
    with pytest.raises(ValueError, match="needs a path"):
        nest.memmap(archive=True)
    with pytest.raises(FileTakenError, match="the archive .* exists"):
        nest.memmap(tmp_path / "archive", archive=True, existsok=False)


def test_memmap_like_archive_returns_zeros(tmp_path: Path) -> None:
    like = TensorDict({"a": torch.ones(1000)}).memmap_like(tmp_path / "save.tdz")
    assert (like["a"] == 0).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_like_over_same_archive_keeps_elements(tmp_path: Path) -> None:
    path, parts = tmp_path / "save.tdz", [torch.zeros(1), torch.zeros(2)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    td = TensorDict({"a": torch.ones(3), "j": jagged, "n": torch.nested.nested_tensor(parts)})
    td.memmap_like(path)["a"].fill_(2)
    td.memmap_like(path)["j"].values().fill_(3)
    td.memmap_like(path)["n"].fill_(4)
    loaded = TensorDict.load_memmap(path)
    assert loaded["a"].tolist() == [2, 2, 2]
    assert loaded["j"].values().tolist() == [3, 3, 3]
    assert [part.tolist() for part in loaded["n"].unbind()] == [[4], [4, 4]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TensorDict({"a": torch.ones(4)}), r"key 'a' is shape \[3\] .* and shape \[4\]"),
        (TensorDict({"a": torch.ones(3), "b": 0}), "key 'b' is nothing in the save"),
        (TensorDict({"a": torch.ones(3)}, [3]), "batch sizes or names are others"),
    ],
)
def test_memmap_like_over_different_archive_raises(other: TensorDict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    TensorDict({"a": torch.ones(3)}).memmap(path)
    with pytest.raises(FileTakenError, match=message):
        other.memmap_like(path)
    assert TensorDict.load_memmap(path)["a"].tolist() == [1, 1, 1]


def test_memmap_like_over_compressed_archive_raises(tmp_path: Path) -> None:
    td, path = TensorDict({"a": torch.ones(3)}), tmp_path / "save.tdz"
    td.memmap(path, compression="deflate")
    with pytest.raises(FileTakenError, match=r"a\.memmap is compressed"):
        td.memmap_like(path)
    path.write_bytes(b"no archive")
    with pytest.raises(FileTakenError, match="is not an archive of a save"):
        td.memmap_like(path)


def test_memmap_archive_path_over_zip_limit_raises(tmp_path: Path) -> None:
    deep = (*["k" * 240] * 280, "a")
    with pytest.raises(CodecError, match="paths of more than 65535 bytes"):
        TensorDict({deep: torch.ones(1)}).memmap(tmp_path / "save.tdz")
    assert not list(tmp_path.iterdir())


def put_sums(td: TensorDict, queue: Any) -> None:
    queue.put([leaf.sum().item() for leaf in td.values()])


@pytest.mark.once
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("mode", [None, "r+"])
def test_send_leaves_of_archive_to_new_process_keeps_values(
    mode: str | None, method: str, tmp_path: Path
) -> None:
    TensorDict({"a": torch.ones(3), "b": torch.ones(5)}).memmap(tmp_path / "save.tdz")
    loaded = TensorDict.load_memmap(tmp_path / "save.tdz", mode=mode)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put_sums, args=(loaded, queue))
    process.start()
    assert queue.get(timeout=120) == [3, 5]
    process.join()


def test_pack_then_unpack_restores_save(nest: Any, tmp_path: Path, same: Any) -> None:
    nest.memmap(tmp_path / "save")
    (tmp_path / "save" / "notes.txt").write_text("mine")
    done = []
    packed = td_memmap.pack_memmap(
        tmp_path / "save",
        tmp_path / "save.tdz",
        compression="deflate",
        progress=lambda done_, total: done.append((done_, total)),
    )
    assert packed == tmp_path / "save.tdz"
    assert done[-1][0] == done[-1][1]
    same(TensorDict.load_memmap(packed), nest)
    with zipfile.ZipFile(packed) as archive:
        assert not {"notes.txt", "%manifest.json"} & set(archive.namelist())
    assert td_memmap.unpack_memmap(packed, tmp_path / "again") == tmp_path / "again"
    same(TensorDict.load_memmap(tmp_path / "again"), nest)
    td_memmap.unpack_memmap(packed, tmp_path / "save")
    same(TensorDict.load_memmap(tmp_path / "save"), nest)
    assert (tmp_path / "save" / "notes.txt").read_text() == "mine"
    with pytest.raises(FormatError, match="no save is at"):
        td_memmap.pack_memmap(tmp_path, tmp_path / "x.tdz")
    assert not (tmp_path / "x.tdz").exists()


def truncate_files(save: Path, *files: str) -> None:
    for file in files:
        os.truncate(save / file, (save / file).stat().st_size - 1)


def shrink_batch_size(save: Path) -> None:
    meta = json.loads((save / "n" / "meta.json").read_text())
    (save / "n" / "meta.json").write_text(
        json.dumps({**meta, "shape": [2], "i": {**meta["i"], "shape": [2]}})
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda save: truncate_files(save, "n/i.memmap"),
            r"n/i.memmap: key \('n', 'i'\): the size is 23, expected at least 24",
        ),
        (
            lambda save: (save / "n" / "i.memmap").unlink(),
            r"the file of key \('n', 'i'\) is missing: .* 24 bytes are exp",
        ),
        (
            lambda save: truncate_files(save, "s.memmap"),
            "s.memmap: key 's': the size is 11, expected at least 12 bytes",
        ),
        (lambda save: (save / "n" / "meta.json").unlink(), "n/meta.json is missing"),
        (lambda save: (save / "lazy" / "0" / "meta.json").unlink(), "lazy/0/meta.json is missing"),
        (
            shrink_batch_size,
            r"n/meta.json: key 'n': the batch size is \[2\], expected one that starts with \[3\]",
        ),
    ],
)
def test_pack_damaged_directory_raises(damage: Any, message: str, tmp_path: Path) -> None:
    strided = torch.nested.nested_tensor([torch.ones(i) for i in (0, 1, 2)])
    lazy = lazy_stack([TensorDict({"a": torch.ones(i)}) for i in range(3)])
    n = TensorDict({"i": torch.arange(3)}, [3])
    save, archive = tmp_path / "save", tmp_path / "save.tdz"
    TensorDict({"n": n, "s": strided, "lazy": lazy}, [3]).memmap(save)
    pack_memmap(save, archive)
    before = archive.read_bytes()
    damage(save)
    with pytest.raises(FormatError, match=message):
        pack_memmap(save, archive)
    assert archive.read_bytes() == before
    assert not td_memmap.verify(save).ok


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_pack_file_longer_than_leaf_keeps_values(compression: Any, tmp_path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(3)})
    td.memmap(tmp_path / "save")
    os.truncate(tmp_path / "save" / "a.memmap", 100)
    same(TensorDict.load_memmap(tmp_path / "save"), td)
    pack_memmap(tmp_path / "save", tmp_path / "save.tdz", compression=compression)
    same(TensorDict.load_memmap(tmp_path / "save.tdz"), td)


@pytest.mark.parametrize(("compression", "levels"), [("deflate", "-1 to 9"), ("bzip2", "1 to 9")])
@pytest.mark.parametrize("level", [99, -2, "high"])
def test_pack_level_out_of_range_raises(compression: str, levels: str, level: Any, tmp_path: Path) -> None:
    TensorDict({"a": 1}).memmap(tmp_path / "save")
    with pytest.raises(
        ValueError, match=f"compresslevel is from {levels} with '{compression}'; got {level!r}"
    ):
        pack_memmap(tmp_path / "save", tmp_path / "s.tdz", compression=compression, compresslevel=level)
    assert not (tmp_path / "s.tdz").exists()


def test_unpack_with_checksums_lets_verify_find_damage(nest: Any, tmp_path: Path) -> None:
    nest["value"] = torch.ones(3)
    nest.memmap(tmp_path / "save.tdz", compression="deflate")
    unpacked = td_memmap.unpack_memmap(tmp_path / "save.tdz", tmp_path / "out")
    assert td_memmap.verify(unpacked).hashed == 0
    td_memmap.unpack_memmap(tmp_path / "save.tdz", unpacked, checksums=True)
    report = td_memmap.verify(unpacked)
    assert report.hashed == report.files == len(list(unpacked.rglob("*.*"))) - 1
    assert not report.problems
    before = (unpacked / "n/i.memmap").stat()
    with open(unpacked / "n/i.memmap", "r+b") as file:
        file.write(b"x")
    os.utime(unpacked / "n/i.memmap", ns=(before.st_atime_ns, before.st_mtime_ns))
    (problem,) = td_memmap.verify(unpacked).problems
    assert (problem.file, problem.kind) == ("n/i.memmap", "damaged")


def test_unpack_ignores_archived_manifest_and_listing(tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(2)}).memmap(tmp_path / "save.tdz")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.memmap").write_text("mine")
    with zipfile.ZipFile(tmp_path / "save.tdz", "a") as archive:
        archive.writestr("%saving", "mine.memmap")
        archive.writestr("%manifest.json", "{")
        archive.writestr("notes.txt", "notes")
    for _ in range(2):
        td_memmap.unpack_memmap(tmp_path / "save.tdz", tmp_path / "out")
        assert (tmp_path / "out" / "mine.memmap").read_text() == "mine"
        assert (report := td_memmap.verify(tmp_path / "out")).ok
        assert report.files == 2
        (tmp_path / "out" / "notes.txt").unlink()


def test_load_archive_of_other_zip_tool_returns_values(nest: Any, tmp_path: Path, same: Any) -> None:
    nest.memmap(tmp_path / "save")
    packed = shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path / "save")
    with zipfile.ZipFile(packed) as archive:
        assert "n/deep/" in archive.namelist()
    same(TensorDict.load_memmap(packed), nest)
    td_memmap.unpack_memmap(packed, tmp_path / "again")
    same(TensorDict.load_memmap(tmp_path / "again"), nest)


class Stream(io.RawIOBase):
    """File that cannot seek, so that zipfile appends a data descriptor to each entry."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self.file.write(data))


def test_refresh_checksums_with_data_descriptors_updates_crc(tmp_path: Path) -> None:
    td = TensorDict({"b": torch.ones(2), "n": {"a": torch.zeros(4, dtype=torch.uint8)}})
    td.memmap(tmp_path / "save")
    packed = tmp_path / "streamed.tdz"
    with open(packed, "wb") as file, zipfile.ZipFile(Stream(file), "w") as archive:  # type: ignore[arg-type]
        for path in sorted(filter(Path.is_file, (tmp_path / "save").rglob("*"))):
            name = path.relative_to(tmp_path / "save").as_posix()
            archive.write(path, name, zipfile.ZIP_DEFLATED if name == "b.memmap" else None)
    with pytest.raises(
        PermissionError, match="cannot write into the entry 'b.memmap' of an archive: it is compressed"
    ):
        TensorDict.load_memmap(packed, mode="r+")
    TensorDict.load_memmap(packed, mode="r+", subpath="n")["a"].fill_(7)
    assert [problem.file for problem in td_memmap.verify(packed).problems] == ["n/a.memmap"]
    td_memmap.refresh_archive_checksums(packed)
    assert td_memmap.verify(packed).ok
    assert TensorDict.load_memmap(packed)["n", "a"].tolist() == [7] * 4


def test_verify_archive_without_node_metadata_reports_it(nest: Any, tmp_path: Path) -> None:
    nest.memmap(tmp_path / "save")
    (tmp_path / "save" / "n" / "meta.json").unlink()
    packed = shutil.make_archive(str(tmp_path / "other"), "zip", tmp_path / "save")
    (problem,) = td_memmap.verify(packed).problems
    assert "other.zip/n/meta.json is missing" in problem.detail
    td_memmap.unpack_memmap(packed, tmp_path / "again")
    assert (tmp_path / "again" / "n" / "i.memmap").exists()
    for place in packed, tmp_path / "again":
        with pytest.raises(FormatError, match="key 'n' has no metadata"):
            TensorDict.load_memmap(place)


@pytest.mark.parametrize("shift", range(16))
def test_load_archive_unaligned_leaf_returns_values(shift: int, tmp_path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(3), "b": torch.ones(3, dtype=torch.complex128)})
    td.memmap(tmp_path / "save")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("x" * (shift + 1), "")
        for file in (tmp_path / "save").iterdir():
            archive.write(file, file.name)
    for mode in (None, "r"):
        loaded = TensorDict.load_memmap(tmp_path / "other.zip", mode=mode)
        same(loaded, td)
        assert all(leaf.data_ptr() % leaf.itemsize == 0 for leaf in loaded.values())
    starts = {info.filename: info.header_offset + 30 + len(info.filename) for info in archive.infolist()}
    if starts["a.memmap"] % 8 == starts["b.memmap"] % 16 == 0:
        same(TensorDict.load_memmap(tmp_path / "other.zip", mode="r+"), td)
    else:
        # An unaligned leaf is copied, so writes to it would not reach the file.
        with pytest.raises(PermissionError, match=r"it starts at byte \d+, which is not aligned for"):
            TensorDict.load_memmap(tmp_path / "other.zip", mode="r+")


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("compression", [None, "deflate", "bzip2", "lzma"])
def test_load_archive_entry_of_wrong_size_raises(compression: str | None, more: int, tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    TensorDict({"a": torch.arange(300)}).memmap(path, compression=compression)
    content = bytearray(path.read_bytes())
    # In a row of the zip directory, the size starts at byte 24 and the name at byte 46.
    place = content.rindex(b"a.memmap") - 46 + 24
    assert int.from_bytes(content[place : place + 4], "little") == 2400
    content[place : place + 4] = (2400 + more).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(FormatError, match="a.memmap"):
        TensorDict.load_memmap(path)
    with pytest.raises(FormatError, match="the entry 'a.memmap'"):
        td_memmap.unpack_memmap(path, tmp_path / "out")
    assert not td_memmap.verify(path).ok


def test_unpack_damaged_archive_writes_nothing(nest: Any, tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    nest.memmap(path)
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("n/i.memmap").header_offset
    content = bytearray(path.read_bytes())
    content[offset + 150] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"the entry 'n/i.memmap' is damaged: Bad CRC-32"):
        td_memmap.unpack_memmap(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["save.tdz"]
    report = td_memmap.verify(path)
    assert not report.ok
    assert [str(problem)[:24] for problem in report.problems] == ["n/i.memmap is damaged: /"]


def test_memmap_archive_failure_keeps_old_archive(
    nest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    path = tmp_path / "save.tdz"
    nest.memmap(path)
    loaded = TensorDict.load_memmap(path)

    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("td_memmap._archive.iter_chunks", fail)
        with pytest.raises(OSError, match="No space left"):
            nest.memmap(path)
    assert os.listdir(tmp_path) == ["save.tdz"]
    TensorDict({"z": torch.zeros(1)}).memmap(path)
    same(loaded, nest)
    assert list(TensorDict.load_memmap(path).keys()) == ["z"]


def test_memmap_durable_archive_syncs_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "save.tdz"
    log: list[Any] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fsync(self, fd: int) -> None:
            log.append(
                os.fstat(fd).st_size if os.readlink(f"/proc/self/fd/{fd}") != str(tmp_path) else "names"
            )

        def replace(self, source: str, target: str) -> None:
            log.append(os.path.basename(target))
            os.replace(source, target)

    monkeypatch.setattr("td_store._temporary_files.os", Watched())
    TensorDict({"a": torch.ones(4)}).memmap(path, durable=True)
    assert log == [os.stat(path).st_size, "save.tdz", "names"]


def test_memmap_archive_removes_only_stale_files(tmp_path: Path) -> None:
    path = tmp_path / "save.tdz"
    (tmp_path / ".save.tdz.tmp-00000001").write_text("killed")
    (tmp_path / ".save.tdz.tmp-mine").write_text("not a stale file")
    with NewFile(path) as busy:
        TensorDict({"a": torch.ones(4)}).memmap(path)
        assert len(os.listdir(tmp_path)) == 3
        busy.commit()
    assert sorted(os.listdir(tmp_path)) == [".save.tdz.tmp-mine", "save.tdz"]
    (tmp_path / ".save.tdz.tmp-00000001").write_text("killed later")
    TensorDict({"a": torch.ones(4)}).memmap(path)
    assert sorted(os.listdir(tmp_path)) == [".save.tdz.tmp-mine", "save.tdz"]


def test_load_archive_many_leaves_uses_one_mapping(tmp_path: Path) -> None:
    td = TensorDict({str(i): torch.tensor([i]) for i in range(500)})
    loaded = td.memmap(tmp_path / "save.tdz")
    before = Path("/proc/self/maps").read_text().count("\n")
    again = TensorDict.load_memmap(tmp_path / "save.tdz")
    assert Path("/proc/self/maps").read_text().count("\n") < before + 10
    assert (again == loaded).all()


def test_changed_byte_of_archive_is_found_by_verify_or_of_no_consequence(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.arange(2)}})
    td.memmap(tmp_path / "x.tdz")
    good = (tmp_path / "x.tdz").read_bytes()
    for position in [417, 430, *range(0, len(good), 23)]:
        changed = bytearray(good)
        changed[position] ^= 1 << position % 8
        (tmp_path / "x.tdz").write_bytes(changed)
        try:
            same = bool((td_memmap.load_memmap(tmp_path / "x.tdz") == td).all())
            is_found = not td_memmap.verify(tmp_path / "x.tdz").ok
        except FormatError:
            same, is_found = False, True
            with contextlib.suppress(FormatError):
                is_found = not td_memmap.verify(tmp_path / "x.tdz").ok
        assert same or is_found, position
