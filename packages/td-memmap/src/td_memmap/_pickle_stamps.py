"""Stamps in pickles: what tells the file of a pickled tensor from one that a later save puts at its path."""

from __future__ import annotations

from td_core.errors import FormatError
from td_core.spi import open_regular
from td_store.files import identify_file

from . import _fs

#: Inode and time of birth of a file; the device has another number on another machine.
Stamp = tuple[object, ...]


def find_stamp(path: str) -> Stamp:
    """Return the stamp of the file at a path."""
    with _fs.closing(open_regular(path)) as fd:
        return tuple(identify_file(fd, _fs.get_open_status(fd))[1:])


def check_stamp(path: str, stamp: Stamp | None) -> None:
    """Raise FormatError if another save has replaced a file since it was pickled; earlier releases stored no stamp."""
    if stamp is not None and find_stamp(path) != stamp:
        raise FormatError(
            f"{path} was replaced since the tensor was pickled: load the save again, or pickle the elements of clone()"
        )
