"""Look at a save without loading it: the tree of its nodes and leaves, and a check of its structure and hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core import Problem, Report, Tree
from td_core.array_formats import Place, build_collection, list_names, restore
from td_core.errors import FormatError, TensorDictError
from td_core.spi import Progress, as_buffer, compute_digest, describe_table, make_reporter, show_path

from ._find_save import Save, open_save
from ._format import DTYPES, get_dtype

__all__ = ["inspect", "verify"]


def inspect(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Tree:
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
    with open_save(path, storage_options) as save:
        name = os.path.basename(os.fspath(path).rstrip("/"))
        return describe_table(save.table, name, partial(_describe_leaf, save))


def _describe_leaf(save: Save, key: str, place: Place) -> Tree:
    """Describe a leaf by its tensors. Those that are shared by several leaves count for each of them."""
    names = [name for name in list_names(place) if name in save.arrays]
    where = []
    size = 0
    for name in names:
        file, array = save.arrays[name]
        begin = file.header.start + array.begin
        where.append(f"{os.path.basename(file.path)}:{begin}-{begin + array.nbytes}")
        size += array.nbytes
    leaf = Tree(key, "leaf", nbytes=size, place=", ".join(where))
    if isinstance(place, dict) and "nested" in place:
        leaf.kind, leaf.dtype = "nested leaf", _get_dtype(save, names)
    elif isinstance(place, dict) and "jagged" in place:
        leaf.kind, leaf.dtype = "nested leaf", _get_dtype(save, list_names(place["jagged"].get("values")))
    else:
        try:
            found = restore(place, lambda name: _make_empty(save, name))
        except (FormatError, KeyError) as error:
            raise FormatError(f"{save.path}: {key!r}: {error}") from error
        leaf.shape, leaf.dtype = list(found.shape), str(found.dtype)
        if isinstance(place, list):  # one part of a stack
            leaf.nbytes = found.numel() * found.element_size()
    return leaf


def _get_dtype(save: Save, names: list[str]) -> str | None:
    return str(DTYPES.get(save.arrays[names[0]][1].dtype)) if names else None


def _make_empty(save: Save, name: str) -> Tensor:
    array = save.arrays[name][1]
    return torch.empty(array.shape, dtype=get_dtype(name, array), device="meta")


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
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
    shown = os.fspath(path)
    try:
        with open_save(path, storage_options) as save:
            files = {file.path for file, _ in save.arrays.values()} | {save.path}
            digests, algorithm = _read_hashes(save)
            problems = _check_hashes(save, digests, algorithm, progress)
            if not problems:
                build_collection(save.table, save.path, save.map)
    except FileNotFoundError:
        raise
    except TensorDictError as error:
        return Report(shown, 1, 0, [Problem(os.path.basename(shown), "damaged", str(error))])
    return Report(shown, len(files), len(digests), problems)


def _read_hashes(save: Save) -> tuple[dict[str, str], str]:
    """Return the stored hash of each tensor, and the name of the algorithm."""
    hashes = save.hashes
    if hashes is None:
        return {}, "crc32"
    digests = hashes.get("tensors") if isinstance(hashes, dict) else None
    if not isinstance(digests, dict) or digests.keys() != save.arrays.keys():
        raise FormatError(f"{save.path}: the hashes of its header are damaged")
    return digests, str(hashes.get("algorithm"))


def _check_hashes(
    save: Save, digests: Mapping[str, str], algorithm: str, progress: Progress
) -> list[Problem]:
    sizes = {name: save.arrays[name][1].nbytes for name in digests}
    report = make_reporter(progress, sum(sizes.values()), "verify")
    problems = []
    for name, wanted in digests.items():
        digest = compute_digest(algorithm, [as_buffer(save.map(name))])
        if digest != wanted:
            keys = _find_keys(save, name)
            detail = f"the hash of {keys} is {digest}, {wanted} was saved"
            problems.append(
                Problem(f"{os.path.basename(save.arrays[name][0].path)}: {name}", "damaged", detail)
            )
        report(sizes[name])
    return problems


def _find_keys(save: Save, name: str) -> str:
    """Return the key paths of the leaves that a tensor belongs to, for messages."""
    paths = save.table.leaf_paths(members=False)
    found = [
        show_path(path)
        for path, place in zip(paths, save.table.leaves, strict=True)
        if name in list_names(place)
    ]
    return ", ".join(dict.fromkeys(found))
