"""Pad ragged entries to dense ones, and make the mask of the padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._plans.elements import pad_plan
from .._torch.private import get_ragged_dim
from .._tree.defaults import check_same_form, show_path
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Child, Core, make_dense
from .._tree.ragged import make_padded_tensor
from .._tree.walks import has_entries, map_levels, visit
from ..errors import DepthError, StructureError
from ..typing import NestedKey

Path = tuple[str, ...]


def pad_to_dense(node: Core, padding: float, mask_key: NestedKey | None) -> object:
    """Pad ragged entries, see ``to_padded_tensor``; with ``mask_key``, add the mask of the padding."""
    try:
        result = pad_node(node, padding)
        if mask_key is not None:
            mask = make_mask(node, unravel_key_to_tuple(mask_key))
            set_masks(partial(result.set, mask_key, mask))
    except RecursionError as error:
        raise DepthError(f"the levels are too many to be padded one inside the other: {error}") from error
    return result


def set_masks(write: Callable[[], object]) -> None:
    """Write masks; for a class without a field for them, say what to do."""
    try:
        write()
    except AttributeError as error:
        told = f"{error}; declare a field for the masks, or pad the result of to_tensordict()"
        raise type(error)(told) from error


def pad_node(node: Core, padding: float) -> Any:
    """Convert a node to a dense one: pad and stack lazy stacks, and pad nested tensors."""
    stacked = node._members_and_dim()
    if stacked is not None:
        members, dim = stacked
        padded = [pad_node(member, padding) for member in members]
        return stack_padded(
            padded,
            dim,
            lambda path, leaves, _: make_padded_tensor(path, leaves, dim, padding),
            lambda values: _pad_batches(values, dim),
        )
    children: dict[str, Any] = {}
    for key, child in dict(node._children()).items():
        if not isinstance(child, Tensor):
            children[key] = pad_node(child, padding)
        else:
            children[key] = torch.nested.to_padded_tensor(child, padding) if child.is_nested else child
    if -1 not in node.batch_size:
        return node._with_children(children)
    # densify() returns batch size -1 for members of different sizes; after padding the size is known.
    ndim = len(node.batch_size)
    leads = [child.shape[:ndim] for child in children.values() if child.ndim >= ndim]
    return node._with_children(children, batch_size=next((lead for lead in leads if -1 not in lead), None))


def stack_padded(
    nodes: Sequence[Any],
    dim: int,
    pad: Callable[[tuple[str, ...], list[Tensor], int], Tensor],
    pad_values: Callable[[list[Core]], Core],
) -> Any:
    """Stack dense nodes whose shapes differ, with only the keys that all have.

    ``pad`` takes a key path, the leaves, and the number of batch dims; ``pad_values`` takes value nodes.
    """

    def fill(
        nodes: Sequence[Core], out: dict[str, Child], prefix: tuple[str, ...]
    ) -> Iterator[tuple[str, Sequence[Core], tuple[str, ...]]]:
        columns = [node._children() for node in nodes]
        for key in columns[0]:
            if not all(key in column for column in columns):
                continue
            entries: list[Any] = [column[key] for column in columns]
            path = (*prefix, key)
            for entry in entries[1:]:
                check_same_form(entries[0], entry, path)
            if isinstance(entries[0], Tensor):
                out[key] = pad(path, entries, len(nodes[0].batch_size))
            elif has_entries(entries[0]):
                yield key, entries, path
            else:
                out[key] = pad_values(entries)

    def make(nodes: Sequence[Core], out: dict[str, Child]) -> Core:
        size = get_largest_size(nodes)
        batch_size = torch.Size((*size[:dim], len(nodes), *size[dim:]))
        return nodes[0]._with_children(out, batch_size=batch_size, names=None)

    return map_levels(nodes, fill, (), make)


def get_largest_size(nodes: Sequence[Core]) -> tuple[int, ...]:
    """Return the largest size of each batch dim; StructureError if the numbers of dims differ."""
    sizes = [node.batch_size for node in nodes]
    if len({*map(len, sizes)}) != 1:
        raise StructureError(
            f"cannot pad: the batch sizes {[list(size) for size in sizes]} differ in their dims"
        )
    return tuple(map(max, zip(*sizes)))


def _pad_batches(nodes: list[Core], dim: int) -> Core:
    """Pad each batch dim of value nodes at its end to one size, and stack them."""
    size, padded = get_largest_size(nodes), []
    for node in nodes:
        missing = [n for wanted, actual in zip(size, node.batch_size) for n in (0, wanted - actual)]
        padded.append(node._transform(pad_plan(node.batch_size, missing, 0)) if any(missing) else node)
    stacked: Core = padded[0]._stack_lazily(padded, dim)
    return stacked


def make_mask(root: Core, key: Path) -> Tensor:
    """Return the mask of a padded collection, or of the node that ``key`` leads to: True at elements, False at padding."""
    node = root.get(key[:-1], None) if key[1:] else root
    if not isinstance(node, Core) or not has_entries(node):
        node = root
    if -1 in node.batch_size:
        return _mask_batch(node, key)
    shapes: dict[Path, list[tuple[int, ...]]] = {}
    visit(partial(_add_shapes, shapes), node, ())
    mask: Tensor | None = None
    found: Path = ()
    even = torch.ones(node.batch_size, dtype=torch.bool, device=node.device)
    for name, part in pad_node(_mark_leaves(node, shapes), False).items(True, True):
        if part.all():
            even = part if part.ndim > even.ndim else even
            continue
        path = unravel_key_to_tuple(name)
        if mask is not None and not (mask.shape == part.shape and torch.equal(mask, part)):
            raise StructureError(
                f"{show_path(found)} and {show_path(path)} are padded differently, so one mask cannot be right for both; "
                "leave mask_key out, or select() the entries of one mask first"
            )
        mask, found = part, path
    return even if mask is None else mask


def _mask_batch(node: Core, key: Path) -> Tensor:
    """Return the mask of a node whose batch is ragged: True at elements of the batch. ``key`` is for messages."""

    def mark(holder: Core) -> Core:
        size = holder.batch_size
        ragged = next((leaf for leaf in holder._leaves() if leaf.is_nested), None) if -1 in size else None
        if ragged is None:
            mask = torch.ones(size, dtype=torch.bool, device=holder.device)
        else:
            parts = [leaf.new_ones(leaf.shape[: len(size) - 1], dtype=torch.bool) for leaf in ragged.unbind()]
            mask = make_padded_tensor(key, parts, 0, False)
        return make_dense({"mask": mask}, mask.shape)

    mask: Tensor = pad_node(node._map_members(mark), False)._children()["mask"]
    return mask


def _add_shapes(
    shapes: dict[Path, list[tuple[int, ...]]], node: Core, path: Path
) -> Iterator[tuple[Core, Path]]:
    """Add the shapes of the leaves below a node by key path, in every member of lazy stacks."""
    for (holder,) in node._zip_members():
        for key, child in dict(holder._children()).items():
            if isinstance(child, Tensor):
                shapes.setdefault((*path, key), []).extend(_list_shapes(child))
            elif has_entries(child):
                yield child, (*path, key)


def _list_shapes(leaf: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of a leaf, or for a nested tensor that of each component with the number of components before it."""
    if not leaf.is_nested:
        return [tuple(leaf.shape)]
    return [(leaf.size(0), *part.shape) for part in leaf.unbind()]


