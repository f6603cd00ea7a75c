"""The checksum at the end of a metadata file: it finds cuts and changes, and accepts the files of other programs."""

from __future__ import annotations

import json
import pickle
import zlib

import pytest

from td_core._encode.check_lines import CHECK_LINE, add_check_line, compare_check_line, has_check_line


@pytest.mark.parametrize("text", [b"", b"{}", b'{"a": 1}\n', b"\x80\x04N."])
def test_compare_check_line_cut_or_changed_raises(text: bytes) -> None:
    compare_check_line(text)
    checked = add_check_line(text)
    compare_check_line(checked)
    assert checked.startswith(text) and not checked[len(text) :].strip()
    for length in range(len(text) + 2, len(checked)):
        with pytest.raises(ValueError, match="damaged"):
            compare_check_line(checked[:length])
    for position in range(len(text) + 1, len(checked) - 1):
        other = b" " if checked[position : position + 1] == b"\t" else b"\t"
        with pytest.raises(ValueError, match="damaged"):
            compare_check_line(checked[:position] + other + checked[position + 1 :])


@pytest.mark.parametrize("text", [b'{"a": 1}   ', b'{"a": 1}\n\n', b'{\n  "a": 1\n}\n'])
def test_compare_check_line_of_other_programs_accepts_it(text: bytes) -> None:
    assert not has_check_line(text)
    compare_check_line(text)


def test_check_line_has_the_bits_of_the_crc_in_blanks() -> None:
    line = add_check_line(b"abc")[3:]
    assert len(line) == CHECK_LINE and line[:1] == line[-1:] == b"\n"
    assert int(line.strip(b"\n").replace(b" ", b"0").replace(b"\t", b"1"), 2) == zlib.crc32(b"abc")


def test_parsers_skip_the_check_line() -> None:
    assert json.loads(add_check_line(b'{"a": 1}')) == {"a": 1}
    assert pickle.loads(add_check_line(pickle.dumps([1, 2]))) == [1, 2]


def test_compare_check_line_accepts_spaces_behind_it() -> None:
    padded = add_check_line(b"{}") + b"  "
    compare_check_line(padded)
    with pytest.raises(ValueError, match="it is damaged: its checksum is that of another text"):
        compare_check_line(b"[]" + padded[2:])


@pytest.mark.parametrize("text", [b"", b"\n", b"{}", b"\n" + b" " * 31 + b"\n", b"\n" + b" " * 31 + b"x\n"])
def test_has_check_line_needs_the_complete_line(text: bytes) -> None:
    assert not has_check_line(text)
    assert has_check_line(add_check_line(text))
