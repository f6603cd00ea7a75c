"""What a first user and other programs bring: views of text, tables of one row, damaged footers, wrong arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from td_arrow import TableWriter, iter_batches, save
from td_core import TensorDict, append, load
from td_core import open as open_save
from td_core.errors import KeyPathError, StructureError

pytest.importorskip("td_tensorclass")


def _write(td: Any, path: Path, **options: Any) -> Path:
    save(td, path, **options)
    return path


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bfloat16]
)
def test_opened_rows_of_several_groups_have_each_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    leaf = torch.arange(12).view(6, 2).to(dtype)
    path = _write(TensorDict({"x": leaf}, [6]), tmp_path / "x.parquet", row_group_size=2)
    opened = open_save(path)
    assert opened[[5, 0, 3]]["x"].tolist() == [*leaf.tolist()[5::-5], leaf.tolist()[3]]
    assert opened.clone()["x"].tolist() == leaf.tolist()


def test_iter_batches_gives_the_row_of_a_collection_without_batch_dims(tmp_path: Path) -> None:
    path = _write(TensorDict({"x": torch.arange(3)}, []), tmp_path / "x.parquet")
    assert [batch["x"].tolist() for batch in iter_batches(path, 2)] == [[[0, 1, 2]]]


VIEWS: dict[str, Callable[[], Any]] = {
    "text": lambda: pa.array(["a", None, "c"], pa.string_view()),
    "bytes": lambda: pa.array([b"a", None, b"c"], pa.binary_view()),
    "categories": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0, None, 1], pa.uint32()), pa.array(["a", "c"], pa.string_view())
    ),
    "lists": lambda: pa.ListArray.from_arrays(
        pa.array([0, 1, 1, 2], pa.int32()), pa.array(["a", "c"], pa.string_view())
    ),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_columns_of_views_are_read_chosen_filtered_and_shuffled(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    column = make()
    try:
        pa.array(["a"], pa.string_view()).cast(pa.large_string())
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow does not cast views")
    table = pa.table({"c": column, "i": [0, 1, 2]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    path, expected = tmp_path / "x.arrow", column.to_pylist()
    assert list(TensorDict.from_arrow(table, nulls="auto")["c"]) == expected
    assert list(load(path, rows=[2, 0])["c"]) == [expected[2], expected[0]]
    assert list(load(path, filter=[("i", ">", 0)])["c"]) == expected[1:]
    shuffled = [
        row for batch in iter_batches(path, 2, shuffle=True) for row in zip(batch["i"].tolist(), batch["c"])
    ]
    assert sorted(shuffled, key=lambda row: row[0]) == list(enumerate(expected))


def test_filter_compares_views_with_text(tmp_path: Path) -> None:
    table = pa.table({"c": VIEWS["text"](), "i": [0, 1, 2]})
    try:
        table["c"].cast(pa.large_string())
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow does not cast views")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert load(tmp_path / "x.arrow", filter=[("c", "==", "c")])["i"].tolist() == [2]


def test_names_of_folders_are_decoded(tmp_path: Path) -> None:
    pq.write_to_dataset(pa.table({"n": ["a b/c", "d"], "x": [1, 2]}), tmp_path / "d", partition_cols=["n"])
    loaded = load(tmp_path / "d")
    assert dict(zip(loaded["n"], loaded["x"].tolist())) == {"a b/c": 1, "d": 2}


@pytest.mark.parametrize(
    ("name", "form"),
    [("x.arrow", b"ARROW1"), ("x.feather", b"ARROW1"), ("x.parquet", b"PAR1"), ("x", b"PAR1")],
)
def test_table_writer_writes_the_format_of_the_suffix(tmp_path: Path, name: str, form: bytes) -> None:
    with TableWriter(tmp_path / name) as writer:
        writer.write(TensorDict({"x": torch.arange(2)}, [2]))
    assert (tmp_path / name).read_bytes().startswith(form)


def _texts(*texts: str | None) -> TensorDict:
    return TensorDict({"s": list(texts)}, [len(texts)])


def test_rows_whose_text_is_all_missing_are_added(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "x.parquet") as writer:
        writer.write(_texts("a", None))
        writer.write(_texts(None, None))
        writer.write(_texts("a")[:0])
    assert list(load(tmp_path / "x.parquet")["s"]) == ["a", None, None, None]
    save(_texts("a"), tmp_path / "d", format="parquet", max_rows_per_file=9)
    append(_texts(None), tmp_path / "d")
    assert list(load(tmp_path / "d")["s"]) == ["a", None]


def test_error_of_other_rows_says_what_fields_say(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / "x.parquet", like=TensorDict({"s": torch.arange(2)}, [2]))
    with pytest.raises(
        StructureError, match=r'the type int64 {"kind": "values"}, and that of the table int64'
    ):
        writer.write(TensorDict({"s": [1, None]}, [2]))


#: Calls that read a footer, and which of its bits are changed.
FOOTER = {
    "load": ("load(name, format='parquet')", [2]),
    "filter": ("load(name, format='parquet', filter=[('x', '>', 0.5)])", [2, 8, 64]),
    "inspect": ("inspect(name, format='parquet')", [1, 8, 64]),
    "open": ("open(name, format='parquet')", [8, 64]),
}


@pytest.mark.once
@pytest.mark.parametrize("name", FOOTER)
def test_damaged_footer_is_an_error_and_the_process_lives(tmp_path: Path, name: str) -> None:
    lists = torch.nested.nested_tensor([torch.arange(2), torch.arange(0)], layout=torch.jagged)
    save(TensorDict({"j": lists, "x": torch.rand(2)}, [2]), tmp_path / "x.parquet")
    code = """
