"""Lazy stacks with uneven members: their shapes, and ragged leaves read as one nested or padded tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._python.settings import RULES
from .._torch.kernels import PLAIN, is_grad_needed
from .._torch.private import functorch_level
from ..errors import StructureError
from ..typing import NestedKey
from .components import TAKES_BOUNDS, JaggedParts
from .defaults import show_path
from .keys import unravel_key_to_tuple
from .node import Child, Core, check_no_hidden_keys, concurrent_change_error, make_dense
from .walks import has_entries, list_holders

_SHAPE, _DTYPE, _NDIM = attrgetter("shape"), attrgetter("dtype"), attrgetter("ndim")
_LAYOUT, _IS_NESTED = attrgetter("layout"), attrgetter("is_nested")

#: The number of leaves from which, and their mean size up to which, one write of all is faster than pad_sequence().
_MANY = 16
_SMALL = 256

#: What :func:`get_member_entry` returns for a member without the entry.
MISSING: object = object()


def get_display_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape for messages: -1 for ragged dims of a strided nested tensor, and for those of a lazy parameter."""
    try:
        shape = tuple(tensor.shape)
        # torch.compile cannot trace is_lazy().
        return shape if type(tensor) in PLAIN or not is_lazy(tensor) else (*shape, -1)
    except RuntimeError:
        return (-1,) if is_lazy(tensor) else tuple(_get_size(tensor, dim) for dim in range(tensor.dim()))


def _get_size(tensor: Tensor, dim: int) -> int:
    try:
        return tensor.size(dim)
    except RuntimeError:
        return -1


def merge_shapes(shapes: Sequence[Sequence[object]], dim: int) -> tuple[object, ...]:
    """Return the shape of a stack along ``dim``: -1 where sizes differ, ``(-1,)`` if numbers of dims differ."""
    if len({len(shape) for shape in shapes}) != 1:
        return (-1,)
    merged = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
    return (*merged[:dim], len(shapes), *merged[dim:])


def list_distinct_members(members: Sequence[Core]) -> list[Core]:
    """List the distinct members of a stack; nested stacks are replaced by their members."""
    flat = [holder for member in members for holder in list_holders(member)]
    if torch.compiler.is_compiling():
        # A guard on id() would recompile the graph for every object, so compare by identity.
        return [
            item
            for position, item in enumerate(flat)
            if not any(item._inner() is o._inner() for o in flat[:position])
        ]
    return list({id(member._inner()): member for member in flat}.values())


def find_holders(root: Core, path: tuple[str, ...]) -> list[Core]:
    """Return the nodes that hold the entry at a key path: of a lazy stack on the path, the members that have it."""
    nodes = list_distinct_members([root])
    for part in path[:-1]:
        found = [node._children().get(part) for node in nodes]
        nodes = list_distinct_members([child for child in found if child is not None and has_entries(child)])
    return [node for node in nodes if path[-1] in node._children()]


def fill_gaps(key: str, members: Sequence[Core]) -> list[Tensor]:
    """Return the entry of each member under a key, with empty tensors for members that lack it."""
    results: list[Any] = [member._children().get(key) for member in members]
    first = next((child for child in results if child is not None), None)
    if first is None:
        raise concurrent_change_error(members[0])
    if not isinstance(first, Tensor) or not first.ndim:
        check_no_hidden_keys([member._children().keys() for member in members])
        raise concurrent_change_error(members[0])
    gap = first.new_empty((0, *first.shape[1:]))
    return [gap if child is None else child for child in results]


def make_ragged_error(key: str, entries: list[Child], error: Exception) -> StructureError:
    """Build the error for entries that cannot be stacked, with their shapes."""
    shapes = [
        get_display_shape(entry) if isinstance(entry, Tensor) else type(entry).__name__ for entry in entries
    ]
    start = RULES.begin("Failed to stack tensors within a tensordict")
    if len(set(shapes)) == 1:
        return StructureError(f"{start}cannot stack {show_path((key,))}: {error}")
    return StructureError(
        f"{start}cannot stack {show_path((key,))}: its shapes differ between members, {shapes}; read it with "
        "get(key, as_nested_tensor=True), as_padded_tensor=True or as_list=True, or pad all keys with to_padded_tensor()"
    )


def list_member_entries(members: Sequence[Core], key: NestedKey, form: dict[str, object]) -> list[Any] | None:
    """Read the entry of each member, see :func:`get_member_entry`; None if one lacks it."""
    if type(key) is str and members and {*map(type, members)} == {type(make_dense({}, torch.Size()))}:
        # The forms are for many members, so read them without a call for each.
        held = [member._children().get(key) for member in members]
        if PLAIN.issuperset(map(type, held)):
            return held
    results = [get_member_entry(member, key, form) for member in members]
    return None if not results or type(MISSING) in {*map(type, results)} else results


def get_member_entry(member: Any, key: NestedKey, form: dict[str, object]) -> object:
    """Read an entry of a member; if the path leads through a lazy stack, that stack returns it in the form ``form``."""
    node, path = member, unravel_key_to_tuple(key)
    while path and isinstance(node, Core) and node._members_and_dim() is None:
        node, path = node._children().get(path[0]), path[1:]
    if not path or not isinstance(node, Core) or not has_entries(node):
        return member.get(key, MISSING)
    if not form.get("as_nested_tensor"):
        return member.get(key, MISSING, **form)
    try:
        return member.get(key, MISSING)
    except StructureError as error:
        raise StructureError(
            f"key {key!r} is ragged in stacks inside the stack, and a nested tensor has components of one level; "
            "flatten() the collection first, or read as_padded_tensor=True or as_list=True"
        ) from error


