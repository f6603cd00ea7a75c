"""Text columns in HDF5 and Zarr files are strings for other programs, and come back equal."""

from __future__ import annotations

import json
import multiprocessing
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import td_core
from td_core import FormatError, TensorDict, append, inspect, load, save, verify

tensorclasses = pytest.importorskip("td_tensorclass")

#: The package of each format, by the suffix of its files.
PACKAGES = {".h5": "td_hdf5", ".zarr": "td_zarr"}


@pytest.fixture(params=PACKAGES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pytest.importorskip(PACKAGES[request.param])
    return tmp_path / f"data{request.param}"


def read_text(path: Path, name: str) -> Any:
    """Return the strings of an array as h5py or zarr reads them, or None if the file has no such array."""
    if path.suffix == ".h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path) as file:
            if name not in file or h5py.check_string_dtype(file[name].dtype) is None:
                return None
            return file[name].asstr()[()].tolist()
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="r")
    return group[name][...].tolist() if name in group and group[name].dtype.kind in "TO" else None


def write_text(path: Path, name: str, position: int, text: str) -> None:
    if path.suffix == ".h5":
        with pytest.importorskip("h5py").File(path, "r+") as file:
            file[name][position] = text
    else:
        pytest.importorskip("zarr").open_group(path, mode="r+")[name][position] = text


def as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def make_two_dims() -> Any:
    rows = [tensorclasses.NonTensorStack(f"p{i}", "q") for i in range(3)]
    return tensorclasses.NonTensorStack(*rows)


#: Columns of three rows, and what other programs see, or None for a value that stays in the header.
COLUMNS: dict[str, tuple[Callable[[], Any], Any]] = {
    "plain": (lambda: ["a", "b", "c"], ["a", "b", "c"]),
    "unicode": (lambda: ["bö", "日本", "🙂"], ["bö", "日本", "🙂"]),
    "empty strings": (lambda: ["", "", ""], ["", "", ""]),
    "long": (lambda: ["x" * 70_000, "y", ""], ["x" * 70_000, "y", ""]),
    "none": (lambda: ["a", None, ""], ["a", "", ""]),
    "two dims": (make_two_dims, [["p0", "q"], ["p1", "q"], ["p2", "q"]]),
    "only none": (lambda: tensorclasses.NonTensorStack(None, None, None), None),
    "mixed": (lambda: ["a", 1, "c"], None),
    "lists": (lambda: tensorclasses.NonTensorStack(["a"], ["b"], ["c"]), None),
    "nul": (lambda: ["a\0b", "", "c"], None),
    "surrogate": (lambda: ["\ud800", "b", "c"], None),
}


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_column_is_text_and_comes_back(name: str, options: Any, path: Path) -> None:
    make, seen = COLUMNS[name]
    data = TensorDict({"x": torch.arange(3), "s": make(), "n": {"s": make()}}, [3], names=["row"])
    save(data, path, **options)
    assert read_text(path, "s") == read_text(path, "n/s") == seen
    for found in (load(path), td_core.open(path), load(path, keys=["s", ("n", "s")])):
        assert as_list(found["s"]) == as_list(found["n", "s"]) == as_list(data["s"])
        assert found.get("s").names == data.get("s").names
    assert verify(path).ok
    assert inspect(path).children["s"].kind == "NonTensorStack"
    part = load(path, rows=[2, 0])
    wanted = as_list(data["s"])
    assert as_list(part["s"]) == [wanted[2], wanted[0]] and part["x"].tolist() == [2, 0]


def test_column_of_tensorclass_is_text(path: Path) -> None:
    save(
        TensorDict({"r": Row(torch.zeros(2), tensorclasses.NonTensorStack("a", "b"), batch_size=[2])}, [2]),
        path,
    )
    assert list(load(path)["r"].name) == ["a", "b"]
    assert read_text(path, "r/name") == ["a", "b"]


@tensorclasses.tensorclass
class Row:
    x: torch.Tensor
    name: Any


