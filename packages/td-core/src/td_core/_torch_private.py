"""Every private name of torch that the packages use, looked up once; each has a fallback, and a test.

What is here may vanish in any release of torch. Nothing else in the package touches a private name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "default_collate_functions",
    "foreach_kernel",
    "functorch_level",
    "nested_view",
    "plain_results",
    "ragged_dim",
]


def foreach_kernel(name: str) -> Callable[..., Any] | None:
    """Return ``torch._foreach_<name>``, which takes a list of tensors, or None where this torch has none.

    >>> foreach_kernel("no_such_function") is None
    True
    """
    return getattr(torch, f"_foreach_{name}", None)


def _unknown_level() -> bool:
    """Stand for "maybe inside a transform", which keeps callers on the path that is always right."""
    return True


#: Return None outside the transforms of ``torch.func`` (vmap, grad, jvp), something else inside.
functorch_level: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _unknown_level
)


def default_collate_functions() -> dict[Any, Callable[..., Any]]:
    """Return the table by which ``torch.utils.data.default_collate`` collates classes; a dummy where torch has none.

    >>> isinstance(default_collate_functions(), dict)
    True
    """
    return getattr(torch.utils.data._utils.collate, "default_collate_fn_map", {})


def _as_plain(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a torch function on tensors of a subclass as on plain ones; slower than what torch has for it."""
    plain: list[Any] = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]  # type: ignore[attr-defined]
    return func(*plain, **(kwargs or {}))


#: The ``__torch_function__`` of a tensor subclass whose results are plain tensors.
plain_results: Any = getattr(torch._C, "_disabled_torch_function_impl", classmethod(_as_plain))


def nested_view(flat: Tensor, shapes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    """Return the strided nested tensor whose components stand in ``flat``: a view, or a copy where torch has none.

    >>> table = torch.tensor([[1], [2]])
    >>> nested_view(torch.arange(3), table, torch.ones_like(table), torch.tensor([0, 1])).unbind()
    (tensor([0]), tensor([1, 2]))
    """
    view: Callable[..., Tensor] | None = getattr(torch, "_nested_view_from_buffer", None)
    if view is not None:
        return view(flat, shapes, strides, offsets)
    rows = zip(shapes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    return torch.nested.as_nested_tensor(
        [flat.as_strided(shape, stride, offset) for shape, stride, offset in rows]
    )


def ragged_dim(tensor: Tensor) -> int:
    """Return which dim of a jagged nested tensor is ragged.

    >>> ragged_dim(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged))
    1
    """
    return int(getattr(tensor, "_ragged_idx", 1))
