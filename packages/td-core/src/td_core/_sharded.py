"""Save collections with sharded leaves (``DTensor``): the ranks gather them together, and one rank writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._collection import Core
from .errors import WorkerError


def save_together(data: Core, write: Callable[[Any], Any], read: Callable[[], Any] | None) -> Any:
    """Call ``write(data)``. Gather sharded leaves first: on all ranks of their mesh, of which the first one writes.

    The other ranks call ``read`` once the collection is saved, or raise WorkerError. With ``read=None``, every rank writes.

    >>> save_together(TensorDict({"a": 1}), print, None)
    TensorDict(batch_size=[], fields={a: i64[]})
    """
    leaves = data._leaves()
    shards = _list_shards(leaves)
    if not shards:
        return write(data)
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


def _list_shards(leaves: list[Tensor]) -> list[Any]:
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    cls = getattr(module, "DTensor", None)
    return [] if cls is None else [leaf for leaf in leaves if isinstance(leaf, cls)]
