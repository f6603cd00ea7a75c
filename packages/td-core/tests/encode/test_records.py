"""The plain and the general form of the nodes of an encoded tree."""

from __future__ import annotations

from typing import Any

import torch

from td_core import Record, TensorDict, TensorDictParams, encode


def test_encode_plain_writes_layout_of_format() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": TensorDict({}, [2])}, [2])
    encoded = encode(td, format_name="memmap/1")
    assert [row["format"] for row in encoded.nodes] == ["memmap/1"] * 2
    assert [row["meta"]["shape"] for row in encoded.nodes] == [[2]] * 2


def test_encode_plain_without_layout_writes_general_form() -> None:
    td = TensorDict({"p": TensorDictParams(TensorDict({}))})
    encoded = encode(td, format_name="consolidated/1")
    assert ["format" in row for row in encoded.nodes] == [True, False, True]
    assert encoded.nodes[1]["meta"] == encode(td).nodes[1]["meta"]


def test_encode_plain_convert_none_writes_general_form() -> None:
    seen: list[tuple[str, Any]] = []

    def convert(node: Any, record: Record, above: dict[str, Any]) -> Record | None:
        seen.append((above.get("format", "general"), list(record.entries)))
        return None if "m" in record.entries else record

    td = TensorDict({"n": {"m": {"a": 1}}})
    encoded = encode(td, format_name="memmap/1", convert=convert)
    assert seen == [("general", ["n"]), ("memmap/1", ["m"]), ("general", ["a"])]
    assert ["format" in row for row in encoded.nodes] == [True, False, True]
    assert encoded.nodes[1] == encode(td).nodes[1]
