"""FSDP2 around a module that returns a collection.

``fully_shard`` gathers the parameters again before the backward pass reaches the tensors that a module returned. It finds
them in tuples, lists, dicts and dataclasses, so those in a collection have to be shown to it.
"""

from __future__ import annotations

from typing import Any

from td_core import TensorCollection

__all__ = ["show_results"]


def show_results(cls: Any) -> None:
    """Let a class that ``fully_shard`` makes of a module's class show the tensors in the collections it returns."""
    if not any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        return

    inherited = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inherited(self, *args, **kwargs)
        # A private name of torch: without it, torch has found another way to the tensors.
        register = getattr(self._get_fsdp_state(), "_register_pre_backward_hook", None)
        if register is not None and isinstance(result, TensorCollection):
            register(tuple(result.values(True, True)))
        return result

    cls.forward = forward
