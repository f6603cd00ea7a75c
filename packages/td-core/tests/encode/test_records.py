"""Records: the header of a node, and the fields that are read from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.spi import Record

NONE = type(None)


@pytest.mark.parametrize(
    ("make", "fields", "meta"),
    [
        (lambda: TensorDict(), {}, {"batch_size": []}),
        (lambda: TensorDict(batch_size=[3, 0]), {"unit": "m"}, {"batch_size": [3, 0], "unit": "m"}),
        (lambda: TensorDict(device="cpu"), {}, {"batch_size": [], "device": "cpu"}),
        (
            lambda: TensorDict(batch_size=[2, 2], names=["x", None]).lock_(),
            {},
            {"batch_size": [2, 2], "names": ["x", None], "locked": True},
        ),
    ],
    ids=["empty", "field", "device", "names and lock"],
)
def test_record_of_node_has_set_fields_only(make: Any, fields: dict[str, Any], meta: dict[str, Any]) -> None:
    node = make()
    record = Record.of(node, {"a": node}, values={"v": 1}, **fields)
    assert record.meta == meta
    assert (record.entries["a"], record.members, record.values) == (node, {}, {"v": 1})
    size, device, names, locked = record.read_header()
    assert (list(size), names) == (meta["batch_size"], tuple(meta["names"]) if "names" in meta else None)
    assert (device, locked) == (torch.device("cpu") if "device" in meta else None, "locked" in meta)


def test_read_field_without_none_must_exist() -> None:
    record = Record({"unit": "m", "count": True})
    assert (record.read_field("unit", int, str), record.read_field("length", str, NONE)) == ("m", None)
    with pytest.raises(KeyError, match="length"):
        record.read_field("length", str)
    with pytest.raises(TypeError, match="^its header says that count is True$"):
        record.read_field("count", int, NONE)  # a bool is not an int


@pytest.mark.parametrize("size", [3, [True], [1.0], ["3"], [1 << 63], [[3]]], ids=str)
def test_read_batch_size_damaged_raises(size: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Record({"batch_size": size}).read_batch_size()
    assert str(caught.value) == f"its header says that batch_size is {size!r}"


@pytest.mark.parametrize(
    ("meta", "error", "message"),
    [
        ({}, KeyError, "batch_size"),
        ({"batch_size": [-1]}, ValueError, "-1"),
        ({"device": 0}, TypeError, "its header says that device is 0"),
        ({"device": "bogus"}, RuntimeError, "bogus"),
        ({"batch_size": [3], "names": ["x", "y"]}, ValueError, "names"),
        ({"batch_size": [3], "names": "x"}, TypeError, "its header says that names is 'x'"),
        ({"batch_size": [3], "locked": 1}, TypeError, "its header says that locked is 1"),
    ],
    ids=str,
)
def test_read_header_damaged_raises(meta: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Record(meta if "batch_size" in meta or not meta else {"batch_size": [], **meta}).read_header()