import sys
from td_core import inspect, load, open as open_save
from td_core.errors import FormatError
name, call, bits = sys.argv[1], sys.argv[2].replace("open(", "open_save("), eval(sys.argv[3])
raw = open(name, "rb").read()
length = int.from_bytes(raw[-8:-4], "little")
seen = set()
first = len(raw) - 8 - length
for place in range(first, first + 60) if bits == [2] else range(first, first + 300, 3):
    for bit in bits:
        open(name, "wb").write(raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1:])
        try:
            eval(call)
            seen.add("fine")
        except FormatError:
            seen.add("damaged")
        except (KeyError, ValueError):
            seen.add("of another schema")
assert "damaged" in seen
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x.parquet"), *map(str, FOOTER[name])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


ENDS = {"unix": "\n", "windows": "\r\n", "old mac": "\r"}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", ["b", '"b\rc"', '"b\nc"'])
def test_csv_lines_end_as_on_any_system(tmp_path: Path, end: str, name: str) -> None:
    (tmp_path / "x.csv").write_bytes(end.join([f"a,{name}", "1,2", "3,4", ""]).encode())
    assert TensorDict.from_csv(tmp_path / "x.csv")["a"].tolist() == [1, 3]
    (tmp_path / "x.csv").write_bytes(end.join(["skipped", "1,2", "3,4", ""]).encode())
    assert TensorDict.from_csv(tmp_path / "x.csv", skiprows=1, header=False)["1"].tolist() == [2, 4]


def test_pandas_missing_numbers_follow_nulls() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, None], "t": pandas.Series(["a", float("nan")], dtype=object)})
    td = TensorDict.from_pandas(frame, nulls="mask")
    assert td["_mask", "x"].tolist() == [True, False]
    assert list(td["t"]) == ["a", None]
    assert TensorDict.from_pandas(frame, nulls={"x": -1, None: "auto"})["x"].tolist() == [1, -1]
    assert TensorDict.from_pandas(frame)["x"].isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="column 'x': 1 of 2 values are null"):
        TensorDict.from_pandas(frame[["x"]], nulls="raise")


