"""Look at a group without loading it: the tree of its nodes and leaves, and a check of its metadata and chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from td_core import Problem, Report, Tree
from td_core.errors import FormatError
from td_core.spi import Serializer
from td_core.typing import Progress
from td_store.arrays import check_arrays, describe_arrays, report_damage

from ._array_documents import parse_json
from ._chunk_access import map_raw, read_whole
from ._group_header import GroupContent, list_documents, read_root
from ._local_objects import LocalObjects
from ._read_collections import open_group


def inspect(location: object, *, storage_options: Mapping[str, object] | None = None) -> Tree:
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
        return describe_arrays(group.read_texts(group.table), group.where, group.make_blank, str)


def verify(
    location: object, *, storage_options: Mapping[str, object] | None = None, progress: Progress = False
) -> Report:
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
    place = Serializer.find_objects(location, storage_options) or location
    check = partial(_check, place, progress)
    return report_damage(str(place), "zarr.json", check)


def _check(location: object, progress: Progress) -> Report:
    with open_group(location) as group:
        sizes = {name: info.nbytes for name, info in group.arrays.items() if info.dtype is not None}
        problems = _check_documents(group)
        problems += check_arrays(
            group.read_texts(group.table), group.where, sizes, partial(_read, group), progress=progress
        )
        infos = [*group.arrays.values(), *group.texts.values()]
        hashed = sum('"crc32c"' in json.dumps(info.document.get("codecs")) for info in infos)
        return Report(group.where, len(infos) + 1, hashed, problems)


def _read(group: GroupContent, name: str) -> Tensor:
    info = group.arrays[name]
    if info.raw is not None and group.is_strict and isinstance(group.objects, LocalObjects):
        return map_raw(group.objects, info)
    return read_whole(group.objects, [info], strict=group.is_strict, report=lambda size: None)[name]


#: What differs between the metadata of an array or group and its copy in the root.
_OWN = {"attributes": None, "consolidated_metadata": None}


def _check_documents(group: GroupContent) -> list[Problem]:
    """Compare the metadata of each array and group with the copy in the root, by which td reads it."""
    problems = []
    documents = list_documents(group.objects, read_root(group.objects)) if group.is_ours else {}
    contents = group.objects.get_many([f"{name}/zarr.json" for name in documents])
    for (name, document), content in zip(documents.items(), contents, strict=True):
        file = f"{name}/zarr.json"
        if content is None:
            problems.append(Problem(file, "missing", "other programs cannot open the array"))
            continue
        try:
            found = parse_json(content, file)
        except FormatError as error:
            problems.append(Problem(file, "damaged", str(error)))
            continue
        if {**found, **_OWN} != {**document, **_OWN}:
            problems.append(Problem(file, "damaged", "it differs from the metadata in the root of the group"))
    return problems
