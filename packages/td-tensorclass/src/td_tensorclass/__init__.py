"""Tensor-carrying data classes and non-tensor data for td-core.

>>> import torch
>>> from td_tensorclass import TensorClass
>>> class Point(TensorClass):
...     xy: torch.Tensor
...     label: str = "unnamed"
>>> points = Point(torch.zeros(3, 2), label="origin", batch_size=[3])
>>> points[0].label, points[:2].xy.shape
('origin', torch.Size([2, 2]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import core first: its last statement loads the plugin of this package.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._attrs import TensorAttrs
    from ._metadata import MetaData
    from ._non_tensor import NonTensorData, NonTensorDataBase, is_non_tensor
    from ._non_tensor import is_leaf_nontensor as is_leaf_nontensor
    from ._non_tensor_stack import NonTensorStack
    from ._plain_classes import from_dataclass, is_tensorclass, tensorclass
    from ._schema import UnknownFieldError
    from ._tensorclass import TensorClass
    from ._typed import TypedTensorDict
    from ._unbatched import UnbatchedTensor
    from ._value_settings import capture_non_tensor_stack as capture_non_tensor_stack
    from ._value_settings import list_to_stack as list_to_stack
    from ._value_settings import set_capture_non_tensor_stack as set_capture_non_tensor_stack
    from ._value_settings import set_list_to_stack as set_list_to_stack

__version__ = _td_core.__version__

__all__ = [
    "MetaData", "NonTensorData", "NonTensorDataBase", "NonTensorStack", "TensorAttrs", "TensorClass",
    "TypedTensorDict", "UnbatchedTensor", "UnknownFieldError", "__version__", "from_dataclass", "is_non_tensor",
    "is_tensorclass", "tensorclass",
]  # fmt: skip

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._attrs": ("TensorAttrs",),
        "._metadata": ("MetaData",),
        "._non_tensor": ("NonTensorData", "NonTensorDataBase", "is_leaf_nontensor", "is_non_tensor"),
        "._non_tensor_stack": ("NonTensorStack",),
        "._plain_classes": ("from_dataclass", "is_tensorclass", "tensorclass"),
        "._value_settings": (
            "capture_non_tensor_stack",
            "list_to_stack",
            "set_capture_non_tensor_stack",
            "set_list_to_stack",
        ),
        "._tensorclass": ("TensorClass",),
        "._typed": ("TypedTensorDict",),
        "._unbatched": ("UnbatchedTensor",),
        "._schema": ("UnknownFieldError",),
    },
    # For programs of tensordict alone.
    hidden=(
        "capture_non_tensor_stack",
        "is_leaf_nontensor",
        "list_to_stack",
        "set_capture_non_tensor_stack",
        "set_list_to_stack",
    ),
)
