"""File names: the encoding of keys, and fixed names that no encoded key can equal.

A key is percent-encoded, so that it names exactly one file in one directory. In an encoded key, ``%`` is followed
by two upper-case hex digits, or is alone for the empty key. Fixed names start with ``%`` and a letter outside
``0-9A-F``, so they never equal an encoded key.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator

META = "meta.json"
OLD_META = "meta.pt"
PICKLE = "other.pickle"
STACK_PICKLE = "pickle.pkl"
JSON_TYPES = "json_types.json"
VALUES = "%values.json"
MANIFEST = "%manifest.json"
SAVING = "%saving"
UNFINISHED_META = "%meta.json"
#: Prefix, followed by a random number, of a temporary file that will replace another file.
TEMPORARY = "%new-"

#: Files of the node itself, whose names no entry can have.
RESERVED_STEMS = (META, VALUES, PICKLE)

#: Files next to the metadata of a node that hold its values.
SIDECARS = (VALUES, PICKLE, STACK_PICKLE, JSON_TYPES)

#: Start of the names of the files of values by rows, followed by a number and ``.memmap``.
SLOTS = "%rows-"
HEAP = "%heap-"
_ROW_FILE = re.compile(rf"({SLOTS}|{HEAP})[0-9]+\.memmap")

#: Subdirectories that are not entries: the entries of a tensorclass, and the source of a saved view.
INNER = "_tensordict"
SOURCE = "_source"

#: Field of ``meta.json`` that is False if file names are the raw keys.
ROBUST_KEY = "_robust_key"
#: Field of ``meta.json`` that is True if values below may be stored by rows, which tensordict does not read.
MAY_HAVE_ROWS = "_rows"

#: Fields of ``meta.json`` that describe the node itself.
RESERVED = frozenset({"shape", "device", "_type", "_class", "_format_version", "_names"})

_UNSAFE = re.compile(r'[\x00-\x20\x7f/\\<>:"|?*%]')
_DOTS = frozenset({"", ".", ".."})
_LONGEST = 255


def is_row_file(name: str) -> bool:
    """Return True for the name of a file of slots or of a heap."""
    return _ROW_FILE.fullmatch(name) is not None


def encode_key(key: str) -> str:
    """Return the file stem or directory name of a key."""
    if _UNSAFE.search(key) is None and key not in _DOTS:
        return key
    if key in _DOTS:
        return "%2E" * len(key) or "%"
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", key)


def get_stem(key: str, robust_key: bool) -> str:
    """Return the file stem or directory name of a key: encoded if ``robust_key``, else the key itself."""
    return encode_key(key) if robust_key else key


def list_temporary_prefixes(name: str) -> str:
    """Return the prefix of temporary names used while ``name`` is saved."""
    # Hash a long name: the temporary name must not exceed 255 bytes.
    raw = os.fsencode(name)
    return f".{name if len(raw) <= 200 else hashlib.sha1(raw).hexdigest()}.td-"


def iter_numbers() -> Iterator[str]:
    """Yield the suffixes of temporary names in order; a save uses the first suffix that is free."""
    return (f"{number:08x}" for number in itertools.count())


def is_valid_name(name: str) -> bool:
    """Return True if file systems accept a name: at most 255 bytes of UTF-8, no lone surrogate."""
    try:
        return len(name.encode()) <= _LONGEST
    except UnicodeEncodeError:
        return False


def get_raw_name(key: str) -> str | None:
    """Return the unencoded name that releases before 0.14 gave to a key, or None if it could leave the directory."""
    if key in _DOTS or "/" in key or "\\" in key or "\0" in key:
        return None
    return key


def format_listing(paths: Iterable[tuple[str, ...]]) -> bytes:
    """Encode file paths as the content of the file ``%saving``."""
    return "\0".join("/".join(path) for path in sorted(paths)).encode(errors="surrogateescape")


def parse_listing(content: bytes) -> list[tuple[str, ...]]:
    """Decode the paths of a listing; drop those that leave the directory."""
    return [
        path
        for line in content.decode(errors="surrogateescape").split("\0")
        if (path := split_relative(line))
    ]


def split_relative(path: str) -> tuple[str, ...] | None:
    """Split a relative path into its parts, or return None if it leaves its directory or is not a valid name."""
    parts = tuple(path.split("/"))
    # Fast path: ASCII parts of at most 255 characters are valid without encoding them.
    short = path.isascii() and max(map(len, parts)) <= _LONGEST
    bad = "\0" in path or not _DOTS.isdisjoint(parts) or not (short or all(map(is_valid_name, parts)))
    return None if bad else parts


def leading(paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return all parent directories of relative paths, without the root."""
    result: set[tuple[str, ...]] = set()
    for path in paths:
        while (path := path[:-1]) and path not in result:
            result.add(path)
    return result
