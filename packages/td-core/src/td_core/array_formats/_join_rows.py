"""Join the rows of a save and new rows, whose values are equal objects if they are equal in the files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .._encode.decode import decode
from .._encode.node_kinds import encode
from .._encode.value_codec import is_same_value


def join_rows(saved: Any, rows: Any) -> Any:
    """Concatenate two collections, in which a value that both have is one object, as MetaData compares values by identity."""
    left, right = encode(saved), encode(rows)
    known = dict(zip(left.node_paths(), left.nodes, strict=True))
    values = list(right.values)
    for path, row in zip(right.node_paths(), right.nodes, strict=True):
        found = dict(known[path]["values"]) if path in known else {}
        for name, position in row["values"]:
            if name in found and is_same_value(left.values[found[name]], values[position]):
                values[position] = left.values[found[name]]
    shared: Any = decode(replace(right, values=values, objects=[]))
    return torch.cat([saved, shared])
