"""Tensors whose elements are in a store, and the kit for authors of formats.

:class:`StoredTensor` is a leaf that is read when an operation needs it. :mod:`td_store.arrays` splits collections into named
arrays and puts them together, :mod:`td_store.files` writes files that are complete or absent, and :mod:`td_store.testing` tests
sources and opened collections.

>>> import torch
>>> from td_core import TensorDict
>>> from td_store import StoredTensor
>>> from td_store.testing import MemorySource
>>> td = TensorDict({"a": StoredTensor(MemorySource(torch.arange(6)))}, batch_size=[6])
>>> td[torch.tensor([4, 2])]["a"]
tensor([4, 2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# td_core must be imported before this package's modules: its last statement loads the plugin of this package.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._stored_tensor import StoredTensor

__version__ = _td_core.__version__

__all__ = ["StoredTensor", "__version__"]

__getattr__, __dir__ = _lazy_names(__name__, {"._stored_tensor": ["StoredTensor"]})
