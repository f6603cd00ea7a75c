"""Build the collection of a table from the arrays of its places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._collection import show_path
from .._encoded_tables import decode_table
from .._nodes import Encoded
from ..errors import FormatError, TensorDictError
from ._places import Place, restore

__all__ = ["build_collection"]


def build_collection(
    table: Encoded,
    where: str,
    read: Callable[[str], Tensor],
    device: torch.device | None = None,
    *,
    wrap: Callable[[Place, Tensor], Tensor] | None = None,
    strict: bool = True,
) -> Any:
    """Build the collection of a table from :func:`td_core.spi.load_table`.

    Args:
        table: the table, with places as leaves.
        where: the location of the save, for messages.
        read: returns the tensor of the array with a name.
        device: device label of the nodes; None is the CPU.
        wrap: takes the place of a leaf and the leaf, and returns the leaf to use.
        strict: False builds a tensorclass that is not defined as the collection that it holds.

    Raises:
        FormatError: the table does not describe a collection, or contradicts the arrays.
    """
    leaves: list[Tensor] = []
    known: dict[str, Tensor] = {}
    for place in table.leaves:
        # Tied leaves are one tensor again.
        name = place if isinstance(place, str) else repr(place)
        try:
            if name not in known:
                leaf = restore(place, read)
                known[name] = leaf if wrap is None else wrap(place, leaf)
            leaves.append(known[name])
        except (TensorDictError, KeyError, RecursionError) as error:
            path = table.leaf_paths(members=False)[len(leaves)]
            raise FormatError(f"{where}: {show_path(path)}: {error}") from error
    rows = [{**row, "meta": _with_device(row, device)} for row in table.nodes]
    return decode_table(replace(table, nodes=rows), leaves, where, strict=strict)


def _with_device(row: dict[str, Any], device: torch.device | None) -> dict[str, object]:
    """Return the meta of a node with another device label: leaves are on ``device``, or on the CPU."""
    meta: dict[str, object] = row["meta"]
    if device is not None and (row["kind"] == "TensorDict" or "device" in meta):
        return {**meta, "device": str(device)}
    return {**meta, "device": "cpu"} if isinstance(meta.get("device"), str) else meta
