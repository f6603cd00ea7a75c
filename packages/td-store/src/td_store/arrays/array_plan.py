"""Plan a save: the arrays of a collection under the names that they get in a store, and the header."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from td_core.errors import CodecError
from td_core.spi import Encoded, check_whole, dump_table, encode, identify_view, show_path

from .array_rows import Row, Stack, find_stacks, list_array_paths
from .places import Piece, Place, as_storable, get_stored, split_leaf
from .text_columns import TextColumn, add_texts, take_texts


@dataclass(slots=True)
class PlannedArray:
    """An array to write, and the tensors that it is stacked from.

    Attributes:
        dtype: one of the dtypes of the format.
        shape: shape of the array.
        parts: one tensor; of a stack, several; of leaves that share an array, each of them.
        dim: the stack dim, or None.
        dtypes: the dtypes of the format.
        batch_names: names of the leading dims that are batch dims; None for a dim without a name.
        path: keys of the array, without those of hidden members.
        logical: dtype of the leaf, if the format lacks it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Tensor]
    dim: int | None = None
    dtypes: Container[torch.dtype] = ()
    batch_names: list[str | None] = field(default_factory=list)
    path: tuple[str, ...] = ()
    logical: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> list[Tensor]:
        """Return the elements as contiguous CPU tensors of the dtype, one after the other."""
        if self.dim:
            stacked = torch.stack([part.detach().cpu() for part in self.parts], self.dim)
            return [as_storable(stacked, self.dtypes)]
        return [as_storable(part, self.dtypes) for part in self.parts]


@dataclass(slots=True)
class ArrayPlan:
    """What a save writes.

    Attributes:
        arrays: the arrays by name, in the order of the tree.
        header: the header of :meth:`td_core.spi.Encoded.make_header`, with ``check``, see :func:`compute_check`.
        nodes: path of each node, without the names of hidden members.
        leaves: the leaves.
        stacks: the leaves that are stored as one array, by the position of the first one.
        homes: the nodes of lazy stacks whose leaves are so stored.
        texts: the arrays of strings by name.
    """

    arrays: dict[str, PlannedArray]
    header: dict[str, Any]
    nodes: list[tuple[str, ...]]
    leaves: list[Tensor]
    stacks: dict[int, Stack]
    homes: set[int]
    texts: dict[str, TextColumn] = field(default_factory=dict)


def make_array_plan(
    data: Any,
    dtypes: Container[torch.dtype],
    join: Callable[[tuple[str, ...]], str],
    *,
    blank: bool = False,
    reserved: Iterable[str] = (),
    separator: str | None = None,
    pack: int = 0,
    texts: bool = False,
) -> ArrayPlan:
    """Plan the save of a collection, without reading the elements of a leaf.

    Args:
        data: the collection.
        dtypes: the dtypes that the format can hold. Others are stored as integers of the same width, or as pairs.
        join: takes the keys of an array, and returns its name. A name that is taken gets a number.
        blank: elements are not saved.
        reserved: names that no array gets.
        separator: separates the names of groups in the name of an array, for a format in which no array is a group, too.
        pack: leaves of fewer bytes share one array for each dtype.
        texts: text columns are arrays of strings, instead of values in the header.

    Raises:
        CodecError: a value or leaf cannot be stored; the message has its key path.

    >>> plan = make_array_plan(TensorDict({"a": 1, "n": {"b": 2}}), {torch.int64}, ".".join)
    >>> list(plan.arrays), plan.header["leaves"]
    (['a', 'n.b'], ['a', 'n.b'])
    """
    encoded = encode(data)
    _check_memory(encoded, blank)
    if blank:  # tied and expanded leaves are written independently later
        encoded.leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in encoded.leaves]
    nodes, leaves = encoded.nodes, encoded.leaves
    pieces = _split_leaves(encoded, dtypes)
    identities = _identify_pieces([parts for parts, _ in pieces])
    counts = Counter(chain.from_iterable(identities))
    # A tied leaf is not stacked with others, so that it is stored once.
    whole_once = [
        _is_whole(parts, leaf, dtypes) and counts[identity[0]] == 1
        for (parts, _), leaf, identity in zip(pieces, leaves, identities, strict=True)
    ]
    stacks, homes = find_stacks(nodes, leaves, whole_once)
    paths, ends = list_array_paths(nodes, stacks, homes)
    packs = _find_packs(leaves, [p for p in ends if p not in stacks and whole_once[p]], pack)
    packed: set[int] = set().union(*packs.values())
    free = FreeNames(reserved, separator)
    builder = _ArrayBuilder(leaves, dtypes, free, join)
    for position, (owner, path) in ends.items():
        dims = _name_batch_dims(nodes[owner])
        if position in stacks:
            builder.add_stack(stacks[position], dims, path)
        elif position not in packed:
            builder.add_leaf(position, *pieces[position], identities[position], dims, path)
    for dtype, members in packs.items():
        builder.add_pack(dtype, members)
    header = dump_table(encoded, builder.places)
    header["check"] = compute_check((name, item.shape) for name, item in builder.arrays.items())
    columns: dict[str, TextColumn] = {}
    if texts:
        positions: dict[str, int] = {}

        def choose(position: int) -> str:
            name = free.choose(join(paths[position]))
            positions[name] = position
            return name

        columns = take_texts(nodes, header["values"], choose)
        for name, column in columns.items():
            column.path = paths[positions[name]]
    return ArrayPlan(builder.arrays, add_texts(header), paths, leaves, stacks, homes, columns)


