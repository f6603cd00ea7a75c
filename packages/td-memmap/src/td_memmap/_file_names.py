"""File names: how a key becomes one, and the fixed names that no key becomes.

A key is percent-encoded, so it can name one file in one directory and nothing else; ``%`` is always followed by two
upper-case hex digits, or stands alone for the empty key. Names of our own start with ``%`` and a letter outside
``0-9A-F``, so they never meet a key.
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
#: What a file is called, and a number, that is about to take the name of another one.
TEMPORARY = "%new-"

#: Files that any level may have.
RESERVED_STEMS = (META, VALUES, PICKLE)

#: Files that may stand beside the metadata of a node, for its values.
SIDECARS = (VALUES, PICKLE, STACK_PICKLE, JSON_TYPES)

#: Directories that stand for a part of a node, not for a key.
INNER = "_tensordict"
SOURCE = "_source"

#: What says False in the ``meta.json`` of a level whose keys stand in file names as they are.
ROBUST_KEY = "_robust_key"

#: Names in the ``meta.json`` of a level that describe the level itself.
RESERVED = frozenset({"shape", "device", "_type", "_class", "_format_version", "_names"})

_UNSAFE = re.compile(r'[\x00-\x20\x7f/\\<>:"|?*%]')
_DOTS = frozenset({"", ".", ".."})
_LONGEST = 255


def encode_key(key: str) -> str:
    """Return the file stem or directory name of a key.

    >>> encode_key("a/b"), encode_key("50%"), encode_key(".."), encode_key("")
    ('a%2Fb', '50%25', '%2E%2E', '%')
    """
    if _UNSAFE.search(key) is None and key not in _DOTS:
        return key
    if key in _DOTS:
        return "%2E" * len(key) or "%"
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", key)


def get_stem(key: str, robust_key: bool) -> str:
    """Return what a save calls the file, without ending, or the directory of a key.

    >>> get_stem("a b", True), get_stem("a b", False)
    ('a%20b', 'a b')
    """
    return encode_key(key) if robust_key else key


def list_temporary_prefixes(name: str) -> str:
    """Return how the names begin that an unfinished save has beside a name that it will take.

    >>> list_temporary_prefixes("save")
    '.save.td-'
    """
    # The whole of it has to fit too.
    raw = os.fsencode(name)
    return f".{name if len(raw) <= 200 else hashlib.sha1(raw).hexdigest()}.td-"


def iter_numbers() -> Iterator[str]:
    """Yield the numbers that tell unfinished saves of one name apart, in order: who builds takes the first that is free.

    >>> next(iter_numbers())
    '00000000'
    """
    return (f"{number:08x}" for number in itertools.count())


def is_valid_name(name: str) -> bool:
    """Tell whether file systems take this name: at most 255 bytes of UTF-8, no lone surrogate.

    >>> is_valid_name("a" * 255), is_valid_name("é" * 128)
    (True, False)
    """
    try:
        return len(name.encode()) <= _LONGEST
    except UnicodeEncodeError:
        return False


def get_raw_name(key: str) -> str | None:
    """Return the unencoded name that releases before 0.14 gave to a key, or None where it could leave the directory.

    >>> get_raw_name("a b"), get_raw_name("../x"), get_raw_name("c:d")
    ('a b', None, 'c:d')
    """
    if key in _DOTS or "/" in key or "\\" in key or "\0" in key:
        return None
    return key


def format_listing(paths: Iterable[tuple[str, ...]]) -> bytes:
    """Return file paths as the content of a file.

    >>> format_listing([("a", "b.memmap")])
    b'a/b.memmap'
    """
    return "\0".join("/".join(path) for path in sorted(paths)).encode(errors="surrogateescape")


def parse_listing(content: bytes) -> list[tuple[str, ...]]:
    """Return the paths of a listing, those that stay in their directory.

    >>> parse_listing(b"a/b.memmap" + bytes(1) + b"../c")
    [('a', 'b.memmap')]
    """
    return [
        path
        for line in content.decode(errors="surrogateescape").split("\0")
        if (path := split_relative(line))
    ]


def split_relative(path: str) -> tuple[str, ...] | None:
    """Return the parts of a relative path, or None where it could leave its directory, or no file system takes it.

    >>> split_relative("a/b"), split_relative("/a"), split_relative("a/../b"), split_relative("x" * 300)
    (('a', 'b'), None, None, None)
    """
    parts = tuple(path.split("/"))
    # Most names are short and plain, and then the longest one tells of all.
    short = path.isascii() and max(map(len, parts)) <= _LONGEST
    bad = "\0" in path or not _DOTS.isdisjoint(parts) or not (short or all(map(is_valid_name, parts)))
    return None if bad else parts


def leading(paths: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the directories that lead to some paths, without that of all of them.

    >>> sorted(leading([("a", "b", "c"), ("a", "d")]))
    [('a',), ('a', 'b')]
    """
    result: set[tuple[str, ...]] = set()
    for path in paths:
        while (path := path[:-1]) and path not in result:
            result.add(path)
    return result
