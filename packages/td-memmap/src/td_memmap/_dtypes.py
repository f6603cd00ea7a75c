"""Dtypes that files can hold, and their names."""

from __future__ import annotations

import torch
from torch import Tensor

from td_core._collection import show_path
from td_core.errors import CodecError

#: Dtypes by their name in files, ``str(dtype)``. Quantized dtypes have parameters that a file cannot hold.
DTYPES: dict[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.quint"))
}

_STORABLE = frozenset(DTYPES.values())


def check_storable(leaf: Tensor, where: str | tuple[str, ...], *, content: bool = True) -> None:
    """Raise CodecError if a leaf is sparse, quantized or, with ``content=True``, has no elements in memory."""
    there = not content or _has_memory(leaf)
    if leaf.layout is torch.strided and leaf.dtype in _STORABLE and there:
        return
    check_dtype(leaf.dtype, where)
    position = where if isinstance(where, str) else show_path(where)
    if leaf.layout not in (torch.strided, torch.jagged):
        raise CodecError(
            f"cannot store a tensor of layout {leaf.layout} at {position}: convert it with to_dense() first; "
            f"shape {list(leaf.shape)}, dtype {leaf.dtype}"
        )
    if content and leaf.is_meta:
        raise CodecError(
            f"cannot store the elements of a meta tensor at {position}: it has none; memmap_like() needs only the shape "
            f"{list(leaf.shape)}"
        )
    if leaf.layout is torch.strided:
        raise CodecError(
            f"cannot store the elements of a {type(leaf).__name__} at {position}: it has no memory of its own; take what it is "
            "made of first, of a DTensor its to_local() or full_tensor()"
        )


def _has_memory(leaf: Tensor) -> bool:
    """Return True if the elements of a tensor are in memory, which is false for fake tensors and wrappers."""
    try:
        # data_ptr() of a FakeTensor warns, so check its storage's device instead.
        if type(leaf) is not Tensor and leaf.untyped_storage().device.type == "meta":
            return False
        return leaf.data_ptr() != 0 or (not leaf.is_meta and not leaf.numel())
    except RuntimeError:
        # Tensors inside vmap() and grad() have no address.
        return False


def check_dtype(dtype: torch.dtype, where: str | tuple[str, ...]) -> None:
    """Raise CodecError if elements of a dtype cannot be stored: quantized dtypes cannot."""
    if dtype not in _STORABLE:
        position = where if isinstance(where, str) else show_path(where)
        raise CodecError(f"cannot store the dtype {dtype} at {position}: convert it with dequantize() first")
