"""Name the dims of a collection, label its devices, and summarize its leaves and entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._python.settings import RULES
from .._tree.batch_sizes import infer_batch_sizes
from .._tree.components import get_parts
from .._tree.defaults import get_parent, has_lazy_stack, missing_key_error, show_path, unwrap_entry
from .._tree.devices import set_device_labels
from .._tree.dim_names import check_names
from .._tree.key_trees import filter_entries
from .._tree.keys import unravel_key_to_tuple
from .._tree.locks import check_no_entry
from .._tree.node import Child, Core, make_dense
from .._tree.ragged import get_display_shape, list_distinct_members
from .._tree.shared_memory import identify_view
from .._tree.stored_leaves import is_stored
from .._tree.walks import expand, has_entries, list_holders, walk
from ..errors import DimNamesError, StructureError
from ..typing import Names, NestedKey


def refine_left_names(left: list[str | None], names: tuple[object, ...]) -> Names:
    """Return the names of a collection whose dims without one get those of ``names``; StructureError for other dims."""
    refined = check_names(_fill_ellipsis(names, left), len(left)) or (None,) * len(left)
    for old, new in zip(left, refined, strict=True):
        if old is not None and new != old:
            raise StructureError(
                f"cannot refine the names {left} to {list(refined)}: the dim {old!r} has its name; use rename()"
            )
    return refined


def replace_names(node: Core, names: tuple[object, ...], rename_map: dict[str, str]) -> None:
    """Give the dims of a collection new names, listed or by their old names."""
    first = names[0] if names else None
    if isinstance(first, Mapping) and len(names) == 1:
        names, rename_map = (), {**first, **rename_map}
    if bool(names) == bool(rename_map):
        raise DimNamesError(
            f"rename takes the new names or a map from old to new ones; got names {list(names)}, map {rename_map}"
        )
    check_no_entry(node, "name the dims of")
    left = node.names
    unknown = [name for name in rename_map if name not in left]
    if unknown:
        hint = f"; rename_keys({rename_map}) renames entries" if {*unknown} & {*node._children()} else ""
        raise DimNamesError(f"no dim is named {unknown}; the names are {left}{hint}")
    new: Sequence[str | None] | None = [rename_map.get(name, name) if name else name for name in left]
    if names:
        new = None if names == (None,) else _fill_ellipsis(names, left)
    node._set_names(check_names(new, len(left)))


def _fill_ellipsis(names: tuple[object, ...], left: Sequence[str | None]) -> tuple[Any, ...]:
    """Replace ``...`` in new names by the current names of those dims."""
    if ... not in names:
        return names
    position = names.index(...)
    count = len(left) - len(names) + 1
    return (*names[:position], *left[position : position + max(count, 0)], *names[position + 1 :])


def measure_depth(root: Core) -> int:
    """Return the number of nested nodes between a collection and its deepest leaf."""

    def below(item: tuple[object, int]) -> list[tuple[Any, int]]:
        node, level = item
        holders = list_holders(node) if isinstance(node, Core) else ()
        return [(child, level + 1) for holder in holders for child in list(holder._children().values())]

    return max([0, *(level for item, level in expand([(root, -1)], below) if not has_entries(item))])


def has_shared_leaves(node: Core) -> bool:
    """Return True if there are leaves, and all are in shared memory."""
    leaves = node._leaves()
    try:
        return bool(leaves) and all(leaf.is_shared() for leaf in leaves)
    except NotImplementedError:
        return False  # torch cannot check a sparse leaf, which has no storage


def is_shared(node: Core) -> bool:
    """Return True if all leaves are in shared memory; in programs of tensordict, also the collection must be locked."""
    # There, what share_memory_() has locked is shared, and what a process received or unlock_() was called on is not.
    return has_shared_leaves(node) and (node.is_locked or not RULES.follows_tensordict)


def is_contiguous(node: Core) -> bool:
    """Return True if every leaf is contiguous, and no level is a lazy stack."""
    kind, todo = type(node), [node]
    # By hand: the row `steps: is_contiguous of each` of benchmarks/scale.py.
    for level in todo:
        children = level._children()
        for child in list(children.values()) if type(children) is dict else (node,):
            if isinstance(child, Tensor):
                if not child.is_contiguous():
                    return False
            elif type(child) is kind and child is not node:
                todo.append(child)
            else:
                return not has_lazy_stack(node) and all(map(Tensor.is_contiguous, node._leaves()))
    return True


def count_bytes(node: Core, count_duplicates: bool) -> int:
    """Return the size of the leaves and their gradients in bytes, with the offsets of jagged leaves."""
    leaves = node._leaves() if count_duplicates else drop_duplicates(node._leaves())
    # torch warns when .grad of a tensor that is not a leaf of the autograd graph is read.
    grads = [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.requires_grad]
    parts = [part for leaf in (*leaves, *grads) if leaf is not None for part in get_parts(leaf)]
    # Jagged leaves with the same lengths may share their offsets, which count once.
    parts = parts if count_duplicates else drop_duplicates(parts)
    return sum(part.numel() * part.element_size() for part in parts)


def find_entry_class(root: Core, key: NestedKey) -> type:
    """Return the class of an entry, without building it; KeyPathError if it is missing."""
    node: Any = root
    path = unravel_key_to_tuple(key)
    for depth, part in enumerate(path):
        if isinstance(node, Tensor):
            raise missing_key_error(root, key)
        try:
            node = node._peek_child(part)
        except KeyError:
            raise missing_key_error(node, part, path[:depth]) from None
    return type(unwrap_entry(node))


def get_entry_shape(root: Core, path: tuple[str, ...]) -> torch.Size:
    """Return the shape of an entry, with -1 for a dim that differs between the members of a lazy stack."""
    parent = get_parent(root, path)
    node = parent._inner()
    children = node._children()
    entry: Any = children.get(path[-1]) if type(children) is dict else None
    if not isinstance(entry, (Tensor, Core)):  # an entry of a lazy stack is described without stacking it
        fields = filter_entries(node, {path[-1]: None})._print_node().fields
        if not fields:
            raise missing_key_error(parent, path[-1], path[:-1])
        entry = fields[0].entry
    if isinstance(entry, str):
        raise StructureError(f"{show_path(path)} has no shape: it is {entry} in the members of a lazy stack")
    return torch.Size(get_display_shape(entry) if isinstance(entry, Tensor) else entry.shape)


def change_batch_sizes(root: Core, batch_dims: int | None, keep_compliant_size: bool) -> None:
    """Set the batch size of every node to the leading dims that all its leaves share, as one change of a store."""
    with root._edit_together():
        infer_batch_sizes(root, batch_dims, keep_compliant_size)


def infer_device_labels(root: Core) -> None:
    """Set the device label of every node to the device of its leaves, None if they differ; values have that of their level."""
    with root._edit_together():
        for node in list_distinct_members([*walk(root)][::-1]):
            labeled, devices = [node], set()
            for child in node._children().values():
                if isinstance(child, Tensor) or has_entries(child):
                    devices.add(child.device)
                else:
                    labeled.append(child)
            device = devices.pop() if len(devices) == 1 else None
            for each in labeled:
                each._set_device(device)


def clear_device_labels(root: Core) -> None:
    """Set the device label of every node to None."""
    with root._edit_together():
        set_device_labels(root, None)


def drop_duplicates(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves without duplicates: leaves with the same memory, dtype, shape and strides."""
    return list({get_view_id(leaf): leaf for leaf in leaves}.values())


def get_view_id(leaf: Tensor) -> object:
    """Return an id that is equal for leaves only if they have the same memory, dtype, shape and strides."""
    if leaf.layout is torch.jagged:
        return tuple(map(get_view_id, get_parts(leaf)))
    if leaf.layout is not torch.strided or leaf.is_nested or is_stored(leaf):
        return id(leaf)  # such a tensor has no single data_ptr() to compare
    return identify_view(leaf)[:-2]  # a conjugate view has no bytes of its own


def list_addresses(entry: Child, storage: bool) -> Core | Tensor:
    """Return a collection of the memory addresses of the leaves, with the numbers of members as keys."""
    if isinstance(entry, Tensor):
        return torch.tensor(entry.untyped_storage().data_ptr() if storage else entry.data_ptr())
    if not has_entries(entry):
        return entry
    stacked = entry._members_and_dim()
    children = entry._children() if stacked is None else {str(i): item for i, item in enumerate(stacked[0])}
    addresses = {key: list_addresses(child, storage) for key, child in dict(children).items()}
    return make_dense(addresses, torch.Size(), torch.device("cpu"))