def test_checksums_find_changed_text(path: Path) -> None:
    save(TensorDict({"s": ["a", "b"]}, [2]), path, checksums=True)
    assert verify(path).ok
    write_text(path, "s", 1, "c")
    assert list(load(path)["s"]) == ["a", "c"]
    assert verify(path).ok is (path.suffix == ".zarr")  # where zarr writes the checksum of a chunk, too


def test_other_program_fills_missing_text(path: Path) -> None:
    save(TensorDict({"s": ["a", None, None]}, [3]), path)
    write_text(path, "s", 1, "b")
    assert list(load(path)["s"]) == ["a", "b", None]


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("rows", [["d", "e"], [None, "e"], [3, "e"]], ids=str)
def test_append_adds_strings(rows: Any, options: Any, path: Path) -> None:
    old = ["a", None, "c"]
    save(TensorDict({"x": torch.arange(3), "n": {"s": old}}, [3]), path, **options)
    append(TensorDict({"x": torch.arange(2), "n": {"s": rows}}, [2]), path)
    assert list(load(path)["n", "s"]) == [*old, *rows]
    assert load(path)["x"].tolist() == [0, 1, 2, 0, 1]
    if 3 not in rows:
        assert read_text(path, "n/s") == [text or "" for text in [*old, *rows]]
    assert verify(path).ok


def open_live(path: Path) -> Any:
    return (
        TensorDict.from_h5(path, mode="r+") if path.suffix == ".h5" else TensorDict.from_zarr(path, mode="r+")
    )


def make_live(path: Path) -> Any:
    save(TensorDict({"x": torch.arange(3), "s": ["a", "b", "c"], "n": {"s": ["d", "e", "f"]}}, [3]), path)
    return open_live(path)


def test_rows_written_in_place_reach_array(path: Path) -> None:
    live = make_live(path)
    live.get("s")[1] = "new"
    live.get(("n", "s"))[0] = None
    assert (list(load(path)["s"]), list(load(path)["n", "s"])) == (["a", "new", "c"], [None, "e", "f"])
    assert (read_text(path, "s"), read_text(path, "n/s")) == (["a", "new", "c"], ["", "e", "f"])
    assert list(open_live(path)["s"]) == ["a", "new", "c"]


def test_column_becomes_mixed_and_text_again(path: Path) -> None:
    live = make_live(path)
    live.get("s")[1] = 3
    assert list(load(path)["s"]) == ["a", 3, "c"]
    assert read_text(path, "s") is None
    live.get("s")[1] = "b"
    assert list(load(path)["s"]) == read_text(path, "s") == ["a", "b", "c"]
    assert verify(path).ok


def test_live_entries_are_set_renamed_and_removed(path: Path) -> None:
    live = make_live(path)
    live["n", "t"] = ["1", "2", "3"]
    live["s"] = ["x", "y", "z"]
    live.rename_key_(("n", "s"), ("n", "u"))
    assert read_text(path, "n/t") == ["1", "2", "3"]
    assert read_text(path, "s") == ["x", "y", "z"]
    assert read_text(path, "n/s") is None
    assert list(load(path)["n", "u"]) == read_text(path, "n/u") == ["d", "e", "f"]
    del live["s"]
    live["n", "u"] = torch.zeros(3)
    assert read_text(path, "s") is None
    assert ({*load(path).keys()}, {*load(path)["n"].keys()}) == ({"x", "n"}, {"t", "u"})
    assert verify(path).ok


def test_failed_change_keeps_strings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = make_live(path)
    module = "td_hdf5._persistent.write_header" if path.suffix == ".h5" else "td_zarr._live_groups.dump_json"

    def fail(*args: object) -> bytes:
        monkeypatch.undo()
        raise OSError("no space")

    monkeypatch.setattr(module, fail)
    with pytest.raises(OSError, match="no space"):
        live["t"] = ["1", "2", "3"]
    assert list(load(path)["s"]) == ["a", "b", "c"] and "t" not in load(path)
    assert verify(path).ok


