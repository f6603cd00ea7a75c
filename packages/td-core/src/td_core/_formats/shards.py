"""Sharded leaves: tensors whose elements lie on several ranks, which save together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._tree.node import Core
from ..errors import CodecError, WorkerError


def save_together(
    data: Core, write: Callable[[Any], Any], read: Callable[[], Any] | None, early: object = False
) -> Any:
    """Call ``write(data)``. Gather sharded leaves first: on all ranks of their mesh, of which the first one writes.

    The other ranks call ``read`` once the collection is saved, or raise WorkerError. With ``read=None``, every rank writes.
    ``early``: ``write`` returns before it has written; raise ValueError if leaves are sharded.

    >>> save_together(TensorDict({"a": 1}), print, None)
    TensorDict(batch_size=[], fields={a: i64[]})
    """
    leaves = data._leaves()
    shards = list_shards(leaves)
    if not shards:
        return write(data)
    if early:
        raise ValueError("return_early=True: the ranks write sharded leaves together; save without it")
    gathered = {id(shard): shard.full_tensor() for shard in shards}
    whole = data._unflatten([gathered.get(id(leaf), leaf) for leaf in leaves])
    if read is None:
        return write(whole)
    mesh = max((shard.device_mesh for shard in shards), key=lambda mesh: mesh.size())
    writer = int(mesh.mesh.flatten()[0])
    writes = torch.distributed.get_rank() == writer
    failed = torch.ones((), device=mesh.device_type)
    try:
        result = write(whole) if writes else None
        failed.zero_()
    finally:
        # A reduction along each dim of the mesh: no rank continues before the first one has written.
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
    if failed.item():
        raise WorkerError(f"rank {writer} could not save the sharded leaves; its error says why")
    return result if writes else read()


def check_whole(leaf: Tensor) -> None:
    """Raise CodecError if a leaf is sharded."""
    if list_shards([leaf]):
        raise CodecError(
            "a DTensor lies on several ranks: td_core.save(data, path, format=...), called on all of them, gathers it; or "
            "store its full_tensor()"
        )


def list_shards(leaves: Iterable[Tensor]) -> list[Any]:
    """Return the leaves that are sharded.

    >>> list_shards([torch.ones(2)])
    []
    """
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    cls = getattr(module, "DTensor", None)
    return [] if cls is None else [leaf for leaf in leaves if isinstance(leaf, cls)]
