"""Files at URLs, through fsspec: the header is read with two requests, and the tensors as ranges of bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError

from ._format import Array, Header, read_header

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z][A-Za-z0-9+.\-]+)*://")
#: Fields of the description of an object that change if it is replaced.
_STAMP = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "created")
#: Neighbouring ranges are read as one of up to this many bytes; fsspec reads several ranges at once.
_LARGEST = 1 << 24


def is_url(path: str) -> bool:
    """Return True for a URL, or a chain of URLs such as ``filecache::s3://bucket/x``."""
    return _URL.match(path) is not None


def connect(url: str, options: Mapping[str, object] | None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ModuleNotFoundError: fsspec, or the package that it needs for the scheme, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"reading {url} needs fsspec: pip install fsspec", name="fsspec") from error
    system, path = url_to_fs(url, **(options or {}))
    return system, path


def _find_stamp(system: Any, path: str) -> dict[str, Any]:
    """Return what distinguishes an object from another one that is later stored at its URL."""
    system.invalidate_cache(path)
    info = system.info(path)
    return {name: info[name] for name in _STAMP if name in info}


class RemoteReader:
    """Reads ranges of an object at a URL. It is picklable, and connects anew in each process."""

    gap = 1 << 18

    def __init__(self, url: str, options: Mapping[str, object] | None, stamp: Mapping[str, object]) -> None:
        self.url, self.options, self.stamp = url, options, stamp

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the bytes of each range.

        Raises:
            FormatError: the object was replaced, or is shorter than its header says.
        """
        merged: list[list[int]] = []
        owners = {}
        for begin, end in sorted(set(ranges)):
            if merged and begin - merged[-1][1] <= self.gap and end - merged[-1][0] <= _LARGEST:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
            owners[begin, end] = len(merged) - 1
        system, path = connect(self.url, self.options)
        starts, ends = [begin for begin, _ in merged], [end for _, end in merged]
        pieces = system.cat_ranges([path] * len(merged), starts, ends, on_error="raise")
        if _find_stamp(system, path) != self.stamp:
            raise FormatError(f"{self.url} was replaced since it was opened: open it again")
        for piece, begin, end in zip(pieces, starts, ends, strict=True):
            if len(piece) != end - begin:
                raise FormatError(
                    f"{self.url} is truncated: {end - begin} bytes from {begin} on gave {len(piece)}"
                )
        results = []
        for begin, end in ranges:
            owner = owners[begin, end]
            part = memoryview(pieces[owner])[begin - starts[owner] : end - starts[owner]]
            results.append(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        return results


class RemoteFile:
    """A file at a URL with its header."""

    def __init__(self, url: str, options: Mapping[str, object] | None) -> None:
        system, path = connect(url, options)
        stamp = _find_stamp(system, path)
        size = stamp.get("size")
        if not isinstance(size, int):
            raise FormatError(f"{url}: the server does not give its size: download it first")
        self.path = url
        self.reader = RemoteReader(url, options, stamp)
        self.header: Header = read_header(
            lambda size, begin: bytes(system.cat_file(path, start=begin, end=begin + size)), size, url
        )

    def read(self, array: Array) -> Tensor:
        """Return the bytes of a tensor."""
        if not array.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        begin = self.header.start + array.begin
        return self.reader.read_ranges([(begin, begin + array.nbytes)])[0]
