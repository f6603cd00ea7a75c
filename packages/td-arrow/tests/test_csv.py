"""csv files: what is written, the rule for the types of columns, exact round trips with a schema, and what is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("td_tensorclass")  # columns of text become values

from td_core import KeyPathError, TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, content: str | bytes, **options: Any) -> Any:
    return TensorDict.from_csv(write(path, content), **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


#: A collection of three rows, and the lines of its file.
WRITTEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "integers": ({"x": torch.tensor([1, -2, 3])}, ['"x"', "1", "-2", "3"]),
    "whole floats": ({"x": torch.tensor([1.0, 0.0, -3.0])}, ['"x"', "1.0", "0.0", "-3.0"]),
    "floats": ({"x": torch.tensor([0.1, float("nan"), float("-inf")])}, ['"x"', "0.1", "nan", "-inf"]),
    "doubles": ({"x": torch.tensor([0.1, 1e-11, 1e20], dtype=torch.float64)}, ['"x"', "0.1", "1e-11", "1e+20"]),
    "large whole floats": (
        {"x": torch.tensor([1.0, -0.0, 1e14], dtype=torch.float64)},
        ['"x"', '"1.0"', '"-0.0"', '"1e+14"'],
    ),
    "whole floats and nan": ({"x": torch.tensor([1.0, float("nan"), 2.0])}, ['"x"', "1", "nan", "2"]),
    "half": ({"x": torch.tensor([0.5, 1, 2]).half()}, ['"x"', "0.5", "1", "2"]),
    "bfloat16": ({"x": torch.tensor([0.5, 1, 2]).bfloat16()}, ['"x"', "0.5", "1", "2"]),
    "bool": ({"x": torch.tensor([True, False, True])}, ['"x"', "true", "false", "true"]),
    "text": ({"x": ['a"b', "", None]}, ['"x"', '"a""b"', '""', ""]),
    "cells": ({"x": torch.arange(6).view(3, 2)}, ['"x[0]","x[1]"', "0,1", "2,3", "4,5"]),
    "matrix": ({"x": torch.arange(6).view(3, 1, 2)}, ['"x[0,0]","x[0,1]"', "0,1", "2,3", "4,5"]),
    "nested": ({"n": {"x": torch.arange(3)}}, ['"n.x"', "0", "1", "2"]),
    "lists": ({"x": [[1], [], [2, 3]]}, ['"x"', '"[1]"', '"[]"', '"[2, 3]"']),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_to_csv_writes_lines(name: str, path: Path) -> None:
    entries, lines = WRITTEN[name]
    TensorDict(entries, [3]).to_csv(path, separator=".")
    assert path.read_text().splitlines() == lines


def test_jagged_rows_are_text(path: Path) -> None:
    rows = [torch.arange(n).float() for n in (1, 0, 2)]
    td = TensorDict({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [3])
    td.to_csv(path)
    assert path.read_text().splitlines() == ['"x"', '"[0.0]"', '"[]"', '"[0.0, 1.0]"']


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_read_back_exactly_without_schema(dtype: torch.dtype, path: Path) -> None:
    values = torch.randn(500, dtype=dtype, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -30, 30, 500, dtype=dtype
    )
    TensorDict({"x": values}, [500]).to_csv(path)
    assert torch.equal(TensorDict.from_csv(path)["x"].to(dtype), values)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"sep": ";"}, ['"x";"s"', '1;"a"']),
        ({"delimiter": "\t"}, ['"x"\t"s"', '1\t"a"']),
        ({"header": False}, ['1,"a"']),
        ({"quoting": "all_valid"}, ['"x","s"', '"1","a"']),
        ({"quoting": csv.QUOTE_NONE}, ['"x","s"', "1,a"]),
    ],
    ids=str,
)
def test_options_of_to_csv(options: dict[str, Any], lines: list[str], path: Path) -> None:
    TensorDict({"x": torch.tensor([1]), "s": ["a"]}, [1]).to_csv(path, **options)
    assert path.read_text().splitlines() == lines


def test_to_csv_encodes_text(path: Path) -> None:
    TensorDict({"s": ["ü"]}, [1]).to_csv(path, encoding="latin-1")
    assert "ü".encode("latin-1") in path.read_bytes()
    assert TensorDict.from_csv(path, encoding="latin-1")["s"] == ["ü"]


def test_file_objects_are_written_and_read() -> None:
    file = io.BytesIO()
    TensorDict({"x": torch.arange(3)}, [3]).to_csv(file)
    assert TensorDict.from_csv(file)["x"].tolist() == [0, 1, 2]


#: The text of a file with a column ``a``, and the elements and dtype that it has; None for values.
RULE: dict[str, tuple[str, list[Any], torch.dtype | None]] = {
    "bool": ("a\ntrue\nFalse\nTRUE\n", [True, False, True], torch.bool),
    "bool with a word": ("a\ntrue\nyes\n", ["true", "yes"], None),
    "integers": ("a\n1\n-2\n0\n", [1, -2, 0], torch.int64),
    "unsigned integers": ("a\n18446744073709551615\n0\n", [2**64 - 1, 0], torch.uint64),
    "leading zero": ("a\n007\n8\n", ["007", "8"], None),
    "leading zero among floats": ("a,b\n1.5,1\n007,2\n", ["1.5", "007"], None),
    "zero": ("a\n0\n0.5\n", [0.0, 0.5], torch.float64),
    "hexadecimal": ("a\n0x10\n", ["0x10"], None),
    "floats": ("a\n1.5\n-2e3\n.5\n", [1.5, -2000.0, 0.5], torch.float64),
    "large floats": ("a\n1e19\n1.5\n", [1e19, 1.5], torch.float64),
    "nan and inf": ("a\nnan\ninf\n-inf\n", [float("nan"), float("inf"), float("-inf")], torch.float64),
    "no word is missing": ("a\nNA\nnull\nNone\n", ["NA", "null", "None"], None),
    "no dates": ("a\n2020-01-01\n", ["2020-01-01"], None),
    "no date and time": ("a\n2020-01-01 10:00:00\n", ["2020-01-01 10:00:00"], None),
    "no times": ("a\n10:00\n", ["10:00"], None),
    "missing text": ('a,b\n"",1\n,2\nx,3\n', ["", None, "x"], None),
    "nothing": ("a,b\n,1\n,2\n", [None, None], None),
    "missing float": ("a,b\n1.5,1\n,2\n", [1.5, float("nan")], torch.float64),
    "byte order mark": ("\ufeffa\n1\n", [1], torch.int64),
    "ends of lines of Windows": ("a\r\n1\r\n2\r\n", [1, 2], torch.int64),
    "text of several lines": ('a,b\n"x\ny",1\n', ["x\ny"], None),
    "only a header": ("a,b\n", [], torch.float64),
}


@pytest.mark.parametrize("name", RULE)
def test_rule_chooses_type_of_column(name: str, path: Path) -> None:
    content, expected, dtype = RULE[name]
    td = read(path, content)
    assert td.batch_size == (len(expected),)
    assert getattr(td["a"], "dtype", None) is dtype
    assert repr(td["a"].tolist() if dtype else list(td["a"])) == repr(expected)


def test_cells_are_one_leaf_if_complete(path: Path) -> None:
    td = read(path, '"x[0,0]","x[0,1]",s,"y[0]","y[2]"\n1,2,a,3,4\n5,6.5,b,7,8\n')
    assert td["x"].tolist() == [[[1.0, 2.0]], [[5.0, 6.5]]]
    assert (td["y[0]"].tolist(), td["y[2]"].tolist(), td["s"]) == ([3, 7], [4, 8], ["a", "b"])


#: Options, and the elements of the column ``a`` of :data:`TABLE`.
TABLE = "a,b.c\n1,x\n2,y\n3,\n"
OPTIONS: list[tuple[dict[str, Any], Any]] = [
    ({"rows": slice(1, None)}, [2, 3]),
    ({"rows": [2, 0]}, [3, 1]),
    ({"nrows": 2}, [1, 2]),
    ({"keys": ["a"]}, [1, 2, 3]),
    ({"usecols": ["a"]}, [1, 2, 3]),
    ({"dtype": torch.float32}, [1.0, 2.0, 3.0]),
    ({"dtypes": {"a": torch.float32}}, [1.0, 2.0, 3.0]),
    ({"dtypes": {"a": torch.bfloat16}}, [1.0, 2.0, 3.0]),
    ({"dtypes": {"a": float}}, [1.0, 2.0, 3.0]),
    ({"na_values": "2", "nulls": "fill"}, [1, 0, 3]),
    ({"na_values": ["2"], "nulls": {"a": -1}}, [1, -1, 3]),
    ({"separator": "."}, [1, 2, 3]),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=[str(row[0]) for row in OPTIONS])
def test_options_of_from_csv(options: dict[str, Any], expected: Any, path: Path) -> None:
    td = read(path, TABLE, **options)
    assert td["a"].tolist() == expected
    assert td["a"].is_floating_point() == isinstance(expected[0], float)
    assert ("b.c" in td.keys()) == (not {"keys", "usecols", "separator"} & options.keys())
    if "separator" in options:
        assert td["b", "c"] == ["x", "y", None]


def test_dtypes_keep_text(path: Path) -> None:
    assert read(path, "a,b\n7,1\n,2\n", dtypes={"a": str})["a"] == ["7", None]
    assert read(path, "a,b\n007,1\n", dtypes={"a": torch.int64})["a"].tolist() == [7]
    nested = read(path, "n.x\n1\n", dtypes={("n", "x"): torch.float16}, separator=".")
    assert nested["n", "x"].dtype is torch.float16


def test_lines_before_and_names_of_columns(path: Path) -> None:
    assert read(path, "# title\na\n1\n", skiprows=1)["a"].tolist() == [1]
    assert read(path, "1,2\n3,4\n", header=False)["1"].tolist() == [2, 4]


def test_batch_sizes_of_the_caller(path: Path) -> None:
    TensorDict({"x": torch.zeros(3, 2)}, [3]).to_csv(path)
    assert TensorDict.from_csv(path, auto_batch_size=True).batch_size == (3, 2)
    assert TensorDict.from_csv(path, batch_size=[]).batch_size == ()
    with pytest.raises(ValueError, match="not both"):
        TensorDict.from_csv(path, batch_size=[3], batch_dims=1)


#: A malformed file, options, and the error.
REFUSED: dict[str, tuple[str | bytes, dict[str, Any], type[Exception], str]] = {
    "fewer fields": ("a,b\n1,2\n3\n4,5\n", {}, FormatError, r"data.csv, line 3: it has 1 fields; expected 2$"),
    "more fields": ("a,b\n1,2\n3,4,5\n", {}, FormatError, r"data.csv, line 3: it has 3 fields; expected 2$"),
    "two names": ("a,a\n1,2\n", {}, FormatError, "data.csv: two columns are called 'a': rename one"),
    "leaf and level": ("a,a.b\n1,2\n", {"separator": "."}, FormatError, "data.csv: 'a' is a column, and the level of 'a.b'"),
    "level and leaf": ("a.b,a\n1,2\n", {"separator": "."}, FormatError, "data.csv: 'a' is a column, and the level of"),
    "no UTF-8": (b"a,b\n1,2\n3,\xff\n", {}, FormatError, "data.csv, line 3: its bytes are not UTF-8: pass encoding="),
    "no UTF-8 in the header": (b"\xff\n1\n", {}, FormatError, "data.csv, line 1: its bytes are not UTF-8"),
    "no encoding": (b"a\n\xff\n", {"encoding": "ascii"}, FormatError, "data.csv, line 2: its bytes are not ascii"),
    "empty": ("", {}, FormatError, "data.csv: the file is empty"),
    "too large": ("a\n18446744073709551616\n", {}, FormatError, "data.csv: column 'a' has integers of more than 64 bits: pass"),
    "too large with a sign": ("a\n-1\n18446744073709551615\n", {}, FormatError, "column 'a' has integers of more than 64 bits"),
    "wrong dtype": ("a\n1\nx\n", {"dtypes": {"a": torch.int8}}, FormatError, "data.csv: column 'a' has a field that is no int8$"),
    "null": ("a,b\n1,2\n,3\n", {}, ValueError, 'column \'a\': 1 of 2 values are null, the first in row 1: pass nulls="fill"'),
    "null policy": ("a\n1\n", {"nulls": "drop"}, ValueError, "nulls is one of 'auto', 'raise', 'fill', 'mask'"),
    "unknown column": ("a\n1\n", {"usecols": ["b"]}, KeyPathError, "data.csv: there is no column 'b'; its columns are 'a'"),
    "unknown key": ("a\n1\n", {"keys": ["b"]}, KeyPathError, "'b'"),
    "unknown key of dtypes": ("a\n1\n", {"dtypes": {"b": str}}, KeyPathError, "there is no column 'b' for dtypes"),
    "complex dtype": ("a\n1\n", {"dtypes": {"a": torch.complex64}}, TypeError, "is no complex number"),
    "option of pandas": ("a\n1\n", {"index_col": 0}, TypeError, r"from_csv\(\) has no option 'index_col'; its options are"),
    "delimiter": ("a\n1\n", {"delimiter": "||"}, ValueError, "delimiter is one character"),
    "two delimiters": ("a\n1\n", {"delimiter": ";", "sep": ";"}, ValueError, "pass delimiter or sep, not both"),
    "nrows": ("a\n1\n", {"nrows": -1}, ValueError, "nrows is a number of rows"),
    "no schema": ("a\n1\n", {"schema": True}, FormatError, "there is no schema of"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_from_csv_refuses(name: str, path: Path) -> None:
    content, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as caught:
        read(path, content, **options)
    assert "\\xff" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: TensorDict({"n": {"x": torch.zeros(3)}}, [3]), {}, ValueError, r"key \('n', 'x'\) is nested: pass separator"),
        (lambda: TensorDict({"s": [b"a"] * 3}, [3]), {}, CodecError, "cannot save key 's' as text: bytes are not text"),
        (lambda: TensorDict({"x": torch.zeros(3, device="meta")}, [3]), {}, CodecError, "cannot save key 'x'"),
        (lambda: TensorDict({"x": torch.zeros(3)}, [3]), {"quoting": "some"}, ValueError, "quoting is one of"),
        (lambda: TensorDict({"s": ["a,b"]}, [1]), {"quoting": "none"}, ValueError, "a field has a delimiter, quote or end of"),
        (lambda: TensorDict({"x[0]": torch.zeros(3), "x": torch.zeros(3, 1)}, [3]), {}, ValueError, "two columns would be"),
        (lambda: TensorDict({"x": torch.zeros(3)}, [3]), {"index": False}, TypeError, "index"),
    ],
    ids=["nested", "bytes", "meta", "quoting", "quotes are needed", "clash", "option of pandas"],
)  # fmt: skip
def test_to_csv_refuses_and_keeps_old_file(
    make: Any, options: Any, error: Any, message: str, path: Path
) -> None:
    write(path, "a\n1\n")
    with pytest.raises(error, match=message):
        make().to_csv(path, **options)
    assert path.read_text() == "a\n1\n"
    assert [each.name for each in path.parent.iterdir()] == ["data.csv"]


def test_lazy_stack_and_absent_file(path: Path) -> None:
    lazy_stack([TensorDict({"x": torch.tensor(n)}) for n in (1, 2)]).to_csv(path)
    assert TensorDict.from_csv(path)["x"].tolist() == [1, 2]
    with pytest.raises(FileNotFoundError):
        TensorDict.from_csv(path.with_name("absent.csv"))
