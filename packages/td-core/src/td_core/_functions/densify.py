"""The entries of lazy stacks as tensors: ragged ones become nested tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from .._tree.node import Child, Core
from .._tree.ragged import fill_gaps, get_display_shape, make_nested_tensor
from .._tree.walks import has_entries, list_holders


def list_dense_entries(
    node: Core, out: dict[str, object], _: None, layout: torch.layout
) -> Iterator[tuple[str, Core, None]]:
    """Add the entries of a node, those that are ragged as nested tensors of ``layout``, and yield its nested nodes."""
    entries = node._children()
    members, dim = node._members_and_dim() or ((), 0)
    for key in list(entries):
        shapes = {
            get_display_shape(entry) if isinstance(entry := member._get_child(key), Tensor) else None
            for member in members
        }
        if len(shapes) > 1:
            out[key] = node.get(key, None, as_nested_tensor=True, layout=layout)
        elif has_entries(child := entries[key]):
            yield key, child, None
        else:
            out[key] = child
    for key in dict.fromkeys(chain(*[list(member._children()) for member in members])):
        if key not in entries:
            out[key] = make_nested_tensor(key, fill_gaps(key, members), dim, layout)


def build_dense(node: Core, entries: dict[str, Child]) -> Core:
    """Build a node of the class of the first innermost member of a lazy stack; other nodes keep their class."""
    first = next(iter(list_holders(node)), node)
    return first._with_children(entries, batch_size=node.batch_size, device=node.device, names=node._names)
