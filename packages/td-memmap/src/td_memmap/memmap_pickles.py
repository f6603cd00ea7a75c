"""Names in pickles of mapped collections and tensors, importable from here in every release.

>>> from td_memmap import memmap_pickles
>>> memmap_pickles.map_elements(torch.ones(2))
MemoryMappedTensor([1., 1.])
"""

from ._anonymous import receive_anonymous_file, remap_anonymous_storage
from ._memmap_backend import remap_collection
from ._tensor import map_elements, remap_anonymous_tensor, remap_storage, remap_tensor
from ._value_file import CopiedValues, ValueFile

__all__ = [
    "CopiedValues", "ValueFile", "map_elements", "receive_anonymous_file", "remap_anonymous_storage", "remap_anonymous_tensor",
    "remap_collection", "remap_storage", "remap_tensor",
]  # fmt: skip
