"""Plan a save: the tensors of a collection under the names that they get in the file, and the ``td`` header."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from td_core import CodecError, Encoded, encode
from td_core.spi import dump_table, show_path

from ._format import NAMES, Array
from ._leaves import Piece, Place, as_storable, get_stored, split_leaf
from ._reference import describe
from ._tensor_names import find_stacks, list_name_paths

__all__ = ["Plan", "Stored", "compute_check", "make_plan"]


@dataclass(slots=True)
class Stored:
    """A tensor to write: its row in the header of the file, and the dense tensors that it is stacked from."""

    array: Array
    parts: list[Tensor]
    dim: int | None = None

    def read(self) -> list[Tensor]:
        """Return the elements as tensors on the CPU, one after the other, with the dtype of the file."""
        if self.dim:
            return [as_storable(torch.stack([part.detach().cpu() for part in self.parts], self.dim))]
        return [as_storable(part) for part in self.parts]


@dataclass(slots=True)
class Plan:
    """What a save writes.

    Attributes:
        stored: the tensors by name, in the order of the tree; their positions in a file are not yet set.
        header: the ``td`` header.
        reference: the ``tensordict`` header, or None if it cannot describe the collection.
    """

    stored: dict[str, Stored]
    header: dict[str, Any]
    reference: dict[str, Any] | None

    def make_metadata(self, hashes: dict[str, Any] | None = None) -> dict[str, str]:
        """Return the metadata of a file: both headers as JSON."""
        header = {**self.header, **({"hashes": hashes} if hashes else {})}
        metadata = {"format": "pt"}
        if self.reference is not None:
            metadata["tensordict"] = json.dumps(self.reference)
            header["beside"] = zlib.crc32(metadata["tensordict"].encode())
        metadata["td"] = json.dumps(header, separators=(",", ":"))
        return metadata


def make_plan(data: Any, *, blank: bool = False) -> Plan:
    """Plan the save of a collection, without reading the elements of a leaf. With ``blank``, elements are not saved.

    Raises:
        CodecError: a value or leaf cannot be stored; the message has its key path.
    """
    encoded = encode(data)
    _check_memory(encoded, blank)
    if blank:  # tied and expanded leaves are written independently later
        encoded.leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in encoded.leaves]
    nodes, leaves = encoded.nodes, encoded.leaves
    pieces = _split_leaves(encoded)
    keys = iter(_identify_pieces([piece for parts, _ in pieces for piece in parts]))
    identities = [[next(keys) for _ in parts] for parts, _ in pieces]
    counts = Counter(chain.from_iterable(identities))
    # A tied leaf is not stacked with others, so that it is stored once.
    free = [
        leaf.dtype in NAMES and parts[0].tensor is leaf and counts[identity[0]] == 1
        for (parts, _), leaf, identity in zip(pieces, leaves, identities, strict=True)
    ]
    stacks, homes = find_stacks(nodes, leaves, free)
    names = _Names()
    stored: dict[str, Stored] = {}
    places: list[Place] = [None] * len(leaves)
    known: dict[Any, str] = {}
    ends = list_name_paths(nodes, stacks, homes)
    for position, name in ends.items():
        if position in stacks:
            stack = stacks[position]
            parts = [leaves[member] for member in stack.leaves]
            chosen = names.choose(name)
            stored[chosen] = _stack(parts, stack.dim)
            for i, member in enumerate(stack.leaves):
                places[member] = [chosen, stack.dim, i]
            continue
        parts_, place = pieces[position]
        placed = []
        for piece, key in zip(parts_, identities[position], strict=True):
            if key not in known:
                known[key] = names.choose(name + piece.ending)
                stored[known[key]] = _store(piece.tensor)
            placed.append(known[key])
        places[position] = place(placed)
    header = dump_table(encoded, places)
    header["check"] = compute_check((name, item.array.shape) for name, item in stored.items())
    return Plan(stored, header, describe(header, leaves, stacks))


def compute_check(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Compute a checksum of names and shapes, by which a file that another program rewrote is noticed."""
    return zlib.crc32(ascii(sorted((name, tuple(shape)) for name, shape in shapes)).encode())


def _check_memory(encoded: Encoded, blank: bool) -> None:
    """Raise CodecError for leaves without elements, or with ``blank`` for those whose shape does not follow from sizes."""
    for position, leaf in enumerate(encoded.leaves):
        if leaf.is_nested if blank else leaf.device.type == "meta":
            path = show_path(encoded.leaf_paths(members=False)[position])
            if blank:
                raise CodecError(
                    f"cannot create {path}: the sizes of a nested tensor are a part of its elements"
                )
            raise CodecError(f"cannot save {path}: a tensor on the device 'meta' has no elements to save")


def _split_leaves(encoded: Encoded) -> list[tuple[list[Piece], Callable[[list[str]], Place]]]:
    result = []
    for position, leaf in enumerate(encoded.leaves):
        try:
            result.append(split_leaf(leaf))
        except CodecError as error:
            path = encoded.leaf_paths(members=False)[position]
            raise CodecError(f"cannot save {show_path(path)}: {error}") from error
    return result


def _identify_pieces(pieces: list[Piece]) -> list[Any]:
    """Return a key for each piece, equal for pieces that are the same view of the same memory."""
    keys: list[Any] = [_get_address(piece.tensor) for piece in pieces]
    counts = Counter(keys)
    for position, piece in enumerate(pieces):
        if counts[keys[position]] > 1:
            tensor = piece.tensor
            bits = tensor.is_conj(), tensor.is_neg()
            keys[position] = (
                keys[position],
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.device,
                bits,
            )
    return keys


def _get_address(tensor: Tensor) -> Any:
    """Return the address of the first element, or the object itself if it has no memory of its own."""
    try:
        return (tensor.numel() and tensor.data_ptr()) or f"at {id(tensor)}"
    except RuntimeError:
        return f"at {id(tensor)}"


def _store(tensor: Tensor) -> Stored:
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if dtype not in NAMES:
        dtype, shape = get_stored(dtype, shape)
    return Stored(Array(NAMES[dtype], shape, 0, tensor.numel() * tensor.dtype.itemsize), [tensor])


def _stack(parts: list[Tensor], dim: int) -> Stored:
    shape, dtype = list(parts[0].shape), parts[0].dtype
    shape.insert(dim, len(parts))
    return Stored(
        Array(NAMES[dtype], tuple(shape), 0, torch.Size(shape).numel() * dtype.itemsize), parts, dim
    )


class _Names:
    """The names of the tensors of a file: a free name for each wanted one."""

    def __init__(self) -> None:
        self._taken = {"__metadata__"}  # the format reserves this name
        self._next: dict[str, int] = {}

    def choose(self, wanted: str) -> str:
        """Return the wanted name, or if it is taken, the name with a number."""
        if not wanted.isascii():  # UTF-8 cannot store a surrogate without its pair
            wanted = wanted.encode("utf-8", "backslashreplace").decode()
        name, number = wanted, self._next.get(wanted, 1)
        while name in self._taken:
            name, number = f"{wanted}#{number}", number + 1
        self._next[wanted] = number
        self._taken.add(name)
        return name
