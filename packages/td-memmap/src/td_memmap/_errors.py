"""Errors that only files bring about."""

from __future__ import annotations

from td_core._public_names import set_module
from td_core.errors import FormatError, StructureError, TensorDictError


@set_module("td_memmap")
class FileTakenError(TensorDictError, RuntimeError, FileExistsError):
    """A file is in the way of one that was to be written, or a tensor already has another file."""


@set_module("td_memmap")
class NoFileError(TensorDictError, RuntimeError):
    """A path was asked of something that is stored in no named file."""


@set_module("td_memmap")
class PickleRefusedError(FormatError, RuntimeError):
    """A save holds a pickled value, and ``allow_pickle=True`` was not given."""


@set_module("td_memmap")
class AppendError(StructureError, ValueError):
    """Rows do not fit the save that they were to be appended to."""