def write_row(path: Path, position: int, text: str) -> None:
    open_live(path).get("s")[position] = text


@pytest.mark.once
def test_processes_write_rows(path: Path) -> None:
    make_live(path)
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=write_row, args=(path, 2, "other"))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert list(load(path)["s"]) == ["a", "b", "other"]


def test_save_of_earlier_release_loads_and_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_store.arrays.array_plan.take_texts", lambda *args: {})
    data = TensorDict({"x": torch.arange(3), "s": ["a", "b", "c"], "t": ["d", "e", "f"]}, [3])
    save(data, path)
    assert read_text(path, "s") is None
    monkeypatch.undo()
    assert list(load(path)["s"]) == ["a", "b", "c"]
    append(data[:1], path)
    assert list(load(path)["s"]) == ["a", "b", "c", "a"]
    live = open_live(path)
    live.get("s")[0] = "new"
    assert list(load(path)["s"]) == read_text(path, "s") == ["new", "b", "c", "a"]
    assert list(load(path)["t"]) == ["d", "e", "f", "d"]


def test_xarray_reads_strings(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("td_zarr")
    save(TensorDict({"x": torch.arange(2), "s": ["a", "b"]}, [2], names=["row"]), tmp_path / "x.zarr")
    found = xarray.open_zarr(tmp_path / "x.zarr")
    assert found["s"].dims == ("row",) and found["s"].values.tolist() == ["a", "b"]


#: Changes of the field ``texts`` of a header, and the message.
DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda texts: [], "texts of its header are damaged"),
    "place": (lambda texts: {"s": [7, [3], []]}, "texts of its header are damaged"),
    "negative place": (lambda texts: {"s": [-1, [3], []]}, "texts of its header are damaged"),
    "other place": (lambda texts: {"s": [0, [-3], []]}, "texts of its header are damaged"),
    "missing": (lambda texts: {"s": [0, [3], [3]]}, "texts of its header are damaged"),
    "shape": (lambda texts: {"s": [0, [4], []]}, "the shape|does not describe"),
    "other array": (lambda texts: {"x": [0, [3], []]}, "header has|does not describe|is not read|is missing"),
    "no array": (lambda texts: {"zz": [0, [3], []]}, "does not describe|is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_texts_raise(name: str, path: Path) -> None:
    save(TensorDict({"x": torch.arange(3), "s": ["a", "b", "c"]}, [3]), path)
    change, message = DAMAGES[name]
    if path.suffix == ".h5":
        numpy, h5py = pytest.importorskip("numpy"), pytest.importorskip("h5py")
        with h5py.File(path, "r+") as file:
            header = json.loads(file.attrs["td.0"])
            text = json.dumps({**header, "texts": change(header["texts"])}).encode()
            file.attrs["td.0"], file.attrs["td.crc"] = (
                numpy.bytes_(text),
                numpy.bytes_(b"%08x" % zlib.crc32(text)),
            )
    else:
        root = json.loads((path / "zarr.json").read_text())
        header = json.loads(root["attributes"]["td"])
        root["attributes"]["td"] = json.dumps({**header, "texts": change(header["texts"])})
        (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(FormatError, match=message):
        load(path)
    assert not verify(path).ok


@pytest.mark.parametrize("suffix", PACKAGES)
@given(
    columns=st.lists(
        st.lists(st.none() | st.text(max_size=4), min_size=2, max_size=2), min_size=1, max_size=4
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_strings_come_back(suffix: str, columns: list[list[str | None]], tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[suffix])
    entries = {str(i): tensorclasses.NonTensorStack(*column) for i, column in enumerate(columns)}
    save(TensorDict(entries, [2]), tmp_path / f"x{suffix}")
    found = load(tmp_path / f"x{suffix}")
    assert [list(found[key]) for key in entries] == columns