def _mark_leaves(node: Core, shapes: dict[Path, list[tuple[int, ...]]]) -> Core:
    """Build a collection of bools with the leading dims of each leaf, up to the last one that is padded."""

    def fill(holder: Core, entries: dict[str, Child], path: Path) -> Iterator[tuple[str, Core, Path]]:
        for key, child in dict(holder._children()).items():
            if not isinstance(child, Tensor):
                if has_entries(child):
                    yield key, child, (*path, key)
                continue
            place = (*path, key)
            known = shapes[place]
            ragged = [i for i, sizes in enumerate(zip(*known)) if len({*sizes}) > 1]
            if child.layout is torch.jagged:  # its mask has this dim, even if all lengths are equal
                ragged.append(get_ragged_dim(child))
            ndim = max([len(holder.batch_size), *[i + 1 for i in ragged]])
            make_ones = partial(torch.ones, dtype=torch.bool, device=child.device)
            if child.is_nested:
                parts = [make_ones(part.shape[: ndim - 1]) for part in child.unbind()]
                entries[key] = make_padded_tensor(place, parts, 0, False)
            else:
                entries[key] = make_ones(child.shape[:ndim])

    def make(holder: Core, entries: dict[str, Child]) -> Core:
        return make_dense(entries, holder.batch_size)

    return map_levels(node, fill, (), make, True)
