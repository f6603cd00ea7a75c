"""Look at a save without loading it: the tree of its nodes and leaves, and a check of its structure and hashes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from td_core import Problem, Report, Tree
from td_core.array_formats import build_collection, list_names, restore
from td_core.errors import FormatError, TensorDictError
from td_core.spi import as_buffer, describe_table, make_checksum, make_reporter, show_path

from ._datasets import describe_storage, find_array
from ._read_h5 import Progress, Save, open_save, read_arrays_of

__all__ = ["inspect", "verify"]


def inspect(path: str | os.PathLike[str]) -> Tree:
    """Return the tree of a save from its header, and from how its datasets are stored.

    Raises:
        FormatError: the header is damaged.

    >>> from td_hdf5 import save
    >>> _ = save(TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.arange(1)}}), "data.h5")
    >>> print(inspect("data.h5"))
    data.h5: TensorDict [], 32 bytes
        a: leaf [3, 2] torch.float32, 24 bytes
        n: TensorDict [], 8 bytes
            b: leaf [1] torch.int64, 8 bytes
    """
    with open_save(path) as save:
        return describe_table(
            save.table, os.path.basename(os.fspath(path)), lambda key, place: _describe_leaf(save, key, place)
        )


def _describe_leaf(save: Save, key: str, place: Any) -> Tree:
    """Describe a leaf by its datasets. Those that are shared by several leaves count for each of them."""
    names = list_names(place)
    where = [f"/{name}: {_describe_storage(save, name)}" for name in names]
    leaf = Tree(key, "leaf", nbytes=sum(save.arrays[name].nbytes for name in names), place=", ".join(where))
    if isinstance(place, dict) and not {"nested", "jagged"}.isdisjoint(place):
        leaf.kind = "nested leaf"
        values = place["jagged"].get("values") if "jagged" in place else place["nested"]
        leaf.dtype = str(save.arrays[list_names(values)[0]].dtype)
        return leaf
    try:
        found = restore(place, lambda name: _make_empty(save, name))
    except (FormatError, KeyError) as error:
        raise FormatError(f"{save.path}: {key!r}: {error}") from error
    leaf.shape, leaf.dtype = list(found.shape), str(found.dtype)
    if isinstance(place, list):  # one part of a stack
        leaf.nbytes = found.numel() * found.element_size()
    return leaf


def _describe_storage(save: Save, name: str) -> str:
    if name in save.loaded:
        return "field of a dataset"
    return describe_storage(find_array(save.file, name, save.path)[0])


def _make_empty(save: Save, name: str) -> torch.Tensor:
    array = save.arrays[name]
    return torch.empty(array.shape, dtype=array.dtype, device="meta")


def verify(path: str | os.PathLike[str], *, progress: Progress = False) -> Report:
    """Check the structure of a save, read every dataset, and compare its hash if hashes were stored (``checksums=True``).

    Args:
        path: the file.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Returns:
        A report that lists the datasets that differ.

    Raises:
        FileNotFoundError: there is no file at ``path``.

    >>> from td_hdf5 import save
    >>> _ = save(TensorDict({"a": torch.ones(2)}), "data.h5", checksums=True)
    >>> print(verify("data.h5"))
    data.h5: 1 files, 1 hashes, 0 problems
    """
    shown = os.fspath(path)
    try:
        with open_save(path) as save:
            digests, algorithm = _read_hashes(save)
            report = make_reporter(progress, sum(array.nbytes for array in save.arrays.values()), "verify")
            problems = [
                problem
                for name in save.arrays
                for problem in _check_dataset(save, name, digests, algorithm, report)
            ]
            if not problems:
                build_collection(
                    save.table,
                    save.path,
                    lambda name: read_arrays_of(save, [name], True, 0, lambda count: None)[name],
                )
    except FileNotFoundError:
        raise
    except TensorDictError as error:
        return Report(shown, 1, 0, [Problem(os.path.basename(shown), "damaged", str(error))])
    return Report(shown, 1, len(digests), problems)


def _read_hashes(save: Save) -> tuple[dict[str, str], str]:
    """Return the stored hash of each dataset, and the name of the algorithm."""
    if save.hashes is None:
        return {}, "crc32"
    digests = save.hashes.get("datasets") if isinstance(save.hashes, dict) else None
    if not isinstance(digests, dict) or digests.keys() != save.arrays.keys():
        raise FormatError(f"{save.path}: the hashes of its header are damaged")
    return digests, str(save.hashes.get("algorithm"))


def _check_dataset(
    save: Save, name: str, digests: dict[str, str], algorithm: str, report: Callable[[int], None]
) -> list[Problem]:
    try:
        array = read_arrays_of(save, [name], True, 0, lambda count: None)[name]
    except FormatError as error:
        return [
            Problem(f"{os.path.basename(save.path)}: {name}", "damaged", f"{_find_keys(save, name)}: {error}")
        ]
    report(array.nbytes)
    if name not in digests:
        return []
    checksum = make_checksum(algorithm)
    checksum.update(as_buffer(array))
    digest = str(checksum.hexdigest())
    if digest == digests[name]:
        return []
    detail = f"the hash of {_find_keys(save, name)} is {digest}, {digests[name]} was saved"
    return [Problem(f"{os.path.basename(save.path)}: {name}", "damaged", detail)]


def _find_keys(save: Save, name: str) -> str:
    """Return the key paths of the leaves that a dataset belongs to, for messages."""
    paths = zip(save.table.leaves, save.table.leaf_paths(members=False), strict=True)
    return ", ".join(dict.fromkeys(show_path(path) for place, path in paths if name in list_names(place)))
