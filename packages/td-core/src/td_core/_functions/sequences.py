"""Pad collections of different lengths to one length, and remove the padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._plans.steps import remove_size
from .._tree.coerce import COERCERS
from .._tree.defaults import check_collection, show_path, type_error
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core
from .._tree.ragged import make_padded_tensor
from .._tree.walks import has_entries
from ..errors import KeyPathError, StructureError
from ..typing import NestedKey
from .joining import cat, lazy_stack, stack_densely
from .padding import get_largest_size, set_masks, stack_padded

MASKS = "masks"
"""Default key of the masks."""

Path = tuple[str, ...]

ItemT = TypeVar("ItemT")


def pad_sequence(
    list_of_tensordicts: Sequence[ItemT],
    pad_dim: int = 0,
    padding_value: float | Mapping[NestedKey, float] = 0.0,
    out: Core | None = None,
    return_mask: bool | NestedKey = False,
    padding_side: str = "right",
) -> ItemT:
    """Pad the leaves of collections to equal length along a dim, and stack them.

    Args:
        list_of_tensordicts: the items; keys that not all items have are dropped.
        pad_dim: the dim of each leaf to pad.
        padding_value: padding value of all leaves, or a mapping by key; non-tensor data is padded with None.
        out: collection that the result is written to and that is returned.
        return_mask: True or a key: store bool masks under that key (``"masks"`` for True), True for data.
        padding_side: ``"right"`` or ``"left"``.

    Returns:
        A collection of batch size ``[len(items), *batch_size]``.

    Raises:
        StructureError: the list is empty, or leaves differ in other dims.
        KeyPathError: ``padding_value`` names an entry that does not exist.

    >>> items = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
    >>> pad_sequence(items)["a"]
    tensor([[1., 0.],
            [1., 1.]])
    """
    items = list(list_of_tensordicts)
    for item in items:
        check_collection("pad_sequence", item)
    if not items:
        raise StructureError("pad_sequence needs at least one item, got an empty list")
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right'; got {padding_side!r}")
    fills = {}
    if isinstance(padding_value, Mapping):
        fills = {unravel_key_to_tuple(key): value for key, value in padding_value.items()}
        padding_value = 0.0
    masks: dict[Path, Tensor] = {}
    used: set[Path] = set()

    def pad(path: Path, leaves: list[Tensor], batch_dims: int) -> Tensor:
        used.add(path)
        _check_shapes(path, leaves, pad_dim)
        if return_mask is not False:
            ndim = max(pad_dim % leaves[0].ndim + 1, batch_dims)
            ones = [torch.ones(leaf.shape[:ndim], dtype=torch.bool, device=leaf.device) for leaf in leaves]
            masks[path] = make_padded_tensor(path, ones, 0, False, padding_side)
        return make_padded_tensor(path, leaves, 0, fills.get(path, padding_value), padding_side)

    result = stack_padded(items, 0, pad, lambda values: _pad_values(values, padding_side))
    unknown = [path for path in fills if path not in used]
    if unknown:
        raise KeyPathError(
            f"padding_value names {unknown}, which are not tensor entries; there are {sorted(used)}"
        )
    if return_mask is not False:
        where = (MASKS,) if return_mask is True else unravel_key_to_tuple(return_mask)
        set_masks(lambda: result.create_nested(where))
        for path, mask in masks.items():
            result._set_path((*where, *path), mask)
    if out is not None:
        result = out.update(result, inplace=True)
    padded: ItemT = result
    return padded


def _check_shapes(path: Path, leaves: list[Tensor], pad_dim: int) -> None:
    """Raise StructureError if the leaves of one key differ in another dim than ``pad_dim``."""
    if any(leaf.is_nested for leaf in leaves):
        raise StructureError(
            f"pad_sequence: {show_path(path)} is a nested tensor; to_padded_tensor() the items first"
        )
    ndim = leaves[0].ndim
    if not -ndim <= pad_dim < ndim:
        raise StructureError(
            f"pad_sequence: {show_path(path)} has {ndim} dims, so dim {pad_dim} cannot be padded; "
            "unsqueeze() it, or exclude() it and stack it by itself"
        )
    if len({(leaf.ndim, remove_size(leaf.shape, pad_dim % ndim)) for leaf in leaves}) > 1:
        raise StructureError(
            f"pad_sequence: {show_path(path)} has shapes {[list(leaf.shape) for leaf in leaves]}, which differ in "
            f"other dims than {pad_dim}"
        )


def _pad_values(entries: list[Core], side: str) -> Core:
    """Pad value nodes with None to one batch size and stack them."""
    size, padded = get_largest_size(entries), []
    coercer = COERCERS.get_fallback()
    assert coercer is not None
    for entry in entries:
        for dim, length in enumerate(size):
            if amount := length - entry.batch_size[dim]:
                shape = torch.Size((*entry.batch_size[:dim], amount, *entry.batch_size[dim + 1 :]))
                filler: Any = coercer.convert(None, shape, entry.device)
                entry = cat([filler, entry] if side == "left" else [entry, filler], dim)
        padded.append(entry)
    return stack_densely(padded, 0)


def unpad_sequence(padded: Any, mask: Tensor | Core | None = None, *, pad_dim: int = 0) -> Any:
    """Remove the padding of :func:`pad_sequence` and return the items as a lazy stack.

    Args:
        padded: the padded collection.
        mask: a bool tensor of shape ``[len(padded), length]``, or a collection of masks under the keys of the leaves;
            by default the entry ``"masks"`` of ``padded``.
        pad_dim: the dim of each leaf that was padded.

    Raises:
        ValueError: no mask is passed or stored; or the data of a row is not contiguous.

    >>> items = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
    >>> padded = pad_sequence(items, return_mask=True)
    >>> [len(item["a"]) for item in unpad_sequence(padded).tensordicts]
    [1, 2]
    """
    check_collection("unpad_sequence", padded)
    if mask is None:
        mask = padded.get(MASKS, None)
        if not isinstance(mask, Core):
            raise ValueError(
                "unpad_sequence needs a mask: give mask=, or pad with pad_sequence(..., return_mask=True)"
            )
        padded = padded.exclude(MASKS)
    if not isinstance(mask, (Tensor, Core)):
        raise type_error("unpad_sequence", mask, "a mask that is a tensor or a collection")
    if isinstance(mask, Tensor) and (mask.ndim != 2 or len(mask) != len(padded)):
        raise ValueError(
            f"a mask is a tensor of shape [{len(padded)}, length], or a collection; got shape {list(mask.shape)}"
        )
    return lazy_stack([_unpad_row(padded[i], mask[i], pad_dim) for i in range(len(padded))], 0)


def _unpad_row(row: object, mask: object, pad_dim: int) -> object:
    rows: list[tuple[Any, dict[str, Any], Any, Any, Any, str, Path]] = [(row, {}, mask, None, None, "", ())]
    sizes = []
    for node, entries, masks, above, _, _, prefix in rows:
        size = list(node.batch_size)
        batched = -len(size) <= pad_dim < len(size)
        # An entry without a mask has the data range (run) of its node, and a node without masks that of its parent.
        run = _find_level_run(masks, pad_dim, len(size), prefix) or above
        if run is not None and batched:
            size[pad_dim] = run[1]
        sizes.append(torch.Size(size))
        for key, child in dict(node._children()).items():
            path = (*prefix, key)
            inner = masks.get(key, None) if isinstance(masks, Core) else masks
            if isinstance(child, Tensor) and inner is not None:
                entries[key] = child.narrow(pad_dim, *_find_run(inner, pad_dim, child.ndim, path))
            elif has_entries(child):
                entries[key] = None
                rows.append((child, {}, inner, run, entries, key, path))
            else:
                entries[key] = child if run is None or not batched else child.narrow(pad_dim, *run)
    result = None
    for (node, entries, _, _, parent, key, _), batch_size in zip(reversed(rows), reversed(sizes)):
        result = node._with_children(entries, batch_size=batch_size)
        if parent is not None:
            parent[key] = result
    return result


def _find_level_run(masks: Any, pad_dim: int, batch_dims: int, path: Path) -> tuple[int, int] | None:
    """Return start and length of the data of a node according to its first mask; None without a mask."""
    while isinstance(masks, Core):
        masks = next(iter(masks._children().values()), None)
    return None if masks is None else _find_run(masks, pad_dim, max(batch_dims, masks.ndim), path)


def _find_run(mask: Tensor, pad_dim: int, ndim: int, path: Path) -> tuple[int, int]:
    """Return start and length of the run of True values in a mask along ``pad_dim``."""
    dim = min(pad_dim % ndim, mask.ndim - 1)
    others = [i for i in range(mask.ndim) if i != dim]
    present = (mask.any(dim=others) if others else mask).nonzero().flatten()
    if not len(present):
        return 0, 0
    start, end = int(present[0]), int(present[-1]) + 1
    if end - start != len(present):
        raise ValueError(
            f"unpad_sequence: the mask of {show_path(path)} has data in more than one place in a row"
        )
    return start, end - start
