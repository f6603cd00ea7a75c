"""Memory-mapped tensors, the directory format, save and load for td-core.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2)}})
>>> saved = td.memmap("save")
>>> TensorDict.load_memmap("save")["n", "b"]
MemoryMappedTensor([1., 1.])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First, whichever of the two packages a program imports first: core loads the plugin of this one as its last statement.
import td_core as _td_core

if TYPE_CHECKING:
    from ._append import append_memmap
    from ._archive import is_memmap_archive, pack_memmap, refresh_archive_checksums, unpack_memmap
    from ._errors import AppendError, FileTakenError, NoFileError, PickleRefusedError
    from ._future import TensorDictFuture
    from ._inspect import Tree, inspect
    from ._listing import print_directory_tree
    from ._manifest import Problem, Report, verify
    from ._methods import load, load_memmap, memmap, memmap_like, save
    from ._tensor import MemoryMappedTensor

__all__ = [
    "AppendError", "FileTakenError", "MemoryMappedTensor", "NoFileError", "PickleRefusedError", "Problem",
    "Report", "TensorDictFuture", "Tree", "append_memmap", "inspect", "is_memmap_archive", "load",
    "load_memmap", "memmap", "memmap_like", "pack_memmap", "print_directory_tree",
    "refresh_archive_checksums", "save", "unpack_memmap", "verify",
]  # fmt: skip

__version__ = _td_core.__version__

# The modules come in with the first name that is asked for.
_HOMES = {
    "_methods": ("load", "load_memmap", "memmap", "memmap_like", "save"),
    "_append": ("append_memmap",),
    "_archive": ("is_memmap_archive", "pack_memmap", "refresh_archive_checksums", "unpack_memmap"),
    "_errors": ("AppendError", "FileTakenError", "NoFileError", "PickleRefusedError"),
    "_future": ("TensorDictFuture",),
    "_inspect": ("Tree", "inspect"),
    "_listing": ("print_directory_tree",),
    "_manifest": ("Problem", "Report", "verify"),
    "_tensor": ("MemoryMappedTensor",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
