"""The UnbatchedTensor of an opened save, whose elements are in a store. It is imported at first use, as stored tensors are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from td_core import StoredTensor

from ._unbatched import UnbatchedTensor


class StoredUnbatchedTensor(StoredTensor, UnbatchedTensor):
    """A stored tensor that all elements of a batch share. Results of operations are plain tensors."""

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        """Reduce to a stored tensor, without reading."""
        rebuild, (_, *place) = super().__reduce_ex__(protocol)
        return rebuild, (StoredTensor, *place)


def convert_stored(tensor: Tensor, unbatched: bool) -> Tensor:
    """Return a stored tensor of one class or the other: the object itself if autograd refers to it, else a view."""
    result = tensor if tensor.requires_grad else tensor.detach()
    result.__class__ = StoredUnbatchedTensor if unbatched else StoredTensor
    return result