def test_columns_of_from_parquet_are_names_or_keys(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n.b": [1, 2], "a": [3, 4]}), tmp_path / "x.parquet")
    for columns in (["n.b"], [("n", "b")], "n.b"):
        td = TensorDict.from_parquet(tmp_path / "x.parquet", columns=columns, separator=".")
        assert list(td.keys(True, True)) == [("n", "b")]


TD = TensorDict({"x": torch.arange(4)}, [4])
WRONG: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "codec": (lambda p: save(TD, p / "y.parquet", compression="zzz"), ValueError, "compression is one of"),
    "codec of a column": (
        lambda p: save(TD, p / "y.parquet", compression={"x": "zzz"}),
        ValueError,
        "got 'zzz'",
    ),
    "codec of a writer": (
        lambda p: TableWriter(p / "y.parquet", compression="zzz"),
        ValueError,
        "compression is one of",
    ),
    "codec of arrow": (
        lambda p: TableWriter(p / "y.arrow", compression="gzip"),
        ValueError,
        "compression is None",
    ),
    "codec of append": (
        lambda p: append(TD, p / "d", compression="zzz"),
        ValueError,
        "compression is one of",
    ),
    "tensors of a writer": (
        lambda p: TableWriter(p / "y.parquet", tensors="zzz"),
        ValueError,
        "tensors is one of",
    ),
    "separator of a writer": (
        lambda p: TableWriter(p / "y.parquet", separator=""),
        ValueError,
        "separator is",
    ),
    "tensors": (lambda p: save(TD, p / "y.parquet", tensors=3), ValueError, "tensors is one of"),
    "no collection": (lambda p: TableWriter(p / "y.parquet").write(3), TypeError, "takes a collection"),
    "nulls of no column": (lambda p: load(p / "x.parquet", nulls={"y": 0}), KeyPathError, "nulls has 'y'"),
    "strict": (lambda p: load(p / "x.parquet", strict="no"), TypeError, "strict is None, True or False"),
    "threads": (lambda p: load(p / "x.parquet", num_threads=-1), ValueError, "num_threads is 0 or more"),
    "cache": (lambda p: open_save(p / "x.parquet", cache_bytes=-1), ValueError, "cache_bytes is a number"),
    "dtype": (
        lambda p: TensorDict.from_parquet(p / "x.parquet", dtype="f4"),
        TypeError,
        "dtype is a dtype of torch",
    ),
    "dtypes of csv": (
        lambda p: TensorDict.from_csv(p / "x.csv", dtypes={"x": "f4"}),
        TypeError,
        "str for text",
    ),
    "keys of csv": (
        lambda p: TensorDict.from_csv(p / "x.csv", keys=["y"]),
        KeyPathError,
        "x.csv: the save has no key 'y'",
    ),
    "keys of json": (
        lambda p: TensorDict.from_json(p / "x.json", keys=["y"]),
        KeyPathError,
        "x.json: the save has no key 'y'",
    ),
    "keys of mds": (
        lambda p: TensorDict.from_mds(p / "m", keys=["y"]),
        KeyPathError,
        "m.*: the save has no key 'y'",
    ),
    "shard": (lambda p: iter_batches(p / "x.parquet", 2, shard=3), ValueError, "shard is"),
    "seed": (lambda p: iter_batches(p / "x.parquet", 2, seed="x"), ValueError, "seed is an int"),
    "generator": (lambda p: iter_batches((item for item in ()), 2), TypeError, "takes locations of files"),
    "path of from_arrow": (lambda p: TensorDict.from_arrow("x.parquet"), TypeError, r"load\(\) reads files"),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_argument_is_refused_before_anything_is_written(
    tmp_path: Path, call: Callable[[Path], Any], error: type[Exception], text: str
) -> None:
    TD.to_parquet(tmp_path / "x.parquet")
    TD.to_csv(tmp_path / "x.csv")
    TD.to_json(tmp_path / "x.json")
    TD.to_mds(out=tmp_path / "m")
    save(TD, tmp_path / "d", format="parquet", max_rows_per_file=4)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=text):
        call(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
