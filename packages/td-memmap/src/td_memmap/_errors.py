"""Errors specific to files."""

from __future__ import annotations

from td_core._public_names import set_module
from td_core.errors import FormatError, StructureError, TensorDictError


@set_module("td_memmap")
class FileTakenError(TensorDictError, RuntimeError, FileExistsError):
    """A target file already exists, or the tensor is already stored in another file."""


@set_module("td_memmap")
class NoFileError(TensorDictError, RuntimeError):
    """The path was requested of a tensor that has no named file."""


@set_module("td_memmap")
class PickleRefusedError(FormatError, RuntimeError):
    """A save contains a pickled value and ``allow_pickle=True`` was not passed."""


@set_module("td_memmap")
class AppendError(StructureError, ValueError):
    """The rows do not fit the save to which they should be appended."""
