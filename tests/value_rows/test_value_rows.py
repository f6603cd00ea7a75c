"""Values of a stack by rows: the layout of the files, writes of one value, and damaged files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError, StructureError
from td_core.spi import RULES
from td_core.testing import assert_same
from td_memmap import (
    AppendError,
    PickleRefusedError,
    _fs,
    append_memmap,
    inspect,
    pack_memmap,
    unpack_memmap,
    verify,
)
from td_memmap import _value_rows as value_rows
from td_tensorclass import NonTensorData, NonTensorStack, tensorclass

COLUMNS: dict[str, list[Any]] = {
    "text": ["a", "", "ü€😀", "a"],
    "surrogates": ["\ud800", "x", "\n", "\0"],
    "long": ["x" * 70_000, "y", "x" * 70_000, ""],
    "numbers": [1, 2.5, True, 10**40],
    "types": [(1, 2), b"\xff", {"a": [None]}, {1: "x"}],
    "lists": [[1, 2], [], ["a"], [[1]]],
    "equal": ["same"] * 4,
    "not a number": [float("inf"), "nan", None, -0.0],
}


def make_rows(values: list[Any]) -> TensorDict:
    stack = NonTensorStack.from_list(values, 1)
    return TensorDict({"x": torch.arange(len(values)), "n": {"name": stack}}, [len(values)])


@pytest.fixture
def saved(prefix: Path) -> Any:
    """Return a save of four rows with text, as it was mapped."""
    return make_rows(["a", "b", "c", "d"]).memmap(prefix)


def load(prefix: Path, **options: Any) -> Any:
    return TensorDict.load_memmap(prefix, **options)


@pytest.mark.parametrize("place", ["save", "save.tdz"])
@pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)
def test_memmap_column_loads_equal(values: list[Any], place: str, tmp_path: Path) -> None:
    data = make_rows(values)
    for options in ({}, {"compression": "deflate"} if place.endswith("z") else {"checksums": True}):
        assert_same(data.memmap(tmp_path / place, **options), data)
        assert_same(load(tmp_path / place), data)
        assert load(tmp_path / place)["n", "name"] == values
        assert verify(tmp_path / place).problems == []


@pytest.mark.parametrize("compatible", [False, True])
def test_memmap_column_writes_listed_files(compatible: bool, prefix: Path, list_files: Any) -> None:
    make_rows(["a", "b"]).memmap(prefix, compatible=compatible)
    meta = json.loads((prefix / "n" / "name" / "meta.json").read_text())
    by_rows = {"n/name/%rows-0.memmap", "n/name/%heap-0.memmap"}
    assert (by_rows <= list_files(prefix)) is not compatible
    assert meta["_format_version"] == (1 if compatible else 3)
    assert meta.get("data") == (["a", "b"] if compatible else None)
    slots = [] if compatible else np.fromfile(prefix / "n/name/%rows-0.memmap", "<u8") & (1 << 40) - 1
    heap = b"" if compatible else (prefix / "n/name/%heap-0.memmap").read_bytes()
    contents = [heap[start + 8 : start + 8 + heap[start]] for start in slots]
    assert contents == ([] if compatible else [b"sa", b"sb"])
    shown = inspect(prefix).children["n"].children["name"]
    assert (shown.kind, shown.nbytes) == ("NonTensorStack", 0 if compatible else 16 + len(heap))


def test_memmap_in_place_of_tensordict_writes_its_layout(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, list_files: Any
) -> None:
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    data = make_rows(["a", "b"])
    data.memmap(prefix)
    write: Any = load(prefix)
    write.set_at_(("n", "name"), "c", 0)
    buffer: Any = TensorDict({"name": "a"}).expand(2).memmap_like(prefix / "like")
    buffer[1] = TensorDict({"name": "b"})
    with pytest.raises(AppendError, match="is of a kind that cannot grow"):
        append_memmap(prefix, data)
    assert not [name for name in list_files(prefix) if "%rows" in name]
    assert load(prefix)["n", "name"] == ["c", "b"] and load(prefix / "like")["name"] == ["a", "b"]


def test_memmap_names_and_dims_load_equal(prefix: Path) -> None:
    size, names = [2, 3], ["t", None]
    inner = TensorDict({"v": NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]])}, size)
    empty = TensorDict({"v": NonTensorStack(batch_size=[0])}, [0])
    for data in (TensorDict({"n": inner, "x": torch.ones(2, 3)}, size, names=names), inner.get("v"), empty):
        data.memmap(prefix)
        assert_same(load(prefix), data)


def test_memmap_joined_values_keep_joints(prefix: Path) -> None:
    rows = [TensorDict({"v": NonTensorData(text, batch_size=[2])}, [2]) for text in "abc"]
    data = torch.stack(rows)
    data.memmap(prefix)
    loaded = load(prefix)
    assert type(loaded[1].get("v")) is type(data[1].get("v")) is NonTensorData
    for each in (loaded, data):
        each[0, 1] = TensorDict({"v": "z"})
    again = load(prefix)
    assert again["v"] == data["v"] == [["a", "z"], ["b", "b"], ["c", "c"]]
    for row in range(3):
        assert type(again[row].get("v")) is type(data[row].get("v"))


def write_item(data: Any) -> None:
    data[1] = TensorDict({"x": 7, "n": {"name": "new"}})


def write_slice(data: Any) -> None:
    data[1:3] = make_rows(["new", "ö" * 99])


def write_mask(data: Any) -> None:
    data[torch.tensor([True, False, False, True])] = make_rows(["new", "other"])


def write_reverse(data: Any) -> None:
    data[torch.tensor([3, 0])] = make_rows(["new", "other"])


WRITES = {
    "item": write_item,
    "slice": write_slice,
    "mask": write_mask,
    "positions": write_reverse,
    "view": lambda data: data[2:].__setitem__(0, TensorDict({"x": 7, "n": {"name": "new"}})),
    "set_at_": lambda data: data.set_at_(("n", "name"), "new", 2),
    "update_at_": lambda data: data.update_at_({"n": {"name": "new"}}, 3),
    "update_": lambda data: data.update_(make_rows(["new", "b", "new", "other"])),
    "set_": lambda data: data.set_(("n", "name"), NonTensorStack("1", "2", "3", "4")),
    "list": lambda data: data["n", "name"].__setitem__(0, "new"),
    "copy_": lambda data: data.copy_(make_rows(["new", "b", "new", "other"])),
    "number": lambda data: data["n", "name"].__setitem__(0, (1, 2.5)),
}


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_row_reaches_save(write: Any, loaded: bool, compatible: bool, prefix: Path) -> None:
    expected = make_rows(["a", "b", "c", "d"])
    data: Any = expected.memmap(prefix, compatible=compatible)
    data = load(prefix) if loaded else data
    meta = (prefix / "n/name/meta.json").read_bytes()
    write(expected)
    write(data)
    assert_same(data, expected)
    assert_same(load(prefix), expected)
    assert ((prefix / "n/name/meta.json").read_bytes() == meta) is not compatible


def test_write_row_of_stack_and_class_reaches_save(prefix: Path) -> None:
    @tensorclass
    class Row:
        x: torch.Tensor
        name: str

    def make() -> Any:
        rows = Row(x=torch.zeros(2), name=NonTensorStack("a", "b"), batch_size=[2])
        return lazy_stack(
            [TensorDict({"c": rows.clone()}, [2]), TensorDict({"c": rows.clone(), "y": torch.ones(2)}, [2])]
        )

    expected, data = make(), make().memmap(prefix)
    for each in (expected, data):
        each[1, 0] = TensorDict({"c": Row(x=torch.tensor(5.0), name="new", batch_size=[])})
    assert_same(load(prefix), expected)
    assert load(prefix)[1]["c"].name == ["new", "b"]


def test_write_row_writes_same_bytes_for_any_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = _fs.write_at, _fs.write_all

    def count(place: int) -> Any:
        def write(fd: int, data: Any, *offset: int) -> None:
            written.append(len(data))
            real[place](fd, data, *offset)

        return write

    found = []
    for rows in (10, 10_000):
        data: Any = make_rows([f"row {row}" for row in range(rows)]).memmap(tmp_path / str(rows))
        write_item(data)  # the first write copies the list in memory
        monkeypatch.setattr(_fs, "write_at", count(0))
        monkeypatch.setattr(_fs, "write_all", count(1))
        written.clear()
        write_item(data)
        monkeypatch.undo()
        found.append(list(written))
    assert found == [[8 + len("snew")]] * 2


def test_write_part_of_one_value_stores_rows_unless_compatible(prefix: Path, list_files: Any) -> None:
    for compatible in (False, True):
        one = TensorDict({"x": torch.zeros(2), "name": "reach"})
        buffer: Any = one.expand(5).memmap_like(prefix / str(compatible), compatible=compatible)
        buffer[1] = TensorDict({"x": torch.ones(2), "name": "grasp"})
        other: Any = load(prefix / str(compatible))
        other[4] = TensorDict({"x": torch.ones(2), "name": "lift"})
        assert load(prefix / str(compatible))["name"] == ["reach", "grasp", "reach", "reach", "lift"]
        assert ("name/%rows-0.memmap" in list_files(prefix / str(compatible))) is not compatible


def test_write_part_of_one_loaded_value_keeps_form_of_save(prefix: Path, list_files: Any) -> None:
    for compatible in (False, True):
        place = prefix / str(compatible)
        TensorDict({"x": torch.zeros(3), "name": "a"}, [3]).memmap(place, compatible=compatible)
        data: Any = load(place)
        data[1] = TensorDict({"x": torch.tensor(1.0), "name": "b"})
        assert load(place)["name"] == ["a", "b", "a"]
        assert ("name/%rows-0.memmap" in list_files(place)) is not compatible


def test_write_row_of_other_process_is_kept(prefix: Path, run_in_child: Any) -> None:
    first: Any = make_rows(["a", "b", "c", "d"]).memmap(prefix)
    shared: Any = make_rows(["a", "b", "c", "d"]).memmap(prefix, share_non_tensor=True)
    second = load(prefix)

    def write() -> None:
        data: Any = load(prefix)
        data.set_at_(("n", "name"), "child", 0)

    assert run_in_child(write) == 0
    second.set_at_(("n", "name"), "second", 1)
    shared.set_at_(("n", "name"), "shared", 2)
    assert load(prefix)["n", "name"] == shared["n", "name"] == ["child", "second", "shared", "d"]
    with pytest.raises(StructureError, match="holds something else by now"):
        first.set_at_(("n", "name"), "first", 3)
    assert second["n", "name"] == ["a", "second", "c", "d"]


def test_write_many_rows_replaces_heap(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_rows, "_SPARE", 0)
    monkeypatch.setattr(value_rows, "_SPARE_OF_SLOT", 0)
    data: Any = make_rows(["a", "b", "c", "d"]).memmap(prefix, checksums=True)
    other, values = load(prefix), ["a", "b", "c", "d"]
    for number in range(60):
        each, row = (data, other)[number % 2], number % 4
        values[row] = f"{'long ' * 9}{number}"
        each.set_at_(("n", "name"), values[row], row)
        assert load(prefix)["n", "name"] == values
    (heap,) = (prefix / "n/name").glob("%heap-*")
    assert len(list((prefix / "n/name").iterdir())) == 3 and heap.name != "%heap-0.memmap"
    assert heap.stat().st_size < 5 * 4 * 60
    assert verify(prefix).ok and {each.kind for each in verify(prefix).problems} == {"modified"}
    data.memmap_refresh_().memmap(prefix)
    assert_same(load(prefix), make_rows(values).set("x", data["x"]))
    assert (prefix / "n/name/%heap-0.memmap").stat().st_size < heap.stat().st_size if heap.exists() else True


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.once
def test_write_killed_at_any_call_leaves_old_or_new_value(
    replaces: bool, prefix: Path, monkeypatch: pytest.MonkeyPatch, kill_at_call: Any
) -> None:
    if replaces:
        for name, value in {"_SPARE": 0, "_SPARE_OF_SLOT": 0, "_GROWTH": 1}.items():
            monkeypatch.setattr(value_rows, name, value)
    make_rows(["a", "b", "c", "d"]).memmap(prefix)
    data, seen = load(prefix), set()
    for number in range(100):
        old = list(load(prefix)["n", "name"])

        def write(text: str = f"new {number}") -> None:
            data.set_at_(("n", "name"), text, 2)

        unfinished = kill_at_call(number, write)
        found = list(load(prefix)["n", "name"])
        assert found in (old, ["a", "b", f"new {number}", "d"]), f"killed at call {number}"
        assert verify(prefix).ok
        seen.add(found == old)
        if not unfinished:
            break
    assert number > 10 and seen == {True, False}
    data.set_at_(("n", "name"), "last", 3)
    assert load(prefix)["n", "name"] == [*found[:3], "last"]
    make_rows(["a"]).memmap(prefix)
    assert len(list((prefix / "n/name").iterdir())) == 3


def test_write_failure_keeps_value_in_memory_and_file(
    saved: Any, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_fs, "write_at", fail)
    with pytest.raises(OSError, match="No space left"):
        saved.set_at_(("n", "name"), "new", 1)
    assert saved["n", "name"] == load(prefix)["n", "name"] == ["a", "b", "c", "d"]


def test_write_unstorable_value_raises_or_pickles(prefix: Path) -> None:
    data: Any = make_rows(["a", "b"]).memmap(prefix)
    with pytest.raises(CodecError, match=r"cannot write what is saved at .*name"):
        data["n", "name"][0] = object
    assert load(prefix)["n", "name"] == ["a", "b"]
    data = make_rows(["a", "b"]).memmap(prefix, allow_pickle=True)
    data["n", "name"][0] = complex
    with pytest.raises(PickleRefusedError):
        load(prefix)
    assert load(prefix, allow_pickle=True)["n", "name"] == [complex, "b"]
    assert not list(prefix.rglob("%rows*"))


def test_memmap_over_columns_leaves_no_other_files(prefix: Path, list_files: Any) -> None:
    make_rows(["a", "b"]).memmap(prefix)
    (prefix / "n/name/%heap-7.memmap").write_bytes(b"left by a killed process")
    (prefix / "n/name/%heap-mine").write_bytes(b"mine")
    TensorDict({"x": torch.ones(2)}, [2]).memmap(prefix)
    assert list_files(prefix) == {"%manifest.json", "meta.json", "x.memmap", "n/name/%heap-mine"}


@pytest.mark.parametrize("checksums", [False, True])
def test_verify_copy_of_written_columns_is_ok(checksums: bool, prefix: Path, tmp_path: Path) -> None:
    data: Any = make_rows(["a", "b"]).memmap(prefix, checksums=checksums)
    data.set_at_(("n", "name"), "new", 1)
    shutil.copytree(prefix, tmp_path / "copy", copy_function=shutil.copyfile)
    later = time.time_ns() + 10**9
    os.utime(
        tmp_path / "copy/%manifest.json", ns=(later, later)
    )  # as if the copy of the manifest was made last
    report = verify(tmp_path / "copy")
    assert report.ok and {problem.kind for problem in report.problems} == {"modified"}


def test_write_on_full_disk_names_the_heap_and_keeps_values(prefix: Path) -> None:
    resource = pytest.importorskip("resource")
    data: Any = make_rows(["a", "b"]).memmap(prefix)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write the values: File too large: .*n/name/%heap-0.memmap"):
            data.set_at_(("n", "name"), "x" * 2000, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load(prefix)["n", "name"] == data["n", "name"] == ["a", "b"]
    data.set_at_(("n", "name"), "y", 1)
    assert load(prefix)["n", "name"] == ["a", "y"] and verify(prefix).ok


def test_memmap_like_over_same_columns_keeps_leaves_and_values(prefix: Path) -> None:
    data = make_rows(["a", "b"])
    data.memmap(prefix)
    for first in ("a", "c"):
        again: Any = data.memmap_like(prefix)
        assert again["x"].tolist() == [0, 1] and again["n", "name"] == [first, "b"]
        again.set_at_(("n", "name"), "c", 0)
        again["x"][0] = 0


def test_pack_and_unpack_keep_columns(saved: Any, prefix: Path, tmp_path: Path) -> None:
    saved.set_at_(("n", "name"), "new", 1)
    for compression in ("deflate", None):
        pack_memmap(prefix, tmp_path / "a.tdz", compression=compression)
        unpack_memmap(tmp_path / "a.tdz", tmp_path / "again", checksums=True)
        for place in ("a.tdz", "again"):
            assert load(tmp_path / place)["n", "name"] == ["a", "new", "c", "d"]
            assert verify(tmp_path / place).problems == []
    archived: Any = load(tmp_path / "a.tdz", mode="r+")
    with pytest.raises(StructureError, match="an archive is written in place"):
        archived["n", "name"][0] = "x"


def test_copies_of_mapped_columns_are_independent(saved: Any, prefix: Path) -> None:
    copies = [
        saved.clone(),
        copy.deepcopy(saved),
        saved.to_tensordict(),
        load(prefix, mode="r"),
        load(prefix, device="cpu"),
    ]
    for each in copies[:4]:
        each["n", "name"][0] = "changed"
    assert load(prefix)["n", "name"] == ["a", "b", "c", "d"]
    mapped: Any = pickle.loads(pickle.dumps(saved))
    mapped["n", "name"][0] = "through a pickle"
    assert load(prefix)["n", "name"][0] == "through a pickle"


@pytest.mark.parametrize("name", ["%rows-0.memmap", "%heap-0.memmap"])
def test_load_changed_byte_raises_or_has_no_effect(name: str, saved: Any, prefix: Path) -> None:
    file = prefix / "n/name" / name
    content = file.read_bytes()
    for place in range(len(content)):
        for bit in (1, 128):
            file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            with pytest.raises(FormatError, match=r"key \('n', 'name'\)"):
                load(prefix)
    file.write_bytes(content)
    assert load(prefix)["n", "name"] == ["a", "b", "c", "d"]


def replace_slot(folder: Path, word: int) -> None:
    slots = np.fromfile(folder / "%rows-0.memmap", "<u8")
    slots[1] = word
    slots.tofile(folder / "%rows-0.memmap")


def add_content(folder: Path, content: bytes) -> None:
    """Add an encoded value to a heap, and point the slot of row 1 to it."""
    heap = (folder / "%heap-0.memmap").read_bytes()
    encoder = value_rows.RowEncoder(len(heap))
    replace_slot(folder, int(encoder.add_contents([content])[0]))
    (folder / "%heap-0.memmap").write_bytes(heap + encoder.records)


DAMAGE: dict[str, tuple[Any, str]] = {
    "slot 0": (
        lambda folder: replace_slot(folder, 0),
        "row 1 is damaged: it is at byte 0 of a heap of 48 bytes",
    ),
    "slot outside": (
        lambda folder: replace_slot(folder, 1 << 30),
        "row 1 is damaged: it is at byte 1073741824",
    ),
    "UTF-8": (lambda folder: add_content(folder, b"s\xff"), "row 1 is damaged: 'utf-8' codec"),
    "JSON": (lambda folder: add_content(folder, b"j{"), "row 1 is damaged"),
    "types": (lambda folder: add_content(folder, b"t[1]"), "row 1 is damaged"),
    "unknown type": (lambda folder: add_content(folder, b't[1, "nothing"]'), "row 1: "),
    "letter": (lambda folder: add_content(folder, b"p."), "row 1 is damaged: its first byte is b'p'"),
    "empty": (lambda folder: add_content(folder, b""), "row 1 is damaged"),
    "short heap": (lambda folder: os.truncate(folder / "%heap-0.memmap", 46), "row 3 is damaged"),
    "short slots": (
        lambda folder: os.truncate(folder / "%rows-0.memmap", 31),
        "the size is 31, expected at least 32",
    ),
    "no heap": (lambda folder: (folder / "%heap-0.memmap").unlink(), "%heap-0.memmap is missing"),
    "no slots": (lambda folder: (folder / "%rows-0.memmap").unlink(), "%rows-0.memmap is missing"),
    "other heap": (
        lambda folder: (folder / "%heap-0.memmap").write_bytes(b"x" * 48),
        "row 0 is damaged: the heap starts",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_load_damaged_column_raises_with_path(damage: Any, message: str, saved: Any, prefix: Path) -> None:
    damage(prefix / "n" / "name")
    with pytest.raises(FormatError, match=message) as found:
        load(prefix)
    assert str(prefix / "n/name") in str(found.value)
    assert list(load(prefix, strict=False).keys(True, True)) == ["x"]
    assert any("n/name/%" in problem.file for problem in verify(prefix).problems)
    assert not verify(prefix).ok


@pytest.mark.parametrize(
    ("field", "value"), [("rows", -1), ("rows", "x"), ("rows", True), ("heap", None), ("heap", 1 << 70)]
)
def test_load_wrong_field_of_rows_raises(
    field: str, value: Any, saved: Any, prefix: Path, edit_metadata: Any
) -> None:
    edit_metadata(prefix / "n/name/meta.json", lambda meta: meta["values"]["data"].update({field: value}))
    with pytest.raises(FormatError, match=f"{field} of 'data' is .*expected a number"):
        load(prefix)


def test_load_more_rows_than_slots_raises(saved: Any, prefix: Path, edit_metadata: Any) -> None:
    edit_metadata(prefix / "n/name/meta.json", lambda meta: meta["meta"].update(batch_size=[1 << 61]))
    with pytest.raises(FormatError, match=r"a shape that a tensor can have"):
        load(prefix)
    edit_metadata(prefix / "n/name/meta.json", lambda meta: meta["meta"].update(batch_size=[1 << 50]))
    with pytest.raises(FormatError, match=r"the size is 32, expected at least"):
        load(prefix)


def test_unpickled_value_file_of_earlier_release_writes_lists(prefix: Path) -> None:
    data: Any = TensorDict({"name": NonTensorData("a", batch_size=[2])}, [2]).memmap(prefix)
    keeper = data.get("name")._keeper
    state = {name: getattr(keeper, name) for name in type(keeper).__slots__ if name != "rows"}
    keeper.__setstate__((None, state))
    assert keeper.rows is False and keeper.path == str(prefix / "name")
