"""Write into a lazy stack at an index: split the value into one part per member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._plans.index import plan_index
from .._plans.plans import compute_coordinates
from .._plans.shapes import unbind_plan
from .._tree.coerce import build_nested, coerce, convert_source
from .._tree.dim_names import refuse_repeated
from .._tree.locks import check_unlocked
from .._tree.node import Child, Core
from .._tree.walks import list_holders, list_state_nodes, visit
from .._writes.check import check_fits
from .._writes.index import (
    ANY,
    Entries,
    as_leaf,
    as_new_rows,
    as_rows,
    count_leading_dims,
    drop_leading_ones,
    find_common_dims,
    form_error,
    has_free_entries,
)
from .._writes.pair import is_scalar, list_pairs
from ..errors import BatchSizeError, CycleError, StructureError
from .uneven import uneven_plans

Part = tuple[Any, object, object]
Path = tuple[str, ...]


def unbind_members(value: Child, dim: int) -> tuple[Any, ...]:
    """Unbind an entry along a batch dim; a lazy stack returns its members."""
    if isinstance(value, Tensor):
        return value.unbind(dim)
    parts: tuple[object, ...] = value._transform_multi(unbind_plan(value.batch_size, dim))
    return parts


def split_for_members(
    stack: Any, index: object, value: object, path: Path = (), dims: int | None = None
) -> Iterator[Part]:
    """Yield (member, index in the member, value) for each write of ``stack[index] = value``; ``path``: that of the stack."""
    size = stack.batch_size
    members, dim = stack.tensordicts, stack.stack_dim
    if not members:
        plan_index(index, size)
        return
    if not isinstance(value, (Core, dict)):
        value = convert_source(value, device=stack.device, path=path)
    if -1 in size:
        yield from _split_uneven(stack, index, value)
        return
    plan = plan_index(index, size)
    lead = torch.Size((*plan.lead, *size[plan.n :]))
    # A graph cannot read the index tensor, so it writes to every member, with an empty mask for some.
    unknown = torch.compiler.is_compiling() and plan.is_tensor_index(dim)
    along: Any = None if unknown else plan.along(dim)
    if along is None:
        # Index a tensor of positions: the result gives the member, and the position in it, of each element.
        chosen = plan.leaf(torch.arange(size.numel(), device="cpu").view(size))
        yield from _split_scattered(
            members, dim, compute_coordinates(chosen, size), _split_broadcast(value, stack, lead, path, dims)
        )
        return
    inner = () if along.plan is None else along.plan.index
    if isinstance(along.picks, int):
        yield members[along.picks], inner, value
        return
    picked = members if along.picks is None else [members[i] for i in along.picks]
    for item in _split_broadcast(value, stack, lead, path, dims):
        parts = item.unbind(along.stack_dim) if isinstance(item, Core) else [item] * len(picked)
        for member, part in zip(picked, parts, strict=True):
            yield member, inner, part


def _split_scattered(
    members: Any, dim: int, places: Sequence[Tensor], values: Sequence[object]
) -> Iterator[Part]:
    for value in values:
        for i, member in enumerate(members):
            here = places[dim] == i
            # A graph cannot branch on data, so it writes every member that has batch dims: an empty index writes nothing.
            if (torch.compiler.is_compiling() and len(places) > 1) or bool(here.any()):
                part = value._index(here) if isinstance(value, Core) else value
                inner = tuple(where[here] for j, where in enumerate(places) if j != dim)
                yield member, inner, part if inner or not isinstance(part, Core) else part._index(-1)


def _split_uneven(stack: Any, index: object, value: object) -> Iterator[Part]:
    picks, plans, dim = uneven_plans(stack, index)
    members = stack.tensordicts
    item = isinstance(picks, int)
    chosen = [picks] if item else list(picks)
    if item or is_scalar(value):
        parts: Any = [value] * len(chosen)
    elif isinstance(value, Core) and dim < len(value.batch_size) and value.batch_size[dim] == len(chosen):
        parts = value.unbind(dim)
    else:
        raise StructureError(
            f"members of different batch sizes are written one at a time, from a number, or from a collection of as many "
            f"parts; got the index {index!r}, which picks {len(chosen)}"
        )
    for i, part in zip(chosen, parts, strict=True):
        yield members[i], () if plans[i] is None else plans[i].index, part


def _split_broadcast(
    value: object, stack: Core, lead: torch.Size, above: Path, dims: int | None
) -> Sequence[object]:
    """Split a value into a collection of batch size ``lead`` and a dict of scalars that apply to all elements."""
    if isinstance(value, Core):
        value = as_rows(value, lead)
    if isinstance(value, Core) or not isinstance(value, Mapping):
        return [value]
    split: dict[Path, object] = {}
    shared: dict[Path, object] = {}
    if dims is None and isinstance(value, Entries):
        dims = ANY
    new: list[tuple[Any, Path]] = []
    counts: set[int | None] = set()

    def pair(node: Core, source: Any, prefix: Path) -> Iterator[tuple[object, ...]]:
        for key, entry in list_pairs(_get_entries(source), (*above, *prefix)):
            path, full = (*prefix, key), (*above, *prefix, key)
            try:
                target = node._peek_child(key)
            except KeyError:
                new.append((entry, path))
                continue
            if isinstance(target, Core) and has_free_entries(entry, lead):
                yield target, entry, path
            elif is_scalar(entry) or (isinstance(target, Tensor) and isinstance(entry, (Core, Mapping))):
                shared[path] = entry
            elif isinstance(target, Tensor):
                tail = _count_dims(node, key) - len(stack.batch_size)
                leaf = as_leaf(entry, target, full)
                counts.add(count_leading_dims(leaf, tail))
                split[path] = _expand_value(leaf, tail, lead, full)
            elif isinstance(entry := coerce(entry, lead, stack.device, full), Tensor):
                raise form_error(target, entry, full)
            else:
                split[path] = entry

    visit(pair, stack, value, ())
    for entry, path in new:
        if has_free_entries(entry, lead):
            new += [(below, (*path, key)) for key, below in list_pairs(_get_entries(entry), (*above, *path))]
        else:
            count = find_common_dims(counts, dims)
            split[path] = as_new_rows(entry, lead, count, stack.device, (*above, *path))
    return [*([build_nested(split, lead, stack.device)] if split else ()), *([shared] if shared else ())]


def _get_entries(level: Core) -> Mapping[Any, object]:
    return level._children() if isinstance(level, Core) else level


def _count_dims(node: Core, key: str) -> int:
    """Return the number of dims of a leaf, which the members of a lazy stack hold with fewer dims."""
    holder: Any = list_holders(node)[0]
    return int(holder._children()[key].ndim) + len(node.batch_size) - len(holder.batch_size)


def _expand_value(leaf: Tensor, tail: int, lead: torch.Size, path: Path) -> Tensor:
    """Expand a value to the batch dims ``lead`` and ``tail`` feature dims."""
    leaf = drop_leading_ones(leaf, len(lead) + tail)
    # torch aligns shapes at the last dim, so insert the missing leading dims.
    leaf = leaf[(None,) * (len(lead) + tail - leaf.ndim)]
    wanted = lead + leaf.shape[len(lead) :]
    check_fits(leaf, wanted, path)
    return leaf.expand(wanted)


def check_new_members(stack: Any, new: Sequence[Any]) -> None:
    """Raise an error if one of ``new`` cannot become a member of a lazy stack."""
    if (
        stack.is_locked
    ):  # is_locked is also True for a stack that was built to read an entry of a locked stack
        check_unlocked(stack, "add a member")
    members = stack.tensordicts
    for item in new:
        if not isinstance(item, Core):
            raise TypeError(f"the members of a lazy stack are collections; got {type(item).__name__}")
        first = (members or new)[0]
        if len(item.batch_size) != len(first.batch_size):
            raise BatchSizeError(
                f"the members have batch size {list(first.batch_size)}, the new one has {list(item.batch_size)}"
            )
        refuse_repeated(stack.stack_dim_name, [item])
        if any(node is stack for node in list_state_nodes(item)):
            raise CycleError("cannot add a member: it contains the stack it is added to")
