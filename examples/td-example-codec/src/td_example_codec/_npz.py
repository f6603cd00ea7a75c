"""A file format for collections: an .npz file with a JSON header and one array per leaf."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from td_core import Encoded, Serializer, TensorCollection, decode, encode, join_value, split_value
from td_core.errors import CodecError, FormatError

HEADER = "td-example-codec.json"


class NpzSerializer(Serializer):
    """The format of ``save(td, path, format="npz")``, for all registered kinds of nodes.

    >>> NpzSerializer().name
    'npz'
    """

    name = "npz"
    suffixes = (".npz",)

    def save(self, data: TensorCollection, path: Path, *, compress: bool = False) -> TensorCollection:
        """Write a collection to one file, atomically: if writing fails, an old file is kept.

        Args:
            data: the collection.
            path: the file.
            compress: whether to compress the arrays.
        """
        encoded = encode(data)
        header = {
            "nodes": encoded.nodes,
            "dtypes": [str(leaf.dtype) for leaf in encoded.leaves],
            "shapes": [list(leaf.shape) for leaf in encoded.leaves],
            "values": [split_value(value) for value in encoded.values],
        }
        for key_path, leaf in zip(encoded.leaf_paths(), encoded.leaves, strict=True):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise CodecError(f"cannot store {key_path} in an .npz file: it is not a dense tensor")
        # Store bytes, since numpy lacks some dtypes of torch.
        leaves = [leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for leaf in encoded.leaves]
        arrays = {str(position): leaf.numpy() for position, leaf in enumerate(leaves)}
        arrays[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        partial = path.with_name(
            f"{path.name}.partial"
        )  # the next save replaces the file that a killed one left
        try:
            with partial.open("wb") as file:
                (np.savez_compressed if compress else np.savez)(file, **arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
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
                header = json.loads(arrays[HEADER].tobytes())
                leaves = [
                    _leaf(arrays[str(position)], dtype, shape)
                    for position, (dtype, shape) in enumerate(
                        zip(header["dtypes"], header["shapes"], strict=True)
                    )
                ]
            values = [join_value(plain, types) for plain, types in header["values"]]
            loaded = decode(Encoded(header["nodes"], leaves, values))
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, RuntimeError) as error:
            raise FormatError(f"{str(path)!r} is damaged, or no .npz file of this format: {error}") from error
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


def _leaf(array: Any, dtype: str, shape: list[int]) -> torch.Tensor:
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or array.dtype != np.uint8:
        raise ValueError(f"unknown dtype {dtype!r}")
    if math.prod(shape) * found.itemsize != array.size:
        raise ValueError(f"{array.size} bytes for the shape {shape} of {dtype}")
    # torch cannot view an empty array as another dtype.
    return (
        torch.from_numpy(array).view(found).reshape(shape) if array.size else torch.empty(shape, dtype=found)
    )