class _ArrayBuilder:
    """Adds the arrays of a plan one after the other.

    Attributes:
        arrays: the arrays by name.
        places: the place of each leaf.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        dtypes: Container[torch.dtype],
        names: FreeNames,
        join: Callable[[tuple[str, ...]], str],
    ) -> None:
        self.arrays: dict[str, PlannedArray] = {}
        self.places: list[Place] = [None] * len(leaves)
        self._leaves, self._dtypes, self._names, self._join = leaves, dtypes, names, join
        #: Names of the arrays of tied leaves, by what they have in common.
        self._known: dict[object, str] = {}

    def add_stack(self, stack: Stack, dims: list[str | None], path: tuple[str, ...]) -> None:
        """Add an array for the leaves of the members of a lazy stack."""
        parts = [self._leaves[member] for member in stack.leaves]
        chosen = self._names.choose(self._join(path))
        self.arrays[chosen] = _stack(parts, stack.dim, self._dtypes, dims, path)
        for i, member in enumerate(stack.leaves):
            self.places[member] = [chosen, stack.dim, i]

    def add_leaf(
        self,
        position: int,
        pieces: list[Piece],
        place: Callable[[list[str]], Place],
        identities: list[object],
        dims: list[str | None],
        path: tuple[str, ...],
    ) -> None:
        """Add the arrays of a leaf, except those that a tied leaf has added."""
        placed = []
        for piece, key in zip(pieces, identities, strict=True):
            if key not in self._known:
                own = _extend_path(path, piece.ending)
                self._known[key] = self._names.choose(self._join(own))
                whole = piece.tensor is self._leaves[position]
                self.arrays[self._known[key]] = _store(piece.tensor, self._dtypes, dims if whole else [], own)
            placed.append(self._known[key])
        self.places[position] = place(placed)

    def add_pack(self, dtype: torch.dtype, members: dict[int, Tensor]) -> None:
        """Add an array that leaves share."""
        path = (f"packed_{str(dtype).removeprefix('torch.')}",)
        chosen, begin = self._names.choose(self._join(path)), 0
        for position, leaf in members.items():
            self.places[position] = {"packed": chosen, "begin": begin, "shape": list(leaf.shape)}
            begin += leaf.numel()
        self.arrays[chosen] = PlannedArray(
            dtype, (begin,), list(members.values()), None, self._dtypes, path=path
        )


def _is_whole(pieces: list[Piece], leaf: Tensor, dtypes: Container[torch.dtype]) -> bool:
    """Return True if a leaf is stored as one array of its dtype."""
    return leaf.dtype in dtypes and pieces[0].tensor is leaf


def _extend_path(path: tuple[str, ...], ending: str) -> tuple[str, ...]:
    """Append the ending of a piece to the last key of a path."""
    if path:
        return (*path[:-1], path[-1] + ending)
    return (ending,) if ending else ()


def _find_packs(
    leaves: Sequence[Tensor], positions: Iterable[int], limit: int
) -> dict[torch.dtype, dict[int, Tensor]]:
    """Return the leaves of fewer bytes that share an array, by its dtype and their position; at least two for each."""
    found: dict[torch.dtype, dict[int, Tensor]] = {}
    for position in positions:
        if leaves[position].nbytes < limit:
            found.setdefault(leaves[position].dtype, {})[position] = leaves[position]
    return {dtype: members for dtype, members in found.items() if len(members) > 1}


def compute_check(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Compute a checksum of names and shapes, by which a save that another program rewrote is noticed.

    >>> compute_check([("a", [2]), ("b", (3,))]) == compute_check([("b", [3]), ("a", [2])])
    True
    """
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
        if not blank:
            try:
                check_whole(leaf)
            except CodecError as error:
                path = show_path(encoded.leaf_paths(members=False)[position])
                raise CodecError(f"cannot save {path}: {error}") from None


