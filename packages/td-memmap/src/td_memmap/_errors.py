"""Errors specific to files."""

from __future__ import annotations

from td_core.errors import FormatError, StructureError, TensorDictError
from td_core.spi import set_module


@set_module("td_memmap")
class FileTakenError(TensorDictError, RuntimeError, FileExistsError):
    """A target file already exists, or the tensor is already stored in another file."""


@set_module("td_memmap")
class NoFileError(TensorDictError, RuntimeError):
    """A tensor has no file of the requested sort: a path, or an anonymous file."""


@set_module("td_memmap")
class PickleRefusedError(FormatError, RuntimeError):
    """A save contains a pickled value and ``allow_pickle=True`` was not passed."""


@set_module("td_memmap")
class AppendError(StructureError, ValueError):
    """Rows cannot be appended to a save, for instance because their keys or dtypes differ."""
