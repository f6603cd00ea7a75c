"""Memory-mapped tensors, the directory format, save and load for td-core.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2)}})
>>> saved = td.memmap("save")
>>> TensorDict.load_memmap("save")["n", "b"]
MemoryMappedTensor([1., 1.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Import td_core first, even if a program imports this package first: td_core loads this plugin last.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from td_core import Problem, Report, TensorDictFuture, Tree

    from ._append import append_memmap
    from ._archive import is_memmap_archive, pack_memmap, refresh_archive_checksums, unpack_memmap
    from ._errors import AppendError, FileTakenError, NoFileError, PickleRefusedError
    from ._inspect import inspect
    from ._inspect import print_directory_tree as print_directory_tree
    from ._manifest import verify
    from ._methods import load, load_memmap, memmap, memmap_like, save
    from ._tensor import MemoryMappedTensor

__all__ = [
    "AppendError", "FileTakenError", "MemoryMappedTensor", "NoFileError", "PickleRefusedError", "Problem",
    "Report", "TensorDictFuture", "Tree", "append_memmap", "inspect", "is_memmap_archive", "load",
    "load_memmap", "memmap", "memmap_like", "pack_memmap", "refresh_archive_checksums", "save", "unpack_memmap",
    "verify",
]  # fmt: skip

__version__ = _td_core.__version__

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._methods": ("load", "load_memmap", "memmap", "memmap_like", "save"),
        "._append": ("append_memmap",),
        "._archive": ("is_memmap_archive", "pack_memmap", "refresh_archive_checksums", "unpack_memmap"),
        "._errors": ("AppendError", "FileTakenError", "NoFileError", "PickleRefusedError"),
        "._inspect": ("inspect", "print_directory_tree"),
        "._manifest": ("verify",),
        "._tensor": ("MemoryMappedTensor",),
        "td_core": ("Problem", "Report", "TensorDictFuture", "Tree"),
    },
    hidden=("print_directory_tree",),  # for programs of tensordict alone
)
