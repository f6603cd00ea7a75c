"""The format of consolidated files, also in object stores: save, load and verify.

The import of td-core does not load this module, which needs more of td-store than consolidation itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import td_core
from td_core import TensorCollection
from td_core.errors import FormatError
from td_core.typing import NestedKey, ObjectLocation, Range
from td_store.arrays import upload

from . import _consolidated_file
from ._consolidate import consolidate, from_consolidated
from ._consolidated_backend import ConsolidatedBackend, attach_backend
from ._memory import make_vector

#: An object is read in parts of this many bytes, so many bytes at the same time.
_PART, _TOGETHER = 1 << 23, 1 << 28


def save_file(
    data: TensorCollection,
    location: Path | ObjectLocation,
    *,
    num_threads: int = 0,
    durable: bool = False,
    checksums: bool = False,
) -> TensorCollection:
    """Save a collection to a consolidated file, also in an object store; the options are those of ``consolidate``."""
    save = partial(consolidate, data, num_threads=num_threads, durable=durable, checksums=checksums)
    if not isinstance(location, ObjectLocation):
        save(location)
        return data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "consolidated")
        save(path)
        with path.open("rb") as file:
            upload(location.store, file)
    return data


def load_file(
    location: Path | ObjectLocation,
    *,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    verify: bool = False,
) -> TensorCollection:
    """Load a consolidated file, or some keys of it; see ``from_consolidated``. One in an object store is read."""
    loaded = _load_all(location, verify)
    return loaded if keys is None else loaded.select(*([keys] if isinstance(keys, (str, tuple)) else keys))


def _load_all(location: Path | ObjectLocation, verify: bool) -> TensorCollection:
    if not isinstance(location, ObjectLocation):
        return from_consolidated(location, verify=verify)
    tree, storage = _consolidated_file.parse(_read_object(location), location.where, verify=verify)
    return attach_backend(tree, ConsolidatedBackend(storage))


def _read_object(location: ObjectLocation) -> Tensor:
    """Return the bytes of an object, which are read in parts."""
    if location.first is None:
        raise FileNotFoundError(f"no consolidated file at {location.where}")
    info, _ = location.first
    if info.size < 8:
        raise FormatError(f"{location.where} is too short for a consolidated file: {info.size} bytes")
    data = torch.empty(info.size, dtype=torch.uint8, device="cpu")
    for begin in range(0, info.size, _TOGETHER):
        end = min(begin + _TOGETHER, info.size)
        starts = range(begin, end, _PART)
        ranges = [Range("", start, min(start + _PART, end), info.stamp) for start in starts]
        for start, part in zip(starts, location.store.read(ranges), strict=True):
            data[start : start + len(part)] = make_vector(part)
    return data


def verify_file(location: Path | ObjectLocation) -> td_core.Report:
    """Check the structure of a consolidated file, and the hash of its storage if that was recorded (``checksums=True``)."""
    hashed, problems = 0, []
    name = location.where if isinstance(location, ObjectLocation) else location.name
    try:
        if isinstance(location, ObjectLocation):
            data = _read_object(location)
            hashed = _consolidated_file.count_hashes_in(data, name)
            _consolidated_file.parse(data, name, verify=True)
        else:
            hashed = _consolidated_file.count_hashes(location)
            _consolidated_file.read(location, verify=True)
    except FormatError as error:
        problems.append(td_core.Problem(name, "damaged", str(error)))
    return td_core.Report(str(location), 1, hashed, problems)
