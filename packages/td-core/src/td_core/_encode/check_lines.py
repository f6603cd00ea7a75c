"""The check line: a checksum at the end of a metadata file, in characters that every parser skips.

The line is the CRC-32 of all bytes before it, as 32 spaces and tabs between two line feeds. So it is whitespace after JSON,
and comes after the end of a pickle: other programs read the file as before, and one that writes the file anew drops the line.
"""

from __future__ import annotations

import zlib

#: Length of a check line in bytes.
CHECK_LINE = 34
_BLANKS = str.maketrans("01", " \t")


def add_check_line(text: bytes) -> bytes:
    r"""Return a text with its check line at the end.

    >>> add_check_line(b"{}")[:8]
    b'{}\n\t \t  '
    """
    digits = f"{zlib.crc32(text):032b}".translate(_BLANKS)
    return b"%b\n%b\n" % (text, digits.encode())


def has_check_line(text: bytes) -> bool:
    """Return True if a text ends with a check line."""
    line = text[-CHECK_LINE:]
    return line[:1] == line[-1:] == b"\n" and len(line) == CHECK_LINE and not line.strip(b"\n \t")


def compare_check_line(text: bytes) -> bool:
    """Return True if a text ends with its check line, as files of other programs do not.

    Raises:
        ValueError: the check line is that of another text.

    >>> compare_check_line(add_check_line(b"{}")), compare_check_line(b"{}")
    (True, False)
    """
    # Another program can have filled the place of the text with spaces.
    kept = text.rstrip(b" ")
    if found := has_check_line(kept):
        intact = add_check_line(kept[:-CHECK_LINE]) == kept
    else:
        # The rest of a check line whose end is missing: blanks after a line feed.
        intact = text[-1:] not in (b" ", b"\t") or text.rstrip(b" \t")[-1:] != b"\n"
    if not intact:
        raise ValueError("it is damaged: its checksum is that of another text")
    return found
