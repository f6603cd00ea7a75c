"""A file format for collections: an .npz file with a JSON header and one array per leaf."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from td_core import TensorCollection
from td_core.errors import CodecError, FormatError
from td_core.spi import STORABLE, Serializer, as_bytes, decode_table, dump_table, encode, load_table
from td_store.files import NewFile

HEADER = "td-example-codec.json"


class NpzSerializer(Serializer):
    """The format of ``save(td, path, format="npz")``, for all registered kinds of nodes.

    >>> NpzSerializer().name
    'npz'
    """

    name = "npz"
    suffixes = (".npz",)
    stores_kinds = True

    def save(self, data: TensorCollection, path: Path, *, compress: bool = False) -> TensorCollection:
        """Write a collection to one file, atomically: if writing fails, an old file is kept.

        Args:
            data: the collection.
            path: the file.
            compress: whether to compress the arrays.
        """
        encoded = encode(data)
        for key_path, leaf in zip(encoded.leaf_paths(), encoded.leaves, strict=True):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise CodecError(f"cannot store {key_path} in an .npz file: it is not a dense tensor")
        places = [[str(leaf.dtype), list(leaf.shape)] for leaf in encoded.leaves]
        # Store bytes, since numpy lacks some dtypes of torch.
        arrays = {str(i): as_bytes(leaf.cpu()).numpy() for i, leaf in enumerate(encoded.leaves)}
        arrays[HEADER] = np.frombuffer(json.dumps(dump_table(encoded, places)).encode(), np.uint8)
        with NewFile(path) as file, open(file.fd, "wb", closefd=False) as stream:
            (np.savez_compressed if compress else np.savez)(stream, **arrays)
            stream.flush()
            file.commit()
        return data

    def load(self, path: Path, *, device: torch.device | str | None = None) -> Any:
        """Load the collection saved at ``path``.

        Args:
            path: the file.
            device: device of the leaves.

        Raises:
            FormatError: the file is damaged or has another format.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                table = load_table(json.loads(arrays[HEADER].tobytes()), str(path))
                leaves = [_leaf(arrays[str(i)], *place) for i, place in enumerate(table.leaves)]
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, RuntimeError) as error:
            raise FormatError(f"{str(path)!r} is damaged, or no .npz file of this format: {error}") from error
        loaded = decode_table(table, leaves, str(path))
        return loaded if device is None else loaded.to(device)

    def detect(self, path: Path, head: bytes) -> bool:
        """Return True if ``path`` is a zip file with the header of this format; ``head`` is its first bytes."""
        if not head.startswith(b"PK"):
            return False
        try:
            with zipfile.ZipFile(path) as file:
                return f"{HEADER}.npy" in file.namelist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False


def _leaf(array: Any, name: str, shape: list[int]) -> torch.Tensor:
    dtype = STORABLE.get(name)
    if dtype is None or array.dtype != np.uint8 or math.prod(shape) * dtype.itemsize != array.size:
        raise ValueError(f"{array.size} bytes of {array.dtype} for the shape {shape} of {name!r}")
    # torch cannot view an empty array as another dtype.
    return (
        torch.from_numpy(array).view(dtype).reshape(shape) if array.size else torch.empty(shape, dtype=dtype)
    )
