"""Look at a group without loading it: the tree of its nodes and leaves, and a check of its metadata and chunks."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from td_core import Problem, Report, Tree
from td_core.array_formats import Place, build_collection, list_names, restore
from td_core.errors import FormatError, TensorDictError
from td_core.spi import describe_table, make_reporter

from ._array_documents import ArrayInfo, make_blank, parse_json
from ._chunk_access import map_raw, read_whole
from ._group_header import GroupContent
from ._read_collections import open_group
from ._zarr_objects import LocalObjects

__all__ = ["inspect", "verify"]


def inspect(location: Any, *, storage_options: dict[str, Any] | None = None) -> Tree:
    """Return the tree of a group from its metadata.

    Raises:
        FormatError: the metadata is damaged.

    >>> from td_zarr import save
    >>> _ = save(TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.arange(1)}}), "data.zarr")
    >>> print(inspect("data.zarr"))
    data.zarr: TensorDict [], 32 bytes
        a: leaf [3, 2] torch.float32, 24 bytes
        n: TensorDict [], 8 bytes
            b: leaf [1] torch.int64, 8 bytes
    """
    with open_group(location, storage_options) as group:
        name = os.path.basename(group.where.rstrip("/")) or group.where
        return describe_table(group.table, name, partial(_describe_leaf, group))


def _describe_leaf(group: GroupContent, key: str, place: Place) -> Tree:
    """Describe a leaf by its arrays. Those that are shared by several leaves count for each of them."""
    infos = [group.arrays[name] for name in list_names(place) if name in group.arrays]
    leaf = Tree(
        key, "leaf", nbytes=sum(info.nbytes for info in infos), place=", ".join(info.name for info in infos)
    )
    if isinstance(place, dict) and not {"jagged", "nested"}.isdisjoint(place):
        leaf.kind, leaf.dtype = "nested leaf", str(infos[0].dtype) if infos else None
        return leaf
    try:
        found = restore(place, lambda name: make_blank(group.arrays[name]))
    except (FormatError, KeyError) as error:
        raise FormatError(f"{group.where}: {key!r}: {error}") from error
    leaf.shape, leaf.dtype = list(found.shape), str(found.dtype)
    if isinstance(place, list):  # one part of a stack
        leaf.nbytes = found.numel() * found.element_size()
    return leaf


def verify(location: Any, *, storage_options: dict[str, Any] | None = None, progress: Any = False) -> Report:
    """Check a group: its metadata, that every chunk exists and can be read, and the checksums of chunks that have them.

    Args:
        location: a directory, a zip file, a URL, or a store or group of zarr.
        storage_options: options of the file system of a URL.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Returns:
        A report that lists the arrays that are damaged.

    Raises:
        FileNotFoundError: there is nothing at a local path.

    >>> from td_zarr import save
    >>> _ = save(TensorDict({"a": torch.ones(2)}), "data.zarr", checksums=True)
    >>> verify("data.zarr").ok
    True
    """
    try:
        with open_group(location, storage_options) as group:
            report = make_reporter(progress, sum(info.nbytes for info in group.arrays.values()), "verify")
            problems = [*_check_documents(group), *_check_chunks(group, report)]
            if not problems:
                build_collection(group.table, group.where, lambda name: make_blank(group.arrays[name]))
            hashed = sum(
                '"crc32c"' in repr(info.document["codecs"]).replace("'", '"') for info in _list_new(group)
            )
            return Report(group.where, len(group.arrays) + 1, hashed, problems)
    except TensorDictError as error:
        return Report(str(location), 1, 0, [Problem("zarr.json", "damaged", str(error))])


def _list_new(group: GroupContent) -> list[ArrayInfo]:
    return [info for info in group.arrays.values() if "codecs" in info.document]


def _check_documents(group: GroupContent) -> list[Problem]:
    """Compare the metadata of each array with the copy in the root, by which td reads it."""
    problems = []
    names = list(group.arrays) if group.is_ours else []
    for name, content in zip(
        names, group.objects.get_many([f"{name}/zarr.json" for name in names]), strict=True
    ):
        file = f"{name}/zarr.json"
        if content is None:
            problems.append(Problem(file, "missing", "other programs cannot open the array"))
            continue
        try:
            found = parse_json(content, file)
        except FormatError as error:
            problems.append(Problem(file, "damaged", str(error)))
            continue
        if {**found, "attributes": None} != {**group.arrays[name].document, "attributes": None}:
            problems.append(Problem(file, "damaged", "it differs from the metadata in the root of the group"))
    return problems


def _check_chunks(group: GroupContent, report: Any) -> list[Problem]:
    problems = []
    for info in group.arrays.values():
        try:
            if info.raw is not None and group.is_strict and isinstance(group.objects, LocalObjects):
                map_raw(group.objects, info)
                report(info.nbytes)
            elif info.dtype is not None:
                read_whole(group.objects, [info], strict=group.is_strict, report=report)
        except FormatError as error:
            kind = "missing" if "is missing" in str(error) else "damaged"
            problems.append(Problem(info.name, kind, str(error)))
    return problems
