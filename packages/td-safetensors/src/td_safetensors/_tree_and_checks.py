"""Look at a save without loading it: the tree of its nodes and leaves, and a check of its structure and hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core import Report, Tree
from td_core.spi import Serializer
from td_core.typing import Progress
from td_store.arrays import check_arrays, describe_arrays, read_hashes, report_damage

from ._find_save import Save, open_save
from ._format import get_dtype


def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> Tree:
    """Return the tree of a save from its header alone; ``storage_options`` are arguments of fsspec, for a URL.

    Raises:
        FormatError: a header is damaged.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.arange(1)}}), "data.safetensors")
    >>> print(inspect("data.safetensors"))
    data.safetensors: TensorDict [], 32 bytes
        a: leaf [3, 2] torch.float32, 24 bytes
        n: TensorDict [], 8 bytes
            b: leaf [1] torch.int64, 8 bytes
    """
    objects = Serializer.find_objects(path, storage_options)
    with open_save(objects or path) as save:
        return describe_arrays(
            save.table, str(objects or path), partial(_make_blank, save), partial(_locate, save)
        )


def _locate(save: Save, name: str) -> str:
    file, array = save.arrays[name]
    begin = file.header.start + array.begin
    return f"{os.path.basename(file.path)}:{begin}-{begin + array.nbytes}"


def _make_blank(save: Save, name: str) -> Tensor:
    array = save.arrays[name][1]
    return torch.empty(array.shape, dtype=get_dtype(name, array), device="meta")


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Progress = False,
    storage_options: Mapping[str, object] | None = None,
) -> Report:
    """Check the structure of a save, and the hash of each tensor if hashes were stored (``checksums=True``).

    Args:
        path: the file, the index of shards, or their directory.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
        storage_options: arguments of the file system of fsspec, for a URL.

    Returns:
        A report that lists the tensors that differ.

    Raises:
        FileNotFoundError: there is no save at ``path``.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.ones(2)}), "data.safetensors", checksums=True)
    >>> print(verify("data.safetensors"))
    data.safetensors: 1 files, 1 hashes, 0 problems
    """
    place: Any = Serializer.find_objects(path, storage_options) or path
    shown = str(place)
    check = partial(_check, place, progress)
    return report_damage(shown, os.path.basename(shown), check)


def _check(path: object, progress: Progress) -> Report:
    with open_save(path) as save:
        files = {file.path for file, _ in save.arrays.values()} | {save.path}
        hashes = read_hashes(save.hashes, "tensors", save.arrays, save.path)
        sizes = {name: array.nbytes for name, (_, array) in save.arrays.items()}

        def locate(name: str) -> str:
            return f"{os.path.basename(save.arrays[name][0].path)}: {name}"

        problems = check_arrays(
            save.table, save.path, sizes, save.map, hashes=hashes, locate=locate, progress=progress
        )
    return Report(str(path), len(files), len(hashes[0]), problems)