def _split_leaves(
    encoded: Encoded, dtypes: Container[torch.dtype]
) -> list[tuple[list[Piece], Callable[[list[str]], Place]]]:
    result = []
    for position, leaf in enumerate(encoded.leaves):
        try:
            result.append(split_leaf(leaf, dtypes))
        except CodecError as error:
            path = encoded.leaf_paths(members=False)[position]
            raise CodecError(f"cannot save {show_path(path)}: {error}") from error
    return result


def _identify_pieces(leaves: list[list[Piece]]) -> list[list[object]]:
    """Return a key for each piece of each leaf, equal for pieces that are the same view of the same memory."""
    pieces = list(chain.from_iterable(leaves))
    keys: list[object] = [_get_address(piece.tensor) for piece in pieces]
    counts = Counter(keys)
    for position, piece in enumerate(pieces):
        if counts[keys[position]] > 1:
            keys[position] = identify_view(piece.tensor)
    remaining = iter(keys)
    return [list(islice(remaining, len(parts))) for parts in leaves]


def _get_address(tensor: Tensor) -> int | str:
    """Return the address of the first element, or the object itself if it has no memory of its own."""
    try:
        return (tensor.numel() and tensor.data_ptr()) or f"at {id(tensor)}"
    except RuntimeError:
        return f"at {id(tensor)}"


def _name_batch_dims(row: Row) -> list[str | None]:
    """Return the names of the leading dims of the leaves of a node, which are its batch dims if it has a batch size."""
    meta = row["meta"]
    size = meta.get("batch_size") or ()
    return list(meta.get("names") or [None] * len(size))[: len(size)]


def _store(
    tensor: Tensor, dtypes: Container[torch.dtype], dims: list[str | None], path: tuple[str, ...]
) -> PlannedArray:
    dtype, shape = get_stored(tensor.dtype, tuple(tensor.shape), dtypes)
    logical = None if dtype == tensor.dtype else tensor.dtype
    return PlannedArray(dtype, shape, [tensor], None, dtypes, dims, path, logical)


def _stack(
    parts: list[Tensor],
    dim: int,
    dtypes: Container[torch.dtype],
    dims: list[str | None],
    path: tuple[str, ...],
) -> PlannedArray:
    shape = list(parts[0].shape)
    shape.insert(dim, len(parts))
    dims.insert(dim, None)
    return PlannedArray(parts[0].dtype, tuple(shape), parts, dim, dtypes, dims, path)


class FreeNames:
    """The names of the arrays of a save: a free name for each wanted one."""

    def __init__(self, reserved: Iterable[str], separator: str | None) -> None:
        self._separator = separator
        self._taken = set(reserved)
        self._groups: set[str] = set()
        self._next: dict[str, int] = {}

    def choose(self, wanted: str) -> str:
        """Return the wanted name, or if it is taken, the name with a number."""
        if not wanted.isascii():  # UTF-8 cannot store a surrogate without its pair
            wanted = wanted.encode("utf-8", "backslashreplace").decode()
        if not self._taken.isdisjoint(self._list_groups(wanted)):  # a group cannot have the name of an array
            wanted = wanted.replace(str(self._separator), "#")
        name, number = wanted, self._next.get(wanted, 1)
        while name in self._taken or name in self._groups:
            name, number = f"{wanted}#{number}", number + 1
        self._next[wanted] = number
        self._taken.add(name)
        self._groups.update(self._list_groups(name))
        return name

    def _list_groups(self, name: str) -> list[str]:
        """Return the names of the groups that an array is in."""
        if self._separator is None:
            return []
        parts = name.split(self._separator)
        return [self._separator.join(parts[:length]) for length in range(1, len(parts))]
