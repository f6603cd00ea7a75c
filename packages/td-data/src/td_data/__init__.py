"""Batches for training: loaders, samplers, views and replay buffers of collections.

>>> import torch
>>> from td_core import TensorDict
>>> from td_data import Loader
>>> data = TensorDict({"x": torch.zeros(5, 3), "y": torch.arange(5)}, batch_size=[5])
>>> [batch["y"].tolist() for batch in Loader(data, batch_size=2)]
[[0, 1], [2, 3], [4]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# td_core must be imported before this package's modules: its last statement loads the plugin of this package.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._blocks import BlockSampler
    from ._device_buffers import prefetch
    from ._loader import Loader
    from ._position import Sampler
    from ._replay import ReplayBuffer
    from ._ring_samplers import PrioritizedSampler, SliceSampler
    from ._samplers import MixtureSampler, RandomSampler, SequentialSampler, WeightedRandomSampler
    from ._views import Concat, Packed, Slices

__version__ = _td_core.__version__

__all__ = [
    "BlockSampler", "Concat", "Loader", "MixtureSampler", "Packed", "PrioritizedSampler", "RandomSampler",
    "ReplayBuffer", "Sampler", "SequentialSampler", "SliceSampler", "Slices", "WeightedRandomSampler", "__version__",
    "prefetch",
]  # fmt: skip

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._blocks": ["BlockSampler"],
        "._device_buffers": ["prefetch"],
        "._loader": ["Loader"],
        "._position": ["Sampler"],
        "._replay": ["ReplayBuffer"],
        "._ring_samplers": ["PrioritizedSampler", "SliceSampler"],
        "._samplers": [
            "MixtureSampler", "RandomSampler", "SequentialSampler", "WeightedRandomSampler",
        ],
        "._views": ["Concat", "Packed", "Slices"],
    },
)  # fmt: skip
