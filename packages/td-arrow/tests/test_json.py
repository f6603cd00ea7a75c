"""JSON files: what is written, the rule for the types of columns, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("td_tensorclass")  # columns of text become values

from td_core import KeyPathError, TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.json"


def read(path: Path, content: str | bytes, **options: Any) -> Any:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TensorDict.from_json(path, **options)


#: A collection of two rows, options, and the text of its file with a record a line.
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "integers": ({"x": torch.tensor([1, -(2**63)])}, {}, '{"x": 1}\n{"x": -9223372036854775808}\n'),
    "whole floats": ({"x": torch.tensor([1.0, 1e20], dtype=torch.float64)}, {}, '{"x": 1.0}\n{"x": 1e+20}\n'),
    "shortest digits": ({"x": torch.tensor([0.1, 1e-11])}, {}, '{"x": 0.1}\n{"x": 1e-11}\n'),
    "half": ({"x": torch.tensor([0.5, 2]).half()}, {}, '{"x": 0.5}\n{"x": 2.0}\n'),
    "bfloat16": ({"x": torch.tensor([0.5, 2]).bfloat16()}, {}, '{"x": 0.5}\n{"x": 2.0}\n'),
    "nan": ({"x": torch.tensor([1.5, NAN])}, {}, '{"x": 1.5}\n{"x": null}\n'),
    "literals": ({"x": torch.tensor([-INF, NAN])}, {"nonfinite": "literal"}, '{"x": -Infinity}\n{"x": NaN}\n'),
    "infinity as null": ({"x": torch.tensor([INF, 2.5])}, {"nonfinite": "null"}, '{"x": null}\n{"x": 2.5}\n'),
    "bool": ({"x": torch.tensor([True, False])}, {}, '{"x": true}\n{"x": false}\n'),
    "text": ({"x": ['a"\\\n\x01ü', None]}, {}, '{"x": "a\\"\\\\\\n\\u0001ü"}\n{"x": null}\n'),
    "cells": ({"x": torch.tensor([[1, 2], [3, 4]])}, {}, '{"x": [1, 2]}\n{"x": [3, 4]}\n'),
    "matrix": ({"x": torch.arange(4.0).view(2, 1, 2)}, {}, '{"x": [[0.0, 1.0]]}\n{"x": [[2.0, 3.0]]}\n'),
    "nested": ({"n": {"x": torch.arange(2)}}, {}, '{"n": {"x": 0}}\n{"n": {"x": 1}}\n'),
    "dotted": ({"n": {"x": torch.arange(2)}}, {"separator": "."}, '{"n.x": 0}\n{"n.x": 1}\n'),
    "lists": ({"x": [["a"], []]}, {}, '{"x": ["a"]}\n{"x": []}\n'),
    "dicts": ({"x": [{"a": 1}, None]}, {}, '{"x": {"a": 1}}\n{"x": null}\n'),
    "no columns": ({}, {}, "{}\n{}\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_to_json_writes_text(name: str, path: Path) -> None:
    entries, options, text = WRITTEN[name]
    td = TensorDict(entries, [2])
    td.to_json(path, lines=True, **options)
    assert path.read_text(encoding="utf-8") == text
    td.to_json(path, **options)
    assert (
        json.loads(path.read_text(encoding="utf-8")) == [json.loads(line) for line in text.splitlines()]
        or "nan" in name
        or "literals" in name
    )


def test_jagged_rows_are_arrays(path: Path) -> None:
    rows = [torch.arange(n) for n in (1, 0, 2)]
    td = TensorDict({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [3])
    td.to_json(path)
    assert json.loads(path.read_text()) == [{"x": [0]}, {"x": []}, {"x": [0, 1]}]
    assert [row.tolist() for row in TensorDict.from_json(path)["x"].unbind()] == [[0], [], [0, 1]]


@pytest.mark.parametrize("lines", [True, False])
def test_many_rows_are_written_in_parts(lines: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from td_arrow import _json

    monkeypatch.setattr(_json, "_ROWS", 3)
    TensorDict({"x": torch.arange(8)}, [8]).to_json(path, lines=lines)
    assert TensorDict.from_json(path)["x"].tolist() == list(range(8))
    assert len(path.read_text().splitlines()) == (8 if lines else 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_read_back_exactly(dtype: torch.dtype, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, dtype=dtype, generator=generator) * torch.logspace(-30, 30, 500, dtype=dtype)
    TensorDict({"x": values}, [500]).to_json(path)
    assert torch.equal(TensorDict.from_json(path)["x"].to(dtype), values)


def test_file_objects_and_empty_collections(path: Path) -> None:
    file = io.BytesIO()
    TensorDict({"x": torch.arange(3)}, [3]).to_json(file, lines=True)
    assert TensorDict.from_json(file)["x"].tolist() == [0, 1, 2]
    TensorDict({"x": torch.zeros(0)}, [0]).to_json(path)
    assert json.loads(path.read_text()) == []
    assert TensorDict.from_json(path).batch_size == (0,)
    lazy_stack([TensorDict({"x": torch.tensor(n)}) for n in (1, 2)]).to_json(path)
    assert TensorDict.from_json(path)["x"].tolist() == [1, 2]


#: The text of a file with a field ``a``, and the elements and dtype that it has; None for values.
RULE: dict[str, tuple[str, Any, torch.dtype | None]] = {
    "integers": ('[{"a": 1}, {"a": -2}]', [1, -2], torch.int64),
    "unsigned integers": ('[{"a": 18446744073709551615}, {"a": 0}]', [2**64 - 1, 0], torch.uint64),
    "integers and floats": ('[{"a": 1}, {"a": 2.5}]', [1.0, 2.5], torch.float64),
    "exponents": ('[{"a": 1e3}, {"a": 2E0}]', [1000.0, 2.0], torch.float64),
    "bools": ('[{"a": true}, {"a": false}]', [True, False], torch.bool),
    "missing float": ('[{"a": 1.5, "b": 1}, {"b": 2}]', [1.5, NAN], torch.float64),
    "literal": ('[{"a": NaN}, {"a": Infinity}]', [NAN, INF], torch.float64),
    "text": ('[{"a": "007"}, {"a": "2020-01-01"}]', ["007", "2020-01-01"], None),
    "missing text": ('[{"a": ""}, {"a": null}]', ["", None], None),
    "mixed": ('[{"a": 1}, {"a": "x"}]', [1, "x"], None),
    "arrays of one length": ('[{"a": [1, 2]}, {"a": [3, 4]}]', [[1, 2], [3, 4]], torch.int64),
    "arrays of arrays": ('[{"a": [[1, 2]]}, {"a": [[3, 4.5]]}]', [[[1.0, 2.0]], [[3.0, 4.5]]], torch.float64),
    "uneven arrays of arrays": ('[{"a": [[1, 2], [3]]}, {"a": []}]', [[[1, 2], [3]], []], None),
    "arrays of text": ('[{"a": ["x"]}, {"a": []}]', [["x"], []], None),
    "nothing": ('[{"a": null}, {"a": null}]', [None, None], None),
    "lines": ('{"a": 1}\n\n{"a": 2}', [1, 2], torch.int64),
    "one line": ('{"a": 1}\n', [1], torch.int64),
    "byte order mark": ('\ufeff[{"a": 1}]', [1], torch.int64),
}


@pytest.mark.parametrize("name", RULE)
def test_rule_chooses_type_of_field(name: str, path: Path) -> None:
    content, expected, dtype = RULE[name]
    found = read(path, content)["a"]
    assert getattr(found, "dtype", None) is dtype
    assert repr(found.tolist() if dtype else list(found)) == repr(expected)


#: Records of other forms than those of :data:`RULE`.
FORMS: dict[str, list[Any]] = {
    "no name in some": [{"a": 1.5}, {"b": "x"}],
    "levels": [{"n": {"a": 1, "m": {"b": "x"}}}, {"n": {"a": 2, "m": {"b": None}}}],
    "missing level": [{"n": {"a": "x"}}, {}],
    "empty level": [{"n": {}}, {"n": {}}],
    "dates": [{"a": "2020-01-01T00:00:00", "n": {"a": "2020-01-01"}}],
    "lists of dates": [{"a": ["2020-01-01"]}],
    "lists of records": [{"a": [{"b": 1}, {"c": 2}]}],
    "lists of lists": [{"a": [[1, 2], [3, 4]]}],
    "lists of floats": [{"a": [1.5, 2.5]}, {"a": [2.5]}],
    "empty lists": [{"a": []}, {"a": []}],
    "large integers": [{"a": 2**63, "n": {"a": 2**64 - 1}}],
    "nothing": [{}, {}],
}


def list_entries(td: Any) -> str:
    """Return the elements of all entries as text, in which NaN is equal to NaN."""
    items = td.to_dict().items()
    parts = [(key, value.unbind() if getattr(value, "is_nested", False) else value) for key, value in items]
    return repr(parts)


@pytest.mark.parametrize("name", [*RULE, *FORMS])
def test_lines_are_read_as_arrays_are(name: str, path: Path) -> None:
    content = json.dumps(FORMS[name]) if name in FORMS else RULE[name][0].lstrip("\ufeff")
    if content[0] != "[":
        pytest.skip("it is lines")
    whole = read(path, content)
    lines = read(path, "".join(json.dumps(record) + "\n" for record in json.loads(content)))
    assert whole.batch_size == lines.batch_size
    assert list_entries(whole) == list_entries(lines)
    assert [getattr(leaf, "dtype", None) for leaf in whole.values(True, True)] == [
        getattr(leaf, "dtype", None) for leaf in lines.values(True, True)
    ]


def test_no_key_has_a_meaning(path: Path) -> None:
    td = read(path, '[{"date": 31536001, "timestamp": 1, "made_at": "1"}]')
    assert (td["date"].tolist(), td["timestamp"].tolist(), td["made_at"]) == ([31536001], [1], ["1"])


def test_objects_are_nested_collections(path: Path) -> None:
    td = read(path, '[{"n": {"a": 1.5, "m": {"b": 1}}}, {"n": {"a": 2.5, "m": {"b": 2}}}]')
    assert td["n"].batch_size == (2,) and td["n", "m", "b"].tolist() == [1, 2]
    missing = read(path, '[{"n": {"a": 1.5}}, {}]')
    assert repr(missing["n", "a"].tolist()) == "[1.5, nan]"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3]),
        ({"rows": [2, 0]}, [3, 1]),
        ({"keys": ["a"]}, [1, 2, 3]),
        ({"dtype": torch.float32}, [1.0, 2.0, 3.0]),
        ({"dtypes": {"a": torch.int8}}, [1, 2, 3]),
        ({"batch_size": []}, [1, 2, 3]),
        ({"lines": False}, [1, 2, 3]),
        ({"nulls": {"b.c": 0}}, [1, 2, 3]),
        ({"separator": "."}, [1, 2, 3]),
    ],
    ids=str,
)
def test_options_of_from_json(options: dict[str, Any], expected: list[Any], path: Path) -> None:
    td = read(path, '[{"a": 1, "b.c": 1.5}, {"a": 2}, {"a": 3, "b.c": 2.5}]', **options)
    assert repr(td["a"].tolist()) == repr(expected)
    assert td["a"].dtype is options.get("dtype", options.get("dtypes", {}).get("a", torch.int64))
    if "separator" in options:
        assert td["b", "c"].shape == (3,)


@pytest.mark.parametrize(("lists", "is_nested"), [("auto", False), ("jagged", True), ("dense", False)])
def test_lists_of_numbers(lists: str, is_nested: bool, path: Path) -> None:
    assert read(path, '[{"a": [1, 2]}, {"a": [3, 4]}]', lists=lists)["a"].is_nested is is_nested


#: A malformed file, options, and the error.
REFUSED: dict[str, tuple[str | bytes, dict[str, Any], type[Exception], str]] = {
    "empty": ("", {}, FormatError, "data.json: the file is empty"),
    "one object": ('{\n "a": 1\n}', {}, FormatError, r"it is a single object, not records: use from_dict\(json.load"),
    "one object, no lines": ('{"a": 1}', {"lines": False}, FormatError, "it is a single object"),
    "no records": ("[1, 2]", {}, FormatError, "data.json: record 0 is no object, but a int"),
    "no array": ("3", {"lines": False}, FormatError, "it is no array of records: its content is a int"),
    "cut line": ('{"a": 1}\n{"a": ', {}, FormatError, "data.json, line 2: Expecting value"),
    "cut array": ('[{"a": 1},\n{"a"', {}, FormatError, "data.json, line 2: "),
    "two names": ('[{"a": 1, "a": 2}]', {}, FormatError, "data.json: a record has two fields called 'a'"),
    "too large": ('[{"a": 18446744073709551616}]', {}, FormatError, "column 'a' has integers of more than 64 bits"),
    "no UTF-8": (b'[{"a": 1},\n{"a": "\xff"}]', {}, FormatError, "data.json, line 2: its bytes are not UTF-8"),
    "too deep": ("[" * 100_000, {}, FormatError, "nested too deep|Expecting"),
    "null": ('[{"a": 1}, {}, {"a": 2}]', {}, ValueError, "column 'a': 1 of 3 values are null, the first in row 1: pass nulls"),
    "null in a list": ('[{"a": [1, null]}]', {}, ValueError, "column 'a': 1 of 2 values are null"),
    "uneven": ('[{"a": [1]}, {"a": [1, 2]}]', {"lists": "dense"}, ValueError, "the list of row 1 has 2 items"),
    "leaf and level": ('[{"a": 1, "a.b": 2}]', {"separator": "."}, FormatError, "'a' is a column, and the level of 'a.b'"),
    "unknown key": ('[{"a": 1}]', {"keys": ["b"]}, KeyPathError, "'b'"),
    "unknown key of dtypes": ('[{"a": 1}]', {"dtypes": {"b": torch.int8}}, KeyPathError, "there is no 'b' for dtypes"),
    "option of pandas": ('[{"a": 1}]', {"orient": "split"}, TypeError, r"from_json\(\) has no option 'orient'; its"),
    "no schema": ('[{"a": 1}]', {"schema": True}, FormatError, "there is no schema of"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_from_json_refuses(name: str, path: Path) -> None:
    content, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        read(path, content, **options)


@pytest.mark.parametrize(
    ("entries", "options", "error", "message"),
    [
        ({"x": torch.tensor([1.0, INF, 1.0])}, {}, ValueError, "key 'x', row 1: it is infinite.*: pass nonfinite="),
        ({"n": {"x": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, -INF]])}}, {}, ValueError, r"\('n', 'x'\), row 2: it is inf"),
        ({"x": [b"a"] * 3}, {}, CodecError, "cannot save key 'x' as text: bytes are not text"),
        ({"x": [b"a"] * 3}, {"separator": "."}, CodecError, "cannot save key 'x' as text: bytes are not text"),
        ({"x": torch.zeros(3)}, {"nonfinite": "nan"}, ValueError, "nonfinite is one of 'raise', 'literal', 'null'"),
        ({"x": torch.zeros(3)}, {"orient": "records"}, TypeError, "orient"),
        ({"x": torch.zeros(3, device="meta")}, {}, CodecError, "cannot save key 'x'"),
    ],
    ids=["infinity", "nested infinity", "bytes", "dotted bytes", "nonfinite", "option of pandas", "meta"],
)  # fmt: skip
def test_to_json_refuses_and_keeps_old_file(
    entries: Any, options: Any, error: Any, message: str, path: Path
) -> None:
    path.write_text("[]")
    with pytest.raises(error, match=message):
        TensorDict(entries, [3]).to_json(path, **options)
    assert path.read_text() == "[]"
    assert [each.name for each in path.parent.iterdir()] == ["data.json"]
