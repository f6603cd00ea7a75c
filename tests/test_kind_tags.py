"""The page on the file format lists the kinds of the project, with the names that their records have."""

from __future__ import annotations

import re
from pathlib import Path

import td_core
from td_core import kinds

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Encoded trees")[2].partition("\n## ")[0]


def test_page_lists_every_kind_of_project() -> None:
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE))))
    tags = {kind.tag for kind in kinds.list_kinds() if not kind.with_class and "." not in kind.tag}
    assert tags <= listed


def test_page_lists_fields_of_rows() -> None:
    class Sub(td_core.TensorDict):
        pass

    row = td_core.spi.encode(Sub({"a": 1})).nodes[0]
    assert set(row) <= set(re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE))