def has_no_form(entries: list[Any] | None) -> bool:
    """Return True if the entries of members are nodes, which programs of tensordict read as without a form."""
    return RULES.follows_tensordict and any(isinstance(entry, Core) for entry in (entries or ())[:1])


def convert_form(
    key: NestedKey,
    entries: list[Any] | None,
    dim: int,
    default: object,
    *,
    as_list: bool = False,
    as_nested_tensor: bool = False,
    as_padded_tensor: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
    layout: torch.layout | None = None,
) -> object:
    """Convert the entries of members to a list, nested or padded tensor; return ``default`` if ``entries`` is None."""
    if as_list + as_nested_tensor + as_padded_tensor != 1:
        raise TypeError("give exactly one of as_list, as_nested_tensor, as_padded_tensor")
    if entries is None:
        return default
    if as_list:
        return entries
    if not all(issubclass(kind, Tensor) for kind in {*map(type, entries)}):
        raise StructureError(
            f"key {key!r} is not a tensor in every member, so it cannot be one nested tensor"
        )
    if as_nested_tensor:
        return make_nested_tensor(key, entries, dim, layout)
    return make_padded_tensor(key, entries, dim, padding_value, padding_side)


def make_nested_tensor(key: NestedKey, leaves: list[Tensor], dim: int, layout: torch.layout | None) -> Tensor:
    """Build a nested tensor from leaves; its layout defaults to jagged if at most one dim is ragged."""
    if dim != 0:
        raise StructureError(
            f"key {key!r}: a nested tensor stacks along dim 0, this stack is along dim {dim}"
        )
    if layout is None:
        ragged = {i for leaf in leaves for i, (a, b) in enumerate(zip(leaf.shape, leaves[0].shape)) if a != b}
        layout = torch.jagged if len(ragged) <= 1 else torch.strided
    try:
        if layout is torch.jagged and (joined := _join_rows(leaves)) is not None:
            return joined
        return torch.nested.as_nested_tensor(leaves, layout=layout)
    except RuntimeError as error:
        raise StructureError(f"key {key!r} cannot be one nested tensor: {error}") from error


def _are_rows(leaves: list[Tensor]) -> bool:
    """Return True if leaves are plain and strided, and differ in the size of the first dim only."""
    return (
        PLAIN.issuperset(map(type, leaves))
        and functorch_level() is None
        and not torch.compiler.is_compiling()
        and not any(map(_IS_NESTED, leaves))
        and all(len({*map(get, leaves)}) == 1 for get in (_LAYOUT, _DTYPE, _NDIM))
        and leaves[0].layout is torch.strided
        and leaves[0].ndim > 0
        and (leaves[0].ndim == 1 or len({shape[1:] for shape in map(_SHAPE, leaves)}) == 1)
    )


def _join_rows(leaves: list[Tensor]) -> Tensor | None:
    """Build a jagged tensor of leaves that differ in the first dim only; None for others."""
    # as_nested_tensor() gives an equal tensor, but takes three times as long for many leaves.
    if not TAKES_BOUNDS or not _are_rows(leaves):
        return None
    lengths = [shape[0] for shape in map(_SHAPE, leaves)]
    offsets = torch.tensor([0, *accumulate(lengths)], device=leaves[0].device)
    return JaggedParts(1, torch.cat(leaves), offsets, None, (min(lengths), max(lengths))).join()


def make_padded_tensor(
    key: NestedKey, leaves: list[Tensor], dim: int, value: float, side: str = "right"
) -> Tensor:
    """Pad leaves to one shape and stack them along ``dim``; ``side`` is the padded side."""
    ndims = {leaf.ndim for leaf in leaves}
    if len(ndims) != 1:
        path = unravel_key_to_tuple(key)
        raise StructureError(f"{show_path(path)}: cannot pad leaves of {sorted(ndims)} dims to one shape")
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right'; got {side!r}")
    if dim == 0 and side == "right" and _are_rows(leaves):
        return _pad_rows(leaves, value)
    shape = [max(sizes) for sizes in zip(*[leaf.shape for leaf in leaves])]
    return torch.stack([pad_to(leaf, shape, value, side) for leaf in leaves], dim)


def _pad_rows(leaves: list[Tensor], value: float) -> Tensor:
    """Pad and stack leaves that differ in the first dim only, with one write of one tensor for small leaves."""
    if len(leaves) >= _MANY and leaves[0].is_cpu and not is_grad_needed(leaves):
        rows = torch.cat(leaves)
        if rows.numel() <= _SMALL * len(leaves):
            lengths = [shape[0] for shape in map(_SHAPE, leaves)]
            padded = rows.new_full((len(leaves), max(lengths), *rows.shape[1:]), value)
            ends = torch.tensor(lengths, device="cpu")[:, None]
            inside = torch.arange(max(lengths), device="cpu") < ends
            with suppress(RuntimeError):  # torch cannot scatter some dtypes
                return padded.masked_scatter_(inside.view(*inside.shape, *[1] * (rows.ndim - 1)), rows)
    # pad_sequence() fills one tensor, while pad() would copy each leaf before stack() copies it again.
    return torch.nn.utils.rnn.pad_sequence(leaves, batch_first=True, padding_value=value)


def pad_to(leaf: Tensor, shape: Sequence[int], value: float, side: str = "right") -> Tensor:
    """Pad the dims of a leaf to ``shape``; a leaf of this shape is returned unchanged."""
    amounts: list[int] = []
    for size, full in zip(reversed(leaf.shape), reversed(shape)):
        amounts += [full - size, 0] if side == "left" else [0, full - size]
    return torch.nn.functional.pad(leaf, amounts, value=value) if any(amounts) else leaf


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
