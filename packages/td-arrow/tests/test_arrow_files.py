"""Files of tables: parts of them, directories, other locations, damage, and errors before anything is written."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch

import td_arrow
from td_arrow import TableWriter, arrow_schema, inspect, load, save, verify
from td_core import TensorDict, append
from td_core import load as load_any
from td_core import open as open_save
from td_core.errors import FormatError, LockedError, StructureError, UnsupportedOperationError
from td_core.testing import assert_same, kill_at_os_call
from td_store import StoredTensor, _temporary_files
from td_store.arrays import MappedTensor

SUFFIXES = [".parquet", ".arrow"]
ROWS = [0, -1, slice(2, 9), slice(None, None, 3), slice(4, 4), [10, 0, 5, 5], torch.tensor([7, 1])]


@pytest.fixture
def td() -> TensorDict:
    """Return a collection of eleven rows."""
    return TensorDict(
        {
            "x": torch.arange(11),
            "v": torch.randn(11, 3),
            "n": {"y": torch.arange(11.0), "b": torch.arange(11) % 2 > 0},
        },
        [11],
    )


def write(td: Any, folder: Path, suffix: str) -> Path:
    """Save a collection in groups of four rows, and return the path."""
    groups = {"row_group_size": 4} if suffix == ".parquet" else {"batch_rows": 4}
    save(td, folder / f"x{suffix}", **groups)
    return folder / f"x{suffix}"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_those_of_the_index(td: TensorDict, suffix: str, rows: Any, tmp_path: Path) -> None:
    assert_same(load(write(td, tmp_path, suffix), rows=rows), td[rows])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ([("x", ">", 7)], [8, 9, 10]),
        (pc.field("x") == 5, [5]),
        ([(("n", "y"), "<", 2)], [0, 1]),
        ([("x", ">", 2), ("x", "<", 5)], [3, 4]),
        ([("x", ">", 99)], []),
    ],
)
def test_filter_keeps_rows_before_rows_counts_them(
    td: TensorDict, suffix: str, condition: Any, rows: list[int], tmp_path: Path
) -> None:
    path = write(td, tmp_path, suffix)
    assert_same(load(path, filter=condition), td[rows])
    found = load(path, filter=condition, keys=["v"], rows=slice(1, None))
    assert_same(found, td[rows].select("v")[1:])


def test_filter_skips_row_groups_by_their_statistics(
    td: TensorDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(td, tmp_path, ".parquet")
    read, groups = td_arrow._table_files.ParquetTable.read, []

    def note(self: Any, paths: Any, chosen: Any = None) -> Any:
        groups.append(chosen)
        return read(self, paths, chosen)

    monkeypatch.setattr(td_arrow._table_files.ParquetTable, "read", note)
    load(path, filter=[("x", ">", 7)])
    assert groups == [[2], [2]]


def test_keys_with_points_are_not_confused(tmp_path: Path) -> None:
    td = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2), "c": torch.ones(2)}}, [2])
    save(td, tmp_path / "x.parquet")
    for keys in (["a.b"], [("a", "b")], [("a", "c"), "a.b"]):
        assert_same(load(tmp_path / "x.parquet", keys=keys), td.select(*keys))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_open_reads_rows_when_they_are_used(td: TensorDict, suffix: str, tmp_path: Path) -> None:
    opened = open_save(write(td, tmp_path, suffix))
    assert isinstance(opened["x"], StoredTensor)
    assert_same(opened[[9, 0, 5]].clone(), td[[9, 0, 5]])
    again = pickle.loads(pickle.dumps(opened))
    assert_same(again.clone(), td)
    with pytest.raises(LockedError):
        opened["x"][0] = 5


def test_open_maps_one_batch_without_a_copy(td: TensorDict, tmp_path: Path) -> None:
    save(td, tmp_path / "x.arrow")
    opened = open_save(tmp_path / "x.arrow")
    assert isinstance(opened["v"], MappedTensor)
    assert_same(opened[[9, 0, 5]].clone(), td[[9, 0, 5]])
    written = open_save(tmp_path / "x.arrow", mode="r+", keys=["x", "v", ("n", "y")])
    written["v"][2:4] = 5.0
    assert load(tmp_path / "x.arrow")["v"][2:4].eq(5).all()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_opened_file_that_was_replaced_is_an_error(td: TensorDict, suffix: str, tmp_path: Path) -> None:
    path = write(td, tmp_path, suffix)
    opened = pickle.dumps(open_save(path))
    save(td * 2, path)
    with pytest.raises(FormatError, match="changed since it was opened: open it again"):
        pickle.loads(opened)[[1]].clone()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"compression": "zstd"}, "compressed"), ({"batch_rows": 4}, "record batches"), ({}, "bools")],
)
def test_open_for_writing_names_the_column_that_cannot_be(
    td: TensorDict, options: Any, reason: str, tmp_path: Path
) -> None:
    save(td, tmp_path / "x.arrow", **options)
    with pytest.raises(UnsupportedOperationError, match=f"column .* cannot be written in place: .*{reason}"):
        open_save(tmp_path / "x.arrow", mode="r+")
    assert_same(open_save(tmp_path / "x.arrow", mode="c").clone(), td)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_directory_is_one_table_that_grows(td: TensorDict, name: str, tmp_path: Path) -> None:
    save(td, tmp_path / "d", format=name, max_rows_per_file=4)
    assert sorted(os.listdir(tmp_path / "d")) == [f"part-0000{i}.{name}" for i in range(3)]
    append(td[:3], tmp_path / "d")
    (tmp_path / "d" / "_ignored").write_text("text")
    assert_same(load_any(tmp_path / "d"), torch.cat([td, td[:3]]))
    assert_same(open_save(tmp_path / "d")[[12, 0]].clone(), td[[1, 0]])
    assert load(tmp_path / "d", filter=[("x", "==", 2)], format=name)["x"].tolist() == [2, 2]
    with pytest.raises(StructureError, match="the rows lack the column 'v'"):
        append(td.exclude("v"), tmp_path / "d", format=name)
    assert len(load(tmp_path / "d")) == 14


def test_killed_append_leaves_the_old_rows_or_the_new_ones(td: TensorDict, tmp_path: Path) -> None:
    path = tmp_path / "d"

    def prepare() -> None:
        shutil.rmtree(path, ignore_errors=True)
        save(td, path, format="parquet", max_rows_per_file=6)

    found, number, was_killed = set(), 0, True
    while was_killed:
        prepare()
        was_killed = kill_at_os_call(lambda: append(td[:2], path), number, _temporary_files)
        found.add(len(load(path)))
        append(td[:1], path)
        assert not [name for name in os.listdir(path) if "tmp" in name]
        number += 1
    assert found == {11, 13}


def test_folders_of_hive_become_columns(tmp_path: Path) -> None:
    for year in (2020, 2021):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"x": [year, 1]}), tmp_path / f"year={year}" / "a.parquet")
    found = load_any(tmp_path)
    assert (found["x"].tolist(), found["year"].tolist()) == ([2020, 1, 2021, 1], [2020, 2020, 2021, 2021])


def test_files_that_differ_are_refused_or_filled(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0], "y": [1.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [2.0]}), tmp_path / "b.parquet")
    with pytest.raises(FormatError, match=r"b\.parquet: the file lacks the column, which is 'y'"):
        load_any(tmp_path)
    found = load(tmp_path, strict=False)
    assert (found["x"].tolist(), found["y"].isnan().tolist()) == ([1.0, 2.0], [False, True])
    pq.write_table(pa.table({"x": [1], "y": [1.0]}), tmp_path / "b.parquet")
    with pytest.raises(FormatError, match="'x' as int64, and .* has it as double"):
        load_any(tmp_path)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_file_objects_and_urls_are_locations(td: TensorDict, name: str) -> None:
    file = io.BytesIO()
    save(td, file, format=name)
    assert_same(load(file), td)
    assert_same(load(file, format=name, rows=slice(2)), td[:2])
    pytest.importorskip("fsspec")
    save(td, f"memory://x.{name}")
    assert_same(load(f"memory://x.{name}"), td)


def test_stream_of_arrow_is_read_by_its_format(td: TensorDict, tmp_path: Path) -> None:
    table = td.to_arrow()
    with pa.ipc.new_stream(tmp_path / "x.arrows", table.schema) as writer:
        writer.write_table(table, 4)
    assert_same(load(tmp_path / "x.arrows", format="arrow"), td)


def test_stored_leaves_are_saved_in_parts(
    td: TensorDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(td, tmp_path / "x.parquet", row_group_size=4)
    monkeypatch.setattr(td_arrow._save_tables, "_GROUP_BYTES", 100)
    opened = open_save(tmp_path / "x.parquet")
    save(opened, tmp_path / "y.parquet")
    assert pq.ParquetFile(tmp_path / "y.parquet").num_row_groups > 2
    assert_same(load(tmp_path / "y.parquet"), td)


def test_writer_joins_pieces_and_cuts_groups(td: TensorDict, tmp_path: Path) -> None:
    with TableWriter(tmp_path / "x.parquet", row_group_size=4) as writer:
        for start in range(0, 11, 3):
            writer.write(td[start : start + 3])
        assert not (tmp_path / "x.parquet").exists()
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 3]
    assert_same(load(tmp_path / "x.parquet"), td)
    with pytest.raises(UnsupportedOperationError, match="is closed"):
        writer.write(td)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writer_that_fails_leaves_the_old_file(td: TensorDict, suffix: str, tmp_path: Path) -> None:
    save(td, tmp_path / f"x{suffix}")

    def fail() -> None:
        with TableWriter(tmp_path / f"x{suffix}", format=suffix[1:], row_group_size=1) as writer:
            writer.write(td)
            writer.write(td.float())

    with pytest.raises(StructureError, match="the column 'x' of the rows has the type float"):
        fail()
    assert os.listdir(tmp_path) == [f"x{suffix}"]
    assert_same(load(tmp_path / f"x{suffix}"), td)


def test_schema_of_collection_is_that_of_its_file(td: TensorDict, tmp_path: Path) -> None:
    save(td, tmp_path / "x.arrow")
    assert arrow_schema(td).equals(arrow_schema(tmp_path / "x.arrow"))
    with TableWriter(tmp_path / "y.parquet", like=td):
        pass
    assert load(tmp_path / "y.parquet").batch_size == (0,)


def test_inspect_reads_footer_alone(td: TensorDict, tmp_path: Path) -> None:
    tree = inspect(write(td, tmp_path, ".parquet"))
    leaf = tree.children["n"].children["y"]
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == ([11], "torch.float32", 44)
    assert leaf.place.startswith("column ('n', 'y'), 3 groups, uncompressed, ") and leaf.place.endswith(
        "0 nulls"
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_verify_finds_a_flipped_bit(td: TensorDict, suffix: str, tmp_path: Path) -> None:
    save(td, tmp_path / f"x{suffix}", checksums=True)
    path = tmp_path / f"x{suffix}"
    assert verify(path).ok
    content = bytearray(path.read_bytes())
    position = content.index(td["v"].numpy().tobytes()[:40])
    content[position + 5] ^= 1
    path.write_bytes(content)
    report = verify(path)
    assert [problem.file for problem in report.problems] == ["'v'"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_load_with_verify_finds_a_flipped_bit_of_the_schema(suffix: str, tmp_path: Path) -> None:
    saved = TensorDict({"id": torch.arange(3), "w": torch.ones(3, 2, dtype=torch.bfloat16)}, [3])
    path = tmp_path / f"x{suffix}"
    save(saved, path, checksums=True)
    assert (verify(path).files, verify(path).hashed) == (1, 1 if suffix == ".parquet" else 3)
    content = path.read_bytes()
    places = [
        match.start()
        for word in (b"ARROW:schema", b"td[.]hash", b"id", b"bf")
        for match in re.finditer(word, content)
    ]
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with contextlib.suppress(FormatError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(load_any(path, verify=True), saved)
    path.write_bytes(content.replace(b"ARROW:schema", b"ARROW:schemb").replace(b"bfloat16", b"bfloat17"))
    assert [problem.file for problem in verify(path).problems][:1] == [path.name]


def test_files_of_a_directory_have_the_hash_of_the_schema(td: TensorDict, tmp_path: Path) -> None:
    save(td, tmp_path / "x", format="parquet", max_rows_per_file=4, checksums=True)
    append(td, tmp_path / "x")
    report = verify(tmp_path / "x")
    assert (report.ok, report.files, report.hashed) == (True, 4, 4)
    with TableWriter(tmp_path / "y.parquet", checksums=True) as writer:
        writer.write(td)
    assert verify(tmp_path / "y.parquet").hashed == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_append_encodes_strings_as_the_categories_of_a_column(ordered: bool, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    kind = pa.dictionary(pa.int8(), pa.string(), ordered)
    column = pa.DictionaryArray.from_arrays(pa.array([1, None], pa.int8()), ["b", "a"], ordered=ordered)
    pq.write_table(pa.table({"c": column}), tmp_path / "0.parquet")
    append(load(tmp_path), tmp_path)
    append(TensorDict({"c": ["new"]}, [1]), tmp_path)
    assert list(load(tmp_path)["c"]) == ["a", None, "a", None, "new"]
    assert pq.read_table(tmp_path).schema.field("c").type == kind
    with pytest.raises(
        StructureError, match=r"give its labels as strings, as load\(categories=\"values\"\) does"
    ):
        append(load(tmp_path, categories="codes", nulls="fill"), tmp_path)
    with pytest.raises(StructureError, match="the column 'c' cannot have the categories of the rows"):
        append(TensorDict({"c": [str(number) for number in range(200)]}, [200]), tmp_path)


def test_append_of_rows_without_batch_dim_names_it(td: TensorDict, tmp_path: Path) -> None:
    save(td, tmp_path / "x", format="parquet", max_rows_per_file=20)
    with pytest.raises(StructureError, match=r"the rows have no batch dim; append data\[i : i \+ 1\]"):
        append(td[0], tmp_path / "x")
    append(td[:1], tmp_path / "x")
    assert load(tmp_path / "x").batch_size == (12,)


#: By name, a call that must raise before it writes, the error and its message.
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown option": (lambda td, p: save(td, p / "x.parquet", compresion="zstd"), TypeError, "no option 'compresion'"),
    "unknown option of arrow": (lambda td, p: save(td, p / "x.arrow", row_group_size=3), TypeError, "no option 'row_gro"),
    "tensors": (lambda td, p: save(td, p / "x.parquet", tensors="dense"), ValueError, "tensors is one of"),
    "row_dims": (lambda td, p: td.to_arrow(row_dims=3), ValueError, "row_dims is 1 or 2; got 3"),
    "separator": (lambda td, p: td.to_arrow(separator=""), ValueError, "separator is a string"),
    "group": (lambda td, p: save(td, p / "x.parquet", row_group_size=0), ValueError, "row_group_size is a positive int; got 0"),
    "batch": (lambda td, p: save(td, p / "x.arrow", batch_rows=-1), ValueError, "batch_rows is a positive int"),
    "codec": (lambda td, p: save(td, p / "x.arrow", compression="gzip"), ValueError, "compression is None"),
    "rows of a file": (lambda td, p: save(td, p / "x", max_rows_per_file=0), ValueError, "max_rows_per_file is a positive"),
    "directory": (lambda td, p: save(td, p, format="parquet"), IsADirectoryError, "which is a directory"),
    "storage options": (lambda td, p: save(td, p / "x.parquet", storage_options={}), ValueError, "are for URLs"),
    "format": (lambda td, p: save(td, p / "x", format="csv"), ValueError, "format is one of 'parquet', 'arrow'"),
    "open for writing": (
        lambda td, p: open_save(write(td, p, ".parquet"), mode="r+"), UnsupportedOperationError, "cannot be changed"
    ),
    "writer": (lambda td, p: TableWriter(p / "x", format="csv"), ValueError, "format is one of 'parquet'"),
    "writer option": (lambda td, p: TableWriter(p / "x", nothing=1), TypeError, "no option 'nothing'"),
    "lists": (lambda td, p: TensorDict.from_arrow(td.to_arrow(), lists="x"), ValueError, "lists is one of"),
    "times": (lambda td, p: TensorDict.from_arrow(td.to_arrow(), times="x"), ValueError, "times is one of"),
    "categories": (lambda td, p: TensorDict.from_arrow(td.to_arrow(), categories=1), ValueError, "categories is one of"),
    "copy": (lambda td, p: TensorDict.from_arrow(td.to_arrow(), copy="x"), TypeError, "copy is None"),
    "no table": (lambda td, p: TensorDict.from_arrow({"a": 1}), TypeError, "takes a table of Arrow"),
    "collection": (lambda td, p: TensorDict.from_arrow(td), TypeError, "it is a collection already"),
    "batch sizes": (
        lambda td, p: TensorDict.from_parquet(write(td, p, ".parquet"), batch_size=[11], batch_dims=1), ValueError, "not both"
    ),
    "key": (lambda td, p: TensorDict.from_arrow(td.to_arrow(), keys=["q"]), KeyError, "the save has no key 'q'"),
    "two names": (
        lambda td, p: TensorDict.from_arrow(pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"])),
        FormatError, "two columns are called 'a': rename one",
    ),
    "leaf and level": (
        lambda td, p: TensorDict.from_arrow(pa.table({"a": [1], "a.b": [2]}), separator="."),
        FormatError, "'a' is a column, and the level of 'a.b' with separator='.'",
    ),
    "level and leaf": (
        lambda td, p: TensorDict.from_arrow(pa.table({"a.b": [1], "a": [2]}), separator="."),
        FormatError, "'a' is a column, and the level of",
    ),
    "union": (
        lambda td, p: TensorDict.from_arrow(
            pa.table({"u": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])})
        ),
        FormatError, "column 'u': has the type sparse_union<.*which td cannot read: leave it out with keys=",
    ),
    "uneven": (
        lambda td, p: TensorDict.from_arrow(pa.table({"l": [[1], [1, 2]]}), lists="dense"),
        ValueError, "column 'l': the list of row 1 has 2 items, that of row 0 has 1",
    ),
    "filter": (lambda td, p: load(write(td, p, ".parquet"), filter="x > 1"), TypeError, "filter is an expression"),
    "filter of no column": (lambda td, p: load(write(td, p, ".parquet"), filter=[("q", ">", 1)]), ValueError, "does not fit"),
    "index": (lambda td, p: load(write(td, p, ".parquet"), rows=99), IndexError, "rows=99 is no index of its 11 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_says_what_and_how(name: str, td: TensorDict, tmp_path: Path) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(td, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"x.parquet", "x.arrow"}


def test_damaged_offsets_of_a_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    table = pa.table({"s": ["abc", "de", "f"]})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    content = bytearray(path.read_bytes())
    position = content.index((3).to_bytes(4, "little") + (5).to_bytes(4, "little"))
    content[position : position + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.arrow: the file is damaged"):
        load_any(path)


def test_pickled_shape_of_ray_is_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "created"

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    field = pa.field(
        "x",
        pa.large_list(pa.float32()),
        metadata={
            "ARROW:extension:name": "ray.data.arrow_tensor_v2",
            "ARROW:extension:metadata": pickle.dumps(Trap()),
        },
    )
    table = pa.Table.from_arrays(
        [pa.array([[1.0, 2.0]], pa.large_list(pa.float32()))], schema=pa.schema([field])
    )
    with pytest.raises(FormatError, match="is not JSON but a pickle, which td never loads"):
        TensorDict.from_arrow(table)
    assert not marker.exists()
