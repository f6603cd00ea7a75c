"""Look at a save without loading it: the tree of its nodes and leaves, and a check of its structure and hashes."""

from __future__ import annotations

import os
from functools import partial

import torch

from td_core import Report, Tree
from td_core.spi import Serializer
from td_core.typing import Progress
from td_store.arrays import check_arrays, describe_arrays, list_texts, read_hashes, report_damage

from ._datasets import describe_storage, find_array
from ._h5_files import Location, find_filename
from ._read_h5 import Save, open_save, read_arrays_of
from ._text_datasets import read_text_dataset


def inspect(path: Location) -> Tree:
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
        return describe_arrays(
            save.read_texts(save.table), save.path, save.make_blank, partial(_locate, save)
        )


def _locate(save: Save, name: str) -> str:
    if name in save.loaded:
        return f"/{name}: field of a dataset"
    return f"/{name}: {describe_storage(find_array(save.file, name, save.path)[0])}"


def verify(path: Location, *, progress: Progress = False) -> Report:
    """Check the structure of a save, read every dataset, and compare its hash if hashes were stored (``checksums=True``).

    Args:
        path: the file, also a URL or an object store, or an open ``h5py.File`` or ``h5py.Group``.
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
    path = Serializer.find_objects(path) or path
    shown = find_filename(path)
    return report_damage(shown, os.path.basename(shown), partial(_check, path, progress))


def _check(path: Location, progress: Progress) -> Report:
    with open_save(path) as save:
        texts = list_texts(save.table)
        sizes = {name: array.nbytes for name, array in save.arrays.items()} | dict.fromkeys(texts, 0)
        hashes = read_hashes(save.hashes, "datasets", sizes, save.path)

        def read(name: str) -> torch.Tensor:
            if name in texts:
                content = "\0".join(read_text_dataset(save.file, texts[name], save.path)).encode()
                return torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)[: len(content)]
            if save.remote is not None and name not in save.loaded:
                source = save.remote.make_source(name, save.arrays[name], name)
                whole: torch.Tensor = source.read(tuple(slice(0, n, 1) for n in source.shape))
                return whole
            return read_arrays_of(save, [name], True, 0, lambda count: None)[name]

        def locate(name: str) -> str:
            return f"{os.path.basename(save.path)}: {name}"

        problems = check_arrays(
            save.read_texts(save.table),
            save.path,
            sizes,
            read,
            hashes=hashes,
            locate=locate,
            progress=progress,
        )
    return Report(save.path, 1, len(hashes[0]), problems)
