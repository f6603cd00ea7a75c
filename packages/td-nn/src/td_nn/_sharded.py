"""Support for FSDP2 (``fully_shard``) of modules that return a collection.

``fully_shard`` registers hooks on the tensors that a module returns, to gather the parameters again before the backward
pass. It finds tensors in tuples, lists, dicts and dataclasses, but not in a collection.
"""

from __future__ import annotations

from typing import Any

from td_core import TensorCollection

__all__ = ["show_results"]


def show_results(cls: Any) -> None:
    """Register the backward hooks of FSDP2 for returned collections, in a class that ``fully_shard`` created."""
    if not any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        return

    inherited = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inherited(self, *args, **kwargs)
        # This name is private in torch, so a release without it must not fail here.
        register = getattr(self._get_fsdp_state(), "_register_pre_backward_hook", None)
        if register is not None and isinstance(result, TensorCollection):
            register(tuple(result.values(True, True)))
        return result

    cls.forward = forward
