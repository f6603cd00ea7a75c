"""Build the collection of a table from the arrays of its places; one that is opened for writing refuses writes of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core.errors import FormatError, LockedError, TensorDictError, UnsupportedOperationError
from td_core.spi import (
    Encoded,
    Keeper,
    Node,
    decode,
    decode_table,
    encode,
    is_same_value,
    set_module,
    show_path,
    walk,
)

from .array_rows import Row
from .places import Place, restore


def build_collection(
    table: Encoded,
    where: str,
    read: Callable[[str], Tensor],
    device: torch.device | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Build the collection of a table from :func:`td_core.spi.load_table`.

    Args:
        table: the table, with places as leaves.
        where: the location of the save, for messages.
        read: returns the tensor of the array with a name.
        device: device label of the nodes; None is the CPU.
        strict: False builds a tensorclass that is not defined as the collection that it holds.

    Raises:
        FormatError: the table does not describe a collection, or contradicts the arrays.
    """
    return build_leaves(table, where, partial(restore, read=read), device, strict=strict)


def build_leaves(
    table: Encoded,
    where: str,
    make_leaf: Callable[[Place], Tensor],
    device: torch.device | None = None,
    *,
    strict: bool = True,
) -> Any:
    """Build the collection of a table as :func:`build_collection` does; ``make_leaf`` returns the leaf of a place."""
    leaves: list[Tensor] = []
    known: dict[str, Tensor] = {}
    for place in table.leaves:
        # Tied leaves are one tensor again.
        name = place if isinstance(place, str) else repr(place)
        try:
            if name not in known:
                known[name] = make_leaf(place)
            leaves.append(known[name])
        except (TensorDictError, KeyError, RecursionError) as error:
            path = table.leaf_paths(members=False)[len(leaves)]
            kind = UnsupportedOperationError if isinstance(error, UnsupportedOperationError) else FormatError
            raise kind(f"{where}: {show_path(path)}: {error}") from error
    rows = [{**row, "meta": _with_device(row, device)} for row in table.nodes]
    return decode_table(replace(table, nodes=rows), leaves, where, strict=strict)


def _with_device(row: Row, device: torch.device | None) -> dict[str, object]:
    """Return the meta of a node with another device label: leaves are on ``device``, or on the CPU."""
    meta: dict[str, object] = row["meta"]
    if device is not None and (row["kind"] == "TensorDict" or "device" in meta):
        return {**meta, "device": str(device)}
    return {**meta, "device": "cpu"} if isinstance(meta.get("device"), str) else meta


@set_module("td_store.arrays")
class RefusedValues(Keeper):
    """Refuses writes of values, which would not reach a save at ``where``."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def check(self, node: Node, values: Sequence[object]) -> None:
        """Raise LockedError."""
        raise LockedError(
            f"cannot write values into {self.where} in place, since only its leaves are opened for writing: clone() the "
            "collection, or save it again"
        )

    @contextmanager
    def lock(self, node: Node) -> Iterator[None]:
        """Raise LockedError."""
        self.check(node, ())
        yield

    def __reduce__(self) -> tuple[object, ...]:
        return RefusedValues, (self.where,)


def refuse_values(opened: Node, where: str) -> None:
    """Let the nodes of a collection that is opened for writing refuse writes of values in place.

    >>> td = TensorDict({"a": 1})
    >>> refuse_values(td, "data.bin")
    >>> td.zero_()["a"]
    tensor(0)
    """
    for node in walk(opened):
        node._keeper = RefusedValues(where)


def join_rows(saved: Any, rows: Any) -> Tensor:
    """Concatenate two collections, in which a value that both have is one object, as MetaData compares values by identity."""
    left, right = encode(saved), encode(rows)
    known = dict(zip(left.node_paths(), left.nodes, strict=True))
    values = list(right.values)
    for path, row in zip(right.node_paths(), right.nodes, strict=True):
        found = dict(known[path]["values"]) if path in known else {}
        for name, position in row["values"]:
            if name in found and is_same_value(left.values[found[name]], values[position]):
                values[position] = left.values[found[name]]
    shared = decode(replace(right, values=values, objects=[]))
    return torch.cat([saved, shared])


def find_batch_sizes(
    shapes: Sequence[Sequence[tuple[int, ...]]], above: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return for each node the dims that all leaves below it share; for a node without leaves, those of the node above.

    Args:
        shapes: for each node the shapes of its own leaves; parents are before their children.
        above: for each node the position of its parent; for the root -1.

    >>> find_batch_sizes([[(3, 2), (3,)], [(3, 4)], []], [-1, 0, 0])
    [(3,), (3, 4), (3,)]
    """
    found: list[tuple[int, ...] | None] = [None] * len(shapes)
    for position in range(len(shapes) - 1, -1, -1):  # children before their parents
        size = found[position]
        for shape in shapes[position]:
            size = shape if size is None else _find_common(size, shape)
        found[position] = size
        parent = above[position]
        if size is not None and parent >= 0:
            known = found[parent]
            found[parent] = size if known is None else _find_common(known, size)
    result: list[tuple[int, ...]] = []
    for position, size in enumerate(found):
        result.append(size if size is not None else result[above[position]] if position else ())
    return result


def _find_common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    count = 0
    for left, right in zip(one, other):
        if left != right:
            break
        count += 1
    return one[:count]
