"""Every error that the packages raise on purpose.

Each class also subclasses the builtin that people already catch for that situation::

    TensorDictError
    ├── KeyPathError (KeyError)             a key is missing, malformed or already taken
    │   ├── KeyThroughLeafError (ValueError)    a nested key goes through a tensor
    │   └── KeyTakenError (ValueError)          two entries would have one key
    ├── BatchSizeError (RuntimeError)       a shape disagrees with the batch size
    ├── CollectionIndexError (IndexError)   an index does not fit the batch dimensions
    ├── DimError (IndexError, RuntimeError, ValueError) a dim that is out of range, or given twice
    ├── DimNamesError (ValueError)          dimension names that are not unique or too many
    ├── LockedError (RuntimeError)          a structural change of a locked collection
    ├── StructureError (RuntimeError)       two structures that had to agree do not
    │   ├── KeyMismatchError (KeyError)         their keys differ
    │   └── CycleError (ValueError)             a collection would contain itself
    ├── DepthError (RecursionError)         nesting deeper than an engine of torch can walk
    ├── FormatError (ValueError)            a file or message that is damaged or not ours
    ├── CodecError (TypeError)              a value that no format can store
    ├── PluginError (RuntimeError)          a plugin that breaks the rules of registration
    ├── WorkerError (RuntimeError)          a worker process that died, or failed in a way it could not send
    └── MissingPluginError (AttributeError) a method whose package is not installed

>>> issubclass(KeyPathError, KeyError) and issubclass(FormatError, ValueError)
True
"""

from __future__ import annotations

__all__ = [
    "BatchSizeError", "CodecError", "CollectionIndexError", "CycleError", "DepthError", "DimError",
    "DimNamesError", "FormatError", "KeyMismatchError", "KeyPathError", "KeyTakenError",
    "KeyThroughLeafError", "LockedError", "MissingPluginError", "PluginError", "StructureError",
    "TensorDictError", "WorkerError",
]  # fmt: skip


class TensorDictError(Exception):
    """Base of every error that these packages raise on purpose."""


class KeyPathError(TensorDictError, KeyError):
    """A key is missing, malformed or already taken."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote a whole sentence.
        return str(self.args[0]) if self.args else ""


class KeyThroughLeafError(KeyPathError, ValueError):
    """A nested key goes through an entry that is a tensor."""


class KeyTakenError(KeyPathError, ValueError):
    """Two entries would have one key."""


class BatchSizeError(TensorDictError, RuntimeError):
    """A shape disagrees with the batch size."""


class CollectionIndexError(TensorDictError, IndexError):
    """An index does not fit the batch dimensions."""


class DimError(TensorDictError, IndexError, RuntimeError, ValueError):
    """A dim is out of range or given twice; torch and people's code know each of these builtins for it."""


class DimNamesError(TensorDictError, ValueError):
    """Dimension names that are not unique, not strings or of the wrong number."""


class LockedError(TensorDictError, RuntimeError):
    """A structural change of a locked collection was refused."""


class StructureError(TensorDictError, RuntimeError):
    """Two structures that had to agree do not."""


class KeyMismatchError(StructureError, KeyError):
    """Two collections that had to have the same keys do not."""

    __str__ = KeyPathError.__str__


class CycleError(StructureError, ValueError):
    """A collection was set into itself."""


class DepthError(TensorDictError, RecursionError):
    """Nesting is deeper than an engine of torch or Python can walk."""


class FormatError(TensorDictError, ValueError):
    """A file or message is damaged, or not in the format it claims."""


class CodecError(TensorDictError, TypeError):
    """A Python value cannot be stored without being asked to pickle it."""


class PluginError(TensorDictError, RuntimeError):
    """A plugin breaks the rules of registration."""


class WorkerError(TensorDictError, RuntimeError):
    """A worker process died, or failed in a way that it could not send."""


class MissingPluginError(TensorDictError, AttributeError):
    """A method belongs to a package that is not installed."""
