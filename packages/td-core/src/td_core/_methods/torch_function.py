"""The ``__torch_function__`` protocol, through which torch functions accept collections."""

from __future__ import annotations

from typing import Any

import torch

from .._functions.torch_function import TABLE
from .._torch.private import is_caller, without_torch_function
from .._tree.node import Core

#: Keyword names of torch functions that differ from those of the methods: torch's name -> method's name.
_KEYWORDS = {
    torch.broadcast_to: {"size": "shape"},
    torch.cat: {"tensors": "input"},
    torch.concat: {"tensors": "input"},
    torch.concatenate: {"tensors": "input"},
    torch.pow: {"exponent": "other"},
    torch.reshape: {"shape": "size"},
    torch.stack: {"tensors": "input"},
    torch.swapdims: {"dim0": "axis0", "dim1": "axis1"},
    torch.unflatten: {"sizes": "unflattened_size"},
}


class TorchFunctionMixin(Core):
    """The ``__torch_function__`` protocol, through which torch functions accept collections."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Call the implementation of a torch function for collections.

        Raises:
            TypeError: the function is not supported on collections.

        >>> torch.exp(TensorDict({"a": torch.zeros(2)}))["a"]
        tensor([1., 1.])
        """
        handler = TABLE.get(func)
        if handler is None:
            if is_caller(func):  # only torch.compile dispatches such functions here, eager mode never does
                with without_torch_function():
                    return func(*args, **(kwargs or {}))
            name = torch.overrides.resolve_name(func) or repr(func)
            raise TypeError(
                f"{name} takes no collections; call it on each leaf, td.apply({name}), or on the leaves that it is for"
            )
        if not kwargs:
            return handler(*args)
        names = _KEYWORDS.get(func, {})
        return handler(*args, **{names.get(key, key): value for key, value in kwargs.items()})
