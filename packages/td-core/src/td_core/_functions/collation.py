"""Collate samples into batches, for a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from .._torch.private import default_collate_functions
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core
from .._tree.ragged import pad_to
from ..errors import StructureError
from ..typing import NestedKey
from .joining import maybe_dense_stack


def collate(
    batch: Any,
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> Any:
    """Collate samples into one batch; a ``collate_fn`` for :class:`torch.utils.data.DataLoader`.

    Collections are stacked, lazily if their keys or shapes differ; tuples and mappings of samples are collated item
    by item; all other samples are passed to :func:`torch.utils.data.default_collate`.

    Args:
        batch: a sequence of samples; a collection is already a batch and is returned unchanged.
        pad_keys: padding value by key, for entries of different shapes.
        nested_keys: keys of entries that become jagged nested tensors.
        mask_key: key for the masks of the entries in ``pad_keys`` (bool tensors, True for data).

    Raises:
        KeyPathError: a sample lacks an entry of ``pad_keys`` or ``nested_keys``.
        ValueError: ``mask_key`` is set without ``pad_keys``.

    >>> collate([TensorDict({"a": 1}), TensorDict({"a": 2})])["a"]
    tensor([1, 2])
    """
    if mask_key is not None and not pad_keys:
        raise ValueError(f"mask_key={mask_key!r} needs pad_keys: only entries that are padded get a mask")
    if isinstance(batch, Core):
        return batch
    samples = list(batch)
    if not samples:
        return samples
    first = samples[0]
    collate_column = partial(collate, pad_keys=pad_keys, nested_keys=nested_keys, mask_key=mask_key)
    if isinstance(first, Core):
        return _collate_collections(samples, pad_keys or {}, nested_keys or (), mask_key)
    if isinstance(first, (tuple, list)):
        return _build_like(first, [collate_column(column) for column in zip(*samples, strict=True)])
    if isinstance(first, Mapping) and any(isinstance(item, Core) for item in first.values()):
        return {key: collate_column([sample[key] for sample in samples]) for key in first}
    return default_collate(samples)


def _build_like(sample: object, columns: list[object]) -> object:
    """Build a named tuple, tuple or list of columns, like a sample."""
    if hasattr(sample, "_fields"):
        return type(sample)(*columns)
    return tuple(columns) if isinstance(sample, tuple) else columns


def _collate_collections(
    samples: list[Core],
    pad_keys: Mapping[NestedKey, float],
    nested_keys: Sequence[NestedKey],
    mask_key: NestedKey | None,
) -> object:
    columns = {key: [sample[key] for sample in samples] for key in nested_keys}
    if nested_keys:
        samples = [sample.exclude(*nested_keys) for sample in samples]
    if pad_keys:
        samples = [sample._shallow_copy() for sample in samples]
    for key, value in pad_keys.items():
        _pad_entry(samples, key, value, mask_key)
    result = maybe_dense_stack(samples, 0)
    for key, leaves in columns.items():
        result.set(key, torch.nested.as_nested_tensor(leaves, layout=torch.jagged))
    return result


def _pad_entry(samples: list[Core], key: NestedKey, value: float, mask_key: NestedKey | None) -> None:
    """Pad one entry of all samples to the same shape, and set its masks."""
    path = unravel_key_to_tuple(key)
    leaves: list[Tensor] = [sample[key] for sample in samples]
    if len({leaf.ndim for leaf in leaves}) != 1:
        raise StructureError(
            f"collate: key {key!r} has {[leaf.ndim for leaf in leaves]} dims, so it cannot be padded"
        )
    shape = [max(sizes) for sizes in zip(*(leaf.shape for leaf in leaves), strict=True)]
    for sample, leaf in zip(samples, leaves, strict=True):
        sample._set_path(path, pad_to(leaf, shape, value))
        if mask_key is not None:
            mask = pad_to(torch.ones(leaf.shape, dtype=torch.bool, device=leaf.device), shape, False)
            sample._set_path((*unravel_key_to_tuple(mask_key), *path), mask)


def _collate_for_torch(batch: object, *, collate_fn_map: object = None) -> object:
    return collate(batch)


default_collate_functions()[Core] = _collate_for_torch
