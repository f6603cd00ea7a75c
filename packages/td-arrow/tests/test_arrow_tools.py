"""Other programs read what td writes, and td reads what they write: pandas, polars, duckdb, Hugging Face."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from td_arrow import load, save
from td_core import TensorDict
from td_core.errors import FormatError
from td_core.testing import assert_same

pytest.importorskip("td_tensorclass")


@pytest.fixture
def td() -> TensorDict:
    """Return a collection of numbers, cells and text."""
    return TensorDict(
        {
            "x": torch.arange(4),
            "f": torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64),
            "v": torch.arange(16.0).view(4, 2, 2),
            "b": torch.tensor([True, False, True, True]),
            "s": ["a", 'b"', None, "é"],
            "j": torch.nested.nested_tensor([torch.arange(n) for n in (2, 0, 1, 3)], layout=torch.jagged),
        },
        [4],
    )


def plain(td: TensorDict) -> dict[str, Any]:
    """Return the entries as lists of Python."""
    return {
        "x": [0, 1, 2, 3],
        "f": [0.5, 1.5, 2.5, 3.5],
        "v": td["v"].tolist(),
        "b": [True, False, True, True],
        "s": ["a", 'b"', None, "é"],
        "j": [[0, 1], [], [0], [0, 1, 2]],
    }


def test_polars_reads_memory_and_files(td: TensorDict, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    save(td, tmp_path / "x.parquet")
    save(td, tmp_path / "x.arrow")
    for frame in (
        polars.DataFrame(td),
        polars.read_parquet(tmp_path / "x.parquet"),
        polars.read_ipc(tmp_path / "x.arrow"),
    ):
        assert frame["v"].dtype == polars.Array(polars.Float32, (2, 2))
        assert {name: frame[name].to_list() for name in frame.columns} == plain(td)
    frame = polars.DataFrame(td)
    back = TensorDict.from_arrow(frame, nulls="auto")
    assert_same(back.exclude("s", "j"), td.exclude("s", "j"))
    assert back["s"] == td["s"] and back["j"].values().tolist() == td["j"].values().tolist()
    frame.write_parquet(tmp_path / "y.parquet")
    assert_same(load(tmp_path / "y.parquet", keys=["x", "v", "b"]), td.select("x", "v", "b"))


def test_pandas_reads_memory_and_files(td: TensorDict, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    save(td, tmp_path / "x.parquet")
    frame = pandas.read_parquet(tmp_path / "x.parquet")
    assert frame["x"].tolist() == [0, 1, 2, 3]
    assert [np.stack(cell).tolist() for cell in frame["v"]] == td["v"].tolist()
    assert [None if item != item else item for item in frame["s"]] == td["s"]
    frame.to_parquet(tmp_path / "y.parquet")
    assert_same(load(tmp_path / "y.parquet", keys=["x", "f", "b", "s"]), td.select("x", "f", "b", "s"))


def test_duckdb_reads_memory_and_files(td: TensorDict, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    save(td, tmp_path / "x.parquet")
    for source in ("td", f"'{tmp_path / 'x.parquet'}'"):
        rows = duckdb.sql(f"select x, f, b, s, v, j from {source}").fetchall()
        columns = dict(zip(["x", "f", "b", "s", "v", "j"], map(list, zip(*rows, strict=True)), strict=True))
        columns["v"] = [[list(part) for part in cell] for cell in columns["v"]]
        assert columns == plain(td)
    found = TensorDict.from_arrow(duckdb.sql("select x, v from td where x > 1").to_arrow_table())
    assert found["x"].tolist() == [2, 3]


def test_hugging_face_reads_memory_and_files(td: TensorDict, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    save(td, tmp_path / "x.parquet")
    files = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    for data in (files, datasets.Dataset(pa.table(td))):
        assert data.with_format("torch")["v"][:].shape == (4, 2, 2)
        assert {name: data[name][:] for name in plain(td)} == plain(td)
    shuffled = files.select([3, 1])
    found = TensorDict.from_arrow(shuffled, nulls="auto")
    assert (found["x"].tolist(), found["s"]) == ([3, 1], ["é", 'b"'])
    assert TensorDict.from_any(shuffled)["v"].tolist() == td["v"][[3, 1]].tolist()
    arrays = datasets.Features(
        {"a": datasets.Array2D((2, 3), "float32"), "l": datasets.ClassLabel(names=["p", "q"])}
    )
    made = datasets.Dataset.from_dict({"a": [np.ones((2, 3), np.float32)] * 2, "l": [0, 1]}, features=arrays)
    found = TensorDict.from_arrow(made)
    assert (found["a"].shape, found["a"].dtype, found["l"].tolist()) == ((2, 2, 3), torch.float32, [0, 1])


@pytest.mark.parametrize("tensors", ["arrow", "object", "columns"])
def test_frame_of_pandas_gives_the_collection_back(tensors: str) -> None:
    pytest.importorskip("pandas")
    td = TensorDict(
        {"x": torch.arange(3), "n": {"v": torch.randn(3, 2, 2), "h": torch.ones(3).bfloat16()}, "s": ["a", None, "b"],
         "d": [{"k": 1}, {"k": (2,)}, None]},
        [3],
    )  # fmt: skip
    assert_same(TensorDict.from_pandas(td.to_pandas(separator=".", tensors=tensors)), td)


def test_frame_of_other_programs_is_read_by_its_types() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "i": [1, 2, 3],
            "f": [1.0, float("nan"), 3.0],
            "c": pandas.Categorical(["p", "q", "p"]),
            "t": pandas.to_datetime(["1970-01-01", "1970-01-02", "1970-01-03"]),
            "I": pandas.array([1, 2**53 + 1, 3], dtype="Int64"),
            "l": [[1, 2], [3], []],
            "a": [np.ones(2)] * 3,
            "m": ["x", 1, None],
            1: [True, False, True],
        }
    )
    found = TensorDict.from_pandas(frame)
    assert (found["c"].tolist(), found["t"].tolist()) == ([0, 1, 0], [0, 86400 * 10**9, 2 * 86400 * 10**9])
    assert (found["I"].tolist(), found["a"].shape, found["m"]) == ([1, 2**53 + 1, 3], (3, 2), ["x", 1, None])
    assert (found["1"].dtype, found["l"].is_nested, found["f"].isnan().tolist()) == (
        torch.bool,
        True,
        [False, True, False],
    )
    found = TensorDict.from_pandas(frame[["c", "t"]], categories="labels", times="values")
    assert (found["c", "codes"].tolist(), found["c", "labels"], found["t"][1].day) == (
        [0, 1, 0],
        ["p", "q"],
        2,
    )
    missing = pandas.DataFrame({"c": pandas.Categorical(["p", None])})
    with pytest.raises(ValueError, match="column 'c': 1 of 2 values are null"):
        TensorDict.from_pandas(missing)
    assert TensorDict.from_pandas(missing, nulls=9)["c"].tolist() == [0, 9]
    found = TensorDict.from_pandas(frame)
    found["i"].zero_()
    assert frame["i"].tolist() == [1, 2, 3]


def test_index_of_frame_is_left_out_with_a_warning() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1, 2]}, index=pandas.Index([5, 6], name="id"))
    with pytest.warns(UserWarning, match="the index of the data frame is left out: pass index=True"):
        assert list(TensorDict.from_pandas(frame).keys()) == ["x"]
    assert TensorDict.from_pandas(frame, index=True)["id"].tolist() == [5, 6]
    assert list(TensorDict.from_pandas(frame, index=False).keys()) == ["x"]
    levels = pandas.DataFrame({("a", "x"): [1], ("a", "y"): [2], ("b", ""): [3]})
    assert TensorDict.from_pandas(levels).to_dict() == {
        "a": {"x": torch.tensor([1]), "y": torch.tensor([2])},
        "b": torch.tensor([3]),
    }
    double = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(FormatError, match="two columns are called 'a'"):
        TensorDict.from_pandas(double)


def test_nested_frame_needs_a_separator() -> None:
    pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"the entry 'n' is nested, .*separator='\.'.*'n\.x'"):
        TensorDict({"n": {"x": torch.ones(2)}}, [2]).to_pandas()


def test_stream_keeps_leaves_alive_and_no_longer() -> None:
    leaf = torch.arange(1000.0)
    reference = weakref.ref(leaf)
    td = TensorDict({"x": leaf}, [1000])
    table = pa.table(td)
    reader = pa.RecordBatchReader.from_stream(td)
    del td, leaf
    gc.collect()
    assert table["x"][999].as_py() == 999.0
    del reader, table
    gc.collect()
    assert reference() is None


def test_requested_schema_is_cast_to_or_ignored() -> None:
    td = TensorDict({"x": torch.arange(3)}, [3])
    wanted = pa.schema([("x", pa.float64())])
    capsule = wanted.__arrow_c_schema__()
    assert (
        pa.RecordBatchReader._import_from_c_capsule(td.__arrow_c_stream__(capsule)).read_all()["x"].type
        == pa.float64()
    )
    other = pa.schema([("y", pa.binary())]).__arrow_c_schema__()
    found = pa.RecordBatchReader._import_from_c_capsule(td.__arrow_c_stream__(other)).read_all()
    assert found["x"].to_pylist() == [0, 1, 2]
    assert pa.record_batch(td).num_rows == 3


def test_other_libraries_still_treat_collections_as_before() -> None:
    td = TensorDict({"x": torch.arange(3)}, [3])
    assert torch.stack([td, td]).batch_size == (2, 3)
    batches = list(torch.utils.data.DataLoader(td, batch_size=2, collate_fn=lambda items: torch.stack(items)))
    assert [batch.batch_size for batch in batches] == [(2,), (1,)]


CHECK = """
import sys
import td_core
heavy = ("pyarrow", "pandas", "polars", "duckdb", "datasets", "xarray")
assert not {name.partition(".")[0] for name in sys.modules} & set(heavy)
assert not {name for name in sys.modules if name.startswith("td_arrow.")} - {"td_arrow.plugin"}
"""


def test_import_loads_no_library() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], check=True)


@pytest.mark.parametrize("name", ["to_pandas", "from_pandas"])
def test_missing_pandas_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    td = TensorDict({"x": torch.ones(2)}, [2])
    with pytest.raises(ImportError, match=rf"{name}\(\) needs pandas: pip install pandas"):
        td.to_pandas() if name == "to_pandas" else TensorDict.from_pandas(None)
