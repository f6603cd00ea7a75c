"""append_memmap adds all rows to a save, or raises and adds none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import td_memmap
from td_core import TensorDict, lazy_stack
from td_core._kinds.lazy_stack import LazyStackedTensorDict
from td_core.errors import FormatError
from td_memmap import AppendError, _fs, append_memmap


def rows(start: int, count: int) -> TensorDict:
    values = torch.arange(start, start + count)
    return TensorDict(
        {
            "a": values[:, None].expand(count, 3),
            "n": TensorDict({"b": values.float()}, batch_size=[count]),
            "none": torch.zeros(count, 0),
        },
        batch_size=[count],
    )


def test_append_rows_extends_every_leaf(prefix: Path, tmp_path: Path, same: Any) -> None:
    saved = rows(0, 3).memmap(prefix)
    mapped = TensorDict.load_memmap(prefix)
    append_memmap(prefix, rows(3, 2))
    append_memmap(prefix, rows(5, 0))
    append_memmap(prefix, rows(5, 1))
    same(TensorDict.load_memmap(prefix), rows(0, 6))
    same(mapped, rows(0, 3))
    saved["a"][0] = -1
    assert (TensorDict.load_memmap(prefix)["a"][0] == -1).all()
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.parametrize("checksums", [False, True])
def test_append_updates_manifest_sizes_and_hashes(checksums: bool, prefix: Path) -> None:
    tied = torch.arange(3)
    TensorDict({"t": tied, "u": tied, "n": rows(0, 3)}, [3]).memmap(prefix, checksums=checksums)
    files = td_memmap.verify(prefix).files
    for start in (3, 5):
        new = torch.arange(start, start + 2)
        append_memmap(prefix, TensorDict({"t": new, "u": new, "n": rows(start, 2)}, [2]))
        report = td_memmap.verify(prefix)
        assert not report.problems and report.files == files and report.hashed == files * checksums
    changed = prefix / "n" / "a.memmap"
    before = changed.stat()
    changed.write_bytes(b"x" * before.st_size if checksums else b"x")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [(each.file, each.kind) for each in td_memmap.verify(prefix).problems] == [
        ("n/a.memmap", "damaged")
    ]
    with pytest.raises(FormatError, match="a.memmap"):
        append_memmap(prefix, TensorDict({"t": new, "u": new, "n": rows(7, 2)}, [2]))


def test_append_unknown_hash_algorithm_raises(tmp_path: Path, same: Any) -> None:
    rows(0, 3).memmap(tmp_path)
    manifest = json.loads((tmp_path / "%manifest.json").read_text())
    (tmp_path / "%manifest.json").write_text(json.dumps({**manifest, "algorithm": "md5"}))
    with pytest.raises(FormatError, match=r"%manifest.json: the hashes are 'md5', which needs: pip install"):
        append_memmap(tmp_path, rows(3, 2))
    same(TensorDict.load_memmap(tmp_path), rows(0, 3))


def test_append_without_manifest_creates_no_manifest(tmp_path: Path) -> None:
    rows(0, 3).memmap(tmp_path)
    (tmp_path / "%manifest.json").unlink()
    append_memmap(tmp_path, rows(3, 2))
    assert not (tmp_path / "%manifest.json").exists() and td_memmap.verify(tmp_path).ok


@pytest.mark.parametrize("key", ["index", "custom_op", "stack_dim"])
def test_append_to_keys_named_like_fields_adds_rows(key: str, tmp_path: Path, same: Any) -> None:
    td = TensorDict({key: torch.arange(2), "n": TensorDict({key: TensorDict({}, [2])}, [2])}, [2])
    td.memmap(tmp_path / "save")
    append_memmap(tmp_path / "save", td)
    same(TensorDict.load_memmap(tmp_path / "save"), torch.cat([td, td]))


@pytest.mark.parametrize("robust_key", [False, True])
def test_append_to_keys_unsafe_as_file_names_adds_rows(robust_key: bool, tmp_path: Path, same: Any) -> None:
    td = TensorDict({"a b": torch.arange(2), "n%n": TensorDict({"c:d": torch.arange(2)}, [2])}, [2])
    td.memmap(tmp_path / "save", robust_key=robust_key)
    append_memmap(tmp_path / "save", td)
    same(TensorDict.load_memmap(tmp_path / "save", robust_key=robust_key), torch.cat([td, td]))


def test_append_to_empty_leaves_keeps_raw_file_names(prefix: Path, same: Any) -> None:
    def make(start: int, count: int) -> TensorDict:
        values = torch.arange(start, start + count)
        below = TensorDict({"c:d": values + 2, "e": values + 3}, [count])
        return TensorDict({"a b": values, "a%20b": values + 1, "n%n": below}, [count])

    make(0, 0).memmap(prefix, robust_key=False)
    append_memmap(prefix, make(0, 2))
    append_memmap(prefix, make(2, 1))
    assert {file.relative_to(prefix).as_posix() for file in prefix.rglob("*.memmap")} == {
        "a b.memmap", "a%20b.memmap", "n%n/c:d.memmap", "n%n/e.memmap",
    }  # fmt: skip
    for robust_key in (False, True):
        same(TensorDict.load_memmap(prefix, robust_key=robust_key), make(0, 3))


def test_append_equal_nan_value_adds_rows(tmp_path: Path) -> None:
    NonTensorData = pytest.importorskip("td_tensorclass").NonTensorData
    td = TensorDict({"a": torch.ones(2), "value": NonTensorData(float("nan"), batch_size=[2])}, [2])
    td.memmap(tmp_path / "save")
    append_memmap(tmp_path / "save", td)
    assert TensorDict.load_memmap(tmp_path / "save").batch_size == (4,)
    other = td.clone().set("value", NonTensorData(0.0, batch_size=[2]))
    with pytest.raises(AppendError, match="the value of key 'value' must stay"):
        append_memmap(tmp_path / "save", other, compatible=True)


@pytest.mark.parametrize("saved", [None, 3, complex, {"a": {complex}}], ids=str)
@pytest.mark.parametrize("given", [None, 3, complex, {"a": {complex}}, {"a": {float}}], ids=str)
def test_append_unequal_pickled_values_raises(saved: Any, given: Any, prefix: Path) -> None:
    NonTensorData = pytest.importorskip("td_tensorclass").NonTensorData
    old, new = (
        TensorDict({"a": torch.ones(2), "value": NonTensorData(value, batch_size=[2])}, [2])
        for value in (saved, given)
    )
    old.memmap(prefix, allow_pickle=True)
    for allow_pickle in {True, saved in (complex, {"a": {complex}})}:
        with (
            contextlib.nullcontext()
            if saved == given
            else pytest.raises(AppendError, match="key 'value' must stay")
        ):
            append_memmap(prefix, new, allow_pickle=allow_pickle, compatible=True)
    loaded = TensorDict.load_memmap(prefix, allow_pickle=True)
    assert loaded["value"] == saved and (loaded.batch_size == (2,)) is (saved != given)


@pytest.mark.parametrize("names", [None, ["b"]])
def test_append_other_dim_names_keeps_saved_names(names: Any, prefix: Path) -> None:
    TensorDict({"a": torch.ones(2), "n": {}}, [2], names=["t"]).memmap(prefix)
    append_memmap(prefix, TensorDict({"a": torch.ones(1), "n": {}}, [1], names=names))
    loaded = TensorDict.load_memmap(prefix)
    assert loaded.names == loaded["n"].names == ["t"] and loaded.batch_size == (3,)


def test_append_to_save_without_rows_adds_rows(prefix: Path, same: Any) -> None:
    rows(0, 0).memmap(prefix)
    append_memmap(prefix, rows(0, 2))
    same(TensorDict.load_memmap(prefix), rows(0, 2))


def test_append_to_tied_leaves_unties_them(prefix: Path) -> None:
    tied = torch.arange(3)
    TensorDict({"a": tied, "b": tied}, batch_size=[3]).memmap(prefix)
    append_memmap(prefix, TensorDict({"a": torch.tensor([3]), "b": torch.tensor([4])}, batch_size=[1]))
    loaded = TensorDict.load_memmap(prefix)
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["b"].tolist() == [0, 1, 2, 4]


WRONG = {
    "keys": (lambda td: td.select("a"), r"the root has the keys \['a', 'n', 'none'\], the rows have \['a'\]"),
    "dtype": (
        lambda td: td.update({"a": td["a"].float()}),
        r"cannot append to key 'a': it has the shape \[3, 3\] of torch.int64",
    ),
    "shape": (lambda td: td.update({"a": td["a"][:, :2]}), r"the rows have \[2, 2\] of torch.int64"),
    "no batch dim": (lambda td: TensorDict(), "the rows have no batch dim"),
    "batch sizes": (
        lambda td: TensorDict(td, batch_size=[2]).update({"n": TensorDict({"b": torch.ones(2, 3)}, batch_size=[2, 3])}),
              r"cannot append to key \('n', 'b'\): it has the shape \[3\] .*the rows have \[2, 3\]"),
    "a leaf for a node": (lambda td: td.update({"n": torch.ones(2)}),
                          "key 'n' is a TensorDict, the rows have a tensor there"),
    "a node for a leaf": (lambda td: td.update({"a": TensorDict({}, [2])}),
                           "key 'a': it is a tensor, the rows have a TensorDict there"),
    "a stack": (lambda td: td.set("n", lazy_stack(td["n"].unbind(0))), "key 'n' is a plain collection, the rows have"),
    "nested": (lambda td: td.set("a", torch.nested.nested_tensor([torch.ones(1)] * 2)), "key 'a': nested tensors cannot"),
    "batch size of a node": (lambda td: td.set("n", td["n"].unsqueeze(1)), r"batch size \[3\], the rows have \[2, 1\]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_append_mismatched_rows_raises(change: Any, message: str, prefix: Path, same: Any) -> None:
    rows(0, 3).memmap(prefix)
    with pytest.raises(AppendError, match=message):
        append_memmap(prefix, change(rows(3, 2)))
    with pytest.raises(ValueError):
        append_memmap(prefix, change(rows(3, 2)))
    same(TensorDict.load_memmap(prefix), rows(0, 3))


def test_append_to_stack_archive_or_missing_path_raises(tmp_path: Path) -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3)}))
    stack.memmap(tmp_path / "stack")
    with pytest.raises(AppendError, match="the root is of a kind that cannot grow"):
        append_memmap(tmp_path / "stack", stack)
    rows(0, 2).memmap(tmp_path / "save.tdz")
    with pytest.raises(AppendError, match=r"an archive cannot grow; unpack_memmap\(\) it first"):
        append_memmap(tmp_path / "save.tdz", rows(0, 2))
    with pytest.raises(FileNotFoundError):
        append_memmap(tmp_path / "nowhere", rows(0, 2))
    with pytest.raises(TypeError, match="takes a collection of rows; got dict"):
        append_memmap(tmp_path / "nowhere", {"a": torch.ones(2)})  # type: ignore[arg-type]


def test_append_write_failure_keeps_save(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    rows(0, 3).memmap(prefix)
    from td_memmap import _fs

    real = _fs.write_at
    calls = 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr("td_memmap._append._fs.write_at", fail)
        with pytest.raises(OSError, match="No space left"):
            append_memmap(prefix, rows(3, 2))
    same(TensorDict.load_memmap(prefix), rows(0, 3))
    append_memmap(prefix, rows(3, 2))
    same(TensorDict.load_memmap(prefix), rows(0, 5))
    assert os.listdir(tmp_path) == ["save"]


@pytest.mark.once
def test_append_concurrent_processes_keeps_all_rows(prefix: Path) -> None:
    rows(0, 1).memmap(prefix)
    children = []
    for start in (100, 200):
        pid = os.fork()
        if pid == 0:
            try:
                for i in range(20):
                    td_memmap.append_memmap(prefix, rows(start + i, 1))
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    found = TensorDict.load_memmap(prefix)
    assert sorted(found["a"][:, 0].tolist()) == [0, *range(100, 120), *range(200, 220)]
    assert found["n", "b"].tolist() == found["a"][:, 0].tolist()


def test_append_to_leaves_tied_across_nodes_unties_them(prefix: Path) -> None:
    tied = torch.arange(3)
    TensorDict({key: TensorDict({"a": tied}, [3]) for key in ("x", "y")}).memmap(prefix)
    for key, new in ("x", 10), ("y", 20):
        append_memmap(prefix / key, TensorDict({"a": torch.tensor([new])}, [1]))
    loaded = TensorDict.load_memmap(prefix)
    assert [loaded[key, "a"].tolist() for key in ("x", "y")] == [[0, 1, 2, 10], [0, 1, 2, 20]]


def test_append_failure_truncates_grown_files(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TensorDict({"a": torch.arange(3), "b": torch.arange(3)}, [3]).memmap(prefix)
    written = []

    def write_at(fd: int, piece: Any, offset: int) -> None:
        os.pwrite(fd, piece, offset)
        written.append(offset)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_fs, "write_at", write_at)
    with pytest.raises(OSError, match="cannot append to key 'b'"):
        append_memmap(prefix, TensorDict({"a": torch.ones(2, dtype=torch.int64), "b": torch.arange(2)}, [2]))
    assert {(prefix / f"{key}.memmap").stat().st_size for key in "ab"} == {24}


@pytest.mark.parametrize(
    ("data", "part", "what"),
    [
        (TensorDict({"n": rows(0, 3)}, [3]), "n", r"has the batch size \[3\]"),
        (TensorDict({"shape": torch.ones(3), "n": rows(0, 3)}, [3]), "n", r"has the batch size \[3\]"),
        (lazy_stack([rows(0, 3), rows(3, 3)]), "1", "is put together of its members"),
    ],
)
def test_append_to_node_with_fixed_row_count_raises(
    data: Any, part: str, what: str, prefix: Path, same: Any
) -> None:
    data.memmap(prefix)
    with pytest.raises(
        AppendError, match=rf"save/{part}: it is a part of what is saved at .*save, which {what}"
    ):
        append_memmap(prefix / part, rows(3, 2))
    same(TensorDict.load_memmap(prefix), data)
    assert td_memmap.verify(prefix).problems == []


def test_append_to_tensorclass_inside_batched_save_raises(prefix: Path, same: Any) -> None:
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass

    @tensorclass
    class Rows:
        a: torch.Tensor

    def make(count: int) -> Any:
        return Rows(a=torch.arange(count), batch_size=[count])

    for size in ([], [2]):
        data = TensorDict({"c": make(2)}, size)
        data.memmap(prefix)
        for part in "c", "c/_tensordict":
            more = make(1) if part == "c" else TensorDict({"a": torch.arange(1)}, [1])
            with (
                pytest.raises(AppendError, match="append to the whole save")
                if size
                else contextlib.nullcontext()
            ):
                append_memmap(prefix / part, more)
        assert TensorDict.load_memmap(prefix)["c"].batch_size == (2 if size else 4,)


def test_append_to_unrelated_save_in_subdirectory_adds_rows(prefix: Path, same: Any) -> None:
    TensorDict({"a": torch.ones(3)}, [3]).memmap(prefix)
    rows(0, 3).memmap(prefix / "mine")
    append_memmap(prefix / "mine", rows(3, 2))
    same(TensorDict.load_memmap(prefix / "mine"), rows(0, 5))


@pytest.mark.parametrize("leaves", [{}, {"a": torch.zeros(0).expand(1 << 62, 0)}])
def test_append_row_count_over_int64_raises(leaves: Any, prefix: Path) -> None:
    TensorDict({"n": TensorDict(leaves, [1 << 62])}, [1 << 62]).memmap(prefix)
    rows = TensorDict({"n": TensorDict(leaves, [1 << 62])}, [1 << 62])
    with pytest.raises(
        AppendError, match=rf"the root has {1 << 62} rows, and {1 << 62} more are more than a tensor can"
    ):
        append_memmap(prefix, rows)
    append_memmap(prefix, rows[: (1 << 62) - 1])
    assert TensorDict.load_memmap(prefix).batch_size == (2**63 - 1,)
