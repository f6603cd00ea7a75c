"""The exception classes of the packages.

Each class also derives from the builtin exceptions that callers usually catch in that situation::

    TensorDictError
    ├── KeyPathError (KeyError)             a key is missing, malformed or already used
    │   ├── KeyThroughLeafError (ValueError)    a nested key has a tensor as one of its parents
    │   └── KeyTakenError (ValueError)          two entries would have the same key
    ├── BatchSizeError (RuntimeError, ValueError) a shape does not match the batch size
    ├── CollectionIndexError (IndexError)   an index is invalid for the batch dims
    ├── DimError (IndexError, RuntimeError, ValueError) a dim is out of range or repeated
    ├── DimNamesError (ValueError, RuntimeError) dim names are repeated, not strings, or not one per dim
    ├── LockedError (RuntimeError)          a change of a locked structure, or a write to a read-only store
    ├── StructureError (RuntimeError, ValueError) two structures that have to match differ
    │   ├── KeyMismatchError (KeyError)         the keys of two structures differ
    │   └── CycleError                          a collection would contain itself
    ├── DepthError (RecursionError)         nesting is too deep for torch, numpy or Python
    ├── FormatError (ValueError)            a file or message is damaged or has another format
    ├── CodecError (TypeError)              no serializer can store a Python value
    ├── UnsupportedOperationError (NotImplementedError) a format does not implement an operation
    ├── PluginError (RuntimeError)          a plugin breaks the rules of registration
    ├── WorkerError (RuntimeError)          a worker process died or could not send its error
    └── MissingPluginError (AttributeError) the package of a method is not installed

>>> issubclass(KeyPathError, KeyError) and issubclass(FormatError, ValueError)
True
"""

from __future__ import annotations

import re
from typing import ClassVar

__all__ = [
    "BatchSizeError", "CodecError", "CollectionIndexError", "CycleError", "DepthError", "DimError",
    "DimNamesError", "FormatError", "KeyMismatchError", "KeyPathError", "KeyTakenError",
    "KeyThroughLeafError", "LockedError", "MissingPluginError", "PluginError", "StructureError",
    "TensorDictError", "UnsupportedOperationError", "WorkerError",
]  # fmt: skip

#: The packages of the project beside td-core, in the order in which their plugins are registered, and those that each needs.
FIRST_PARTY: dict[str, tuple[str, ...]] = {
    "td-store": (),
    "td-memmap": ("td-store",),
    "td-tensorclass": (),
    "td-distributed": ("td-store",),
    "td-nn": (),
    "td-data": (),
    "td-safetensors": ("td-store",),
    "td-zarr": ("td-store",),
    "td-hdf5": ("td-store",),
    "td-arrow": ("td-store",),
    "td-remote": ("td-store",),
    "td-redis": ("td-store",),
}

_PROVIDER = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?)==([A-Za-z0-9.+!_\-]*)\Z")


class TensorDictError(Exception):
    """Base of the exceptions of all td packages."""


class KeyPathError(TensorDictError, KeyError):
    """A key is missing, malformed or already used."""

    def __str__(self) -> str:
        # str() of a KeyError is the repr of its argument, which would put the message in quotes.
        return str(self.args[0]) if self.args else ""


class KeyThroughLeafError(KeyPathError, ValueError):
    """A nested key has a tensor as one of its parents."""


class KeyTakenError(KeyPathError, ValueError):
    """Two entries would have the same key."""


class BatchSizeError(TensorDictError, RuntimeError, ValueError):
    """A shape does not match the batch size."""


class CollectionIndexError(TensorDictError, IndexError):
    """An index is invalid for the batch dims."""


class DimError(TensorDictError, IndexError, RuntimeError, ValueError):
    """A dim is out of range or repeated. torch raises different builtin exceptions for this; it derives from each."""


class DimNamesError(TensorDictError, ValueError, RuntimeError):
    """Dim names are repeated, not strings, or not one per batch dim."""


class LockedError(TensorDictError, RuntimeError):
    """A change of the structure of a locked collection was refused, or a write to a store that is opened read-only."""


class StructureError(TensorDictError, RuntimeError, ValueError):
    """Two structures that have to match differ."""


class KeyMismatchError(StructureError, KeyError):
    """Two collections that must have the same keys have different keys."""

    __str__ = KeyPathError.__str__


class CycleError(StructureError):
    """A collection would contain itself."""


class DepthError(TensorDictError, RecursionError):
    """Nesting is too deep for a recursive function of torch, numpy or Python."""


class FormatError(TensorDictError, ValueError):
    """A file or message is damaged or has another format."""


class CodecError(TensorDictError, TypeError):
    """A Python value has no serializer, and pickling it was not allowed."""


class UnsupportedOperationError(TensorDictError, NotImplementedError):
    """A format does not implement an operation."""


class PluginError(TensorDictError, RuntimeError):
    """A plugin breaks the rules of registration."""


class WorkerError(TensorDictError, RuntimeError):
    """A worker process died, or raised an error that it could not send."""


class MissingPluginError(TensorDictError, AttributeError):
    """A method is provided by a package that is not installed or not active."""

    #: Reason why an installed distribution provides nothing, by name; the plugin manager fills it.
    unavailable: ClassVar[dict[str, str]] = {}

    @classmethod
    def describe(cls, distribution: str) -> str:
        """Return the part of a message that names a missing package and the remedy.

        >>> MissingPluginError.describe("td-none")
        "the package 'td-none', which is not installed: install it from where its authors publish it"
        """
        return f"the package {distribution!r}, which is {cls._explain(distribution)}"

    @classmethod
    def of_writer(cls, what: str, provider: object) -> MissingPluginError | None:
        """Build the error for content of a missing package; None if ``provider`` does not have the form ``name==version``.

        >>> print(MissingPluginError.of_writer("the value", "td-none==1.0"))
        the value was written by 'td-none' 1.0, which is not installed: install it from where its authors publish it
        """
        result = _PROVIDER.match(provider) if isinstance(provider, str) else None
        if result is None:
            return None
        name, version = result.groups()
        return cls(f"{what} was written by {name!r} {version}, which is {cls._explain(name)}")

    @classmethod
    def _explain(cls, distribution: str) -> str:
        if distribution in FIRST_PARTY:
            folders = " ".join(f"./packages/{name}" for name in (*FIRST_PARTY[distribution], distribution))
            remedy = f"pip install {folders} in a checkout of td"
        else:
            remedy = "install it from where its authors publish it"
        return cls.unavailable.get(distribution, f"not installed: {remedy}")
