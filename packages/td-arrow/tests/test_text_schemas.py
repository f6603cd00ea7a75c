"""Text files with a schema beside them: exact round trips of all kinds, dtypes and values, and damage."""

from __future__ import annotations

import datetime
import decimal
import io
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("td_tensorclass")  # columns of text become values

from td_core import TensorDict
from td_core.errors import FormatError
from td_core.testing._collection_samples import assert_same, make_samples, make_value_samples

_DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip
_DAY = datetime.datetime(2020, 1, 2, 3, 4, 5, 6)

SAMPLES: dict[str, Any] = {
    **make_samples(),
    **{
        name: data.exclude(("v", "bytes")) for name, data in make_value_samples().items()
    },  # bytes are not text
    "dtypes": TensorDict({str(dtype)[6:]: torch.tensor([0, 1, 2]).to(dtype) for dtype in _DTYPES}, [3]),
    "cells of dtypes": TensorDict(
        {str(dtype)[6:]: torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in _DTYPES}, [2]
    ),
    "numbers": TensorDict(
        {"x": torch.tensor([1.5, float("nan"), 3e38]), "y": torch.tensor([2**53 + 1, -(2**63), 2**63 - 1])},
        [3],
    ),
    "matrix": TensorDict({"x": torch.arange(12.0).view(2, 3, 2)}, [2]),
    "rows of values": TensorDict(
        {
            "text": ["a", 'quote " and \\, line\n', None],
            "no text": ["", "x", None],
            "day": [_DAY.date()] * 3,
            "moment": [_DAY] * 3,
            "time": [_DAY.time()] * 3,
            "span": [datetime.timedelta(seconds=1)] * 3,
            "decimal": [decimal.Decimal("1.50")] * 3,
            "dict": [{"a": 1}, {"b": [1]}, None],
            "mixed": [1, "a", 2.5],
            "integers": [1, 2, 3],
            "bools": [True, None, False],
            "lists": [["a"], [], ["b", "c"]],
        },
        [3],
    ),
    "jagged": TensorDict(
        {
            "x": torch.nested.nested_tensor(
                [torch.arange(n).float() for n in (1, 0, 3)], layout=torch.jagged
            ),
            "y": torch.nested.nested_tensor(
                [torch.arange(2 * n).view(n, 2) for n in (1, 0, 3)], layout=torch.jagged
            ),
        },
        [3],
    ),
}


def write(data: Any, kind: str, path: Any, **options: Any) -> None:
    if kind == "csv":
        data.to_csv(path, separator=".", **options)
    else:
        data.to_json(path, lines=kind == "jsonl", nonfinite="literal", **options)


def read(kind: str, path: Any, **options: Any) -> Any:
    return (
        TensorDict.from_csv(path, separator=".", **options)
        if kind == "csv"
        else TensorDict.from_json(path, **options)
    )


KINDS = ("csv", "json", "jsonl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_round_trip_with_schema_is_exact(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    write(SAMPLES[name], kind, path, schema=True)
    assert_same(read(kind, path), SAMPLES[name])
    assert_same(read(kind, path, schema=True), SAMPLES[name])


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_ignored_after_the_file_has_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    write(TensorDict({"x": torch.zeros(3).half()}, [3]), kind, path, schema=True)
    assert read(kind, path)["x"].dtype is torch.float16
    assert read(kind, path, schema=False)["x"].dtype is torch.float64
    path.write_text("x\n1\n" if kind == "csv" else '{"x": 1}\n')
    assert read(kind, path)["x"].dtype is torch.int64
    with pytest.raises(FormatError, match="or the file has changed: pass schema=False"):
        read(kind, path, schema=True)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_of_another_file_of_the_same_size_raises(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    write(TensorDict({"x": torch.zeros(3, dtype=torch.int64)}, [3]), kind, path, schema=True)
    path.write_bytes(path.read_bytes().replace(b"0", b"x" if kind == "csv" else b'"'))
    with pytest.raises(FormatError):
        read(kind, path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 2, "size": 1, "schema": ""}']
)
def test_damaged_schema_raises(content: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    write(TensorDict({"x": torch.zeros(3)}, [3]), kind, path, schema=True)
    Path(f"{path}.td.json").write_text(content)
    with pytest.raises(FormatError, match=rf"data.{kind}.td.json (is damaged|has the version 2)"):
        read(kind, path)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_of_file_object_raises(kind: str) -> None:
    td = TensorDict({"x": torch.zeros(3)}, [3])
    with pytest.raises(ValueError, match="schema=True writes a file beside a local file; a BytesIO is none"):
        write(td, kind, io.BytesIO(), schema=True)
    file = io.BytesIO()
    write(td, kind, file)
    with pytest.raises(ValueError, match="schema=True writes a file beside a local file; a BytesIO is none"):
        read(kind, file, schema=True)
