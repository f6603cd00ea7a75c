"""Limits of headers: not more nodes than a file of its size can hold."""

from __future__ import annotations

from typing import Any

import pytest

from td_core import FormatError
from td_core.spi import decode_table, get_most_nodes, load_table, refuse_nodes


@pytest.mark.parametrize("depth", [13, 60, 20_000])
def test_read_header_of_too_many_nodes_raises(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"kind": "TensorDict", "meta": {"batch_size": []}, "members": [], "values": []}
    rows: list[Any] = [{**row, "entries": [["l", i + 1], ["r", i + 1]]} for i in range(depth)]
    header = {"version": 1, "nodes": [*rows, {**row, "entries": []}], "leaves": [], "values": []}
    most = max(10_000, depth + 1)
    with pytest.raises(
        FormatError, match=f"x.bin: its header describes more than {most} nodes.*TD_MAX_NODES"
    ):
        load_table(header, "x.bin")
    if depth == 13:
        monkeypatch.setenv("TD_MAX_NODES", "20000")
        assert len(list(decode_table(load_table(header, "x.bin"), [], "x.bin").keys(True))) == 2**14 - 2


@pytest.mark.parametrize(
    ("variable", "nbytes", "most"),
    [(None, 0, 10_000), (None, 10_001, 10_001), ("5", 0, 5), ("5", 300, 300), ("20000", 300, 20_000)],
)
def test_most_nodes_is_size_of_file_or_setting(
    variable: str | None, nbytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TD_MAX_NODES", raising=False)
    if variable is not None:
        monkeypatch.setenv("TD_MAX_NODES", variable)
    assert get_most_nodes(nbytes) == most


def test_refuse_nodes_names_place_limit_and_setting() -> None:
    assert str(refuse_nodes("x.bin", 7)) == (
        "x.bin: its header describes more than 7 nodes and leaves, which a file of its size cannot hold; if you trust it, "
        "set the environment variable TD_MAX_NODES to a larger number"
    )
