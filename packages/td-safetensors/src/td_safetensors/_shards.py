"""The names, sizes and index of sharded saves, in the form that model hubs use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping

from td_core.errors import FormatError
from td_store.arrays import PlannedArray

#: The index of a directory of shards, and the file of a directory without shards.
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Field of an index in an object store until the shards of a save are complete.
UNFINISHED = "td_unfinished"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}(-[0-9a-f]{8})?\.safetensors")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_size(size: int | str) -> int:
    """Return a number of bytes from a number or a text such as ``"5GB"``; ValueError for any other."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size is a number of bytes or a text such as '5GB'; got {size!r}")
    result = int(float(match[1]) * _UNITS[match[2].upper()])
    if result <= 0:
        raise ValueError(f"max_shard_size must be positive; got {size!r}")
    return result


def split_shards(stored: Mapping[str, PlannedArray], limit: int) -> list[dict[str, PlannedArray]]:
    """Distribute tensors, in order, on as few files as possible of at most ``limit`` bytes; a larger tensor is alone."""
    shards: list[dict[str, PlannedArray]] = [{}]
    size = 0
    for name, item in stored.items():
        added = item.nbytes
        if shards[-1] and size + added > limit:
            shards.append({})
            size = 0
        shards[-1][name] = item
        size += added
    return shards


def name_shard(position: int, count: int, generation: str = "") -> str:
    """Return the name of a shard; ``generation`` distinguishes it from a file of an older save."""
    suffix = f"-{generation}" if generation else ""
    return f"model-{position + 1:05d}-of-{count:05d}{suffix}.safetensors"


def list_shards(names: Iterable[str]) -> set[str]:
    """Return those of some names that have the form of a shard."""
    return {name for name in names if _SHARD.fullmatch(name)}


def choose_names(count: int, taken: Collection[str]) -> list[str]:
    """Return the names of shards, which have a random part if an older save, which is still complete, has the others."""
    names = [name_shard(i, count) for i in range(count)]
    if set(taken).isdisjoint(names):
        return names
    generation = secrets.token_hex(4)
    return [name_shard(i, count, generation) for i in range(count)]


def choose_file(path: str, names: Collection[str]) -> str:
    """Return the name of the file to load from a directory with some names: an index, or the file without shards."""
    others = sorted(name for name in names if name.endswith(".safetensors.index.json"))
    if INDEX in others:
        return INDEX
    if len(others) > 1 and SINGLE not in names:
        raise FormatError(f"{path} has more than one index: {', '.join(others)}; pass the path of one")
    return others[0] if len(others) == 1 else SINGLE


def check_weight_map(index: object, path: str) -> dict[str, str]:
    """Return the map from tensors to files of an index; FormatError unless all are below the directory of the index."""
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict):
        raise FormatError(f"{path}: weight_map is not an object; got {weights!r:.100}")
    for name, file in weights.items():
        if not isinstance(file, str) or not _is_below(file):
            raise FormatError(
                f"{path}: weight_map of {name!r} names a file outside of its directory: {file!r:.200}"
            )
    return weights


def _is_below(file: str) -> bool:
    parts = re.split(r"[/\\]", file)
    return all(part not in ("", ".", "..") for part in parts) and ":" not in file and "\0" not in file
