"""Shards of MDS: files of samples with their offsets, their index, compression and hashes."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from td_core.errors import FormatError

from ._arrow_types import Facts

#: The names of compressions in pyarrow, and their usual levels in the library of the format.
_CODECS = {"zstd": ("zstd", 3), "br": ("brotli", 11), "snappy": ("snappy", None)}
_LEVELS = {"gz": range(10), "bz2": range(1, 10), "br": range(12), "zstd": range(1, 23), "snappy": range(0)}
_UNITS = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_MOST_BYTES = (1 << 32) - 1
Ints = npt.NDArray[np.int64]


class Packing(NamedTuple):
    """How shards are packed: the compression as the caller named it, its codec and level, hashes, and the most bytes."""

    name: str | None
    codec: str | None
    level: int | None
    hashes: list[str]
    limit: int | None

    @classmethod
    def of(
        cls, compression: str | None, hashes: Sequence[str] | None, size_limit: int | str | None
    ) -> Packing:
        """Return the packing of the options of ``to_mds``; raise ValueError for an invalid one."""
        codec, level = _parse_compression(compression)
        found = [] if hashes is None else list(hashes)
        if found != sorted({*found}):  # as the library requires
            raise ValueError(f"hashes are unique and sorted; got {found!r:.200}")
        for name in found:
            _make_hash(name, b"")
        return cls(compression, codec, level, found, _parse_size(size_limit))

    def compress(self, data: bytes) -> bytes:
        """Return compressed data."""
        if self.codec in ("gz", "bz2"):
            pack = gzip.compress if self.codec == "gz" else bz2.compress
            return pack(data, 9 if self.level is None else self.level)
        name, usual = _CODECS[str(self.codec)]
        codec = pa.Codec(name, compression_level=usual if self.level is None else self.level)
        return bytes(codec.compress(data, asbytes=True))


def _parse_size(size: int | str | None) -> int | None:
    """Return the bytes of a size limit, which can be text such as ``"100kb"``; None for no limit."""
    if size is None or (type(size) is int and size > 0):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(b|kb|mb|gb|tb)", size.lower() if isinstance(size, str) else "")
    if match is None:
        raise ValueError(f'size_limit is a number of bytes, text such as "100kb", or None; got {size!r:.100}')
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_compression(compression: str | None) -> tuple[str | None, int | None]:
    """Return codec and level of a compression."""
    if compression is None:
        return None, None
    name, _, level = compression.partition(":") if isinstance(compression, str) else ("", "", "")
    if name not in _LEVELS or (level and (not level.isdecimal() or int(level) not in _LEVELS[name])):
        raise ValueError(
            f"compression is one of {', '.join(map(repr, _LEVELS))}, or name:level; got {compression!r:.100}"
        )
    return name, int(level) if level else None


def _make_hash(name: str, data: bytes) -> str:
    if name in hashlib.algorithms_guaranteed and not str(name).startswith("shake"):
        return hashlib.new(name, data).hexdigest()
    if name in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        try:
            import xxhash
        except ImportError as error:
            raise ImportError(f"the hash {name!r} needs xxhash: pip install xxhash") from error
        digest: str = getattr(xxhash, f"{name}_hexdigest")(data)
        return digest
    raise ValueError(f"no hash is called {name!r:.100}")


def _decompress(name: str, data: bytes, size: int) -> bytes:
    if name == "gz":
        return gzip.decompress(data)
    if name == "bz2":
        return bz2.decompress(data)
    found: bytes = pa.Codec(_CODECS[name][0]).decompress(data, decompressed_size=size, asbytes=True)
    return found


def describe_file(name: str, data: bytes, hashes: Sequence[str]) -> Facts:
    """Return what the index says about a file."""
    return {"basename": name, "bytes": len(data), "hashes": {each: _make_hash(each, data) for each in hashes}}


def split_samples(sizes: Ints, head: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Yield first and last sample of each shard, of samples of some sizes; a shard is full where the library says so."""
    start, total = 0, head
    for number, size in enumerate((sizes + 4).tolist()):
        if limit is not None and limit < total + size and number > start:
            yield start, number
            start, total = number, head
        total += size
    if len(sizes):
        yield start, len(sizes)


def make_shard(config: bytes, samples: bytes, sizes: Ints) -> bytes:
    """Return the content of a shard; ``samples`` are the bytes of all of its samples."""
    begin = 4 + 4 * (len(sizes) + 1) + len(config)
    offsets = begin + np.concatenate([[0], np.cumsum(sizes)])
    if offsets[-1] > _MOST_BYTES:
        raise ValueError("a shard has at most 4 GB: pass a smaller size_limit")
    return b"".join([np.array(len(sizes), "<u4").tobytes(), offsets.astype("<u4").tobytes(), config, samples])


def unpack_shard(info: Facts, data: bytes, is_packed: bool, where: str) -> bytes:
    """Return the content of a shard from that of its file, after checks of sizes and hashes."""
    described = info["zip_data"] if is_packed else info["raw_data"]
    _check_file(described, data, where)
    if not is_packed:
        return data
    name = str(info["compression"]).partition(":")[0]
    if name not in _LEVELS:
        raise FormatError(f"{where} has the compression {name!r:.100}, which is unknown")
    try:
        content = _decompress(name, data, info["raw_data"]["bytes"])
    except (OSError, EOFError, ValueError, pa.ArrowException) as error:
        raise FormatError(f"{where} is damaged: it cannot be decompressed") from error
    _check_file(info["raw_data"], content, where)
    return content


def _check_file(described: Facts, data: bytes, where: str) -> None:
    if len(data) != described["bytes"]:
        raise FormatError(f"{where} is damaged: it has {len(data)} bytes; expected {described['bytes']}")
    for name, digest in (described.get("hashes") or {}).items():
        try:
            found = _make_hash(name, data)
        except ValueError as error:
            raise FormatError(f"{where}: {error}") from error
        if found != digest:
            raise FormatError(f"{where} is damaged: its {name} is not that of the index")


def read_offsets(content: bytes, samples: int, where: str) -> Ints:
    """Return the offsets of the samples of a shard, and its end; FormatError if they are not in the shard."""
    count = int(np.frombuffer(content[:4], "<u4")[0]) if len(content) >= 4 else -1
    end = 4 + 4 * (samples + 1)
    if count != samples or len(content) < end:
        raise FormatError(f"{where} is damaged: it has {count} samples; expected {samples}")
    offsets = np.frombuffer(content[4:end], "<u4").astype(np.int64)
    if offsets[0] < end or offsets[-1] > len(content) or (np.diff(offsets) < 0).any():
        raise FormatError(f"{where} is damaged: its offsets leave the file")
    return offsets
