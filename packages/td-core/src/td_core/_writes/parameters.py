"""Write the parameters of a module below a collection, which in-place methods write without a record by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .._tree.node import Child, Core
from .._tree.walks import has_entries, map_levels, walk
from ..errors import StructureError


def write_unrecorded(root: Core, write: Callable[[Any], object]) -> None:
    """Call ``write(root)``. If it raises and modules are below ``root``, write the data of their parameters instead."""
    copied: list[tuple[Core, Core]] = []
    try:
        write(root)
        return
    except StructureError:
        if not any(isinstance(node, nn.Module) for node in walk(root)):
            raise
        data = _replace_parameters(root, copied)
    write(data)
    # A write may replace a value node in its parent, which is a copy here.
    for node, copy in copied:
        for key, child in copy._children().items():
            if (
                not (isinstance(child, Tensor) or has_entries(child))
                and node._children().get(key) is not child
            ):
                node._set_child(key, child)


def _replace_parameters(root: Core, copied: list[tuple[Core, Core]]) -> object:
    """Return a shallow copy with detached leaves in place of those of modules; list each node with its copy."""

    def fill(node: Core, entries: dict[str, Child], inside: bool) -> Iterator[tuple[str, Core, bool]]:
        inside = inside or isinstance(node, nn.Module)
        for key, child in dict(node._children()).items():
            if has_entries(child):
                yield key, child, inside
            else:
                entries[key] = child.detach() if inside and isinstance(child, Tensor) else child

    def make(node: Core, entries: dict[str, Child]) -> Core:
        copy = node._with_children(entries)
        copied.append((node, copy))
        return copy

    return map_levels(root, fill, False, make, by_member=True)


def find_data(root: Core, leaf: Tensor) -> Tensor | None:
    """Return the data of a leaf if a module at or below ``root`` has it, else None."""
    modules = (node for node in walk(root) if isinstance(node, nn.Module))
    inside = any(own is leaf for node in modules if isinstance(node, Core) for own in node._leaves())
    return leaf.detach() if inside else None
