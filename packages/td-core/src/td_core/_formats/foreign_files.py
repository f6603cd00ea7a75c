"""Names of files of other libraries, which no format of the project writes, and the function that reads each."""

from __future__ import annotations

from .locations import Location, has_suffix

_READERS = {
    (".pt", ".pth"): "torch.load()",
    (".npy", ".npz"): "numpy.load()",
    (".pkl", ".pickle"): "pickle.load()",
    (".json",): "json.load()",
}


def find_reader(location: Location) -> str | None:
    """Return the function that reads files of a name, or None if the name is of no known library.

    >>> find_reader("model.pt")
    'torch.load()'
    """
    return next((reader for suffixes, reader in _READERS.items() if has_suffix(location, suffixes)), None)
